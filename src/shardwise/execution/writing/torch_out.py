"""Writes a file as ``torch.save`` does, in blocks: its pickle, then every tensor, and what is around it."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from shardwise.errors import FormatError, StorageError
from shardwise.execution.writing.committing import let_count, remove_unnamed
from shardwise.execution.writing.saving_lock import new_token, take_lock
from shardwise.execution.writing.sink import Sink, WrittenTensors, write_extents
from shardwise.execution.writing.stream_out import BLOCK_BYTES, Part, write_ahead
from shardwise.formats.torch_file import read_torch_file, read_torch_tensor
from shardwise.models.torch_words import save_without_data, to_torch
from shardwise.planning.saves.commit import Commit, Rename, on_its_way
from shardwise.planning.saves.save_plan import Extent, Saved
from shardwise.storage.contract import StorageWriter
from shardwise.storage.names import shown
from shardwise.storage.reading.local import LocalReader
from shardwise.tensors import ByteRange

Levels: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a value, through dicts and (by numbers) lists."""

Nest: TypeAlias = Mapping[Levels, object]
"""Values of nested dicts and lists, by the way to each."""

_HOLLOW = "archive"
"""A file whose archive is called so inside, too, as torch calls one that has no name."""


class RoomyFile:
    """A file of ``torch.save`` under way: its pickle is written, with room for the bytes of its tensors.

    All of it goes through ``sink`` and its writer, by one process, under the mark of the folder. The archive's
    checksums of the tensors stay those of nothing, which torch does not look at.

    Attributes:
        file: as it is called.
        nbytes: as large as it is, once begun.
    """

    def __init__(self, sink: Sink[str], file: str) -> None:
        self._sink = sink
        self._writer = sink.writer
        self.file = file
        self.nbytes = 0

    def begin(self, tensors: Mapping[Levels, Saved], objects: Nest) -> list[tuple[ByteRange, Saved]]:
        """Write all but the bytes of the tensors; where these belong, each once, in the order of the file.

        ``tensors`` are key, dtype and shape, by where they are in the object that is saved (:func:`nested`); those
        of one key are one. ``objects`` is what else is in it.
        """

        def make() -> object:
            hollow = {key: torch.empty(shape, dtype=to_torch(dtype)) for key, dtype, shape in tensors.values()}
            return nested({**{path: hollow[key] for path, (key, _, _) in tensors.items()}, **objects})

        try:
            # As large as the file is to be, and nearly all of it holes, which take no space.
            with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
                save_without_data(make, Path(folder, _HOLLOW))
                with LocalReader(folder) as reader:
                    places = _places(reader, {".".join(map(str, path)): at for path, at in tensors.items()})
                    self.nbytes = reader.size(_HOLLOW)
                    self._writer.create(self.file, self.nbytes)
                    for around in _around([place for place, _ in places], self.nbytes):
                        content = reader.read(_HOLLOW, around.start, around.stop)
                        self._writer.write(self.file, around.start, [memoryview(content)])
            return places
        except OSError as error:
            raise StorageError(f"{self.file} in {self._writer.root}: laying it out failed, {error}") from error

    def write(self, extents: Sequence[Extent], tensors: Sequence[torch.Tensor]) -> None:
        """Put boxes of tensors where they belong. One thread does this at a time."""
        write_extents(self._sink, self.file, extents, tensors)

    def sync(self) -> None:
        """Make sure that what has been written stays."""
        self._writer.sync(self.file)


def stream_torch_file(
    writer: StorageWriter,
    name: str,
    tensors: Mapping[Levels, Saved],
    objects: Nest,
    values: Callable[[Sequence[Part]], Sequence[torch.Tensor]],
    *,
    companions: Mapping[str, bytes],
    advance: Callable[[int], None],
) -> WrittenTensors:
    """Write one file, which then takes the place of the one of this name.

    Args:
        writer: to the folder.
        name: of the file.
        tensors: key, dtype and shape, by where they are in the object that is saved.
        objects: what else is in it.
        values: the boxes asked for, by key.
        companions: small files that belong to it.
        advance: told of bytes as they are written.

    Memory: four blocks, and what ``values`` takes.
    """
    written = WrittenTensors({key: 0 for key, _, _ in tensors.values()})
    token = new_token()
    held = take_lock(writer, token)
    file = RoomyFile(Sink(writer, written.add, bytes_by_file=written.bytes_by_file), on_its_way(name, token))
    try:
        # What saves of such a file left; once it is gone, nothing can begin to count by it.
        remove_unnamed(writer, [other for other in writer.list() if other.startswith(".")])
        places = [(place.start, saved) for place, saved in file.begin(tensors, objects)]
        write_ahead(file.write, places, values, advance=advance)
        file.sync()
        commit = Commit(
            {file.file: file.nbytes},
            steps=(Rename(file.file, name),),
            then={name: file.nbytes},
            without=frozenset({file.file}),
        )
        let_count(writer, held, commit, companions)
        held.release()
        writer.sync_names()
    except BaseException:
        with contextlib.suppress(StorageError):
            writer.remove(file.file)
        with contextlib.suppress(StorageError):
            held.release()
            writer.sync_names()
        raise
    return written


def nested(values: Nest) -> object:
    """Values in dicts and lists, as their keys say. A number leads into a list where lists begin with 0."""
    if () in values:
        return values[()]
    inner: dict[str | int, dict[tuple[str | int, ...], object]] = {}
    for (first, *rest), value in ((list(path), value) for path, value in values.items()):
        inner.setdefault(first, {})[tuple(rest)] = value
    if all(isinstance(key, int) for key in inner) and sorted(inner) == list(range(len(inner))):
        return [nested(inner[number]) for number in range(len(inner))]
    return {key: nested(found) for key, found in inner.items()}


def loaded(content: bytes, what: str) -> Any:
    """A value that ``torch.save`` wrote, by itself.

    Raises:
        FormatError: it holds more than data.
    """
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # what torch raises for a damaged or malign file is of many kinds
        raise FormatError(f"{what}: cannot be read as plain data: {str(error).splitlines()[0]}") from error


def fingerprints_in(folder: Path, name: str, tensors: Mapping[Levels, Saved]) -> dict[str, int]:
    """Of the tensors of such a file, read again."""
    keys = {".".join(map(str, path)): saved for path, saved in tensors.items()}
    found = WrittenTensors({key: 0 for key, _, _ in tensors.values()})
    with LocalReader(folder) as reader:
        for tensor in read_torch_file(reader, name).tensors:
            key, where = keys[".".join(tensor.path)][0], tensor.chunks[0].view.range
            for start in range(where.start, where.stop, BLOCK_BYTES):
                content = reader.read(name, start, min(start + BLOCK_BYTES, where.stop))
                found.add(key, start - where.start, memoryview(content))
    return found.fingerprints


def _places(reader: LocalReader, keys: Mapping[str, Saved]) -> list[tuple[ByteRange, Saved]]:
    """Where the bytes of each tensor belong, in the order of the file."""
    found = {".".join(item.path): item.chunks[0].view.range for item in read_torch_file(reader, _HOLLOW).tensors}
    if found.keys() != keys.keys():
        odd = shown(sorted(found.keys() ^ keys.keys())[0])
        raise FormatError(f"{odd}: its place in a file of torch.save is not found; two values have one name")
    once = {saved[0]: (found[path], saved) for path, saved in keys.items()}
    return sorted(once.values(), key=lambda item: item[0].start)


def _around(places: Sequence[ByteRange], nbytes: int) -> Iterator[ByteRange]:
    """What of so many bytes lies between these ranges, which are in order, in pieces of bounded size."""
    position = 0
    for place in [*places, ByteRange(nbytes, nbytes)]:
        for start in range(position, place.start, BLOCK_BYTES):
            yield ByteRange(start, min(start + BLOCK_BYTES, place.start))
        position = max(position, place.stop)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes before a tensor's own, and those after."""

    before: bytes
    after: bytes


@lru_cache(maxsize=4096)
def envelope(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """What is around a contiguous tensor of this shape, in an archive of its own.

    torch writes it, into a file with a hole for the bytes of the tensor. So the checksum in it is that of nothing;
    torch looks at it no more than when it loads what it wrote itself with ``skip_data``.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        place = Path(folder, "archive")
        save_without_data(lambda: torch.empty(shape, dtype=dtype), place)
        with LocalReader(folder) as reader:
            nbytes = reader.size(place.name)
            hole = read_torch_tensor(reader, place.name, ByteRange(0, nbytes), {}, what=str(place)).range
            before, after = reader.read(place.name, 0, hole.start), reader.read(place.name, hole.stop, nbytes)
        return Envelope(before, after)
