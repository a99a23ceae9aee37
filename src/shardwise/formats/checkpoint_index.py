"""Which tensors a checkpoint holds, and where: files are chosen, their headers read, all of it checked."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NoReturn

from shardwise.errors import FormatError, StorageError
from shardwise.formats.safetensors import FileHeader, TensorEntry, read_header
from shardwise.formats.strict_json import parse_object
from shardwise.storage.local import LocalReader
from shardwise.storage.names import shown, why_unsafe
from shardwise.storage.opening import OpenStorage, open_storage
from shardwise.storage.reader import CannotListError, StorageReader
from shardwise.storage.urls import is_url

MAX_INDEX_BYTES = 100_000_000
"""The longest index file that is read, the same as the longest header."""

Layout = Literal["indexed", "single file", "several files without an index"]

_SINGLE_FILE = "model.safetensors"
_USUAL_INDEX = "model.safetensors.index.json"
_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")
_LISTED_PER_FAULT = 20
_HEADER_THREADS = 8


@dataclass(frozen=True)
class CheckpointIndex:
    """All that a checkpoint stores, without a byte of its tensors. Plain data: ranks send it to each other.

    ``files`` are the safetensors files in name order, with their sizes in bytes; ``entries`` the tensors by
    key, file by file in the order of their bytes; ``metadata`` that of the files' headers and of the index
    file, whose values count where both have one.
    """

    root: str
    files: Mapping[str, int]
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    layout: Layout

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, headers not counted."""
        return sum(entry.nbytes for entry in self.entries.values())


def open_checkpoint(
    path: str | os.PathLike[str] | StorageReader,
    *,
    weights_name: str | None = None,
    extra_files: Sequence[str] = (),
) -> CheckpointIndex:
    """Find the safetensors files of a checkpoint and read their headers.

    ``path`` is a folder, a safetensors file, an index file, the URL of one of these, or a reader. In a folder
    the first of these counts: ``weights_name`` (from ``config.transformers_weights``), ``model.safetensors``,
    ``model.safetensors.index.json``, the only other index, all safetensors files. Where the storage does not tell
    which files there are, the first three are tried. ``extra_files`` are read in addition where they are there.
    Files named by an index are relative to the folder, as in transformers.

    Raises :class:`FormatError` with all faults of all files at once; :class:`StorageError` when nothing is
    wrong but that bytes could not be read.
    """
    if isinstance(path, StorageReader):
        return _open(path, weights_name, extra_files)
    opened = open_storage(path) if is_url(path) else _open_local(Path(path))
    with opened.reader:
        if opened.file is not None:
            if weights_name is not None:
                raise FormatError(
                    f"{opened.reader.root}/{shown(opened.file)}: is a file, so weights_name={weights_name!r} has "
                    "no place; pass one of the two"
                )
            weights_name = opened.file
        return _open(opened.reader, weights_name, extra_files)


def _open_local(place: Path) -> OpenStorage:
    if place.is_file():
        return OpenStorage(LocalReader(place.parent), place.name)
    return OpenStorage(LocalReader(place), None)


@dataclass
class _Faults:
    """What is wrong with a checkpoint, by kind, so that all of it is said at once."""

    root: str
    by_kind: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unread: list[str] = field(default_factory=list)

    def add(self, kind: str, fault: str) -> None:
        self.by_kind[kind].append(fault)

    def add_error(self, kind: str, error: FormatError | StorageError) -> None:
        """A file's own error; bytes that exist but could not be read are no fault of the checkpoint."""
        if isinstance(error, StorageError) and isinstance(error.__cause__, OSError):
            if not isinstance(error.__cause__, FileNotFoundError):
                self.unread.append(str(error))
                return
            kind = "missing files"
        self.add(kind, str(error))

    def raise_if_any(self) -> None:
        kinds = dict(self.by_kind)
        if self.unread:
            kinds["files that could not be read"] = self.unread
        if not kinds:
            return
        lines = [f"the checkpoint in {shown(self.root)} cannot be used as it is"]
        for kind, faults in kinds.items():
            lines.append(f"  {kind}: {len(faults)}")
            lines += [f"    {fault}" for fault in faults[:_LISTED_PER_FAULT]]
            if len(faults) > _LISTED_PER_FAULT:
                lines.append(f"    ... and {len(faults) - _LISTED_PER_FAULT} more")
        if not self.by_kind:
            raise StorageError("\n".join([*lines, "Make these files readable and try again."]))
        raise FormatError("\n".join([*lines, "Download or write the files named above again."]))


@dataclass(frozen=True)
class _Selection:
    """The files to open, and what the index file says about them."""

    layout: Layout
    files: Sequence[str]
    weight_map: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


def _open(reader: StorageReader, weights_name: str | None, extra_files: Sequence[str]) -> CheckpointIndex:
    faults = _Faults(reader.root)
    selection = _select(reader, weights_name, faults)
    extras = [name for name in extra_files if _is_there(reader, name)]
    headers = _read_headers(reader, sorted({*selection.files, *extras}), faults)
    entries = _merge_entries(headers, faults)
    _check_weight_map(selection.weight_map, headers, faults)
    faults.raise_if_any()
    metadata: dict[str, str] = {}
    for header in headers:
        metadata = {**header.metadata, **metadata}
    return CheckpointIndex(
        root=reader.root,
        files={header.file: header.file_nbytes for header in headers},
        entries=entries,
        metadata={**metadata, **selection.metadata},
        layout=selection.layout,
    )


def _is_there(reader: StorageReader, name: str) -> bool:
    try:
        reader.size(name)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return True


# Which files


def _select(reader: StorageReader, weights_name: str | None, faults: _Faults) -> _Selection:
    if weights_name is not None:
        return _select_named(reader, weights_name, faults)
    try:
        names = [name for name in reader.list() if "/" not in name]
    except CannotListError:
        return _select_probed(reader, faults)
    if _SINGLE_FILE in names:
        return _Selection("single file", [_SINGLE_FILE])
    if _USUAL_INDEX in names:
        return _select_indexed(reader, _USUAL_INDEX, faults)
    indexes = _without_side_files(name for name in names if name.endswith(_INDEX))
    if len(indexes) > 1:
        raise FormatError(
            f"{reader.root}: several index files and no {_USUAL_INDEX}: {_listed(indexes)}; "
            "pass the one that is meant as weights_name, or its path"
        )
    if indexes:
        return _select_indexed(reader, indexes[0], faults)
    return _select_all(reader, names, faults)


def _select_probed(reader: StorageReader, faults: _Faults) -> _Selection:
    """By their usual names, one after the other, where the storage does not tell which files it has."""
    refusal: StorageError | None = None
    for name in (_SINGLE_FILE, _USUAL_INDEX):
        try:
            if _is_there(reader, name):
                return _select_named(reader, name, faults)
        except StorageError as error:
            # An object store that must not tell which files it has refuses those it does not have.
            if not isinstance(error.__cause__, PermissionError):
                raise
            refusal = error
    if refusal is not None:
        raise refusal
    raise FormatError(
        f"{reader.root}: no weights found\n"
        f"  looked for: {_SINGLE_FILE}, {_USUAL_INDEX}; for others the storage would have to list its files\n"
        f"Check the URL, or name the file: the URL of the *{_WEIGHTS} or *{_INDEX} file itself, or weights_name=..."
    )


def _select_named(reader: StorageReader, name: str, faults: _Faults) -> _Selection:
    if not name.endswith((_INDEX, _WEIGHTS)):
        raise FormatError(
            f"{shown(name)} in {reader.root}: this layout is not supported for loading; "
            f"name a file that ends in {_WEIGHTS} or {_INDEX}"
        )
    if not _is_there(reader, name):
        raise FormatError(
            f"{shown(name)} in {reader.root}: no such file, but it is asked for by name; "
            "check weights_name (transformers_weights in config.json), or download the file"
        )
    if name.endswith(_INDEX):
        return _select_indexed(reader, name, faults)
    return _Selection("single file", [name])


def _select_all(reader: StorageReader, names: Sequence[str], faults: _Faults) -> _Selection:
    """Every safetensors file of a folder that has no index."""
    files = _without_side_files(name for name in names if name.endswith(_WEIGHTS))
    if not files:
        raise _nothing_there(reader.root, names)
    _check_numbering(files, faults)
    return _Selection("single file" if len(files) == 1 else "several files without an index", files)


def _without_side_files(names: Iterable[str]) -> list[str]:
    """Without adapters, and without "consolidated" files where they are a second copy of the weights."""
    kept = [name for name in names if not fnmatchcase(name, "adapter_model*")]
    return [name for name in kept if not fnmatchcase(name, "consolidated*")] or kept


def _check_numbering(files: Sequence[str], faults: _Faults) -> None:
    """Where files are numbered "-00002-of-00003" and no index says which there are, none may be missing."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for file in files:
        match = _NUMBERED.fullmatch(file)
        if match:
            found[match["stem"], int(match["total"])].add(int(match["number"]))
    for (stem, total), numbers in found.items():
        first = 0 if 0 in numbers else 1
        # The total is a stranger's number: look no further than what is there plus what is listed.
        looked_at = range(first, first + min(total, len(numbers) + _LISTED_PER_FAULT))
        absent = [number for number in looked_at if number not in numbers]
        if absent:
            faults.add(
                "incomplete sets of numbered files",
                f"{shown(stem)}-*-of-{total:05d}{_WEIGHTS}: {len(numbers)} of {total} are there, "
                f"missing are the numbers {_listed(str(number) for number in absent)}",
            )


def _nothing_there(root: str, names: Sequence[str]) -> FormatError:
    lines = [
        f"{root}: no weights found",
        f"  looked for: {_SINGLE_FILE}, {_USUAL_INDEX}, another *{_INDEX}, *{_WEIGHTS}",
        f"  files there: {_listed(map(shown, names)) or 'none'}",
    ]
    if any(fnmatchcase(name, "adapter_model*") for name in names):
        lines.append("  There is an adapter without its base model; open the base model's folder.")
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
    if others:
        lines.append(f"  {_listed(map(shown, others))}: this layout is not supported for loading.")
    if ".metadata" in names:
        lines.append("  .metadata (torch.distributed.checkpoint): this layout is not supported for loading.")
    return FormatError("\n".join([*lines, "Check the path, or save the model as safetensors files."]))


# The index file


def _select_indexed(reader: StorageReader, name: str, faults: _Faults) -> _Selection:
    nbytes = reader.size(name)
    if nbytes > MAX_INDEX_BYTES:
        _refuse_index(reader, name, f"it has {nbytes} bytes, {MAX_INDEX_BYTES} is the limit")
    content = parse_object(reader.read(name, 0, nbytes), what=f"{shown(name)} in {reader.root}")
    weight_map = _weight_map(reader, name, content.get("weight_map"), faults)
    metadata = content.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in metadata.items()}
    return _Selection("indexed", sorted(set(weight_map.values())), weight_map, texts)


def _weight_map(reader: StorageReader, name: str, value: object, faults: _Faults) -> dict[str, str]:
    """The index's map of keys to files, without the files that must not be opened; those are faults."""
    if not isinstance(value, dict):
        _refuse_index(reader, name, "it has no object named weight_map")
    if not value:
        _refuse_index(reader, name, "its weight_map is empty")
    for key, file in value.items():
        if not isinstance(file, str):
            faults.add(f"keys without a file in {shown(name)}", f"{shown(key)}: {shown(repr(file))}, not a string")
    mapped = {key: file for key, file in value.items() if isinstance(file, str)}
    unsafe = {file: why for file in mapped.values() if (why := _why_not_opened(file)) is not None}
    for file, why in sorted(unsafe.items()):
        faults.add(f"file names refused in {shown(name)}", f"{shown(file)}: {why}")
    return {key: file for key, file in mapped.items() if file not in unsafe}


def _why_not_opened(file: str) -> str | None:
    if not file.endswith(_WEIGHTS):
        return f"it does not end in {_WEIGHTS}"
    return why_unsafe(file)


def _refuse_index(reader: StorageReader, name: str, cause: str) -> NoReturn:
    raise FormatError(f"{shown(name)} in {reader.root}: {cause}; download or write the index again")


# The files' headers


def _read_headers(reader: StorageReader, files: Sequence[str], faults: _Faults) -> list[FileHeader]:
    """The headers of the files that have a sound one; the others are faults."""

    def attempt(file: str) -> FileHeader | FormatError | StorageError:
        try:
            return read_header(reader, file)
        except (FormatError, StorageError) as error:
            return error

    # Threads because of networks, where a checkpoint of hundreds of files is hundreds of waits.
    with ThreadPoolExecutor(max(_HEADER_THREADS, reader.policy.concurrency)) as pool:
        results = list(pool.map(attempt, files))
    for result in results:
        if not isinstance(result, FileHeader):
            faults.add_error("damaged files", result)
    return [result for result in results if isinstance(result, FileHeader)]


def _merge_entries(headers: Iterable[FileHeader], faults: _Faults) -> dict[str, TensorEntry]:
    merged: dict[str, TensorEntry] = {}
    for header in headers:
        for entry in header.entries:
            first = merged.setdefault(entry.key, entry)
            if first is not entry:
                faults.add(
                    "keys held by two files",
                    f"{shown(entry.key)}: in {shown(first.file)} and in {shown(entry.file)}; "
                    "remove the file that does not belong",
                )
    return merged


def _check_weight_map(weight_map: Mapping[str, str], headers: Iterable[FileHeader], faults: _Faults) -> None:
    """Every key is where the index says. Keys of an opened file that the index leaves out are welcome."""
    held = {header.file: {entry.key for entry in header.entries} for header in headers}
    for key, file in weight_map.items():
        if file in held and key not in held[file]:
            faults.add("keys not in the file the index names", f"{shown(key)}: not in {shown(file)}")


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = len(every) - _LISTED_PER_FAULT
    return ", ".join(every[:_LISTED_PER_FAULT]) + (f", ... and {more} more" if more > 0 else "")
