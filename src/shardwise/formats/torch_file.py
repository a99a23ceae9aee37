"""A file written by ``torch.save``: which tensor lies at which bytes.

It is a zip archive: ``data.pkl`` is a pickle of the object, with a persistent id for every storage, and
``data/<id>`` is that storage's memory, as it is. The pickle is read by :mod:`shardwise.formats.pickles`, so nothing
is run. Source of the layout: torch's ``serialization.py`` and ``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from shardwise.errors import FormatError
from shardwise.formats.nested_dicts import MAX_DEPTH, Chunk, FoundTensor, Path, StoredView, why_not_strided
from shardwise.formats.pickles import Other, Record, read_pickle
from shardwise.formats.torch_values import TORCH_FILE, PickledTensor, Storage
from shardwise.formats.zip_archive import Archive, FileWindow
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import ByteRange, Strided

MAX_PICKLE_BYTES = 100_000_000
"""The longest pickle that is read, the same as the longest header of a safetensors file."""

_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_LFS = b"version https://git-lfs"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TorchFileContents:
    """What a file holds: its tensors, and of all else the path and the name of its type."""

    file: str
    file_nbytes: int
    tensors: tuple[FoundTensor, ...]
    others: tuple[tuple[Path, str], ...]


def read_torch_file(reader: StorageReader, file: str) -> TorchFileContents:
    """The tensors of ``file``, from its directory and its pickle; no element is read.

    Raises :class:`FormatError` for a file that is not a sound one or holds what is no data,
    :class:`~shardwise.errors.StorageError` for bytes that do not come.
    """
    what = shown(file)
    file_nbytes = reader.size(file)
    part = FileWindow(reader, file, 0, file_nbytes)
    _refuse_others(part, what)
    archive = TorchArchive(part, what, {})
    tensors, others = _walk(archive.value, archive.pickle_nbytes, what)
    storages = {tensor.storage.name: tensor.storage for _, tensor in tensors}
    places = each(reader, archive.place_of, storages.values())
    by_name = dict(zip(storages, places, strict=True))
    found = [
        FoundTensor(path, tensor.dtype, view.shape, (Chunk((0,) * len(view.shape), view),))
        for path, tensor in tensors
        for view in (archive.view_of(tensor, by_name[tensor.storage.name], ".".join(path)),)
    ]
    return TorchFileContents(file, file_nbytes, tuple(found), tuple(others))


def read_torch_tensor(
    reader: StorageReader, file: str, where: ByteRange, known: dict[bytes, object], *, what: str
) -> StoredView:
    """The one tensor that was saved by itself in a range of a file.

    ``known`` are the pickles that have been read before: chunks of equal shapes have equal ones.
    """
    archive = TorchArchive(FileWindow(reader, file, where.start, where.stop), what, known)
    tensor = archive.value
    if not isinstance(tensor, PickledTensor):
        archive.refuse(f"it holds a {type(tensor).__name__}, not a tensor")
    return archive.view_of(tensor, archive.place_of(tensor.storage), "the tensor")


def each(reader: StorageReader, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results for all items, many at once where every read is a wait."""
    if not reader.policy.is_remote:
        return [function(item) for item in items]
    with ThreadPoolExecutor(reader.policy.concurrency) as pool:
        return list(pool.map(function, items))


class TorchArchive(Archive):
    """The archive that ``torch.save`` makes of an object; ``value`` is that object, also kept in ``known``."""

    def __init__(self, part: FileWindow, what: str, known: dict[bytes, object]) -> None:
        super().__init__(part, what)
        self._file = part.file
        name = next((name for name in self.members if name.endswith("/data.pkl") and name.count("/") == 1), None)
        if name is None:
            self.refuse("it is a zip archive, but not one of torch.save", remedy="save the model's state dict")
        self._folder = name.removesuffix("data.pkl")
        if f"{self._folder}constants.pkl" in self.members:
            self.refuse("it is a TorchScript program", remedy="save the model's state dict with torch.save")
        order = f"{self._folder}byteorder"
        if order in self.members and self.content(order, max_nbytes=16) != b"little":
            self.refuse("its numbers are not little-endian", remedy="save it again on a machine that is")
        pickle = self.content(name, max_nbytes=MAX_PICKLE_BYTES)
        self.pickle_nbytes = len(pickle)
        if pickle not in known:
            known[pickle] = read_pickle(pickle, TORCH_FILE, what=f"{what}: {name}")
        self.value = known[pickle]

    def place_of(self, storage: Storage) -> ByteRange:
        """The bytes of a storage."""
        name = f"{self._folder}data/{storage.name}"
        where = self.bytes_of(name)
        if where.nbytes != storage.nbytes:
            self.refuse(f"its member {shown(name)} has {where.nbytes} bytes, and should have {storage.nbytes}")
        return where

    def view_of(self, tensor: PickledTensor, place: ByteRange, name: str) -> StoredView:
        """A tensor as bytes of the file: only its own where they are one run, else its storage's."""
        if tensor.storage.nbytes != place.nbytes:
            self.refuse(f"{shown(name)}: two sizes are told of its storage")
        strided, itemsize = tensor.strided, tensor.dtype.itemsize
        fault = why_not_strided(strided, place.nbytes // itemsize)
        if fault is not None:
            self.refuse(f"{shown(name)}: {fault}", remedy="save a contiguous copy of it (tensor.clone())")
        if strided.numel == 0:
            return StoredView(
                self._file, ByteRange(place.start, place.start), tensor.dtype, Strided.contiguous(strided.sizes)
            )
        if strided.is_contiguous:
            start = place.start + strided.offset * itemsize
            own = ByteRange(start, start + strided.numel * itemsize)
            return StoredView(self._file, own, tensor.dtype, Strided.contiguous(strided.sizes))
        whole = place.nbytes // itemsize * itemsize
        return StoredView(self._file, ByteRange(place.start, place.start + whole), tensor.dtype, strided)


def refuse_others(reader: StorageReader, file: str) -> None:
    """Raise :class:`FormatError` for files that are well known and no archives of ``torch.save``."""
    _refuse_others(FileWindow(reader, file, 0, reader.size(file)), shown(file))


def _refuse_others(part: FileWindow, what: str) -> None:
    """Refuse what is well known and no archive."""
    first = part.read_range(0, min(part.nbytes, len(_LFS)))
    if first.startswith(_LEGACY):
        raise FormatError(
            f"{what}: it is in the format that torch wrote before 1.6, which cannot be read in parts; load it once "
            "and write it again: torch.save(torch.load(file, weights_only=True), file)"
        )
    if first == _LFS:
        raise FormatError(f"{what}: it is a pointer of git-lfs, not the file itself; run `git lfs pull`")


def _walk(value: object, most: int, what: str) -> tuple[list[tuple[Path, PickledTensor]], list[tuple[Path, str]]]:
    """Every tensor with the keys that lead to it, and what else there is; ``most`` bounds the items there can be.

    A pickle spends more than a byte on every item, unless its dicts hold each other again and again.
    """
    if isinstance(value, PickledTensor):
        raise FormatError(f"{what}: it holds one tensor without a name; save a state dict")
    if not isinstance(value, dict):
        raise FormatError(f"{what}: it holds a {_kind(value)}, not a state dict; save model.state_dict()")
    tensors: list[tuple[Path, PickledTensor]] = []
    others: list[tuple[Path, str]] = []
    waiting: list[tuple[Path, object]] = [((), value)]
    visited = 0
    while waiting:
        path, item = waiting.pop()
        visited += 1
        if len(path) > MAX_DEPTH or visited > most:
            raise FormatError(f"{what}: its dicts are nested too deeply; save model.state_dict()")
        if isinstance(item, PickledTensor):
            tensors.append((path, item))
        elif isinstance(item, dict):
            members = [(_component(key), member) for key, member in item.items()]
            waiting += [((*path, name), member) for name, member in reversed(members)]
        elif isinstance(item, list | tuple) and _holds_tensors(item):
            waiting += [((*path, str(number)), member) for number, member in reversed(list(enumerate(item)))]
        else:
            others.append((path, _kind(item)))
    return tensors, others


def _holds_tensors(items: Sequence[object]) -> bool:
    return any(isinstance(item, PickledTensor | dict | list | tuple) for item in items)


def _component(key: object) -> str:
    return key if isinstance(key, str) else str(key) if isinstance(key, int) else f"<{_kind(key)}>"


def _kind(value: object) -> str:
    return (
        value.kind if isinstance(value, Other) else "object" if isinstance(value, Record) else type(value).__name__
    )
