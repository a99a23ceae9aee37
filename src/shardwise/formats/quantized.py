"""Quantized forms with elements and scales in separate tensors, which are paired by name.

[Note: Pairs by name] Block sizes come from the ``quantization_config``, never from shapes: 160 rows in blocks of
128 have two scales, as 128 rows in blocks of 80 would. Scales have the names in use: ``weight_scale_inv``
(DeepSeek, Qwen, GLM), ``weight_scale`` (compressed-tensors, modelopt), ``scale`` and ``qscale_weight`` (Mistral)
for ``weight``. For stacked experts they have the parameter's name with ``_scale_inv`` or ``_scale``, and
``_blocks`` and ``_scales`` for MXFP4. compressed-tensors stores a zero point for each scale in
``weight_zero_point``, and a group for each column in ``weight_g_idx``. Both are used wherever they are stored.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from shardwise.errors import ConfigError, FormatError
from shardwise.formats import contract
from shardwise.formats.coded import Scaled, Zeros, words_as_bytes
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import Code, DType, numel

_FLOAT8: Final = (DType.F8_E4M3, DType.F8_E5M2)
_BYTES: Final = (DType.U8, DType.I8)
_MX_BYTES: Final = 16
"""Bytes of a block of MXFP4, which has 32 numbers."""

_INTEGERS: Final = (DType.I32, DType.I64)
_WORD_BITS: Final = 32
_MAX_SHAPE_BYTES: Final = 64
_SCALE_DTYPES: Final = (DType.F32, DType.BF16, DType.F16, DType.F8_E8M0, DType.U8)
_FAULTS: Final = "quantized weights that do not match their scales"


@dataclass(frozen=True, slots=True)
class _WithScales:
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

    @property
    def is_kept(self) -> bool:
        return self.kind == "mxfp4"

    def dequantized(self, reader: StorageReader, index: contract.CheckpointIndex) -> contract.CheckpointIndex:
        extra = {key for key in index.entries if contract.OF_ACTIVATIONS.fullmatch(key)}
        entries = {key: entry for key, entry in index.entries.items() if key not in extra}
        shapes: Mapping[str, tuple[int, ...]] = {}
        if self.kind == "words":
            entries = {
                key: words_as_bytes(entry) if key.endswith(("_packed", f"_{_ZERO_POINT}")) else entry
                for key, entry in entries.items()
            }
            shapes = _stored_shapes(reader, index)
        pairing = _Pairing(replace(index, entries=entries), self, shapes, contract.FormatFaults(index.root))
        pairing.pair()
        pairing.faults.raise_if_any()
        read = {
            item.composition.values.key
            for item in pairing.composed.values()
            if isinstance(item.composition, Scaled)
        }
        entries = {key: replace(entry, dtype=DType.U8) if key in read else entry for key, entry in entries.items()}
        return replace(
            index,
            entries={key: entries.get(key, entry) for key, entry in index.entries.items()},
            composed={**index.composed, **pairing.composed},
            extra=frozenset(extra),
            ignored=(*index.ignored, *sorted(extra)),
        )


def parse_form(config: Mapping[str, Any]) -> contract.QuantizedForm:
    """Return the form of a ``quantization_config`` with elements and scales as separate tensors.

    Raises:
        ConfigError: the kind is not supported, or the config is invalid.
    """
    method = config.get("quant_method")
    match method:
        case "fp8" | "fbgemm_fp8":
            return _WithScales("float8", _pair(config.get("weight_block_size")))
        case "mxfp4":
            return _WithScales("mxfp4", (32,))
        case "compressed-tensors":
            groups = config.get("config_groups")
            if not isinstance(groups, Mapping) or not groups:
                raise contract.unknown_form("compressed-tensors without config_groups")
            found = {_parse_group(group, config.get("format")) for group in groups.values()}
            if len(found) > 1:
                raise contract.unknown_form("compressed-tensors with several kinds of weights in one checkpoint")
            return found.pop()
        case "modelopt":
            inner = config.get("quantization")
            settings = config if config.get("quant_algo") or not isinstance(inner, Mapping) else inner
            algorithm = str(settings.get("quant_algo"))
            if algorithm not in ("FP8", "NVFP4"):
                raise contract.unknown_form(f"modelopt's {shown(algorithm)}")
            return _WithScales("float8") if algorithm == "FP8" else _WithScales("nvfp4", (16,))
    raise contract.unknown_form(f"quant_method {shown(repr(method))}")


def _parse_group(group: Any, form: object) -> _WithScales:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise contract.unknown_form("compressed-tensors without weights")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    form = group.get("format") or form
    size = weights.get("group_size")
    block = (size,) if strategy in ("group", "tensor_group") and size is not None else ()
    if block and (type(size) is not int or size < 1):
        raise contract.unknown_form(f"compressed-tensors with group_size {shown(repr(size))}")
    needs: tuple[str, ...] = (_ZERO_POINT,) if weights.get("symmetric") is False else ()
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):  # with these, columns keep their order
        if order not in (True, "group", "dynamic") or not block:
            raise contract.unknown_form(f"compressed-tensors with actorder {shown(repr(order))}")
        needs += (_GROUPS,)
    if needs and kind != "int":
        raise contract.unknown_form(f"compressed-tensors with {needs[0]} of {shown(repr(kind))}")
    match (kind, bits if type(bits) is int else 0, form):
        case ("float", 8, _):
            return _WithScales("float8", _pair(weights.get("block_structure")) if strategy == "block" else ())
        case ("float", 4, "nvfp4-pack-quantized"):
            return _WithScales("nvfp4", block or (16,))
        case ("int", 4 | 8 as width, "pack-quantized"):
            return _WithScales("words", block, width, needs)
        case ("int", 8, _):
            return _WithScales("bytes", block, needs=needs)
    raise contract.unknown_form(
        f"compressed-tensors with {shown(repr(kind))} of {bits!r} bits as {shown(repr(form))}"
    )


def _pair(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise ConfigError(f"quantization_config: a block of {shown(repr(value))} is not a list of two sizes")


# Which tensors belong together

_OF_WEIGHTS = re.compile(
    r".+(_scale_inv|weight_scale|weight_scale_2|weight_global_scale|qscale_weight|_proj_scales?)"
)
"""Names of scales of weights."""

_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_SCALES_OF_WEIGHTS = ("scale", "qscale_weight")
_ZERO_POINT, _GROUPS = "zero_point", "g_idx"

_ScaledEntries: TypeAlias = tuple[
    str, contract.TensorEntry, contract.TensorEntry | None, tuple[contract.TensorEntry, int] | None
]
"""A key, its elements, their scales, and the scale of the whole tensor with its power."""


@dataclass
class _Pairing:
    """Pairs elements with scales. ``shapes`` are the stored shapes of the elements by key."""

    index: contract.CheckpointIndex
    form: _WithScales
    shapes: Mapping[str, tuple[int, ...]]
    faults: contract.FormatFaults
    composed: dict[str, contract.Composed] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def fault(self, fault: str) -> None:
        self.faults.add(_FAULTS, fault)

    def pair(self) -> None:
        for entry in self.index.entries.values():
            if (found := self._scaled_entries(entry)) is not None:
                key, values, scales, overall = found
                if (fault := self._find_fault(key, entry)) is not None:
                    self.used |= set() if scales is None else {scales.key}
                    self.fault(fault)
                    continue
                if scales is None:
                    self.fault(f"{shown(entry.key)} is stored as {entry.dtype.label}, and has no scale")
                    continue
                self._compose(key, values, scales, overall)
        for entry in self.index.entries.values():
            if entry.key not in self.used and _is_scale(entry.key):
                self.fault(f"{shown(entry.key)} is a scale of nothing that is stored")

    def _find_fault(self, key: str, entry: contract.TensorEntry) -> str | None:
        """Return the fault of an entry of elements, or None."""
        stored = f"{shown(entry.key)} is stored as {entry.dtype.label} {entry.shape}, and"
        match self.form.kind:
            case "words" if entry.dtype is not DType.U8 or not entry.shape:
                return f"{stored} I32 (or its bytes) with columns is expected"
            case "mxfp4" if entry.shape[-1:] != (_MX_BYTES,):
                return f"{stored} blocks of {_MX_BYTES} bytes in the last dimension are expected"
        if key != entry.key and key in self.index.entries:
            return f"{shown(key)} is stored as well as {shown(entry.key)}, and one of the two is expected"
        return None

    def _scaled_entries(self, entry: contract.TensorEntry) -> _ScaledEntries | None:
        """Return the key of the tensor whose elements an entry has, with its scales, or None."""
        key, entries = entry.key, self.index.entries
        if key.endswith(f"_{_ZERO_POINT}"):
            return None
        match self.form.kind:
            case "mxfp4" if entry.dtype in _BYTES and key.endswith("_blocks"):
                whole = key.removesuffix("_blocks")
                return whole, entry, entries.get(f"{whole}_scales"), None
            case "float8" | "bytes" if entry.dtype in (_FLOAT8 if self.form.kind == "float8" else (DType.I8,)):
                return key, entry, self._find_scale(key), None
            case "words" if key.endswith("_packed"):
                whole = key.removesuffix("_packed")
                return whole, entry, entries.get(f"{whole}_scale"), None
            case "nvfp4" if entry.dtype in _BYTES and key.endswith("weight_packed"):
                whole = key.removesuffix("_packed")
                return self._entries_with_two_scales(entry, whole, f"{whole}_global_scale", -1)
            case "nvfp4" if entry.dtype in _BYTES and key.endswith("weight"):
                return self._entries_with_two_scales(entry, key, f"{key}_scale_2", 1)
        return None

    def _entries_with_two_scales(
        self, entry: contract.TensorEntry, whole: str, overall: str, power: int
    ) -> _ScaledEntries:
        found = self.index.entries.get(overall)
        if found is None:
            return whole, entry, None, None
        return whole, entry, self.index.entries.get(f"{whole}_scale"), (found, power)

    def _find_scale(self, key: str) -> contract.TensorEntry | None:
        names = contract.companion_names(key, _SCALE_SUFFIXES, _SCALES_OF_WEIGHTS)
        found = [self.index.entries[name] for name in names if name in self.index.entries]
        if len(found) > 1:
            self.fault(f"{shown(key)} has several scales: {', '.join(shown(item.key) for item in found)}")
        return found[0] if found else None

    def _compose(
        self,
        key: str,
        values: contract.TensorEntry,
        scales: contract.TensorEntry,
        overall: tuple[contract.TensorEntry, int] | None,
    ) -> None:
        self.used |= {values.key, scales.key}
        if overall is not None:
            self.used.add(overall[0].key)
        if scales.dtype not in ((DType.F8_E4M3,) if self.form.kind == "nvfp4" else _SCALE_DTYPES):
            self.fault(f"{shown(scales.key)}: scales of {scales.dtype.label} are not supported")
            return
        shape, unit = self._shape_and_unit(key, values, scales)
        counts = tuple(-(-size // step) for size, step in zip(shape, unit, strict=True))
        if not shape or numel(counts) != numel(scales.shape) or _squeezed(counts) != _squeezed(scales.shape):
            blocks = " x ".join(map(str, unit))
            self.fault(
                f"{shown(scales.key)} has the shape {scales.shape}, and {shown(key)}, {shape} in blocks of "
                f"{blocks}, needs {counts}"
            )
            return
        if overall is not None and numel(overall[0].shape) != 1:
            self.fault(f"{shown(overall[0].key)} has the shape {overall[0].shape}, and one number is expected")
            return
        try:
            self._check_columns(key, values, shape, unit)
            zeros, groups = self._zeros(key, shape, counts), self._groups(key, shape)
        except FormatError as error:
            self.fault(str(error))
            return
        swaps = self.form.kind == "mxfp4"
        self.composed[key] = contract.Composed(
            DType.F32,
            (*shape[:-2], shape[-1], shape[-2]) if swaps else shape,
            Scaled(
                contract.Whole(values.key),
                contract.Whole(scales.key),
                shape,
                unit,
                self._code(values),
                scales.dtype is DType.U8,
                None if overall is None else (contract.Whole(overall[0].key), overall[1]),
                swaps,
                zeros,
                groups,
            ),
        )

    def _companion(self, key: str, name: str) -> contract.TensorEntry | None:
        """Return the zero points or groups of elements, or None. Only integers and 8-bit floats have them."""
        if self.form.kind in ("mxfp4", "nvfp4"):
            return None
        found = self.index.entries.get(f"{key}_{name}")
        if found is not None:
            self.used.add(found.key)
        elif name in self.form.needs:
            raise FormatError(f"{shown(key)} has no {shown(key)}_{name}, which quantization_config says there is")
        return found

    def _zeros(self, key: str, shape: tuple[int, ...], counts: tuple[int, ...]) -> Zeros | None:
        found = self._companion(key, _ZERO_POINT)
        if found is None:
            return None
        if found.dtype is not DType.U8 or self.form.kind != "words":
            if _squeezed(found.shape) != _squeezed(counts) or found.dtype is DType.BOOL:
                raise FormatError(
                    f"{shown(found.key)} has {found.dtype.label} {found.shape}, and {shown(key)} needs {counts}"
                )
            return Zeros(contract.Whole(found.key))
        in_a_word = _WORD_BITS // self.form.bits
        words = (*counts[:-2], -(-shape[-2] // in_a_word), 4 * counts[-1]) if len(shape) > 1 else ()
        if found.shape != words or counts[-2:-1] != shape[-2:-1]:
            raise FormatError(
                f"{shown(found.key)} has the shape {found.shape} in bytes, and {shown(key)}, {in_a_word} rows in a "
                f"word, needs {words}"
            )
        return Zeros(contract.Whole(found.key), in_a_word)

    def _groups(self, key: str, shape: tuple[int, ...]) -> contract.Whole | None:
        found = self._companion(key, _GROUPS)
        if found is None:
            return None
        if found.dtype not in _INTEGERS or found.shape != shape[-1:]:
            raise FormatError(
                f"{shown(found.key)} is {found.dtype.label} {found.shape}, and {shown(key)} needs an integer for "
                f"each of {shape[-1]} columns"
            )
        return contract.Whole(found.key)

    def _check_columns(
        self, key: str, values: contract.TensorEntry, shape: tuple[int, ...], unit: tuple[int, ...]
    ) -> None:
        """Check the columns of words, the last of which may be partly filled.

        Raises:
            FormatError: the stored shape does not match.
        """
        if self.form.kind != "words":
            return
        nbytes = -(-shape[-1] * self.form.bits // _WORD_BITS) * 4
        if (*shape[:-1], nbytes) != values.shape or shape[-1] < 1:
            raise FormatError(
                f"{shown(key)}_shape says {shape}, and {shown(values.key)} has {values.shape} in bytes"
            )
        if shape[-1] * self.form.bits % 8 and self.form.block:
            raise FormatError(f"{shown(key)} has {shape[-1]} columns in groups of {unit[-1]}, which is not known")

    def _code(self, values: contract.TensorEntry) -> Code:
        match self.form.kind:
            case "float8":
                return Code[values.dtype.name]
            case "words":
                return Code.OFFSET4 if self.form.bits == 4 else Code.OFFSET8
            case "bytes":
                return Code.INT8
        return Code.E2M1

    def _shape_and_unit(
        self, key: str, values: contract.TensorEntry, scales: contract.TensorEntry
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape, block = values.shape, self.form.block
        match self.form.kind:
            case "mxfp4":
                shape = (*shape[:-2], numel(shape[-2:]) * 2) if len(shape) > 2 else ()
            case "nvfp4":
                shape = (*shape[:-1], shape[-1] * 2) if shape else ()
            case "words":
                shape = self.shapes.get(key, (*shape[:-1], shape[-1] * 8 // self.form.bits))
        if block and len(shape) >= len(block):
            return shape, (*(1 for _ in shape[: -len(block)]), *block)
        if numel(scales.shape) == 1:
            return shape, tuple(max(1, size) for size in shape)
        # One for each row (of each expert): sizes of 1 follow.
        unit = [max(1, size) for size in shape]
        for dim, count in enumerate(scales.shape[: len(shape)]):
            if count == shape[dim]:
                unit[dim] = 1
        return shape, tuple(unit)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _is_scale(key: str) -> bool:
    if contract.OF_ACTIVATIONS.fullmatch(key):
        return False
    # Others, such as ``logit_scale``, belong to the model, and are matched with its tensors.
    return _OF_WEIGHTS.fullmatch(key) is not None


def _stored_shapes(reader: StorageReader, index: contract.CheckpointIndex) -> dict[str, tuple[int, ...]]:
    """Return the unpacked shapes of packed elements by key, if shapes are stored."""
    found = {
        key.removesuffix("_shape"): entry
        for key, entry in index.entries.items()
        if key.endswith("_shape") and f"{key.removesuffix('_shape')}_packed" in index.entries
    }
    for entry in found.values():
        if entry.dtype not in _INTEGERS or len(entry.shape) != 1 or entry.nbytes > _MAX_SHAPE_BYTES:
            raise FormatError(
                f"{index.root}: {shown(entry.key)} is {entry.dtype.label} {entry.shape}, and a shape is expected"
            )
    texts, kinds = contract.contents(reader, list(found.values())), {DType.I64: "q", DType.I32: "i"}
    return {
        key: struct.unpack(f"<{entry.shape[0]}{kinds[entry.dtype]}", texts[entry.key])
        for key, entry in found.items()
    }
