"""Reads and writes headers of safetensors files, and finds the files of a checkpoint.

A checkpoint is one file, several with an index or by their names, or a file of chunks for each rank. torch's
``HuggingFaceStorageWriter`` writes the last kind with ``save_distributed=True``, as transformers' distributed
checkpoints do: the metadata of each header has the offsets of the file's chunk of each tensor. The shape of the
full tensor is not stored, so it is the end of its last chunk.

Files are rejected by the rules of the safetensors library (``Metadata::validate`` in Rust) and two stricter ones: a
key that occurs twice is rejected even if both are equal, and a tensor's description must be an object (the library
also accepts ``["F32", [1], [0, 4]]``).

Files are written as the library does (``prepare``): tensors in the order of their dtypes, widest first, then of
their names as UTF-8, without gaps. The header is padded with spaces to eight bytes.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Final, TypeGuard

from shardwise.core.errors import FormatError
from shardwise.core.tensors import DType, Strided, find_dtype, numel
from shardwise.files import checkpoint_index, join_entries
from shardwise.files.checkpoint_index import (
    LISTED,
    CheckpointFormat,
    FileSelection,
    FormatFaults,
    IndexSoFar,
    TensorEntry,
)
from shardwise.files.join_entries import MAX_DIMS, Chunk, FoundTensor, StoredView
from shardwise.files.storage import StorageReader
from shardwise.files.urls import shown

_CHUNKS = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def parse_chunk_offsets(header: FileHeader) -> Mapping[str, tuple[int, ...]]:
    """Return the offsets of the file's chunk of each tensor, or an empty mapping for a file of full tensors.

    Raises :class:`FormatError` if they contradict the file's tensors.
    """
    text = header.metadata.get(_CHUNKS)
    if text is None:
        return {}
    # By key {"saved_offsets": [row, column, ...]}, as torch's HuggingFaceStorageWriter writes it
    content = text.encode("utf-8", "surrogatepass")  # a lone surrogate is a fault of the JSON like any other
    described = checkpoint_index.parse_object(content, what=f"{shown(header.file)}: {_CHUNKS}")
    offsets_by_key: dict[str, tuple[int, ...]] = {}
    for entry in header.entries:
        if entry.key not in described:
            continue
        # One offset for each dimension, checked like the rest of a header, which is untrusted.
        value = described[entry.key]
        offsets = value.get(_OFFSETS) if isinstance(value, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) > MAX_DIMS
            or len(offsets) != len(entry.shape)
            or not all(type(offset) is int and 0 <= offset < 2**63 for offset in offsets)
        ):
            raise FormatError(
                f"{shown(header.file)}: {_CHUNKS} has no valid offsets of the chunk of {shown(entry.key)} of shape "
                f"{entry.shape}. Save it again"
            )
        if entry.dtype.bits % 8:
            raise FormatError(
                f"{shown(header.file)}: {shown(entry.key)} is a chunk of a tensor of {entry.dtype.label}, whose "
                "elements are not whole bytes. Save it whole"
            )
        offsets_by_key[entry.key] = tuple(offsets)
    return offsets_by_key


def join_chunks(key: str, chunks: list[tuple[tuple[int, ...], TensorEntry]]) -> FoundTensor:
    """Return the tensor of these chunks, each with its offsets.

    Raises :class:`FormatError` if chunks differ in dtype or number of dimensions.
    """
    first = chunks[0][1]
    for _, entry in chunks:
        if entry.dtype is not first.dtype or len(entry.shape) != len(first.shape):
            raise FormatError(
                f"{shown(key)}: {first.dtype.label} {first.shape} in {shown(first.file)}, and {entry.dtype.label} "
                f"{entry.shape} in {shown(entry.file)}. The folder mixes two saves: write it again"
            )
    # Whether the chunks tile this shape is checked by add_tensor().
    ends = [[start + size for start, size in zip(offsets, entry.shape, strict=True)] for offsets, entry in chunks]
    pieces: list[Chunk] = []
    for offsets, entry in chunks:
        view = StoredView(entry.file, entry.range, entry.dtype, Strided.contiguous(entry.shape))
        pieces.append(Chunk(offsets, view))
    shape = tuple(map(max, zip(*ends, strict=True)))  # the end of the last chunk in each dimension
    return FoundTensor((key,), first.dtype, shape, tuple(pieces))


_USUAL_INDEX: Final = "model.safetensors.index.json"
_WEIGHTS: Final = ".safetensors"
_INDEX_ENDING: Final = ".safetensors.index.json"
_INDEX_NAME = re.compile(r".*\.safetensors\.index(\.[^./]+)?\.json")
"""Index files by name, those of a variant too."""
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")


class _SafetensorsFiles(CheckpointFormat):
    usual = ("model.safetensors", _USUAL_INDEX)
    endings = (_WEIGHTS, _INDEX_ENDING)
    looked_for = (f"another *{_INDEX_ENDING}", f"*{_WEIGHTS}")

    def is_named(self, name: str) -> bool:
        return name.endswith(_WEIGHTS) or _INDEX_NAME.fullmatch(name) is not None

    def select(self, reader: StorageReader, name: str, faults: FormatFaults) -> FileSelection:
        if _INDEX_NAME.fullmatch(name):
            return join_entries.select_indexed(reader, name, _WEIGHTS, "indexed", faults)
        return FileSelection("single file", [name])

    def find(self, reader: StorageReader, names: Sequence[str], faults: FormatFaults) -> FileSelection | None:
        here = [name for name in names if "/" not in name]
        # One index decides. Several are ambiguous. Without any, all files of weights are one checkpoint.
        indexes = _without_side_files(name for name in here if name.endswith(_INDEX_ENDING))
        if len(indexes) > 1:
            raise FormatError(
                f"{reader.root}: several index files and no {_USUAL_INDEX}: {checkpoint_index.listed(indexes)}. "
                "Pass the path of one of them"
            )
        if indexes:
            return self.select(reader, indexes[0], faults)
        files = _without_side_files(name for name in here if name.endswith(_WEIGHTS))
        if not files:
            return None
        _check_numbering(files, faults)
        layout = "single file" if len(files) == 1 else "several files without an index"
        return FileSelection(layout, files)

    def read(
        self, reader: StorageReader, selection: FileSelection, index: IndexSoFar, faults: FormatFaults
    ) -> None:
        headers = join_entries.read_each(reader, sorted(set(selection.files)), read_header, faults)
        _add_headers(headers, index, faults)


FORMAT: Final[CheckpointFormat] = _SafetensorsFiles()


def _without_side_files(names: Iterable[str]) -> list[str]:
    """Return the files without adapters and "consolidated" files, which are a second copy of the weights."""
    model_files = [name for name in names if not fnmatchcase(name, "adapter_model*")]
    return [name for name in model_files if not fnmatchcase(name, "consolidated*")] or model_files


def _check_numbering(files: Sequence[str], faults: FormatFaults) -> None:
    """Check that no file is missing if files are numbered "-00002-of-00003" and there is no index."""
    numbers_by_set: dict[tuple[str, int], set[int]] = defaultdict(set)
    for file in files:
        match = _NUMBERED.fullmatch(file)
        if match:
            numbers_by_set[match["stem"], int(match["total"])].add(int(match["number"]))
    for (stem, total), numbers in numbers_by_set.items():
        first = 0 if 0 in numbers else 1
        # The total is untrusted and may be huge.
        expected = range(first, first + min(total, len(numbers) + LISTED))
        absent = [number for number in expected if number not in numbers]
        if absent:
            faults.add(
                "incomplete sets of numbered files",
                f"{shown(stem)}-*-of-{total:05d}{_WEIGHTS}: {len(numbers)} of {total} exist, "
                f"missing are the numbers {checkpoint_index.listed(str(number) for number in absent)}",
            )


def _add_headers(headers: Iterable[FileHeader], index: IndexSoFar, faults: FormatFaults) -> None:
    chunks: dict[str, list[tuple[tuple[int, ...], TensorEntry]]] = defaultdict(list)
    for header in headers:
        index.files[header.file] = header.file_nbytes
        index.keys[header.file] = {entry.key for entry in header.entries}
        # Of one name in several files, the first file's value counts.
        metadata = {name: text for name, text in header.metadata.items() if name != _CHUNKS}
        index.metadata = {**metadata, **index.metadata}
        try:
            offsets = parse_chunk_offsets(header)
        except FormatError as error:
            faults.add_error("damaged files", error)
            continue
        for entry in header.entries:
            if entry.key in offsets:
                chunks[entry.key].append((offsets[entry.key], entry))
                continue
            if entry.key in index.composed:  # from a file of torch that was read before
                faults.add("keys held twice", f"{shown(entry.key)}: in {shown(entry.file)}, and elsewhere in parts")
                continue
            first = index.entries.setdefault(entry.key, entry)
            if first is not entry:
                faults.add(
                    "keys held by two files",
                    f"{shown(entry.key)}: in {shown(first.file)} and in {shown(entry.file)}. "
                    "Remove the file that does not belong",
                )
    # Only now, when all files have been seen: chunks of a tensor are in the files of different ranks.
    for key, pieces in chunks.items():
        if key in index.entries:
            whole = shown(index.entries[key].file)
            faults.add(
                "keys held twice", f"{shown(key)}: in chunks, and whole in {whole}. Remove what does not belong"
            )
            continue
        try:
            join_entries.add_tensor(key, join_chunks(key, pieces), index, faults)
        except FormatError as error:
            faults.add_error("damaged files", error)


MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors library reads (``MAX_HEADER_SIZE``)."""

_LENGTH_BYTES = 8
_FIRST_READ_BYTES = 256 * 1024
_MAX_SIZE = 2**63 - 1
_MAX_BITS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Header of a safetensors file. ``entries`` are in the order of their bytes, which tile the data."""

    file: str
    file_nbytes: int
    data_start: int
    metadata: Mapping[str, str]
    entries: tuple[TensorEntry, ...]


def read_header(reader: StorageReader, file: str) -> FileHeader:
    """Read the header of ``file``, in at most two reads.

    Raises :class:`FormatError` for an invalid file, :class:`StorageError` if it cannot be read.
    """
    # The first 8 bytes are the length of the header, little-endian. The JSON follows, then the data.
    file_nbytes = reader.size(file)
    if file_nbytes < _LENGTH_BYTES:
        what = "is empty" if file_nbytes == 0 else f"has {file_nbytes} bytes"
        raise checkpoint_index.invalid_file(
            shown(file), f"the file {what}, a safetensors file has at least {_LENGTH_BYTES}"
        )
    # The length is unknown yet. Nearly all headers are in this first part, so that a remote file takes one request.
    first = reader.read(file, 0, min(file_nbytes, _FIRST_READ_BYTES))
    checkpoint_index.reject_pointer(first, shown(file))
    header_nbytes = int.from_bytes(first[:_LENGTH_BYTES], "little")
    _check_header_length(file, file_nbytes, header_nbytes)
    header = first[_LENGTH_BYTES : _LENGTH_BYTES + header_nbytes]
    if len(header) < header_nbytes:
        header += reader.read(file, len(first), _LENGTH_BYTES + header_nbytes)
    return parse_header(file, file_nbytes, header)


def parse_header(file: str, file_nbytes: int, header: bytes) -> FileHeader:
    """Parse ``header``, the JSON without its length, of a file of ``file_nbytes`` bytes.

    Raises :class:`FormatError` for the first fault. In the result every entry lies in the file, has the size of its
    dtype and shape, and no two overlap.
    """
    fields = checkpoint_index.parse_object(header, what=f"{shown(file)}: header")
    data_start = _LENGTH_BYTES + len(header)
    try:
        metadata = _parse_metadata(fields.pop("__metadata__", None))
        entries = [_parse_entry(file, key, field, data_start, file_nbytes) for key, field in fields.items()]
        entries.sort(key=attrgetter("start", "stop"))
        _check_tiling(entries, data_start, file_nbytes)
    except ValueError as error:
        raise checkpoint_index.invalid_file(shown(file), str(error)) from None
    return FileHeader(file, file_nbytes, data_start, metadata, tuple(entries))


def _check_header_length(file: str, file_nbytes: int, header_nbytes: int) -> None:
    announced = f"a header of {header_nbytes} bytes is announced"
    if header_nbytes > MAX_HEADER_BYTES:
        raise checkpoint_index.invalid_file(shown(file), f"{announced}, {MAX_HEADER_BYTES} is the limit")
    if _LENGTH_BYTES + header_nbytes > file_nbytes:
        raise checkpoint_index.invalid_file(
            shown(file), f"{announced}, but the file ends after {file_nbytes} bytes"
        )


def _parse_metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"__metadata__ is a {type(value).__name__}, not an object of strings")
    for key, text in value.items():
        if not isinstance(text, str):
            raise ValueError(f"__metadata__ has a {type(text).__name__} under {shown(key)}, not a string")
    return value


def _parse_entry(file: str, key: str, field: object, data_start: int, file_nbytes: int) -> TensorEntry:
    """Return the tensor that a field of the header describes. Raises ValueError if the field is invalid."""
    name = f"tensor {shown(key)}"
    if not isinstance(field, dict):
        raise ValueError(f"{name} is described by a {type(field).__name__}, not an object")
    kind, shape, offsets = (field.get(item) for item in ("dtype", "shape", "data_offsets"))
    dtype = find_dtype(kind) if isinstance(kind, str) else None
    if dtype is None:
        labels = ", ".join(dtype.label for dtype in DType if dtype is not DType.OTHER)
        raise ValueError(f"{name} has the unknown dtype {_shown_value(kind)}. Known are {labels}")
    if not _are_sizes(shape):
        raise ValueError(f"{name} has the shape {_shown_value(shape)}, not a list of integers 0..{_MAX_SIZE}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        value = _shown_value(offsets)
        raise ValueError(f"{name} has the data_offsets {value}, not [start, stop] with 0 <= start <= stop")
    # Offsets count from the end of the header. Entries have them from the start of the file.
    start, stop = offsets
    described = f"{name} of {dtype.label} {_shown_value(shape)}"
    # Multiplied step by step with a bound: a shape of a million large sizes must not become a huge integer.
    bits = dtype.bits
    for size in shape:
        bits *= size
        if bits > _MAX_BITS:
            raise ValueError(f"{described} has more than 2**64 bits")
    if bits % 8:
        raise ValueError(f"{described} does not end at a byte")
    if bits // 8 != stop - start:
        raise ValueError(f"{described} takes {bits // 8} bytes, but its data_offsets span {stop - start}")
    if data_start + stop > file_nbytes:
        raise ValueError(
            f"{name} reaches to byte {data_start + stop}, but the file ends after {file_nbytes} bytes: "
            f"{data_start + stop - file_nbytes} are missing"
        )
    return TensorEntry(key, dtype, tuple(shape), file, data_start + start, data_start + stop)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    # Not isinstance: JSON's true is an int to Python.
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values)


def _check_tiling(entries: Sequence[TensorEntry], data_start: int, file_nbytes: int) -> None:
    """Check that tensors fill the file after the header without gap or overlap."""
    # Sorted by start, so each tensor must begin where the one before ends.
    covered, previous = data_start, "the header"
    for entry in entries:
        name = f"tensor {shown(entry.key)}"
        if entry.start > covered:
            gap = f"{entry.start - covered} bytes from byte {covered} on"
            raise ValueError(f"{gap}, between {previous} and {name}, belong to no tensor")
        if entry.start < covered:
            raise ValueError(
                f"{name} starts at byte {entry.start}, inside {previous}, which ends at byte {covered}"
            )
        covered, previous = entry.stop, name
    if covered != file_nbytes:
        raise ValueError(f"the last {file_nbytes - covered} bytes, from byte {covered} on, belong to no tensor")


def _shown_value(value: object) -> str:
    return shown(repr(value))


_ORDER: Final = [
    *(DType.U64, DType.I64, DType.F64, DType.C64, DType.F32, DType.U32, DType.I32, DType.BF16, DType.F16),
    *(DType.U16, DType.I16, DType.F8_E5M2FNUZ, DType.F8_E4M3FNUZ, DType.F8_E8M0, DType.F8_E4M3, DType.F8_E5M2),
    *(DType.I8, DType.U8, DType.BOOL),
]
"""Order of tensors in a file, the reverse of the library's ``Dtype``."""

_POSITION = {dtype: position for position, dtype in enumerate(_ORDER)}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class NewFile:
    """A safetensors file to write: its header, its tensors, and its size in bytes."""

    name: str
    header: bytes
    entries: tuple[TensorEntry, ...]
    nbytes: int


def lay_out(
    name: str, tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]
) -> NewFile:
    """Lay out a file of tensors, each with key, dtype and shape.

    Raises:
        FormatError: a dtype that safetensors does not have, or a header longer than the library reads.
    """
    items = list(tensors)
    for key, dtype, _ in items:
        if dtype not in _POSITION:
            raise FormatError(f"{shown(key)}: {dtype.label} elements cannot be saved to a safetensors file")
        if key == "__metadata__":
            raise FormatError("a tensor cannot be named __metadata__ in a safetensors file. Rename it")
    # The library's order, so that a file of the same tensors has the same bytes.
    items.sort(key=lambda item: (_POSITION[item[1]], item[0].encode()))
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
            f"{shown(name)}: a header of {len(text)} bytes would be needed, {MAX_HEADER_BYTES} is the limit. Save "
            "to more files by a smaller max_shard_size"
        )
    # Offsets in the header count from its end, those of entries from the start of the file.
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    entries: list[TensorEntry] = []
    place = len(header)
    for key, dtype, shape in items:
        stop = place + numel(shape) * dtype.itemsize
        entries.append(TensorEntry(key, dtype, shape, name, place, stop))
        place = stop
    return NewFile(name, header, tuple(entries), place)
