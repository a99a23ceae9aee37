"""Checkpoints of safetensors files: one, several, with an index or by their names, or chunks, a file for each rank.

``HuggingFaceStorageWriter`` of torch writes them with ``save_distributed=True``, as transformers' distributed
checkpoints do: the metadata of each header tell where the file's part of each tensor begins. Nothing tells the size
of the whole, so that it is what the parts reach to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from shardwise.errors import FormatError
from shardwise.formats.checkpoint_index import TensorEntry
from shardwise.formats.contract import LISTED, CheckpointFormat, FileSelection, FormatFaults, IndexSoFar, listed
from shardwise.formats.joining import add_tensor, read_each, select_indexed
from shardwise.formats.nested_dicts import MAX_DIMS, Chunk, FoundTensor, StoredView
from shardwise.formats.safetensors_header import FileHeader, read_header
from shardwise.formats.strict_json import parse_object
from shardwise.storage.contract import StorageReader
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


_USUAL_INDEX: Final = "model.safetensors.index.json"
_WEIGHTS: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_INDEXES = re.compile(r".*\.safetensors\.index(\.[^./]+)?\.json")
"""Index files by name, those of a variant too."""
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")


class _SafetensorsFiles:
    usual = ("model.safetensors", _USUAL_INDEX)
    probed = ()
    endings = (_WEIGHTS, _INDEX)
    looked_for = (f"another *{_INDEX}", f"*{_WEIGHTS}")

    def is_named(self, name: str) -> bool:
        return name.endswith(_WEIGHTS) or _INDEXES.fullmatch(name) is not None

    def select(self, reader: StorageReader, name: str, faults: FormatFaults) -> FileSelection:
        if _INDEXES.fullmatch(name):
            return select_indexed(reader, name, _WEIGHTS, "indexed", faults)
        return FileSelection("single file", [name])

    def find(self, reader: StorageReader, names: Sequence[str], faults: FormatFaults) -> FileSelection | None:
        here = [name for name in names if "/" not in name]
        indexes = _without_side_files(name for name in here if name.endswith(_INDEX))
        if len(indexes) > 1:
            raise FormatError(
                f"{reader.root}: several index files and no {_USUAL_INDEX}: {listed(indexes)}; "
                "pass the one that is meant as weights_name, or its path"
            )
        if indexes:
            return self.select(reader, indexes[0], faults)
        files = _without_side_files(name for name in here if name.endswith(_WEIGHTS))
        if not files:
            return None
        _check_numbering(files, faults)
        return FileSelection("single file" if len(files) == 1 else "several files without an index", files)

    def hints(self, names: Sequence[str]) -> list[str]:  # noqa: ARG002 - as any format
        return []

    def read(
        self, reader: StorageReader, selection: FileSelection, found: IndexSoFar, faults: FormatFaults
    ) -> None:
        _add_headers(read_each(reader, sorted(set(selection.files)), read_header, faults), found, faults)


FORMAT: Final[CheckpointFormat] = _SafetensorsFiles()


def _without_side_files(names: Iterable[str]) -> list[str]:
    """Without adapters, and without "consolidated" files where they are a second copy of the weights."""
    kept = [name for name in names if not fnmatchcase(name, "adapter_model*")]
    return [name for name in kept if not fnmatchcase(name, "consolidated*")] or kept


def _check_numbering(files: Sequence[str], faults: FormatFaults) -> None:
    """Where files are numbered "-00002-of-00003" and no index says which there are, none may be missing."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for file in files:
        match = _NUMBERED.fullmatch(file)
        if match:
            found[match["stem"], int(match["total"])].add(int(match["number"]))
    for (stem, total), numbers in found.items():
        first = 0 if 0 in numbers else 1
        # The total is a stranger's number: look no further than what is there plus what is listed.
        looked_at = range(first, first + min(total, len(numbers) + LISTED))
        absent = [number for number in looked_at if number not in numbers]
        if absent:
            faults.add(
                "incomplete sets of numbered files",
                f"{shown(stem)}-*-of-{total:05d}{_WEIGHTS}: {len(numbers)} of {total} are there, "
                f"missing are the numbers {listed(str(number) for number in absent)}",
            )


def _add_headers(headers: Iterable[FileHeader], found: IndexSoFar, faults: FormatFaults) -> None:
    chunks: dict[str, list[tuple[tuple[int, ...], TensorEntry]]] = defaultdict(list)
    for header in headers:
        found.files[header.file] = header.file_nbytes
        found.held[header.file] = {entry.key for entry in header.entries}
        told = {name: text for name, text in header.metadata.items() if name != KEY}
        found.metadata = {**told, **found.metadata}
        try:
            offsets = chunk_offsets(header)
        except FormatError as error:
            faults.add_error("damaged files", error)
            continue
        for entry in header.entries:
            if entry.key in offsets:
                chunks[entry.key].append((offsets[entry.key], entry))
                continue
            if entry.key in found.composed:  # of a file of torch's, read before
                faults.add("keys held twice", f"{shown(entry.key)}: in {shown(entry.file)}, and elsewhere in parts")
                continue
            first = found.entries.setdefault(entry.key, entry)
            if first is not entry:
                faults.add(
                    "keys held by two files",
                    f"{shown(entry.key)}: in {shown(first.file)} and in {shown(entry.file)}; "
                    "remove the file that does not belong",
                )
    for key, parts in chunks.items():
        if key in found.entries:
            whole = shown(found.entries[key].file)
            faults.add(
                "keys held twice", f"{shown(key)}: in chunks, and whole in {whole}; remove what does not belong"
            )
            continue
        try:
            add_tensor(key, from_chunks(key, parts), found, faults)
        except FormatError as error:
            faults.add_error("damaged files", error)
