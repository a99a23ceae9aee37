"""Quantised checkpoints: which of their tensors are the elements, the scales and the rest of one that a model has.

[Note: Pairs by name] What a ``quantization_config`` says of blocks counts, never what the shapes would allow: 160
rows in blocks of 128 have two scales, as 128 rows in blocks of 80 would. The names of scales are those in use:
``weight_scale_inv`` (DeepSeek, Qwen, GLM), ``weight_scale`` (compressed-tensors, modelopt), ``scale`` and
``qscale_weight`` (Mistral) beside ``weight``; of stacked experts the parameter's name with ``_scale_inv`` or
``_scale``, and ``_blocks`` and ``_scales`` for MXFP4. compressed-tensors has a zero point for each scale in
``weight_zero_point``, and a group for each column in ``weight_g_idx``: both count wherever they are stored.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from shardwise.errors import ConfigError, FormatError
from shardwise.formats.coded import Scaled, Zeros
from shardwise.formats.contract import (
    OF_ACTIVATIONS,
    CheckpointIndex,
    Composed,
    QuantisedForm,
    TensorEntry,
    Whole,
    names_beside,
    unknown_form,
)
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import Code, DType, numel

_FLOAT8: Final = (DType.F8_E4M3, DType.F8_E5M2)
_BYTES: Final = (DType.U8, DType.I8)
_MX_BYTES: Final = 16
"""A block of MXFP4 has 32 numbers."""

_INTEGERS: Final = (DType.I32, DType.I64)
_WORD_BITS: Final = 32
_MOST_SHAPE_BYTES: Final = 64
_SHAPES_APART: Final = 1 << 16
"""Bytes between two shapes that are read with one request."""
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
    needs: tuple[str, ...] = ()
    """Names of what is stored beside each, but for elements and scales."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers of 8 bits as they are, a scale for so many along the columns; None: for a row or a tensor."""

    block: int | None = None
    needs: tuple[str, ...] = ()


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
    size = weights.get("group_size")
    block = size if strategy in ("group", "tensor_group") else None
    if block is not None and (type(block) is not int or block < 1):
        raise unknown_form(f"compressed-tensors with group_size {shown(repr(size))}")
    width = bits if type(bits) is int else 0
    needs: tuple[str, ...] = (_ZERO_POINT,) if weights.get("symmetric") is False else ()
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):  # these are of calibration, and columns as they were
        if order not in (True, "group", "dynamic") or block is None:
            raise unknown_form(f"compressed-tensors with actorder {shown(repr(order))}")
        needs += (_GROUPS,)
    if needs and kind != "int":
        raise unknown_form(f"compressed-tensors with {needs[0]} of {shown(repr(kind))}")
    match (kind, width, form):
        case ("float", 8, _):
            return Float8(_pair(weights.get("block_structure")) if strategy == "block" else None)
        case ("float", 4, "nvfp4-pack-quantized"):
            return Float4() if block is None else Float4(block)
        case ("int", 4 | 8, "pack-quantized"):
            return PackedIntegers(width, block, needs)
        case ("int", 8, _):
            return Integers(block, needs)
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

    def as_numbers(self, reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
        return dequantised_index(reader, index, self.config)


def form_of(config: Mapping[str, Any]) -> QuantisedForm:
    """That of a ``quantization_config`` that says how elements and scales lie beside each other.

    Raises:
        ConfigError: as of :func:`scheme_of`.
    """
    return _WithScales(config, is_kept=isinstance(scheme_of(config), MicroscalingFloat4))


# Which tensors belong together

_OF_WEIGHTS = re.compile(
    r".+(_scale_inv|weight_scale|weight_scale_2|weight_global_scale|qscale_weight|_proj_scales?)"
)
"""Scales that belong to elements of weights by their very names."""

_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_SCALES_OF_WEIGHTS = ("scale", "qscale_weight")
_ZERO_POINT, _GROUPS = "zero_point", "g_idx"

_ScaledParts: TypeAlias = tuple[str, TensorEntry, TensorEntry | None, tuple[TensorEntry, int] | None]
"""A key, its elements, their scales, and the scale of the whole with its power."""


@dataclass
class _Pairing:
    """``shapes`` are those of the elements by key, where they are stored beside them."""

    index: CheckpointIndex
    scheme: Scheme
    shapes: Mapping[str, tuple[int, ...]]
    composed: dict[str, Composed] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def pair(self) -> None:
        for entry in self.index.entries.values():
            if (made := self._made_of(entry)) is not None:
                key, values, scales, overall = made
                if (fault := self._fault_of(key, entry)) is not None:
                    self.used |= set() if scales is None else {scales.key}
                    self.faults.append(fault)
                    continue
                if scales is None:
                    self.faults.append(f"{shown(entry.key)} is stored as {entry.dtype.label}, and has no scale")
                    continue
                self._compose(key, values, scales, overall)
        for entry in self.index.entries.values():
            if entry.key not in self.used and _is_scale(entry.key):
                self.faults.append(f"{shown(entry.key)} is a scale of nothing that is stored")

    def _fault_of(self, key: str, entry: TensorEntry) -> str | None:
        """What is wrong with elements themselves."""
        told = f"{shown(entry.key)} is stored as {entry.dtype.label} {entry.shape}, and"
        match self.scheme:
            case PackedIntegers() if entry.dtype is not DType.U8 or not entry.shape:
                return f"{told} I32 (or its bytes) with columns is wanted"
            case MicroscalingFloat4() if entry.shape[-1:] != (_MX_BYTES,):
                return f"{told} blocks of {_MX_BYTES} bytes, the last dimension, are wanted"
        if key != entry.key and key in self.index.entries:
            return f"{shown(key)} is stored beside {shown(entry.key)}, and one of the two is wanted"
        return None

    def _made_of(self, entry: TensorEntry) -> _ScaledParts | None:
        """The key of what an entry is the elements of, with its scales; None where it is no such elements."""
        key, entries = entry.key, self.index.entries
        if key.endswith(f"_{_ZERO_POINT}"):
            return None
        match self.scheme:
            case MicroscalingFloat4():
                if entry.dtype in _BYTES and key.endswith("_blocks"):
                    whole = key.removesuffix("_blocks")
                    return whole, entry, entries.get(f"{whole}_scales"), None
            case Float8() if entry.dtype in _FLOAT8:
                return key, entry, self._scale_of(key), None
            case Integers() if entry.dtype is DType.I8:
                return key, entry, self._scale_of(key), None
            case PackedIntegers() if key.endswith("_packed"):
                whole = key.removesuffix("_packed")
                return whole, entry, entries.get(f"{whole}_scale"), None
            case Float4() if entry.dtype in _BYTES and key.endswith("weight_packed"):
                whole = key.removesuffix("_packed")
                return self._of_two_scales(entry, whole, f"{whole}_global_scale", -1)
            case Float4() if entry.dtype in _BYTES and key.endswith("weight"):
                return self._of_two_scales(entry, key, f"{key}_scale_2", 1)
        return None

    def _of_two_scales(self, entry: TensorEntry, whole: str, overall: str, power: int) -> _ScaledParts:
        found = self.index.entries.get(overall)
        if found is None:
            return whole, entry, None, None
        return whole, entry, self.index.entries.get(f"{whole}_scale"), (found, power)

    def _scale_of(self, key: str) -> TensorEntry | None:
        names = names_beside(key, _SCALE_SUFFIXES, _SCALES_OF_WEIGHTS)
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
        shape, unit = self._shape_and_unit(key, values, scales)
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
        try:
            self._check_columns(key, values, shape, unit)
            zeros, groups = self._zeros(key, shape, counts), self._groups(key, shape)
        except FormatError as error:
            self.faults.append(str(error))
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
                zeros,
                groups,
            ),
        )

    def _beside(self, key: str, name: str) -> TensorEntry | None:
        """What is stored of elements beside their scales; only integers and floats of 8 bits have that."""
        if isinstance(self.scheme, MicroscalingFloat4 | Float4):
            return None
        found = self.index.entries.get(f"{key}_{name}")
        if found is not None:
            self.used.add(found.key)
        elif isinstance(self.scheme, PackedIntegers | Integers) and name in self.scheme.needs:
            raise FormatError(f"{shown(key)} has no {shown(key)}_{name}, which quantization_config says there is")
        return found

    def _zeros(self, key: str, shape: tuple[int, ...], counts: tuple[int, ...]) -> Zeros | None:
        found = self._beside(key, _ZERO_POINT)
        if found is None:
            return None
        if found.dtype is not DType.U8 or not isinstance(self.scheme, PackedIntegers):
            if _bare(found.shape) != _bare(counts) or found.dtype is DType.BOOL:
                raise FormatError(
                    f"{shown(found.key)} has {found.dtype.label} {found.shape}, and {shown(key)} wants {counts}"
                )
            return Zeros(Whole(found.key))
        in_a_word = _WORD_BITS // self.scheme.bits
        words = (*counts[:-2], -(-shape[-2] // in_a_word), 4 * counts[-1]) if len(shape) > 1 else ()
        if found.shape != words or counts[-2:-1] != shape[-2:-1]:
            raise FormatError(
                f"{shown(found.key)} has the shape {found.shape} in bytes, and {shown(key)}, {in_a_word} rows in a "
                f"word, wants {words}"
            )
        return Zeros(Whole(found.key), in_a_word)

    def _groups(self, key: str, shape: tuple[int, ...]) -> Whole | None:
        found = self._beside(key, _GROUPS)
        if found is None:
            return None
        if found.dtype not in _INTEGERS or found.shape != shape[-1:]:
            raise FormatError(
                f"{shown(found.key)} is {found.dtype.label} {found.shape}, and {shown(key)} wants an integer for "
                f"each of {shape[-1]} columns"
            )
        return Whole(found.key)

    def _check_columns(self, key: str, values: TensorEntry, shape: tuple[int, ...], unit: tuple[int, ...]) -> None:
        """Words may be filled in part at the end of a row."""
        if not isinstance(self.scheme, PackedIntegers):
            return
        nbytes = -(-shape[-1] * self.scheme.bits // _WORD_BITS) * 4
        if (*shape[:-1], nbytes) != values.shape or shape[-1] < 1:
            raise FormatError(
                f"{shown(key)}_shape says {shape}, and {shown(values.key)} has {values.shape} in bytes"
            )
        if shape[-1] * self.scheme.bits % 8 and self.scheme.block is not None:
            raise FormatError(f"{shown(key)} has {shape[-1]} columns in groups of {unit[-1]}, which is not known")

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

    def _shape_and_unit(
        self, key: str, values: TensorEntry, scales: TensorEntry
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        stored = values.shape
        match self.scheme:
            case MicroscalingFloat4(block):
                shape = (*stored[:-2], numel(stored[-2:]) * 2) if len(stored) > 2 else ()
                return shape, (*(1 for _ in shape[:-1]), block) if shape else ()
            case Float4(block):
                shape = (*stored[:-1], stored[-1] * 2) if stored else ()
            case PackedIntegers(bits, block):
                shape = self.shapes.get(key, (*stored[:-1], stored[-1] * 8 // bits))
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
    if OF_ACTIVATIONS.fullmatch(key):
        return False
    # Models have scales of their own, such as ``logit_scale``: those are theirs to find missing, or too much.
    return _OF_WEIGHTS.fullmatch(key) is not None


def dequantised_index(reader: StorageReader, index: CheckpointIndex, config: Mapping[str, Any]) -> CheckpointIndex:
    """The same checkpoint with the tensors that a model has in place of elements and scales.

    ``config`` is its ``quantization_config``. What is said of activations is a tensor only of a model that has one
    of that name.

    Raises:
        ConfigError: as of :func:`scheme_of`.
        FormatError: naming elements without scales, scales without elements, and shapes that do not go together.
        StorageError: shapes that are stored as tensors cannot be read.
    """
    scheme = scheme_of(config)
    spare = {key for key in index.entries if OF_ACTIVATIONS.fullmatch(key)}
    entries = {key: entry for key, entry in index.entries.items() if key not in spare}
    shapes: Mapping[str, tuple[int, ...]] = {}
    if isinstance(scheme, PackedIntegers):
        entries = {
            key: _as_bytes(entry) if key.endswith(("_packed", f"_{_ZERO_POINT}")) else entry
            for key, entry in entries.items()
        }
        shapes = _stored_shapes(reader, index)
    pairing = _Pairing(replace(index, entries=entries), scheme, shapes)
    pairing.pair()
    if pairing.faults:
        told = "\n  ".join([*pairing.faults[:_SHOWN], *_more(pairing.faults)])
        raise FormatError(f"{index.root}: the quantised weights do not go with their scales:\n  {told}")
    read = {item.part.values.key for item in pairing.composed.values() if isinstance(item.part, Scaled)}
    entries = {key: replace(entry, dtype=DType.U8) if key in read else entry for key, entry in entries.items()}
    return replace(
        index,
        entries={key: entries.get(key, entry) for key, entry in index.entries.items()},
        composed={**index.composed, **pairing.composed},
        spare=frozenset(spare),
        ignored=(*index.ignored, *sorted(spare)),
    )


def _stored_shapes(reader: StorageReader, index: CheckpointIndex) -> dict[str, tuple[int, ...]]:
    """Of packed elements by key, where they are stored beside these. They lie together, and are read so."""
    found = sorted(
        (
            entry
            for key, entry in index.entries.items()
            if key.endswith("_shape") and f"{key.removesuffix('_shape')}_packed" in index.entries
        ),
        key=lambda entry: (entry.file, entry.start),
    )
    runs: list[list[TensorEntry]] = []
    for entry in found:
        if entry.dtype not in _INTEGERS or len(entry.shape) != 1 or entry.nbytes > _MOST_SHAPE_BYTES:
            raise FormatError(
                f"{index.root}: {shown(entry.key)} is {entry.dtype.label} {entry.shape}, and a shape is wanted"
            )
        last = runs[-1][-1] if runs else None
        if last is not None and last.file == entry.file and entry.start - last.stop <= _SHAPES_APART:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    shapes: dict[str, tuple[int, ...]] = {}
    for run in runs:
        start = run[0].start
        content = reader.read(run[0].file, start, max(entry.stop for entry in run))
        for entry in run:
            sizes = memoryview(content)[entry.start - start : entry.stop - start]
            kind = "<q" if entry.dtype is DType.I64 else "<i"
            shapes[entry.key.removesuffix("_shape")] = tuple(size for (size,) in struct.iter_unpack(kind, sizes))
    return shapes


def _as_bytes(words: TensorEntry) -> TensorEntry:
    """The same elements as bytes, of which each has the lower ones first."""
    if words.dtype is not DType.I32 or not words.shape:
        return words
    return replace(words, dtype=DType.U8, shape=(*words.shape[:-1], 4 * words.shape[-1]))


def _more(faults: list[str]) -> Iterator[str]:
    if len(faults) > _SHOWN:
        yield f"and {len(faults) - _SHOWN} more"
