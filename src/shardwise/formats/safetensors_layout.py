"""The header that the safetensors library would write for these tensors, byte by byte.

Source: ``prepare`` and ``Metadata``'s serialisation in the library. Tensors lie in the order of their dtypes,
widest first, then of their names as UTF-8; nothing lies between them; the header is padded with spaces to eight
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shardwise.errors import FormatError
from shardwise.formats.entries import TensorEntry
from shardwise.formats.safetensors_header import MAX_HEADER_BYTES
from shardwise.storage.names import shown
from shardwise.tensors.dtypes import DType
from shardwise.tensors.strided import numel

_ORDER: Final = (
    DType.U64,
    DType.I64,
    DType.F64,
    DType.C64,
    DType.F32,
    DType.U32,
    DType.I32,
    DType.BF16,
    DType.F16,
    DType.U16,
    DType.I16,
    DType.F8_E5M2FNUZ,
    DType.F8_E4M3FNUZ,
    DType.F8_E8M0,
    DType.F8_E4M3,
    DType.F8_E5M2,
    DType.I8,
    DType.U8,
    DType.BOOL,
)
"""The library's ``Dtype`` declares them the other way round, and writes the last first."""

_RANK = {dtype: rank for rank, dtype in enumerate(_ORDER)}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class NewFile:
    """A safetensors file that is to be: what it begins with, where its tensors will be, and its size in bytes."""

    name: str
    header: bytes
    entries: tuple[TensorEntry, ...]
    nbytes: int


def lay_out(
    name: str, tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]
) -> NewFile:
    """The file of this name that holds these tensors: (key, dtype, shape) each.

    Raises:
        FormatError: a dtype that no file can hold, or a header longer than the library reads.
    """
    items = list(tensors)
    for key, dtype, _ in items:
        if dtype not in _RANK:
            raise FormatError(f"{shown(key)}: {dtype.label} elements cannot be saved to a safetensors file")
        if key == "__metadata__":
            raise FormatError("a tensor cannot be named __metadata__ in a safetensors file; rename it")
    items.sort(key=lambda item: (_RANK[item[1]], item[0].encode()))
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for key, dtype, shape in items:
        stop = start + numel(shape) * dtype.itemsize
        fields[key] = {"dtype": dtype.label, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            f"{shown(name)}: a header of {len(text)} bytes would be needed, {MAX_HEADER_BYTES} "
            "is the limit; save to "
            "more files by a smaller max_shard_size"
        )
    header = len(text).to_bytes(_ALIGNMENT, "little") + text
    entries: list[TensorEntry] = []
    place = len(header)
    for key, dtype, shape in items:
        stop = place + numel(shape) * dtype.itemsize
        entries.append(TensorEntry(key, dtype, shape, name, place, stop))
        place = stop
    return NewFile(name, header, tuple(entries), place)
