"""Safetensors files that hold chunks of tensors, one file for each rank.

``HuggingFaceStorageWriter`` of torch writes them with ``save_distributed=True``, as transformers' distributed
checkpoints do: the metadata of each header tell where the file's part of each tensor begins. Nothing tells the size
of the whole, so that it is what the parts reach to.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.errors import FormatError
from shardwise.formats.entries import TensorEntry
from shardwise.formats.found import MAX_DIMS, Chunk, FoundTensor, StoredView
from shardwise.formats.safetensors_header import FileHeader
from shardwise.formats.strict_json import parse_object
from shardwise.storage.names import shown
from shardwise.tensors import Strided

KEY = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def chunk_offsets(header: FileHeader) -> Mapping[str, tuple[int, ...]]:
    """Where the file's part of each tensor begins in the whole; empty for a file of whole tensors.

    Raises :class:`FormatError` where that contradicts the file's tensors.
    """
    text = header.metadata.get(KEY)
    if text is None:
        return {}
    told = parse_object(text.encode(), what=f"{shown(header.file)}: {KEY}")
    found: dict[str, tuple[int, ...]] = {}
    for entry in header.entries:
        if entry.key not in told:
            continue
        value = told[entry.key]
        offsets = value.get(_OFFSETS) if isinstance(value, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) > MAX_DIMS
            or len(offsets) != len(entry.shape)
            or not all(type(offset) is int and 0 <= offset < 2**63 for offset in offsets)
        ):
            raise FormatError(
                f"{shown(header.file)}: {KEY} does not tell where the part of {shown(entry.key)} of shape "
                f"{entry.shape} begins; save it again"
            )
        if entry.dtype.bits % 8:
            raise FormatError(
                f"{shown(header.file)}: {shown(entry.key)} is a part of a tensor of {entry.dtype.label}, whose "
                "elements are no whole bytes; save it whole"
            )
        found[entry.key] = tuple(offsets)
    return found


def from_chunks(key: str, chunks: list[tuple[tuple[int, ...], TensorEntry]]) -> FoundTensor:
    """The tensor that parts of the same dtype, each beginning at its offsets, make up.

    Raises :class:`FormatError` where they cannot belong together.
    """
    first = chunks[0][1]
    for _, entry in chunks:
        if entry.dtype is not first.dtype or len(entry.shape) != len(first.shape):
            raise FormatError(
                f"{shown(key)}: {first.dtype.label} {first.shape} in {shown(first.file)}, and {entry.dtype.label} "
                f"{entry.shape} in {shown(entry.file)}; the folder mixes two saves: write it again"
            )
    ends = [[start + size for start, size in zip(offsets, entry.shape, strict=True)] for offsets, entry in chunks]
    found = tuple(
        Chunk(offsets, StoredView(entry.file, entry.range, entry.dtype, Strided.contiguous(entry.shape)))
        for offsets, entry in chunks
    )
    return FoundTensor((key,), first.dtype, tuple(map(max, zip(*ends, strict=True))), found)
