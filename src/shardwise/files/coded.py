"""Quantized forms as nodes over stored entries, and the form of bitsandbytes.

bitsandbytes stores in addition to ``weight``, packed bytes (n, 1): ``weight.absmax``, one scale for each block,
``weight.quant_map``, the sixteen values, and ``weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``), JSON with the
shape, the dtype and the block size. Nested scales are bytes, and have ``weight.nested_absmax``, one for 256 of
them, ``weight.nested_quant_map``, and an offset in the JSON (``QuantState.as_dict`` of bitsandbytes). The maps and
the JSON are read and validated, because another map would give other values.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from shardwise.core.errors import FormatError
from shardwise.core.tensors import Code, DType, Form4, numel
from shardwise.files import checkpoint_index
from shardwise.files.checkpoint_index import (
    CheckpointIndex,
    Composed,
    FormatFaults,
    QuantizedForm,
    TensorEntry,
    Whole,
)
from shardwise.files.four_bit_blocks import BLOCKS, NESTED_BLOCK
from shardwise.files.storage import StorageReader
from shardwise.files.urls import shown


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zero points, one for each scale.

    Attributes:
        values: the zero points, as values or as bytes of words.
        in_a_word: number of zero points of a column, in the code of the elements, in a word of 32 bits. 0 for
            numbers.
    """

    values: Whole
    in_a_word: int = 0


@dataclass(frozen=True, slots=True)
class Scaled:
    """Elements that are stored in few bits, less their zero points, times the scales of their blocks.

    Attributes:
        values: the elements, row-major. Rows may be padded.
        scales: one for each block.
        shape: shape of the elements.
        unit: sizes of a block, by dimension. The last blocks of a dimension may be smaller.
        code: values of the stored bytes.
        has_exponents: True if scales are exponents of 2, with a bias of 127.
        overall: a number, and 1 or -1: all scales are multiplied by it, or divided.
        swaps: True if the last two dimensions are transposed in the end.
        zeros: zero points.
        groups: the block in its row of each column, if it does not follow from the position.
    """

    values: Whole
    scales: Whole
    shape: tuple[int, ...]
    unit: tuple[int, ...]
    code: Code
    has_exponents: bool = False
    overall: tuple[Whole, int] | None = None
    swaps: bool = False
    zeros: Zeros | None = None
    groups: Whole | None = None

    kind: ClassVar[str] = "scaled"


@dataclass(frozen=True, slots=True)
class Nested:
    """Second level of scales: the code table and the scales of 8-bit scales.

    Attributes:
        scales: one for each 256 8-bit scales.
        offset: number that is added to all 8-bit scales.
        codebook: values of the 256 bytes.
    """

    scales: Whole
    offset: float
    codebook: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FourBits:
    """Elements of four bits as bitsandbytes packs them, times the scales of their blocks.

    Attributes:
        values: the packed bytes, row-major.
        scales: one for each block.
        shape: shape of the elements.
        block: consecutive elements with one scale. Blocks continue from row to row, and the last may be smaller.
        form: 4-bit data type.
        dtype: dtype before packing.
        nested: second level of scales, if scales are bytes.
    """

    values: Whole
    scales: Whole
    shape: tuple[int, ...]
    block: int
    form: Form4
    dtype: DType
    nested: Nested | None = None

    kind: ClassVar[str] = "four bits"


def words_as_bytes(entry: TensorEntry) -> TensorEntry:
    """Return an entry of 32-bit words as one of little-endian bytes. Others are unchanged."""
    if entry.dtype is not DType.I32 or not entry.shape:
        return entry
    return replace(entry, dtype=DType.U8, shape=(*entry.shape[:-1], 4 * entry.shape[-1]))


ABSMAX = ".absmax"
QUANT_MAP = ".quant_map"
NESTED_ABSMAX = ".nested_absmax"
NESTED_MAP = ".nested_quant_map"
QUANT_STATE = ".quant_state.bitsandbytes__"
_ENDS = (ABSMAX, QUANT_MAP, NESTED_ABSMAX, NESTED_MAP)

_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}
_MAX_STATE_BYTES = 1 << 16
_MAP_BYTES = 4 * 256
_MAX_OFFSET = 3.4e38
"""About the largest float32. An integer of JSON may be too large for any float."""

_FOUR_BIT_FAULTS: Final = "4-bit weights whose companion tensors do not match"


@dataclass(frozen=True, slots=True)
class _Companions:
    """Entries that accompany packed bytes (scales, maps, states).

    Attributes:
        form: 4-bit data type, from the name of the JSON.
        state: entry of the JSON.
        entries: the other entries, by the suffix of their keys.
    """

    form: Form4
    state: TensorEntry
    entries: Mapping[str, TensorEntry]

    @classmethod
    def find(cls, index: CheckpointIndex, key: str) -> Self | None:
        """Return the entries that accompany packed bytes, or None for other entries."""
        for form in Form4:
            # The key of the JSON has the data type in it, so each type is tried.
            state = index.entries.get(f"{key}{QUANT_STATE}{form.value}")
            if state is not None:
                entries = {end: index.entries[f"{key}{end}"] for end in _ENDS if f"{key}{end}" in index.entries}
                return cls(form, state, entries)
        return None

    @property
    def small(self) -> list[TensorEntry]:
        """Entries that are read whole."""
        maps = [self.entries[end] for end in (QUANT_MAP, NESTED_MAP) if end in self.entries]
        return [entry for entry in (self.state, *maps) if entry.nbytes <= _MAX_STATE_BYTES]


@dataclass(frozen=True, slots=True)
class _PackedFourBits:
    """4-bit weights in bitsandbytes' packing, which each weight describes itself."""

    is_kept: bool = True

    def dequantize(self, reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
        faults = FormatFaults(index.root)
        composed: dict[str, Composed] = {}
        used: set[str] = set()
        companions_by_key: dict[str, _Companions] = {}
        for key in index.entries:
            companions = _Companions.find(index, key)
            if companions is not None:
                companions_by_key[key] = companions
        # All at once, because a remote storage reads them concurrently.
        small = [entry for parts in companions_by_key.values() for entry in parts.small]
        texts = checkpoint_index.contents(reader, small)
        for key, companions in companions_by_key.items():
            used |= {companions.state.key, *(entry.key for entry in companions.entries.values())}
            try:
                composed[key] = _compose(index.entries[key], companions, texts)
            except FormatError as error:
                faults.add(_FOUR_BIT_FAULTS, f"{shown(key)}: {error}")
        for key in index.entries:
            if key not in used and (key.endswith(_ENDS) or QUANT_STATE in key):
                faults.add(_FOUR_BIT_FAULTS, f"{shown(key)} belongs to packed bytes that are missing or incomplete")
        faults.raise_if_any()
        # States and maps have been read, and are dropped. Scales stay, because they are read with the codes.
        for item in composed.values():
            used.difference_update(checkpoint_index.iter_entry_keys(item.composition))
        entries = {key: entry for key, entry in index.entries.items() if key not in used}
        # Bytes, whatever dtype they are stored under (``bnb_4bit_quant_storage``).
        flat = {key: replace(entries[key], dtype=DType.U8, shape=(entries[key].nbytes,)) for key in composed}
        return replace(index, entries=entries | flat, composed={**index.composed, **composed})


def bitsandbytes(config: Mapping[str, Any]) -> QuantizedForm:
    """Return the form of bitsandbytes' ``quantization_config``.

    Raises:
        ConfigError: it is not of four bits.
    """
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        return _PackedFourBits()
    raise checkpoint_index.unknown_form("bitsandbytes without load_in_4bit, as with load_in_8bit")


def _compose(values: TensorEntry, companions: _Companions, texts: Mapping[str, bytes]) -> Composed:
    """Return the tensor of packed bytes.

    Raises:
        FormatError: their companion entries are invalid.
    """
    # Everything is checked against the shape in the JSON: bytes, maps, number of scales.
    if companions.state.key not in texts:
        raise FormatError(f"its quant_state has {companions.state.nbytes} bytes, {_MAX_STATE_BYTES} is the limit")
    state = checkpoint_index.parse_object(texts[companions.state.key], what="its quant_state")
    shape, block = _shape_in(state), state.get("blocksize")
    if block not in BLOCKS or not isinstance(block, int):
        raise FormatError(f"its quant_state has blocks of {shown(repr(block))}")
    if state.get("quant_type") != companions.form.value:
        raise FormatError(
            f"its quant_state has the type {shown(repr(state.get('quant_type')))}, not {companions.form.value}"
        )
    if values.nbytes != -(-numel(shape) // 2):
        raise FormatError(f"it has {values.nbytes} bytes, and its quant_state the shape {shape}")
    # Values are looked up by data type. A file with another table of them would be read wrongly.
    numbers = struct.pack(f"<{len(companions.form.codebook)}f", *companions.form.codebook)
    if QUANT_MAP not in companions.entries or texts.get(companions.entries[QUANT_MAP].key) != numbers:
        raise FormatError("its quant_map is missing, or differs from that of bitsandbytes")
    scales, blocks = companions.entries.get(ABSMAX), -(-numel(shape) // block)
    if scales is None:
        raise FormatError("it has no absmax")
    if numel(scales.shape) != blocks:
        raise FormatError(
            f"its absmax has {numel(scales.shape)} scales, and {shape} in blocks of {block} needs {blocks}"
        )
    # Scales are bytes exactly if they are nested.
    nested = None
    if NESTED_ABSMAX in companions.entries or NESTED_MAP in companions.entries or scales.dtype is DType.U8:
        nested = _parse_nested(companions, texts, state, scales)
    elif scales.dtype is not DType.F32:
        raise FormatError(f"its absmax is {scales.dtype.label}, and not F32")
    dtype = _DTYPES.get(str(state.get("dtype")))
    if dtype is None:
        raise FormatError(f"its quant_state has the dtype {shown(repr(state.get('dtype')))}")
    whole = Whole(values.key), Whole(scales.key)
    return Composed(dtype, shape, FourBits(*whole, shape, block, companions.form, dtype, nested))


def _parse_nested(
    companions: _Companions,
    texts: Mapping[str, bytes],
    state: Mapping[str, object],
    scales: TensorEntry,
) -> Nested:
    nested_absmax, offset = companions.entries.get(NESTED_ABSMAX), state.get("nested_offset")
    if nested_absmax is None or NESTED_MAP not in companions.entries or scales.dtype is not DType.U8:
        raise FormatError("its scales are nested, and their nested_absmax, nested_quant_map or bytes are missing")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) <= _MAX_OFFSET:
        raise FormatError(f"its quant_state has the nested_offset {shown(repr(offset))}")
    if state.get("nested_blocksize") != NESTED_BLOCK:
        raise FormatError(
            f"its scales are nested in blocks of {shown(repr(state.get('nested_blocksize')))}, not 256"
        )
    if nested_absmax.dtype is not DType.F32 or numel(nested_absmax.shape) != -(
        -numel(scales.shape) // NESTED_BLOCK
    ):
        raise FormatError(f"its nested_absmax is {nested_absmax.dtype.label} {nested_absmax.shape}")
    # In contrast to the 4-bit table, this one is read and used.
    numbers = texts.get(companions.entries[NESTED_MAP].key, b"")
    if companions.entries[NESTED_MAP].dtype is not DType.F32 or len(numbers) != _MAP_BYTES:
        raise FormatError("its nested_quant_map does not have 256 float32 values")
    return Nested(Whole(nested_absmax.key), float(offset), struct.unpack("<256f", numbers))


def _shape_in(state: Mapping[str, object]) -> tuple[int, ...]:
    shape = state.get("shape")
    if isinstance(shape, list) and 2 <= len(shape) <= 3 and all(type(n) is int and 0 < n < 1 << 40 for n in shape):
        return tuple(shape)
    raise FormatError(f"its quant_state has the shape {shown(repr(shape))}")
