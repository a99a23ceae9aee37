"""Which tensors a checkpoint holds, and where: files are chosen, their headers read, all of it checked."""

from __future__ import annotations

import os
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from shardwise.errors import FormatError, StorageError
from shardwise.formats.composed import (
    Composed,
    ComposedPart,
    FoundTensor,
    FourBits,
    Joined,
    Scaled,
    StoredView,
    View,
    Whole,
    tiling,
)
from shardwise.formats.distributed import METADATA, DistributedMetadata, read_distributed, read_metadata
from shardwise.formats.faults import FormatFaults
from shardwise.formats.safetensors_chunks import KEY as SHARDING_KEY
from shardwise.formats.safetensors_chunks import chunk_offsets, from_chunks
from shardwise.formats.safetensors_header import FileHeader, TensorEntry, read_header
from shardwise.formats.selection import FileSelection, Layout, is_there, select, variant_in, where_models_are
from shardwise.formats.torch_file import TorchFileContents, read_torch_file
from shardwise.formats.wrappers import Path, WrapperChoice, choose_model
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.storage.reading.local import LocalReader
from shardwise.storage.reading.opening import OpenStorage, open_storage
from shardwise.storage.urls import is_url
from shardwise.tensors import Box, ByteRange, DType, Strided, coalesce, numel

_HEADER_THREADS = 8
_MOST_IGNORED = 1000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, and the entries that it is made of: one, for most."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    entries: tuple[TensorEntry, ...]

    @property
    def numel(self) -> int:
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Of its own elements; those of its entries may be more."""
        return self.numel * self.dtype.bits // 8


@dataclass(frozen=True)
class CheckpointIndex:
    """All that a checkpoint stores, without a byte of its tensors. Plain data: ranks send it to each other.

    ``files`` are the files with tensors in name order, with their sizes in bytes; ``entries`` what lies in one run,
    by key, file by file in the order of their bytes; ``metadata`` that of the files' headers and of the index file,
    whose values count where both have one. ``composed`` are the tensors that are made of several entries, or of
    parts of one; these entries are no tensors by themselves. ``wrapper`` is where in a nest of dicts the model was
    found, as in "model"; ``ignored`` is what else was there, which is not loaded.
    """

    root: str
    files: Mapping[str, int]
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    layout: Layout
    composed: Mapping[str, Composed] = field(default_factory=dict)
    wrapper: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, those that several share counted once, headers not counted."""
        by_file = defaultdict(list)
        for entry in self.entries.values():
            by_file[entry.file].append(entry.range)
        return sum(item.nbytes for ranges in by_file.values() for item in coalesce(ranges, max_gap_bytes=0))

    def is_scaled(self, key: str) -> bool:
        """Whether a tensor is stored in few bits, with scales: its dtype is that of the numbers."""
        return key in self.composed and isinstance(self.composed[key].part, Scaled | FourBits)

    def tensors(self) -> list[StoredTensor]:
        """Every tensor, in the order of the entries; composed ones last."""
        parts = {key for item in self.composed.values() for key in entries_of(item.part)}
        simple = [
            StoredTensor(key, entry.dtype, entry.shape, (entry,))
            for key, entry in self.entries.items()
            if key not in parts
        ]
        return simple + [
            StoredTensor(key, item.dtype, item.shape, tuple(self.entries[part] for part in entries_of(item.part)))
            for key, item in self.composed.items()
        ]


def entries_of(part: ComposedPart) -> Iterator[str]:
    """The keys of the entries that a part of a tensor is made of."""
    match part:
        case Whole(key) | View(key):
            yield key
        case Joined(parts):
            for inner in parts:
                yield from entries_of(inner)
        case Scaled():
            yield from (inner.key for inner in part.parts)
        case FourBits():
            yield from part.keys


def open_checkpoint(
    path: str | os.PathLike[str] | StorageReader,
    *,
    weights_name: str | None = None,
    extra_files: Sequence[str] = (),
    variant: str | None = None,
) -> CheckpointIndex:
    """Find the files of a checkpoint and read what they say about their tensors.

    ``path`` is a folder, a file of tensors, an index file, the URL of one of these, or a reader. In a folder the
    first of these counts: ``weights_name`` (from ``config.transformers_weights``), ``model.safetensors``,
    ``model.safetensors.index.json``, ``pytorch_model.bin``, ``pytorch_model.bin.index.json``, the only other index
    of safetensors files, all safetensors files, ``.metadata`` of ``torch.distributed.checkpoint``, here or in the
    only folder that accelerate names for a model. Where the storage does not tell which files there are, the usual
    names are tried. ``variant`` takes the weights of that variant instead. ``extra_files`` are safetensors files,
    read in addition where they are there. Files named by an index are relative to the folder, as in transformers.

    Pickles are read without running anything: see :mod:`shardwise.formats.pickles`.

    Raises :class:`FormatError` with all faults of all files at once; :class:`StorageError` when nothing is
    wrong but that bytes could not be read.
    """
    if isinstance(path, StorageReader):
        return _open(path, weights_name if variant is None else variant_in(path, variant), extra_files)
    opened = open_storage(path) if is_url(path) else _open_local(pathlib.Path(path))
    with opened.reader:
        if opened.file is not None:
            if weights_name is not None:
                raise FormatError(
                    f"{opened.reader.root}/{shown(opened.file)}: is a file, so weights_name={weights_name!r} has "
                    "no place; pass one of the two"
                )
            weights_name = opened.file
        return open_checkpoint(opened.reader, weights_name=weights_name, extra_files=extra_files, variant=variant)


def open_state(
    reader: StorageReader, file: str | None = None, metadata: DistributedMetadata | None = None
) -> CheckpointIndex:
    """All tensors of a folder of ``torch.distributed.checkpoint``, an optimizer's too, under whole paths.

    Or those of one ``file`` of ``torch.save``. The folder's ``metadata`` are read where they are not given.
    Raises as :func:`open_checkpoint`.
    """
    faults, found = FormatFaults(reader.root), _IndexSoFar()
    if file is not None:
        saved = read_torch_file(reader, file)
        found.files[saved.file] = saved.file_nbytes
        _add_tensors(saved.tensors, WrapperChoice((), ()), found, faults)
        faults.raise_if_any()
        return CheckpointIndex(reader.root, found.files, found.entries, {}, "torch file", found.composed)
    metadata = read_metadata(reader) if metadata is None else metadata
    contents = read_distributed(reader, choose=lambda _: WrapperChoice((), ()), metadata=metadata)
    assert contents is not None
    found.files.update(contents.files)
    for place in metadata.objects.values():
        found.files.setdefault(place.file, reader.size(place.file))
    _add_tensors(contents.tensors, contents.choice, found, faults)
    faults.raise_if_any()
    layout: Layout = "torch distributed checkpoint"
    return CheckpointIndex(reader.root, found.files, found.entries, {}, layout, found.composed)


def holds_optimizer(reader: StorageReader) -> bool:
    """Whether a folder of ``torch.distributed.checkpoint`` has an optimizer's state and no model."""
    if METADATA not in reader.list():
        return False
    tensors = read_metadata(reader).tensors
    return bool(tensors) and choose_model(tensors) is None


def _open_local(place: pathlib.Path) -> OpenStorage:
    if place.is_file():
        return OpenStorage(LocalReader(place.parent), place.name)
    return OpenStorage(LocalReader(place), None)


@dataclass
class _IndexSoFar:
    """What has been found in the files so far."""

    files: dict[str, int] = field(default_factory=dict)
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    composed: dict[str, Composed] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    held: dict[str, set[str]] = field(default_factory=dict)
    wrapper: str = ""
    ignored: list[str] = field(default_factory=list)


def _open(reader: StorageReader, weights_name: str | None, extra_files: Sequence[str]) -> CheckpointIndex:
    faults = FormatFaults(reader.root)
    selection = select(reader, weights_name, faults)
    extras = [name for name in extra_files if is_there(reader, name)]
    found = _IndexSoFar()
    match selection.layout:
        case "torch distributed checkpoint":
            _add_distributed(reader, selection, found, faults)
        case "torch file" | "indexed torch files":
            _add_torch_files(reader, selection.files, found, faults)
        case _:
            extras += selection.files
    _add_headers(_read_each(reader, sorted(set(extras)), read_header, faults), found, faults)
    _check_weight_map(selection.weight_map, found.held, faults)
    faults.raise_if_any()
    ignored = found.ignored[:_MOST_IGNORED]
    if len(found.ignored) > _MOST_IGNORED:
        ignored.append(f"... and {len(found.ignored) - _MOST_IGNORED} more")
    return CheckpointIndex(
        root=reader.root,
        files=dict(sorted(found.files.items())),
        entries=found.entries,
        metadata={**found.metadata, **selection.metadata},
        layout=selection.layout,
        composed=found.composed,
        wrapper=found.wrapper,
        ignored=tuple(ignored),
    )


def _read_each(
    reader: StorageReader, files: Sequence[str], read: Callable[[StorageReader, str], T], faults: FormatFaults
) -> list[T]:
    """What is read of the sound files; the others are faults."""

    def attempt(file: str) -> T | FormatError | StorageError:
        try:
            return read(reader, file)
        except (FormatError, StorageError) as error:
            return error

    # Threads because of networks, where a checkpoint of hundreds of files is hundreds of waits.
    with ThreadPoolExecutor(max(_HEADER_THREADS, reader.policy.concurrency)) as pool:
        results = list(pool.map(attempt, files))
    sound: list[T] = []
    for result in results:
        if isinstance(result, FormatError | StorageError):
            faults.add_error("damaged files", result)
        else:
            sound.append(result)
    return sound


def _add_headers(headers: Iterable[FileHeader], found: _IndexSoFar, faults: FormatFaults) -> None:
    chunks: dict[str, list[tuple[tuple[int, ...], TensorEntry]]] = defaultdict(list)
    for header in headers:
        found.files[header.file] = header.file_nbytes
        found.held[header.file] = {entry.key for entry in header.entries}
        told = {name: text for name, text in header.metadata.items() if name != SHARDING_KEY}
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
            first = found.entries.setdefault(entry.key, entry)
            if first is not entry:
                faults.add(
                    "keys held by two files",
                    f"{shown(entry.key)}: in {shown(first.file)} and in {shown(entry.file)}; "
                    "remove the file that does not belong",
                )
    for key, parts in chunks.items():
        try:
            _add_tensor(key, from_chunks(key, parts), found, faults)
        except FormatError as error:
            faults.add_error("damaged files", error)


def _check_weight_map(weight_map: Mapping[str, str], held: Mapping[str, set[str]], faults: FormatFaults) -> None:
    """Every key is where the index says. Keys of an opened file that the index leaves out are welcome."""
    for key, file in weight_map.items():
        if file in held and key not in held[file]:
            faults.add("keys not in the file the index names", f"{shown(key)}: not in {shown(file)}")


# Files of torch


def _add_torch_files(reader: StorageReader, files: Sequence[str], found: _IndexSoFar, faults: FormatFaults) -> None:
    contents: list[TorchFileContents] = _read_each(reader, files, read_torch_file, faults)
    choice = choose_model([tensor.path for item in contents for tensor in item.tensors])
    if choice is None:
        raise _no_model(reader, " and ".join(map(shown, files)))
    for item in contents:
        found.files[item.file] = item.file_nbytes
        _add_ignored(item.others, choice, found)
        found.held[item.file] = _add_tensors(item.tensors, choice, found, faults)


def _add_distributed(
    reader: StorageReader, selection: FileSelection, found: _IndexSoFar, faults: FormatFaults
) -> None:
    contents = read_distributed(reader, selection.folder)
    if contents is None:
        raise _no_model(reader, f"{selection.folder}{METADATA}")
    found.files.update(contents.files)
    _add_ignored(contents.others, contents.choice, found)
    _add_tensors(contents.tensors, contents.choice, found, faults)


def _no_model(reader: StorageReader, what: str) -> FormatError:
    where = where_models_are(reader) or "pass the folder or the file of the model, which is saved apart"
    return FormatError(f"{what} in {reader.root}: holds the state of an optimizer, not a model; {where}")


def _add_ignored(others: Iterable[tuple[Path, str]], choice: WrapperChoice, found: _IndexSoFar) -> None:
    """Note what is not loaded: an optimizer as a whole, all else one by one."""
    ignored = [f"{'.'.join(path)} (an optimizer's state)" for path in choice.others]
    ignored += [f"{'.'.join(path)} ({kind})" for path, kind in others if choice.key_of(path) is not None]
    found.ignored = list(dict.fromkeys([*found.ignored, *ignored]))


def _add_tensors(
    tensors: Iterable[FoundTensor], choice: WrapperChoice, found: _IndexSoFar, faults: FormatFaults
) -> set[str]:
    """Add entries and what is composed of them; the keys of the tensors."""
    found.wrapper = ".".join(choice.wrapper)
    keys: set[str] = set()
    for tensor in tensors:
        key = choice.key_of(tensor.path)
        if key is None:
            continue
        if key in keys or key in found.entries or key in found.composed:
            faults.add("keys held twice", f"{shown(key)}: at {shown('.'.join(tensor.path))}, and elsewhere")
            continue
        keys.add(key)
        _add_tensor(key, tensor, found, faults)
    return keys


def _add_tensor(key: str, tensor: FoundTensor, found: _IndexSoFar, faults: FormatFaults) -> None:
    def enter(name: str, view: StoredView, shape: tuple[int, ...]) -> None:
        entry = TensorEntry(name, view.dtype, shape, view.file, view.range.start, view.range.stop)
        if found.entries.setdefault(name, entry) is not entry:
            faults.add("keys held twice", f"{shown(name)}: as a tensor, and as a part of one")

    def part(name: str, view: StoredView) -> ComposedPart:
        if view.is_whole:
            enter(name, view, view.shape)
            return Whole(name)
        name = f"{name} (storage)"
        enter(name, view, (view.range.nbytes // view.dtype.itemsize,))
        return View(name, view.strided)

    if not numel(tensor.shape) and tensor.chunks:
        nothing = tensor.chunks[0].view
        empty = ByteRange(nothing.range.start, nothing.range.start)
        enter(key, StoredView(nothing.file, empty, tensor.dtype, Strided.contiguous(tensor.shape)), tensor.shape)
        return
    chunks = [chunk for chunk in tensor.chunks if numel(chunk.view.shape)]  # a rank may have had none of it
    boxes = [Box(chunk.offsets, chunk.view.shape) for chunk in chunks]
    if len(boxes) == 1 and boxes[0] == Box.whole(tensor.shape):
        whole = part(key, chunks[0].view)
        if not isinstance(whole, Whole):
            found.composed[key] = Composed(tensor.dtype, tensor.shape, whole)
        return
    parts = [(box, part(_name(key, box), chunk.view)) for box, chunk in zip(boxes, chunks, strict=True)]
    tree = tiling(tensor.shape, parts)
    if tree is None:
        faults.add(
            "tensors whose chunks do not tile them",
            f"{shown(key)} of shape {tensor.shape}: {len(boxes)} chunks with holes or overlaps between them",
        )
        return
    found.composed[key] = Composed(tensor.dtype, tensor.shape, tree)


def _name(key: str, box: Box) -> str:
    """The key of a chunk, as it would be indexed: ``key[0:4, 8:16]``."""
    spans = ", ".join(f"{start}:{start + size}" for start, size in zip(box.offsets, box.sizes, strict=True))
    return f"{key}[{spans}]"
