"""Shared parts of readers: concurrent reads of files, their index, tensors assembled from parts.

Tensors lie in a nest of dicts: this module finds where in it the model is, and joins views and chunks to wholes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn, TypeVar

from shardwise.errors import FormatError, StorageError
from shardwise.formats.contract import (
    LISTED,
    CheckpointIndex,
    Composed,
    ComposedPart,
    FileSelection,
    FormatFaults,
    IndexSoFar,
    Joined,
    TensorEntry,
    View,
    Whole,
    each,
    listed,
    moved,
    parse_object,
)
from shardwise.storage.contract import FilePlaces, StorageReader
from shardwise.storage.names import shown, unsafe_name_reason
from shardwise.tensors import Box, ByteRange, DType, Strided, numel

T = TypeVar("T")


def read_each(
    reader: StorageReader, files: Sequence[str], read: Callable[[StorageReader, str], T], faults: FormatFaults
) -> list[T]:
    """Read each file and return the results of sound ones. Failures are added to ``faults``."""

    def attempt(file: str) -> T | FormatError | StorageError:
        try:
            return read(reader, file)
        except (FormatError, StorageError) as error:
            return error

    sound: list[T] = []
    for result in each(reader, attempt, files):
        if isinstance(result, FormatError | StorageError):
            faults.add_error("damaged files", result)
        else:
            sound.append(result)
    return sound


def add_ignored(others: Iterable[tuple[KeyPath, str]], choice: WrapperChoice, found: IndexSoFar) -> None:
    """Record entries that are not loaded: an optimizer as one, all others individually."""
    ignored = [f"{'.'.join(path)} (an optimizer's state)" for path in choice.others]
    ignored += [f"{'.'.join(path)} ({kind})" for path, kind in others if choice.key_of(path) is not None]
    found.ignored = list(dict.fromkeys([*found.ignored, *ignored]))


def add_tensors(
    tensors: Iterable[FoundTensor], choice: WrapperChoice, found: IndexSoFar, faults: FormatFaults
) -> set[str]:
    """Add entries and their composed tensors. Return the keys of the tensors."""
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
        add_tensor(key, tensor, found, faults)
    return keys


def add_tensor(key: str, tensor: FoundTensor, found: IndexSoFar, faults: FormatFaults) -> None:
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
            "tensors whose chunks overlap or leave gaps",
            f"{shown(key)} of shape {tensor.shape}: {len(boxes)} chunks with holes or overlaps between them",
        )
        return
    found.composed[key] = Composed(tensor.dtype, tensor.shape, tree)


def _name(key: str, box: Box) -> str:
    """The key of a chunk, as it would be indexed: ``key[0:4, 8:16]``."""
    spans = ", ".join(f"{start}:{start + size}" for start, size in zip(box.offsets, box.sizes, strict=True))
    return f"{key}[{spans}]"


def beside(first: CheckpointIndex, second: CheckpointIndex, folder: str) -> CheckpointIndex:
    """Both as one: the files and the keys of the second have names that begin with ``folder`` and a slash."""

    def inside(name: str) -> str:
        return f"{folder}/{name}"

    entries = {
        inside(key): replace(entry, key=inside(key), file=inside(entry.file))
        for key, entry in second.entries.items()
    }
    composed = {inside(key): replace(item, part=moved(item.part, inside)) for key, item in second.composed.items()}
    return replace(
        first,
        files={**first.files, **{inside(file): nbytes for file, nbytes in second.files.items()}},
        entries={**first.entries, **entries},
        composed={**first.composed, **composed},
    )


MAX_INDEX_BYTES = 100_000_000
"""The longest index file that is read, the same as the longest header."""


def select_indexed(
    reader: StorageReader, name: str, suffix: str, layout: str, faults: FormatFaults
) -> FileSelection:
    """The files that an index names, each of which must end in ``suffix``."""
    nbytes = reader.size(name)
    if nbytes > MAX_INDEX_BYTES:
        _refuse_index(reader, name, f"it has {nbytes} bytes, {MAX_INDEX_BYTES} is the limit")
    content = parse_object(reader.read(name, 0, nbytes), what=f"{shown(name)} in {reader.root}")
    weight_map = _weight_map(reader, name, content.get("weight_map"), suffix, faults)
    metadata = content.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in metadata.items()}
    return FileSelection(layout, sorted(set(weight_map.values())), weight_map, texts)


def _weight_map(
    reader: StorageReader, name: str, value: object, suffix: str, faults: FormatFaults
) -> dict[str, str]:
    """Return the index's map of keys to files, without files that must not be opened, which are faults."""
    if not isinstance(value, dict):
        _refuse_index(reader, name, "it has no object named weight_map")
    if not value:
        _refuse_index(reader, name, "its weight_map is empty")
    for key, file in value.items():
        if not isinstance(file, str):
            faults.add(f"keys without a file in {shown(name)}", f"{shown(key)}: {shown(repr(file))}, not a string")
    mapped = {key: file for key, file in value.items() if isinstance(file, str)}
    unsafe = {file: why for file in mapped.values() if (why := _why_not_opened(file, suffix)) is not None}
    for file, why in sorted(unsafe.items()):
        faults.add(f"file names refused in {shown(name)}", f"{shown(file)}: {why}")
    return {key: file for key, file in mapped.items() if file not in unsafe}


def _why_not_opened(file: str, suffix: str) -> str | None:
    if not file.endswith(suffix):
        return f"it does not end in {suffix}"
    return unsafe_name_reason(file)


def _refuse_index(reader: StorageReader, name: str, cause: str) -> NoReturn:
    raise FormatError(f"{shown(name)} in {reader.root}: {cause}. Download or write the index again")


KeyPath = tuple[str, ...]

MAX_DEPTH = 64
"""As deep as dicts may be nested."""

_OPTIMIZER_STATE = frozenset({"state", "param_groups"})


@dataclass(frozen=True, slots=True)
class WrapperChoice:
    """Choice of the model's tensors: paths that begin with ``wrapper``, except the optimizer's.

    ``others`` are the paths of the optimizers.
    """

    wrapper: KeyPath
    others: tuple[KeyPath, ...]

    def key_of(self, path: KeyPath) -> str | None:
        """Return the key of a tensor of the model, or None for others."""
        if any(path[: len(other)] == other for other in self.others):
            return None
        return ".".join(path[len(self.wrapper) :])


def choose_model(paths: Collection[KeyPath]) -> WrapperChoice | None:
    """Return the choice of the model's tensors, or None if all belong to an optimizer.

    A dict is entered where everything but optimizers is in it. If there are several, none is chosen: all tensors
    keep their full paths as keys.
    """
    wrapper: KeyPath = ()
    others: list[KeyPath] = []
    kept = list(paths)
    while kept:
        depth = len(wrapper)
        inner = {path[depth] for path in kept if len(path) > depth + 1}
        is_flat = any(len(path) == depth + 1 for path in kept)
        if not is_flat and inner <= _OPTIMIZER_STATE:
            return None
        aside = {name for name in inner if name.lower().startswith("optim")}
        others += [(*wrapper, name) for name in sorted(aside)]
        kept = [path for path in kept if len(path) == depth + 1 or path[depth] not in aside]
        inner -= aside
        if is_flat or len(inner) != 1:
            break
        wrapper = (*wrapper, *inner)
    return WrapperChoice(wrapper, tuple(others)) if kept or not paths else None


MAX_DIMS = 64
"""As many dimensions as a tensor of torch may have."""

_MAX_CUTS = 32


@dataclass(frozen=True, slots=True)
class StoredView:
    """A tensor as a file holds it: elements, seen through strides, of the run of bytes ``range``."""

    file: str
    range: ByteRange
    dtype: DType
    strided: Strided

    @property
    def shape(self) -> tuple[int, ...]:
        return self.strided.sizes

    @property
    def is_whole(self) -> bool:
        """True if it is all of the range, row by row."""
        nbytes = self.strided.numel * self.dtype.itemsize
        return nbytes == self.range.nbytes and (self.strided.is_contiguous or not nbytes)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a tensor that begins at ``offsets``."""

    offsets: tuple[int, ...]
    view: StoredView


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor in a nest of dicts: the keys that lead to it, and its chunks, which have to tile it."""

    path: tuple[str, ...]
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def strided_obstacle(strided: Strided, available: int) -> str | None:
    """Return the reason why a view cannot consist of distinct elements among ``available`` ones, or None."""
    if strided.numel == 0:
        return None
    if strided.stop > available:
        return f"it reaches to element {strided.stop} of a storage of {available}"
    reach = 0
    for stride, size in sorted(zip(strided.strides, strided.sizes, strict=True)):
        if size > 1:
            if stride <= reach:
                return "its elements share memory, as after expand()"
            reach += stride * (size - 1)
    return None


def tiling(shape: Sequence[int], boxes: Sequence[tuple[Box, ComposedPart]]) -> ComposedPart | None:
    """Return the tree that assembles boxes to a tensor of this shape, or None if they do not tile it.

    The boxes are those of a grid, or of a grid in a box of a grid, and so on: some cut through the whole leaves
    each box on one side. So are all that come from sharding one dimension after the other. More than 32 cuts
    inside of each other are not looked for.
    """
    if len(shape) > MAX_DIMS or sum(box.numel for box, _ in boxes) != numel(shape):
        return None
    return _tiling(Box.whole(shape), list(boxes), _MAX_CUTS)


def _tiling(whole: Box, boxes: list[tuple[Box, ComposedPart]], cuts: int) -> ComposedPart | None:
    if len(boxes) == 1:
        return boxes[0][1] if boxes[0][0] == whole else None
    if cuts == 0:
        return None
    for dim in range(len(whole.sizes)):
        groups = _cut(whole, dim, boxes)
        if groups is None:
            return None
        if len(groups) > 1:
            parts = [_tiling(box, members, cuts - 1) for box, members in groups]
            found = tuple(part for part in parts if part is not None)
            return Joined(found, dim) if len(found) == len(parts) else None
    return None


def _cut(
    whole: Box, dim: int, boxes: list[tuple[Box, ComposedPart]]
) -> list[tuple[Box, list[tuple[Box, ComposedPart]]]] | None:
    """Return the boxes in groups along ``dim``, divided wherever no box is split, or None if there is a hole."""
    ordered = sorted(boxes, key=lambda item: item[0].offsets[dim])
    groups: list[tuple[Box, list[tuple[Box, ComposedPart]]]] = []
    start = stop = whole.offsets[dim]
    members: list[tuple[Box, ComposedPart]] = []
    for box, part in ordered:
        first = box.offsets[dim]
        if first >= stop and members:
            groups.append((_slab(whole, dim, start, stop), members))
            start, members = stop, []
        if first > stop:
            return None
        members.append((box, part))
        stop = max(stop, first + box.sizes[dim])
    groups.append((_slab(whole, dim, start, stop), members))
    return groups if stop == whole.offsets[dim] + whole.sizes[dim] else None


def _slab(whole: Box, dim: int, start: int, stop: int) -> Box:
    offsets = (*whole.offsets[:dim], start, *whole.offsets[dim + 1 :])
    return Box(offsets, (*whole.sizes[:dim], stop - start, *whole.sizes[dim + 1 :]))


METADATA = ".metadata"


_OPTIMIZER_FOLDERS = "optim*"


def no_model(reader: StorageReader, what: str) -> FormatError:
    """Return the error for a folder that holds an optimizer only. It names the folders that may hold the model."""
    where = where_models_are(reader) or "Pass the folder or the file of the model, which is saved apart"
    return FormatError(f"{what} in {reader.root}: holds the state of an optimizer, not a model. {where}")


def distributed_folders(names: Iterable[str]) -> list[str]:
    """Folders, one level down, that hold a distributed checkpoint."""
    found = (name.removesuffix(f"/{METADATA}") for name in names if name.endswith(f"/{METADATA}"))
    return sorted(folder for folder in found if "/" not in folder)


def where_models_are(reader: StorageReader, names: Iterable[str] = ()) -> str:
    """Return a sentence on the distributed checkpoints in the folder and next to it. Empty if there are none."""
    folders = [f"{reader.root}/{folder}" for folder in distributed_folders(names)] + _beside(reader)
    optimizers = [folder for folder in folders if fnmatchcase(Path(folder).name, _OPTIMIZER_FOLDERS)]
    models = [folder for folder in folders if folder not in optimizers]
    if models:
        also = f" ({listed(map(shown, optimizers))}: an optimizer's state)" if optimizers else ""
        return f"Pass the folder of the model: {' or '.join(map(shown, models[:LISTED]))}{also}"
    if optimizers:
        return (
            f"{listed(map(shown, optimizers))}: an optimizer's state, without the folder of a "
            "model beside it. That path works for merge_weights (optimizer.bin), and for load_accelerate_optimizer"
        )
    return ""


def _beside(reader: StorageReader) -> list[str]:
    """Return the sibling folders of a local one that have a distributed checkpoint."""
    if not isinstance(reader, FilePlaces):
        return []
    root = Path(reader.root).absolute()
    try:
        return sorted(
            str(place) for place in root.parent.iterdir() if place != root and (place / METADATA).is_file()
        )
    except OSError:
        return []
