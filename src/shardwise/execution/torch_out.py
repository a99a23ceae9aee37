"""A file as ``torch.save`` writes it, filled block by block: its pickle first, then the bytes of every tensor."""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from shardwise.errors import FormatError, StorageError
from shardwise.execution.landing import memory_of
from shardwise.execution.saving_lock import release_lock, take_lock
from shardwise.execution.stream_out import BLOCK_BYTES, Part, Streamed
from shardwise.formats.torch_file import read_torch_file
from shardwise.models._torch_private import save_without_data
from shardwise.models.dtypes import to_torch
from shardwise.planning.save_plan import Saved
from shardwise.storage import INCOMPLETE, LocalReader, LocalWriter
from shardwise.storage.names import shown
from shardwise.tensors import ByteRange, row_blocks

Levels: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a value, through dicts and (by numbers) lists."""

Nest: TypeAlias = Mapping[Levels, object]
"""Values of nested dicts and lists, by the way to each."""


class RoomyFile:
    """A file of ``torch.save`` under way: its pickle is written, with room for the bytes of its tensors.

    The archive's checksums of these stay those of nothing, which torch does not look at.
    """

    def __init__(self, writer: LocalWriter, name: str) -> None:
        self._writer = writer
        self._name = name
        self._token = f"model.{secrets.token_hex(4)}{INCOMPLETE}"

    def begin(self, tensors: Mapping[Levels, Saved], objects: Nest) -> list[tuple[ByteRange, Saved]]:
        """Write all but the bytes of the tensors; where these belong, each once, in the order of the file.

        ``tensors`` are key, dtype and shape, by where they are in the object that is saved (:func:`nested`); those
        of one key are one. ``objects`` is what else is in it.
        """
        take_lock(self._writer, self._token)
        try:

            def make() -> object:
                hollow = {key: torch.empty(shape, dtype=to_torch(dtype)) for key, dtype, shape in tensors.values()}
                return nested({**{path: hollow[key] for path, (key, _, _) in tensors.items()}, **objects})

            try:
                save_without_data(make, Path(self._writer.root, self._token))
            except OSError as error:
                raise StorageError(
                    f"{self._token} in {self._writer.root}: writing it failed, {error.strerror}"
                ) from error
            return _places(
                self._writer, self._token, {".".join(map(str, path)): at for path, at in tensors.items()}
            )
        except BaseException:
            self.undo()
            raise

    def write(self, start: int, value: torch.Tensor) -> memoryview:
        """Put the bytes of a tensor, or of a row-major run of one, into the file at this byte."""
        data = memory_of(value.contiguous().view(-1).view(torch.uint8))
        self._writer.write(self._token, start, [data])
        return data

    def sync(self) -> None:
        """Make sure that what has been written stays."""
        self._writer.sync(self._token)

    def commit(self) -> None:
        """Take the place of the file of this name, once synced."""
        self._writer.rename(self._token, self._name)
        release_lock(self._writer, self._token)
        self._writer.sync_names()

    def undo(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(StorageError):
            self._writer.remove(self._token)
            release_lock(self._writer, self._token)


def stream_torch_file(
    writer: LocalWriter,
    name: str,
    tensors: Mapping[Levels, Saved],
    objects: Nest,
    values: Callable[[Sequence[Part]], Sequence[torch.Tensor]],
    *,
    companions: Mapping[str, bytes],
    advance: Callable[[int], None],
) -> Streamed:
    """Write one file, which then takes the place of the one of this name.

    Args:
        writer: to the folder.
        name: of the file.
        tensors: key, dtype and shape, by where they are in the object that is saved.
        objects: what else is in it.
        values: the boxes asked for, by key.
        companions: small files that belong to it.
        advance: told of bytes as they are written.

    Memory: two blocks, and what ``values`` takes.
    """
    streamed = Streamed({key: 0 for key, _, _ in tensors.values()})
    file = RoomyFile(writer, name)
    try:
        for place, (key, dtype, shape) in file.begin(tensors, objects):
            inside = 0
            for box in row_blocks(shape, max(1, BLOCK_BYTES // dtype.itemsize)):
                (value,) = values([(key, box)])
                data = file.write(place.start + inside, value)
                streamed.add(key, data, inside)
                advance(data.nbytes)
                inside += data.nbytes
        file.sync()
    except BaseException:
        file.undo()
        raise
    for companion, content in companions.items():
        writer.replace(companion, content)
    file.commit()
    return streamed


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
    found = Streamed({key: 0 for key, _, _ in tensors.values()})
    with LocalReader(folder) as reader:
        for tensor in read_torch_file(reader, name).tensors:
            key, where = keys[".".join(tensor.path)][0], tensor.chunks[0].view.range
            for start in range(where.start, where.stop, BLOCK_BYTES):
                content = reader.read(name, start, min(start + BLOCK_BYTES, where.stop))
                found.add(key, memoryview(content), start - where.start)
    return found.fingerprints


def _places(writer: LocalWriter, token: str, keys: Mapping[str, Saved]) -> list[tuple[ByteRange, Saved]]:
    """Where the bytes of each tensor belong, in the order of the file."""
    with LocalReader(writer.root) as reader:
        found = {".".join(item.path): item.chunks[0].view.range for item in read_torch_file(reader, token).tensors}
    if found.keys() != keys.keys():
        odd = shown(sorted(found.keys() ^ keys.keys())[0])
        raise FormatError(f"{odd}: its place in a file of torch.save is not found; two values have one name")
    once = {saved[0]: (found[path], saved) for path, saved in keys.items()}
    return sorted(once.values(), key=lambda item: item[0].start)
