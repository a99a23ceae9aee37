"""Quantised checkpoints: which of their tensors are the elements, the scales and the rest of one that a model has.

[Note: Pairs by name] What a ``quantization_config`` says of blocks counts, never what the shapes would allow: 160
rows in blocks of 128 have two scales, as 128 rows in blocks of 80 would. The names of scales are those in use:
``weight_scale_inv`` (DeepSeek, Qwen, GLM), ``weight_scale`` (compressed-tensors, modelopt), ``scale`` and
``qscale_weight`` (Mistral) beside ``weight``; of stacked experts the parameter's name with ``_scale_inv`` or
``_scale``, and ``_blocks`` and ``_scales`` for MXFP4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from shardwise.errors import ConfigError, FormatError
from shardwise.formats.checkpoint_index import CheckpointIndex, Composed, TensorEntry, Whole
from shardwise.formats.coded import Scaled
from shardwise.formats.contract import QuantisedForm, unknown_form
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import Code, DType, numel

_FLOAT8: Final = (DType.F8_E4M3, DType.F8_E5M2)
_SCALE_DTYPES: Final = (DType.F32, DType.BF16, DType.F16, DType.F8_E8M0, DType.U8)
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Float8:
    """Floats of 8 bits; a scale for each block, or as many as there are: of a tensor, of rows."""

    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class MicroscalingFloat4:
    """MXFP4: two in a byte, an exponent for 32 along the columns; stored (.., out, in), used as (.., in, out)."""

    block: int = 32


@dataclass(frozen=True, slots=True)
class Float4:
    """NVFP4: two in a byte, a scale for 16 along the columns and one for the whole."""

    block: int = 16


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Integers of 4 or 8 bits in words of 32; a scale for so many in a row. None: for a row or a tensor."""

    bits: int
    block: int | None


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers of 8 bits as they are, a scale for so many along the columns; None: for a row or a tensor."""

    block: int | None = None


Scheme: TypeAlias = Float8 | MicroscalingFloat4 | Float4 | PackedIntegers | Integers


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """What a ``quantization_config`` says of how weights are stored.

    Raises:
        ConfigError: it is a kind that is not known here, or makes no sense.
    """
    method = config.get("quant_method")
    match method:
        case "fp8" | "fbgemm_fp8":
            return Float8(_pair(config.get("weight_block_size")))
        case "mxfp4":
            return MicroscalingFloat4()
        case "compressed-tensors":
            return _of_compressed_tensors(config)
        case "modelopt":
            inner = config.get("quantization")
            told = config if config.get("quant_algo") or not isinstance(inner, Mapping) else inner
            algorithm = str(told.get("quant_algo"))
            if algorithm == "FP8":
                return Float8()
            if algorithm == "NVFP4":
                return Float4()
            raise unknown_form(f"modelopt's {shown(algorithm)}")
        case _:
            raise unknown_form(f"quant_method {shown(repr(method))}")


def _of_compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise unknown_form("compressed-tensors without config_groups")
    found = {_of_group(group, config.get("format")) for group in groups.values()}
    if len(found) > 1:
        raise unknown_form("compressed-tensors with several kinds of weights in one checkpoint")
    return found.pop()


def _of_group(group: Any, form: object) -> Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise unknown_form("compressed-tensors without weights")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    form = group.get("format") or form
    if weights.get("symmetric") is False or weights.get("actorder"):
        raise unknown_form("compressed-tensors with zero points or another order of columns")
    size = weights.get("group_size")
    block = size if strategy in ("group", "tensor_group") else None
    if block is not None and (type(block) is not int or block < 1):
        raise unknown_form(f"compressed-tensors with group_size {shown(repr(size))}")
    width = bits if type(bits) is int else 0
    match (kind, width, form):
        case ("float", 8, _):
            return Float8(_pair(weights.get("block_structure")) if strategy == "block" else None)
        case ("float", 4, "nvfp4-pack-quantized"):
            return Float4() if block is None else Float4(block)
        case ("int", 4 | 8, "pack-quantized"):
            return PackedIntegers(width, block)
        case ("int", 8, _):
            return Integers(block)
        case _:
            raise unknown_form(
                f"compressed-tensors with {shown(repr(kind))} of {bits!r} bits as {shown(repr(form))}"
            )


def _pair(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise ConfigError(f"quantization_config: a block of {shown(repr(value))} makes no sense; wanted are two sizes")


@dataclass(frozen=True, slots=True)
class _WithScales:
    """Elements and scales that lie beside each other, in any of these schemes."""

    config: Mapping[str, Any]
    is_kept: bool = False

    def as_numbers(self, _reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
        return dequantised_index(index, self.config)


def form_of(config: Mapping[str, Any]) -> QuantisedForm:
    """That of a ``quantization_config`` that says how elements and scales lie beside each other.

    Raises:
        ConfigError: as of :func:`scheme_of`.
    """
    return _WithScales(config, is_kept=isinstance(scheme_of(config), MicroscalingFloat4))


# Which tensors belong together

_OF_ACTIVATIONS = re.compile(
    r"(.+\.)?(input_scale|activation_scale|activation_scale_ub|input_scale_ub|qscale_act|input_global_scale|"
    r"[kvq]_scale|weight_shape)"
)
"""What is said of inputs while a model runs, or what the shapes tell."""

_OF_WEIGHTS = re.compile(
    r".+(_scale_inv|weight_scale|weight_scale_2|weight_global_scale|qscale_weight|_proj_scales?)"
)
"""Scales that belong to elements of weights by their very names."""

_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_SCALES_OF_WEIGHTS = ("scale", "qscale_weight")


_ScaledParts: TypeAlias = tuple[str, TensorEntry, TensorEntry | None, tuple[TensorEntry, int] | None]
"""A key, its elements, their scales, and the scale of the whole with its power."""


@dataclass
class _Pairing:
    index: CheckpointIndex
    scheme: Scheme
    composed: dict[str, Composed] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def pair(self) -> None:
        for entry in self.index.entries.values():
            if (made := self._made_of(entry)) is not None:
                key, values, scales, overall = made
                if isinstance(self.scheme, PackedIntegers) and (entry.dtype is not DType.U8 or not entry.shape):
                    self.used |= set() if scales is None else {scales.key}
                    self.faults.append(
                        f"{shown(entry.key)} is stored as {entry.dtype.label} {entry.shape}, and I32 (or its "
                        "bytes) with columns is wanted"
                    )
                    continue
                if scales is None:
                    self.faults.append(f"{shown(entry.key)} is stored as {entry.dtype.label}, and has no scale")
                    continue
                self._compose(key, values, scales, overall)
        for entry in self.index.entries.values():
            if entry.key not in self.used and _is_scale(entry.key):
                self.faults.append(f"{shown(entry.key)} is a scale of nothing that is stored")

    def _made_of(self, entry: TensorEntry) -> _ScaledParts | None:
        """The key of what an entry is the elements of, with its scales; None where it is no such elements."""
        key, entries = entry.key, self.index.entries
        match self.scheme:
            case MicroscalingFloat4():
                if entry.dtype is DType.U8 and key.endswith("_blocks"):
                    whole = key.removesuffix("_blocks")
                    return whole, entry, entries.get(f"{whole}_scales"), None
            case Float8() if entry.dtype in _FLOAT8:
                return key, entry, self._scale_of(key), None
            case Integers() if entry.dtype is DType.I8:
                return key, entry, self._scale_of(key), None
            case PackedIntegers() if key.endswith("_packed"):
                whole = key.removesuffix("_packed")
                return whole, entry, entries.get(f"{whole}_scale"), None
            case Float4() if entry.dtype is DType.U8 and key.endswith("weight_packed"):
                whole = key.removesuffix("_packed")
                return self._of_two_scales(entry, whole, f"{whole}_global_scale", -1)
            case Float4() if entry.dtype is DType.U8 and key.endswith("weight"):
                return self._of_two_scales(entry, key, f"{key}_scale_2", 1)
        return None

    def _of_two_scales(self, entry: TensorEntry, whole: str, overall: str, power: int) -> _ScaledParts:
        found = self.index.entries.get(overall)
        if found is None:
            return whole, entry, None, None
        return whole, entry, self.index.entries.get(f"{whole}_scale"), (found, power)

    def _scale_of(self, key: str) -> TensorEntry | None:
        names = [f"{key}{suffix}" for suffix in _SCALE_SUFFIXES]
        if key.endswith(".weight"):
            names += [f"{key.removesuffix('weight')}{name}" for name in _SCALES_OF_WEIGHTS]
        found = [self.index.entries[name] for name in names if name in self.index.entries]
        if len(found) > 1:
            self.faults.append(f"{shown(key)} has several scales: {', '.join(shown(item.key) for item in found)}")
        return found[0] if found else None

    def _compose(
        self, key: str, values: TensorEntry, scales: TensorEntry, overall: tuple[TensorEntry, int] | None
    ) -> None:
        self.used |= {values.key, scales.key}
        if overall is not None:
            self.used.add(overall[0].key)
        wanted = (DType.F8_E4M3,) if isinstance(self.scheme, Float4) else _SCALE_DTYPES
        if scales.dtype not in wanted:
            self.faults.append(f"{shown(scales.key)}: scales of {scales.dtype.label} are not known")
            return
        shape, unit = self._shape_and_unit(values, scales)
        counts = tuple(-(-size // step) for size, step in zip(shape, unit, strict=True))
        if not shape or numel(counts) != numel(scales.shape) or _bare(counts) != _bare(scales.shape):
            blocks = " x ".join(map(str, unit))
            self.faults.append(
                f"{shown(scales.key)} has the shape {scales.shape}, and {shown(key)}, {shape} in blocks of "
                f"{blocks}, wants {counts}"
            )
            return
        if overall is not None and numel(overall[0].shape) != 1:
            self.faults.append(
                f"{shown(overall[0].key)} has the shape {overall[0].shape}, and one number is wanted"
            )
            return
        swaps = isinstance(self.scheme, MicroscalingFloat4)
        self.composed[key] = Composed(
            DType.F32,
            (*shape[:-2], shape[-1], shape[-2]) if swaps else shape,
            Scaled(
                Whole(values.key),
                Whole(scales.key),
                shape,
                unit,
                self._code(values),
                scales.dtype is DType.U8,
                None if overall is None else (Whole(overall[0].key), overall[1]),
                swaps,
            ),
        )

    def _code(self, values: TensorEntry) -> Code:
        match self.scheme:
            case MicroscalingFloat4() | Float4():
                return Code.E2M1
            case PackedIntegers(bits=4):
                return Code.OFFSET4
            case PackedIntegers():
                return Code.OFFSET8
            case Integers():
                return Code.INT8
            case _:
                return Code[values.dtype.name]

    def _shape_and_unit(self, values: TensorEntry, scales: TensorEntry) -> tuple[tuple[int, ...], tuple[int, ...]]:
        stored = values.shape
        match self.scheme:
            case MicroscalingFloat4(block):
                shape = (*stored[:-2], numel(stored[-2:]) * 2) if len(stored) > 2 else ()
                return shape, (*(1 for _ in shape[:-1]), block) if shape else ()
            case Float4(block):
                shape = (*stored[:-1], stored[-1] * 2) if stored else ()
            case PackedIntegers(bits, block):
                shape = (*stored[:-1], stored[-1] * 8 // bits) if stored else ()
            case Integers(block):
                shape = stored
            case Float8((rows, columns)) if len(stored) > 1:
                return stored, (*(1 for _ in stored[:-2]), rows, columns)
            case _:
                shape, block = stored, None
        if block is not None:
            return shape, (*(1 for _ in shape[:-1]), block) if shape else ()
        if numel(scales.shape) == 1:
            return shape, tuple(max(1, size) for size in shape)
        # Of each row, of each expert: as many as there are in front, 1 behind.
        unit = [max(1, size) for size in shape]
        for dim, count in enumerate(scales.shape[: len(shape)]):
            if count == shape[dim]:
                unit[dim] = 1
        return shape, tuple(unit)


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _is_scale(key: str) -> bool:
    if _OF_ACTIVATIONS.fullmatch(key):
        return False
    # Models have scales of their own, such as ``logit_scale``: those are theirs to find missing, or too much.
    return _OF_WEIGHTS.fullmatch(key) is not None


def dequantised_index(index: CheckpointIndex, config: Mapping[str, Any]) -> CheckpointIndex:
    """The same checkpoint with the tensors that a model has in place of elements and scales.

    ``config`` is its ``quantization_config``. What is said of activations is no tensor of it any more.

    Raises:
        ConfigError: as of :func:`scheme_of`.
        FormatError: naming elements without scales, scales without elements, and shapes that do not go together.
    """
    scheme = scheme_of(config)
    dropped = {key for key in index.entries if _OF_ACTIVATIONS.fullmatch(key)}
    entries = {key: entry for key, entry in index.entries.items() if key not in dropped}
    if isinstance(scheme, PackedIntegers):
        entries = {key: _as_bytes(entry) if key.endswith("_packed") else entry for key, entry in entries.items()}
    pairing = _Pairing(replace(index, entries=entries), scheme)
    pairing.pair()
    if pairing.faults:
        told = "\n  ".join([*pairing.faults[:_SHOWN], *_more(pairing.faults)])
        raise FormatError(f"{index.root}: the quantised weights do not go with their scales:\n  {told}")
    read = {item.part.values.key for item in pairing.composed.values() if isinstance(item.part, Scaled)}
    return replace(
        index,
        entries={key: replace(entry, dtype=DType.U8) if key in read else entry for key, entry in entries.items()},
        composed={**index.composed, **pairing.composed},
        ignored=(*index.ignored, *sorted(dropped)),
    )


def _as_bytes(words: TensorEntry) -> TensorEntry:
    """The same elements as bytes, of which each has the lower ones first."""
    if words.dtype is not DType.I32 or not words.shape:
        return words
    return replace(words, dtype=DType.U8, shape=(*words.shape[:-1], 4 * words.shape[-1]))


def _more(faults: list[str]) -> Iterator[str]:
    if len(faults) > _SHOWN:
        yield f"and {len(faults) - _SHOWN} more"
