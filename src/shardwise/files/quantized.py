"""Quantized forms with elements and scales in separate tensors, which are paired by name.

[Note: Pairs by name] :class:`_ScaledForm` is one form, and :class:`_EntryMatcher` finds the entries of its tensors.
Block sizes come from the ``quantization_config``, never from shapes: 160 rows in blocks of 128 have two scales, as
128 rows in blocks of 80 would. Scales have the names in use: ``weight_scale_inv`` (DeepSeek, Qwen, GLM),
``weight_scale`` (compressed-tensors, modelopt), ``scale`` and ``qscale_weight`` (Mistral) for ``weight``. For
stacked experts they have the parameter's name with ``_scale_inv`` or ``_scale``, and ``_blocks`` and ``_scales``
for MXFP4. compressed-tensors stores a zero point for each scale in ``weight_zero_point``, and a group for each
column in ``weight_g_idx``. Both are used wherever they are stored.
"""

import contextlib
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from shardwise.core.errors import ConfigError, FormatError
from shardwise.core.tensors import Code, DType, numel
from shardwise.core.untrusted import Pattern, require_quick_patterns
from shardwise.files import checkpoint_index
from shardwise.files.checkpoint_index import (
    OF_ACTIVATIONS,
    CheckpointIndex,
    Composed,
    FormatFaults,
    QuantizedForm,
    TensorEntry,
    Whole,
)
from shardwise.files.coded import Scaled, Zeros, words_as_bytes
from shardwise.files.storage import StorageReader
from shardwise.files.urls import shown

_FLOAT8: Final = (DType.F8_E4M3, DType.F8_E5M2)
_BYTES: Final = (DType.U8, DType.I8)
_MX_BYTES: Final = 16
"""Bytes of a block of MXFP4, which has 32 numbers."""

_INTEGERS: Final = (DType.I32, DType.I64)
_WORD_BITS: Final = 32
_MAX_SHAPE_BYTES: Final = 64
_SCALE_DTYPES: Final = (DType.F32, DType.BF16, DType.F16, DType.F8_E8M0, DType.U8)
_FAULTS: Final = "quantized weights that do not match their scales"

_WEIGHT_SCALES = re.compile(
    r".+(_scale_inv|weight_scale|weight_scale_2|weight_global_scale|qscale_weight|_proj_scales?)"
)
"""Names of scales of weights."""

_ZEROS_AND_GROUPS = re.compile(r".+((weight|_proj)_(zero_point|g_idx)|\.(qzeros|g_idx))")
"""Names of zero points and of groups of columns."""

_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_SCALES_OF_WEIGHTS = ("scale", "qscale_weight")
_ZERO_POINT, _GROUPS = "zero_point", "g_idx"


@dataclass(frozen=True, slots=True)
class _ScaledForm:
    """Elements and scales in separate tensors.

    Attributes:
        kind: 8-bit floats, MXFP4 (two in a byte with an exponent for 32, stored (.., out, in) and used as (.., in,
            out)), NVFP4 (two in a byte with a scale for 16 and one for the tensor), integers in words of 32 bits,
            or 8-bit integers.
        block: sizes of a block in the last dimensions. If empty, there is one scale for a tensor or for each row,
            by the number of stored scales.
        bits: bits of an integer.
        needs: names of required companion tensors in addition to scales.
    """

    kind: Literal["float8", "mxfp4", "nvfp4", "words", "bytes"]
    block: tuple[int, ...] = ()
    bits: int = 8
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _ScaledForms:
    """The forms of a checkpoint. Several are told apart by what is stored, then by ``targets``, then by shapes.

    Attributes:
        targets: the modules of each form: names (also of modules around them), regexes after "re:", or classes.
    """

    targets: Mapping[_ScaledForm, Collection[str]]

    @property
    def is_kept(self) -> bool:
        return any(form.kind == "mxfp4" for form in self.targets)

    def dequantize(self, reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
        # 1. Leave out what belongs to activations, and view words as bytes.
        activation_keys = {key for key in index.entries if OF_ACTIVATIONS.fullmatch(key)}
        entries = {key: entry for key, entry in index.entries.items() if key not in activation_keys}
        shapes: Mapping[str, tuple[int, ...]] = {}
        if any(form.kind == "words" for form in self.targets):
            for key, entry in entries.items():
                if key.endswith(("_packed", f"_{_ZERO_POINT}")):
                    entries[key] = words_as_bytes(entry)
            shapes = _read_stored_shapes(reader, index)
        # 2. Match each entry with every form, and choose one.
        if len(self.targets) > 1:
            self._require_quick_targets(entries)
        matchers = [_EntryMatcher(entries, form, shapes) for form in self.targets]
        faults = FormatFaults(index.root)
        composed: dict[str, Composed] = {}
        used: set[str] = set()
        for entry in entries.values():
            candidates = {matcher: matched for matcher in matchers if (matched := matcher.find(entry)) is not None}
            # The entries of all candidates, not only of the chosen one: none of these scales is without a weight.
            for matched in candidates.values():
                used |= matched.keys
            try:
                for matcher, matched in self._choose(candidates).items():
                    composed[matched.key] = matcher.compose(matched)
                    used.update(checkpoint_index.iter_entry_keys(composed[matched.key].composition))
            except FormatError as error:
                faults.add(_FAULTS, str(error))
                # One fault for a weight: its other companions are not faults of their own.
                for matched in candidates.values():
                    used |= {f"{matched.key}_{_ZERO_POINT}", f"{matched.key}_{_GROUPS}"}
        # Only now, because companions may be stored before and after their weights.
        for key in entries:
            if key in used:
                continue
            if _is_scale(key):
                faults.add(_FAULTS, f"{shown(key)}: the weights of this scale are not stored")
            elif _ZEROS_AND_GROUPS.fullmatch(key):
                # A reader that ignores them gets other values.
                faults.add(_FAULTS, f"{shown(key)} is not supported for weights in this form")
        faults.raise_if_any()
        # Nodes look codes up by byte, whatever dtype (I8, F8_E4M3) they are stored under.
        for item in composed.values():
            if isinstance(item.composition, Scaled):
                key = item.composition.values.key
                entries[key] = replace(entries[key], dtype=DType.U8)
        return replace(
            index,
            entries={key: entries.get(key, entry) for key, entry in index.entries.items()},
            composed={**index.composed, **composed},
            extra=frozenset(activation_keys),
            ignored=(*index.ignored, *sorted(activation_keys)),
        )

    def _require_quick_targets(self, keys: Iterable[str]) -> None:
        """Check the regexes among the targets. They are of the config, and so untrusted."""
        patterns: list[Pattern] = []
        for target in sorted(set().union(*self.targets.values())):
            if target.startswith("re:"):
                regex = target.removeprefix("re:")
                patterns.append(Pattern("quantization_config.targets", regex, regex))
        # The modules, as `_choose` names them: a pattern may be slow for these names alone.
        weights = [key.removesuffix("_packed").removesuffix("_blocks") for key in keys]
        require_quick_patterns(patterns, [weight.removesuffix(".weight") for weight in weights])

    def _choose(
        self, candidates: "Mapping[_EntryMatcher, _MatchedEntries]"
    ) -> "Mapping[_EntryMatcher, _MatchedEntries]":
        """Return the only one of the forms in which an entry may be stored, or none if there are none.

        Raises:
            FormatError: there are several.
        """
        if len(candidates) < 2:
            return candidates
        # The targets of the config decide, by the most specific one that names the module.
        key = next(iter(candidates.values())).key
        module = key.removesuffix(".weight")
        closeness = {matcher: _measure_closeness(module, self.targets[matcher.form]) for matcher in candidates}
        best = max(closeness.values())
        closest = {matcher: matched for matcher, matched in candidates.items() if closeness[matcher] == best}
        if len(closest) < 2:
            return closest
        # Nothing in the config decides: the shapes do, if scales of only one form fit.
        fitting = {}
        for matcher, matched in closest.items():
            with contextlib.suppress(FormatError):
                matcher.compose(matched)
                fitting[matcher] = matched
        if len(fitting) != 1:
            raise FormatError(
                f"{shown(key)} fits {len(fitting)} of the {len(closest)} forms that quantization_config has for "
                f"{shown(module)}"
            )
        return fitting


def _measure_closeness(module: str, targets: Collection[str]) -> tuple[int, int]:
    """Return how closely targets name a module, as compressed-tensors does: by name, by regex, by class, or not.

    For the module ``model.layers.0.mlp`` the target ``model.layers.0`` gives (3, 3), ``re:.*mlp`` (2, 0),
    ``Linear`` (1, 0), and names of other modules (0, 0).
    """
    # By name: the module itself, or the innermost module around it.
    parts = module.split(".")
    for depth in range(len(parts), 0, -1):
        if ".".join(parts[:depth]) in targets:
            return 3, depth
    if any(re.match(target.removeprefix("re:"), module) for target in targets if target.startswith("re:")):
        return 2, 0
    # Classes of modules are not known here, so a class may be that of any module.
    has_class = any(not target.startswith("re:") and "." not in target for target in targets)
    return int(has_class), 0


def parse_form(config: Mapping[str, Any]) -> QuantizedForm:
    """Return the form of a ``quantization_config`` with elements and scales as separate tensors.

    Raises:
        ConfigError: the kind is not supported, or the config is invalid.
    """
    method = config.get("quant_method")
    match method:
        case "fp8" | "fbgemm_fp8":
            return _ScaledForms({_ScaledForm("float8", _parse_block(config.get("weight_block_size"))): ()})
        case "mxfp4":
            return _ScaledForms({_ScaledForm("mxfp4", (32,)): ()})
        case "compressed-tensors":
            _require_merged_transforms(config.get("transform_config"))
            # Several groups may have one form. Their targets are united.
            groups = config.get("config_groups")
            if not isinstance(groups, Mapping) or not groups:
                raise checkpoint_index.unknown_form("compressed-tensors without config_groups")
            targets: dict[_ScaledForm, set[str]] = {}
            for group in groups.values():
                if isinstance(group, Mapping) and group.get("weights") is None and len(groups) > 1:
                    continue  # activations only
                form = _parse_group(group, config.get("format"))
                targets.setdefault(form, set()).update(_parse_targets(group.get("targets") or []))
            if not targets:
                raise checkpoint_index.unknown_form("compressed-tensors without weights")
            return _ScaledForms(targets)
        case "modelopt":
            return _parse_modelopt(config)
    raise checkpoint_index.unknown_form(f"quant_method {shown(repr(method))}")


def _require_merged_transforms(config: Any) -> None:
    """Check that all transforms (rotations of QuIP, SpinQuant) are merged into the stored weights.

    Raises:
        ConfigError: one is applied in the forward pass, which only compressed-tensors does.
    """
    if not config:
        return
    try:
        places = {str(each["location"]) for group in config["config_groups"].values() for each in group["apply"]}
    except (AttributeError, KeyError, TypeError) as error:
        raise checkpoint_index.unknown_form("compressed-tensors with an invalid transform_config") from error
    in_forward = sorted(places - {"weight_input", "weight_output"})
    if in_forward:
        raise checkpoint_index.unknown_form(
            f"compressed-tensors with transforms of {', '.join(map(shown, in_forward))} in transform_config"
        )


_MODELOPT: Final = {
    "FP8": _ScaledForm("float8"),
    "FP8_PER_CHANNEL_PER_TOKEN": _ScaledForm("float8"),
    "FP8_PB_WO": _ScaledForm("float8", (128, 128)),
    "NVFP4": _ScaledForm("nvfp4", (16,)),
    "W4A16_NVFP4": _ScaledForm("nvfp4", (16,)),
}
"""Forms of weights by modelopt's ``quant_algo``, with the block sizes that are meant without a ``group_size``."""


def _parse_modelopt(config: Mapping[str, Any]) -> _ScaledForms:
    # The settings are at the top, or in an object of hf_quant_config.json.
    inner = config.get("quantization")
    settings = config if config.get("quant_algo") or not isinstance(inner, Mapping) else inner
    layers = settings.get("quantized_layers")
    if str(settings.get("quant_algo")).upper() != "MIXED_PRECISION" or not isinstance(layers, Mapping):
        return _ScaledForms({_parse_algorithm(settings): ()})
    targets: dict[_ScaledForm, set[str]] = {}
    for name, layer in layers.items():
        form = _parse_algorithm(layer if isinstance(layer, Mapping) else {})
        targets.setdefault(form, set()).add(name)
    return _ScaledForms(targets)


def _parse_algorithm(settings: Mapping[str, Any]) -> _ScaledForm:
    algorithm = str(settings.get("quant_algo"))
    form = _MODELOPT.get(algorithm.upper())  # modelopt also writes it in lower case
    if form is None:
        raise checkpoint_index.unknown_form(f"modelopt's {shown(algorithm)}")
    size = settings.get("group_size")
    if not form.block or size is None:
        return form
    return replace(form, block=_parse_group_size(size, "modelopt") * len(form.block))


def _parse_group_size(size: object, what: str) -> tuple[int]:
    if type(size) is not int or size < 1:
        raise checkpoint_index.unknown_form(f"{what} with group_size {shown(repr(size))}")
    return (size,)


def _parse_targets(targets: Any) -> list[str]:
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise checkpoint_index.unknown_form(f"compressed-tensors with targets {shown(repr(targets))}")
    target: str
    try:
        for target in targets:
            if target.startswith("re:"):
                re.compile(target.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise checkpoint_index.unknown_form(f"compressed-tensors with the target {shown(repr(target))}") from error
    return targets


def _parse_group(group: Any, form: object) -> _ScaledForm:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise checkpoint_index.unknown_form("compressed-tensors without weights")
    # Settings that change values are read, or refused if they are not known. Those of activations are not
    # looked at.
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    form = group.get("format") or form
    size = weights.get("group_size")
    block: tuple[int, ...] = ()
    if strategy in ("group", "tensor_group") and size is not None:
        block = _parse_group_size(size, "compressed-tensors")
    needs: tuple[str, ...] = (_ZERO_POINT,) if weights.get("symmetric") is False else ()
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):  # with these, columns keep their order
        if order not in (True, "group", "dynamic") or not block:
            raise checkpoint_index.unknown_form(f"compressed-tensors with actorder {shown(repr(order))}")
        needs += (_GROUPS,)
    if needs and kind != "int":
        raise checkpoint_index.unknown_form(f"compressed-tensors with {needs[0]} of {shown(repr(kind))}")
    match (kind, bits if type(bits) is int else 0, form):
        case ("float", 8, _):
            if strategy == "block":
                return _ScaledForm("float8", _parse_block(weights.get("block_structure")))
            return _ScaledForm("float8")
        case ("float", 4, "nvfp4-pack-quantized"):
            return _ScaledForm("nvfp4", block or (16,))
        case ("int", 4 | 8 as width, "pack-quantized"):
            return _ScaledForm("words", block, width, needs)
        case ("int", 8, _):
            return _ScaledForm("bytes", block, needs=needs)
    raise checkpoint_index.unknown_form(
        f"compressed-tensors with {shown(repr(kind))} of {bits!r} bits as {shown(repr(form))}"
    )


def _parse_block(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise ConfigError(
        f"quantization_config: a block of {shown(repr(value))} is not a list of two sizes. Correct the config"
    )


@dataclass(frozen=True, slots=True)
class _MatchedEntries:
    """The stored entries of one quantized tensor.

    Attributes:
        key: the key of the dequantized tensor.
        values: the elements.
        scales: the scales of the elements, or None if they are missing.
        overall: the scale of the whole tensor, and 1 if elements are multiplied by it, -1 if they are divided.
    """

    key: str
    values: TensorEntry
    scales: TensorEntry | None
    overall: tuple[TensorEntry, int] | None = None

    @property
    def keys(self) -> set[str]:
        entries = [self.values, self.scales, None if self.overall is None else self.overall[0]]
        return {entry.key for entry in entries if entry is not None}


@dataclass(frozen=True, eq=False)
class _EntryMatcher:
    """Matches elements with scales in one form.

    ``shapes`` are the unpacked shapes of packed elements, by key, where the checkpoint stores them.
    """

    entries: Mapping[str, TensorEntry]
    form: _ScaledForm
    shapes: Mapping[str, tuple[int, ...]]

    def find(self, entry: TensorEntry) -> _MatchedEntries | None:
        """Return the entries of the tensor whose elements this one holds. None if it holds none in this form."""
        key, entries = entry.key, self.entries
        if key.endswith(f"_{_ZERO_POINT}") or _is_scale(key):
            return None
        match self.form.kind:
            case "mxfp4" if entry.dtype in _BYTES and key.endswith("_blocks"):
                whole = key.removesuffix("_blocks")
                return _MatchedEntries(whole, entry, entries.get(f"{whole}_scales"))
            # Scales may be stored under several names. More than one of them is an error of compose().
            case "float8" | "bytes" if entry.dtype in (_FLOAT8 if self.form.kind == "float8" else (DType.I8,)):
                names = checkpoint_index.companion_names(key, _SCALE_SUFFIXES, _SCALES_OF_WEIGHTS)
                return _MatchedEntries(key, entry, next((entries[name] for name in names if name in entries), None))
            case "words" if key.endswith("_packed"):
                whole = key.removesuffix("_packed")
                return _MatchedEntries(whole, entry, entries.get(f"{whole}_scale"))
            case "nvfp4" if entry.dtype in _BYTES and key.endswith(("weight_packed", "weight")):
                whole = key.removesuffix("_packed")
                name, power = (f"{whole}_scale_2", 1) if whole == key else (f"{whole}_global_scale", -1)
                if name not in entries:
                    return _MatchedEntries(whole, entry, None)
                return _MatchedEntries(whole, entry, entries.get(f"{whole}_scale"), (entries[name], power))
        return None

    def _require_elements(self, key: str, entry: TensorEntry) -> None:
        stored = f"{shown(entry.key)} is stored as {entry.dtype.label} {entry.shape}, not as"
        match self.form.kind:
            case "words" if entry.dtype is not DType.U8 or not entry.shape:
                raise FormatError(f"{stored} I32 (or its bytes) with columns")
            case "mxfp4" if entry.shape[-1:] != (_MX_BYTES,):
                raise FormatError(f"{stored} blocks of {_MX_BYTES} bytes in the last dimension")
            case "float8" | "bytes":
                names = checkpoint_index.companion_names(key, _SCALE_SUFFIXES, _SCALES_OF_WEIGHTS)
                scales = [name for name in names if name in self.entries]
                if len(scales) > 1:
                    raise FormatError(f"{shown(key)} has several scales: {', '.join(map(shown, scales))}")
        if key != entry.key and key in self.entries:
            raise FormatError(
                f"{shown(key)} is stored twice, as numbers and as {shown(entry.key)}. Keep one of the two"
            )

    def compose(self, matched: _MatchedEntries) -> Composed:
        """Return the dequantized tensor.

        Raises:
            FormatError: its entries do not match.
        """
        # First what is stored, each entry alone. Then whether shapes of elements, scales and companions fit
        # together.
        key, values, scales, overall = matched.key, matched.values, matched.scales, matched.overall
        self._require_elements(key, values)
        if scales is None:
            raise FormatError(f"{shown(values.key)} is stored as {values.dtype.label}, and has no scale")
        dtypes = (DType.F8_E4M3,) if self.form.kind == "nvfp4" else _SCALE_DTYPES
        if scales.dtype not in dtypes:
            raise FormatError(f"{shown(scales.key)}: scales of {scales.dtype.label} are not supported")
        shape, unit = self._find_shape_and_unit(key, values, scales)
        # Blocks in each dimension: (2, 2) for an FP8 weight (130, 132) in blocks of (128, 128). modelopt stores
        # these scales as (2, 1, 2, 1), so sizes of 1 are ignored.
        counts = tuple(-(-size // step) for size, step in zip(shape, unit, strict=True))
        if not shape or numel(counts) != numel(scales.shape) or _squeeze(counts) != _squeeze(scales.shape):
            blocks = " x ".join(map(str, unit))
            raise FormatError(
                f"{shown(scales.key)} has the shape {scales.shape}, and {shown(key)}, {shape} in blocks of "
                f"{blocks}, needs {counts}"
            )
        if overall is not None and numel(overall[0].shape) != 1:
            raise FormatError(f"{shown(overall[0].key)} has the shape {overall[0].shape}, and must be one number")
        self._require_columns(key, values, shape, unit)
        whole_scale = None if overall is None else (Whole(overall[0].key), overall[1])
        composition = Scaled(
            Whole(values.key),
            Whole(scales.key),
            shape,
            unit,
            self._select_code(values),
            has_exponents=scales.dtype is DType.U8,
            overall=whole_scale,
            swaps=self.form.kind == "mxfp4",
            zeros=self._find_zeros(key, shape, counts),
            groups=self._find_groups(key, shape),
        )
        if composition.swaps:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return Composed(DType.F32, shape, composition)

    def _find_companion(self, key: str, name: str) -> TensorEntry | None:
        """Return the zero points or groups of elements, or None. Only integers and 8-bit floats have them."""
        if self.form.kind in ("mxfp4", "nvfp4"):
            return None
        companion = self.entries.get(f"{key}_{name}")
        if companion is None and name in self.form.needs:
            raise FormatError(f"{shown(key)}: {shown(key)}_{name} is missing, and quantization_config requires it")
        return companion

    def _find_zeros(self, key: str, shape: tuple[int, ...], counts: tuple[int, ...]) -> Zeros | None:
        entry = self._find_companion(key, _ZERO_POINT)
        if entry is None:
            return None
        if entry.dtype is not DType.U8 or self.form.kind != "words":
            if _squeeze(entry.shape) != _squeeze(counts) or entry.dtype is DType.BOOL:
                raise FormatError(
                    f"{shown(entry.key)} has {entry.dtype.label} {entry.shape}, and {shown(key)} needs {counts}"
                )
            return Zeros(Whole(entry.key))
        # Eight zero points of 4 bits in a word of 32, or four of 8 bits.
        in_a_word = _WORD_BITS // self.form.bits
        # In contrast to codes, zero points are packed along the rows: (out, groups) are words (out / 8, groups).
        words = (*counts[:-2], -(-shape[-2] // in_a_word), 4 * counts[-1]) if len(shape) > 1 else ()
        if entry.shape != words or counts[-2:-1] != shape[-2:-1]:
            raise FormatError(
                f"{shown(entry.key)} has the shape {entry.shape} in bytes, and {shown(key)}, {in_a_word} rows in a "
                f"word, needs {words}"
            )
        return Zeros(Whole(entry.key), in_a_word)

    def _find_groups(self, key: str, shape: tuple[int, ...]) -> Whole | None:
        entry = self._find_companion(key, _GROUPS)
        if entry is None:
            return None
        if entry.dtype not in _INTEGERS or entry.shape != shape[-1:]:
            raise FormatError(
                f"{shown(entry.key)} is {entry.dtype.label} {entry.shape}, and {shown(key)} needs an integer for "
                f"each of {shape[-1]} columns"
            )
        return Whole(entry.key)

    def _require_columns(
        self, key: str, values: TensorEntry, shape: tuple[int, ...], unit: tuple[int, ...]
    ) -> None:
        """Check the columns of words, the last of which may be partly filled.

        Raises:
            FormatError: the stored shape does not match.
        """
        if self.form.kind != "words":
            return
        # 9 columns of 4 bits are 36 bits: two words, 8 bytes.
        nbytes = -(-shape[-1] * self.form.bits // _WORD_BITS) * 4
        if (*shape[:-1], nbytes) != values.shape or shape[-1] < 1:
            raise FormatError(
                f"{shown(key)}_shape says {shape}, and {shown(values.key)} has {values.shape} in bytes"
            )
        if shape[-1] * self.form.bits % 8 and self.form.block:
            raise FormatError(
                f"{shown(key)} has {shape[-1]} columns in groups of {unit[-1]}, which is not supported"
            )

    def _select_code(self, values: TensorEntry) -> Code:
        match self.form.kind:
            case "float8":
                return Code[values.dtype.name]
            case "words":
                return Code.OFFSET4 if self.form.bits == 4 else Code.OFFSET8
            case "bytes":
                return Code.INT8
        return Code.E2M1

    def _find_shape_and_unit(
        self, key: str, values: TensorEntry, scales: TensorEntry
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the dequantized elements, and the sizes of a block in each dimension."""
        shape, block = values.shape, self.form.block
        match self.form.kind:
            case "mxfp4":  # (experts, out, in / 32, 16) bytes are (experts, out, in) elements
                shape = (*shape[:-2], numel(shape[-2:]) * 2) if len(shape) > 2 else ()
            case "nvfp4":  # (out, in / 2) bytes are (out, in) elements
                shape = (*shape[:-1], shape[-1] * 2) if shape else ()
            case "words":  # (out, 4 * words) bytes; a stored shape says how much of the last word is used
                shape = self.shapes.get(key, (*shape[:-1], shape[-1] * 8 // self.form.bits))
        # The config decides: for experts (8, 512, 256), a block of (128, 128) is (1, 128, 128). But a layer of FP8
        # may have one scale beside others with blocks.
        is_whole = numel(scales.shape) == 1
        if block and len(shape) >= len(block) and not (is_whole and self.form.kind == "float8"):
            return shape, (*(1 for _ in shape[: -len(block)]), *block)
        if is_whole:
            return shape, tuple(max(1, size) for size in shape)
        # One scale for each row, (out, 1), or for each row of each expert, (experts, out, 1): a dimension in which
        # scales have the full size has blocks of 1.
        unit = [max(1, size) for size in shape]
        for dim, count in enumerate(scales.shape[: len(shape)]):
            if count == shape[dim]:
                unit[dim] = 1
        return shape, tuple(unit)


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _is_scale(key: str) -> bool:
    if OF_ACTIVATIONS.fullmatch(key):
        return False
    # Others, such as ``logit_scale``, belong to the model, and are matched with its tensors.
    return _WEIGHT_SCALES.fullmatch(key) is not None


def _read_stored_shapes(reader: StorageReader, index: CheckpointIndex) -> dict[str, tuple[int, ...]]:
    """Return the unpacked shapes of packed elements by key, if shapes are stored."""
    shape_entries: dict[str, TensorEntry] = {}
    for name, entry in index.entries.items():
        key = name.removesuffix("_shape")
        if key != name and f"{key}_packed" in index.entries:
            shape_entries[key] = entry
    # Checked before they are read: an entry of this name may have any size.
    for entry in shape_entries.values():
        if entry.dtype not in _INTEGERS or len(entry.shape) != 1 or entry.nbytes > _MAX_SHAPE_BYTES:
            raise FormatError(
                f"{index.root}: {shown(entry.key)} is {entry.dtype.label} {entry.shape}, not the sizes of a tensor"
            )
    texts = checkpoint_index.contents(reader, list(shape_entries.values()))
    shapes: dict[str, tuple[int, ...]] = {}
    for key, entry in shape_entries.items():
        kind = "q" if entry.dtype is DType.I64 else "i"
        shapes[key] = struct.unpack(f"<{entry.shape[0]}{kind}", texts[entry.key])
    return shapes
