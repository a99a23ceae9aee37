"""The header of a safetensors file: read, as far as it can be trusted, and written as the library would.

Source of the rules: the safetensors format, and its Rust library (``Metadata::validate``), which refuses what
is refused here. Two things are stricter here: a key that occurs twice is refused even when both say the same,
and a tensor's description must be an object (the library also takes ``["F32", [1], [0, 4]]``).

Source: ``prepare`` and ``Metadata``'s serialisation in the library. Tensors lie in the order of their dtypes,
widest first, then of their names as UTF-8; nothing lies between them; the header is padded with spaces to eight
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeGuard

from shardwise.errors import FormatError
from shardwise.formats.checkpoint_index import TensorEntry
from shardwise.formats.strict_json import parse_object
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import DType, dtype_named, numel

MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors library reads (``MAX_HEADER_SIZE``)."""

_LENGTH_BYTES = 8
_FIRST_READ_BYTES = 256 * 1024
_MAX_SIZE = 2**63 - 1
_MAX_BITS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a safetensors file holds. ``entries`` are in the order of their bytes, which tile the data."""

    file: str
    file_nbytes: int
    data_start: int
    metadata: Mapping[str, str]
    entries: tuple[TensorEntry, ...]


def read_header(reader: StorageReader, file: str) -> FileHeader:
    """The header of ``file``, in at most two reads.

    Raises :class:`FormatError` for a file that is not a sound safetensors file,
    :class:`~shardwise.errors.StorageError` for bytes that do not come.
    """
    file_nbytes = reader.size(file)
    if file_nbytes < _LENGTH_BYTES:
        what = "is empty" if file_nbytes == 0 else f"has {file_nbytes} bytes"
        _refuse(file, f"the file {what}, a safetensors file has at least {_LENGTH_BYTES}")
    first = reader.read(file, 0, min(file_nbytes, _FIRST_READ_BYTES))
    header_nbytes = int.from_bytes(first[:_LENGTH_BYTES], "little")
    _check_header_length(file, file_nbytes, header_nbytes)
    header = first[_LENGTH_BYTES : _LENGTH_BYTES + header_nbytes]
    if len(header) < header_nbytes:
        header += reader.read(file, len(first), _LENGTH_BYTES + header_nbytes)
    return parse_header(file, file_nbytes, header)


def parse_header(file: str, file_nbytes: int, header: bytes) -> FileHeader:
    """The header whose JSON is ``header`` (without its length) of a file of ``file_nbytes`` bytes.

    Raises :class:`FormatError` for the first fault found. What is returned is consistent: every entry lies in
    the file, fits its dtype and shape, and no two share a byte.
    """
    _check_header_length(file, file_nbytes, len(header))
    fields = parse_object(header, what=f"{shown(file)}: header")
    metadata = _metadata(file, fields.pop("__metadata__", None))
    data_start = _LENGTH_BYTES + len(header)
    entries = [_entry(file, key, field, data_start, file_nbytes) for key, field in fields.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_tiling(file, entries, data_start, file_nbytes)
    return FileHeader(file, file_nbytes, data_start, metadata, tuple(entries))


def _check_header_length(file: str, file_nbytes: int, header_nbytes: int) -> None:
    if header_nbytes > MAX_HEADER_BYTES:
        _refuse(file, f"a header of {header_nbytes} bytes is announced, {MAX_HEADER_BYTES} is the limit")
    if _LENGTH_BYTES + header_nbytes > file_nbytes:
        _refuse(
            file,
            f"a header of {header_nbytes} bytes is announced, but the file ends after {file_nbytes} bytes",
        )


def _metadata(file: str, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        _refuse(file, f"__metadata__ is a {type(value).__name__}, not an object of strings")
    for key, text in value.items():
        if not isinstance(text, str):
            _refuse(file, f"__metadata__ has a {type(text).__name__} under {shown(key)}, not a string")
    return value


def _entry(file: str, key: str, field: object, data_start: int, file_nbytes: int) -> TensorEntry:
    if not isinstance(field, dict):
        _refuse(file, f"tensor {shown(key)} is described by a {type(field).__name__}, not an object")
    dtype = _dtype(file, key, field.get("dtype"))
    shape = _shape(file, key, field.get("shape"))
    start, stop = _offsets(file, key, field.get("data_offsets"))
    _check_size(file, key, dtype, shape, stop - start)
    if data_start + stop > file_nbytes:
        _refuse(
            file,
            f"tensor {shown(key)} reaches to byte {data_start + stop}, but the file ends after {file_nbytes} "
            f"bytes: {data_start + stop - file_nbytes} are missing",
        )
    return TensorEntry(key, dtype, shape, file, data_start + start, data_start + stop)


def _dtype(file: str, key: str, value: object) -> DType:
    dtype = dtype_named(value) if isinstance(value, str) else None
    if dtype is None:
        known = ", ".join(known.label for known in DType)
        _refuse(
            file,
            f"tensor {shown(key)} has the unknown dtype {_shown_value(value)}",
            remedy=f"known are {known}: update shardwise if the file is newer",
        )
    return dtype


def _shape(file: str, key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not _are_sizes(value):
        _refuse(
            file,
            f"tensor {shown(key)} has the shape {_shown_value(value)}, not a list of integers 0..{_MAX_SIZE}",
        )
    return tuple(value)


def _offsets(file: str, key: str, value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not _are_sizes(value) or value[0] > value[1]:
        _refuse(
            file,
            f"tensor {shown(key)} has the data_offsets {_shown_value(value)}, "
            "not [start, stop] with 0 <= start <= stop",
        )
    return value[0], value[1]


def _are_sizes(values: list[object]) -> TypeGuard[list[int]]:
    # Not isinstance: JSON's true is an int to Python.
    return all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values)


def _check_size(file: str, key: str, dtype: DType, shape: Sequence[int], nbytes: int) -> None:
    # Multiplied step by step with a bound: a shape of a million large sizes must not become a huge integer.
    bits = dtype.bits
    for size in shape:
        bits *= size
        if bits > _MAX_BITS:
            _refuse(file, f"tensor {shown(key)} of shape {_shown_value(list(shape))} has more than 2**64 bits")
    if bits % 8:
        _refuse(file, f"tensor {shown(key)} of {dtype.label} {_shown_value(list(shape))} does not end at a byte")
    if bits // 8 != nbytes:
        _refuse(
            file,
            f"tensor {shown(key)} of {dtype.label} {_shown_value(list(shape))} takes {bits // 8} bytes, "
            f"but its data_offsets span {nbytes}",
        )


def _check_tiling(file: str, entries: Sequence[TensorEntry], data_start: int, file_nbytes: int) -> None:
    """Tensors follow each other without a hole or an overlap, from the header's end to the file's end."""
    covered = data_start
    previous: TensorEntry | None = None
    for entry in entries:
        if entry.start > covered:
            _refuse(
                file,
                f"{entry.start - covered} bytes from byte {covered} on, between {_named(previous)} and "
                f"{_named(entry)}, belong to no tensor",
            )
        if entry.start < covered:
            _refuse(
                file,
                f"{_named(entry)} starts at byte {entry.start}, inside {_named(previous)}, "
                f"which ends at byte {covered}",
            )
        covered = entry.stop
        previous = entry
    if covered != file_nbytes:
        _refuse(
            file,
            f"the last {file_nbytes - covered} bytes, from byte {covered} on, belong to no tensor",
        )


def _named(entry: TensorEntry | None) -> str:
    return "the header" if entry is None else f"tensor {shown(entry.key)}"


def _shown_value(value: object) -> str:
    return shown(repr(value))


def _refuse(file: str, cause: str, *, remedy: str = "") -> NoReturn:
    advice = remedy or "the file is damaged, incomplete or of another format: download or write it again"
    raise FormatError(f"{shown(file)}: {cause}; {advice}")


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
