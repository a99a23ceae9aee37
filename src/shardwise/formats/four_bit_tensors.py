"""Weights in four bits as bitsandbytes stores them: which tensors belong together, and whether they make sense.

Beside ``weight``, packed bytes (n, 1), there are ``weight.absmax``, one scale for each block; ``weight.quant_map``,
the sixteen numbers; and ``weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``), JSON with the shape, the dtype and
the size of a block. Nested scales are bytes, and have ``weight.nested_absmax``, one for 256 of them,
``weight.nested_quant_map``, and an offset in the JSON. (``QuantState.as_dict`` of bitsandbytes.) The small ones are
read, and held against what is known: a map that is another one would make other numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.checkpoint_index import CheckpointIndex, Composed, TensorEntry, Whole
from shardwise.formats.coded import FourBits, Nested
from shardwise.formats.contract import QuantisedForm, unknown_form
from shardwise.formats.strict_json import parse_object
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import DType, Form4, numel

ABSMAX = ".absmax"
QUANT_MAP = ".quant_map"
NESTED_ABSMAX = ".nested_absmax"
NESTED_MAP = ".nested_quant_map"
QUANT_STATE = ".quant_state.bitsandbytes__"

_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MOST_STATE_BYTES = 1 << 16
_READERS = 8
_NESTED_BLOCK = 256
_BYTES_OF_MAP = 4 * 256
_MOST_OFFSET = 3.4e38
"""A float32, nearly; an integer of JSON may be too large for any float."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class _Companions:
    """What lies beside packed bytes.

    Attributes:
        form: what four bits stand for, by the name of the JSON.
        entries: by the end of their keys; ``state`` is the JSON.
    """

    form: Form4
    state: TensorEntry
    entries: Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class _PackedFourBits:
    """Four bits as bitsandbytes packs them; each weight says how."""

    is_kept: bool = True

    def as_numbers(self, reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
        return with_four_bits(reader, index)


def form_of(config: Mapping[str, Any]) -> QuantisedForm:
    """That of bitsandbytes' ``quantization_config``.

    Raises:
        ConfigError: it is not of four bits.
    """
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        return _PackedFourBits()
    raise unknown_form(f"quant_method {shown(repr(config.get('quant_method')))}")


def with_four_bits(reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
    """The same checkpoint with numbers in place of packed bytes and what lies beside them.

    Raises:
        FormatError: naming what is half there, or makes no sense.
        StorageError: it cannot be read.
    """
    faults: list[str] = []
    found = {key: beside for key in index.entries if (beside := _companions_of(index, key)) is not None}
    with ThreadPoolExecutor(_READERS) as readers:
        read = readers.map(lambda beside: _small(reader, beside), found.values())
        texts = dict(zip(found, read, strict=True))
    composed: dict[str, Composed] = {}
    used: set[str] = set()
    for key, beside in found.items():
        used |= {beside.state.key, *(entry.key for entry in beside.entries.values())}
        try:
            composed[key] = _composed(index.entries[key], beside, texts[key])
        except FormatError as error:
            faults.append(f"{shown(key)}: {error}")
    ends = (ABSMAX, QUANT_MAP, NESTED_ABSMAX, NESTED_MAP)
    faults += [
        f"{shown(key)} belongs to packed bytes that are not stored, or not whole"
        for key in index.entries
        if key not in used and (key.endswith(ends) or QUANT_STATE in key)
    ]
    if faults:
        told = "\n  ".join([*faults[:_SHOWN], *([f"and {len(faults) - _SHOWN} more"] if faults[_SHOWN:] else [])])
        raise FormatError(f"{index.root}: weights in four bits do not go with what lies beside them:\n  {told}")
    kept = {entry for item in composed.values() if isinstance(item.part, FourBits) for entry in item.part.keys}
    entries = {key: entry for key, entry in index.entries.items() if key not in used or key in kept}
    return replace(
        index,
        entries=entries | {key: _as_bytes(entries[key]) for key in composed},
        composed={**index.composed, **composed},
    )


def _as_bytes(entry: TensorEntry) -> TensorEntry:
    """The same bytes, whatever dtype they are stored under (``bnb_4bit_quant_storage``)."""
    return replace(entry, dtype=DType.U8, shape=(entry.nbytes,))


def _companions_of(index: CheckpointIndex, key: str) -> _Companions | None:
    """What lies beside an entry, where it is packed bytes."""
    for form in Form4:
        state = index.entries.get(f"{key}{QUANT_STATE}{form.value}")
        if state is not None:
            ends = (ABSMAX, QUANT_MAP, NESTED_ABSMAX, NESTED_MAP)
            entries = {end: index.entries[f"{key}{end}"] for end in ends if f"{key}{end}" in index.entries}
            return _Companions(form, state, entries)
    return None


def _small(reader: StorageReader, beside: _Companions) -> Mapping[str, bytes]:
    """The bytes of what is small: the JSON as "", and maps by the end of their keys; none of what is too large."""
    wanted = {
        "": beside.state,
        **{end: beside.entries[end] for end in (QUANT_MAP, NESTED_MAP) if end in beside.entries},
    }
    return {
        end: reader.read(entry.file, entry.start, entry.stop)
        for end, entry in wanted.items()
        if entry.nbytes <= _MOST_STATE_BYTES
    }


def _composed(values: TensorEntry, beside: _Companions, texts: Mapping[str, bytes]) -> Composed:
    """The numbers that packed bytes stand for.

    Raises:
        FormatError: what lies beside them makes no sense.
    """
    if "" not in texts:
        raise FormatError(f"its quant_state has {beside.state.nbytes} bytes, more than any")
    told = parse_object(texts[""], what="its quant_state")
    shape, block = _shape_in(told), told.get("blocksize")
    if block not in _BLOCK_SIZES or not isinstance(block, int):
        raise FormatError(f"its quant_state has blocks of {shown(repr(block))}")
    if told.get("quant_type") != beside.form.value:
        raise FormatError(f"its quant_state says {shown(repr(told.get('quant_type')))}, not {beside.form.value}")
    if values.nbytes != -(-numel(shape) // 2):
        raise FormatError(f"it has {values.nbytes} bytes, and its quant_state the shape {shape}")
    _require_map(texts, QUANT_MAP, beside.form.numbers)
    scales, blocks = beside.entries.get(ABSMAX), -(-numel(shape) // block)
    if scales is None:
        raise FormatError("it has no absmax")
    if numel(scales.shape) != blocks:
        raise FormatError(f"its absmax has {numel(scales.shape)} scales, and {shape} in blocks of {block} {blocks}")
    nested = None
    if NESTED_ABSMAX in beside.entries or NESTED_MAP in beside.entries or scales.dtype is DType.U8:
        nested = _nested(beside, texts, told, scales)
    elif scales.dtype is not DType.F32:
        raise FormatError(f"its absmax is {scales.dtype.label}, and not F32")
    dtype = _DTYPES.get(str(told.get("dtype")))
    if dtype is None:
        raise FormatError(f"its quant_state has the dtype {shown(repr(told.get('dtype')))}")
    return Composed(
        dtype, shape, FourBits(Whole(values.key), Whole(scales.key), shape, block, beside.form, dtype, nested)
    )


def _nested(
    beside: _Companions, texts: Mapping[str, bytes], told: Mapping[str, object], scales: TensorEntry
) -> Nested:
    found, offset = beside.entries.get(NESTED_ABSMAX), told.get("nested_offset")
    if found is None or NESTED_MAP not in beside.entries or scales.dtype is not DType.U8:
        raise FormatError("its scales are nested, and only a part of what belongs to that is stored")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) <= _MOST_OFFSET:
        raise FormatError(f"its quant_state has the nested_offset {shown(repr(offset))}")
    if told.get("nested_blocksize") != _NESTED_BLOCK:
        raise FormatError(
            f"its scales are nested in blocks of {shown(repr(told.get('nested_blocksize')))}, not 256"
        )
    if found.dtype is not DType.F32 or numel(found.shape) != -(-numel(scales.shape) // _NESTED_BLOCK):
        raise FormatError(f"its nested_absmax is {found.dtype.label} {found.shape}")
    numbers = texts.get(NESTED_MAP, b"")
    if beside.entries[NESTED_MAP].dtype is not DType.F32 or len(numbers) != _BYTES_OF_MAP:
        raise FormatError("its nested_quant_map has not 256 float32")
    return Nested(Whole(found.key), float(offset), struct.unpack("<256f", numbers))


def _shape_in(told: Mapping[str, object]) -> tuple[int, ...]:
    shape = told.get("shape")
    if isinstance(shape, list) and 2 <= len(shape) <= 3 and all(type(n) is int and 0 < n < 1 << 40 for n in shape):
        return tuple(shape)
    raise FormatError(f"its quant_state has the shape {shown(repr(shape))}")


def _require_map(texts: Mapping[str, bytes], end: str, numbers: Sequence[float]) -> None:
    if texts.get(end) != struct.pack(f"<{len(numbers)}f", *numbers):
        raise FormatError(f"its {end[1:]} is not there, or not the one that is known: other numbers would come out")
