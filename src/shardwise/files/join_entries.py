"""Shared parts of readers: concurrent reads of files, index files, and tensors composed of views and chunks.

Tensors lie in nested dicts. This module finds the dict of the model, and composes its tensors of views and chunks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from shardwise.core.errors import FormatError, StorageError
from shardwise.core.tensors import Box, ByteRange, DType, Strided, numel
from shardwise.files import checkpoint_index
from shardwise.files.checkpoint_index import (
    LISTED,
    CheckpointIndex,
    Composed,
    Composition,
    FileSelection,
    FormatFaults,
    IndexSoFar,
    Joined,
    TensorEntry,
    View,
    Whole,
)
from shardwise.files.storage import FilePlaces, StorageReader, read_limited
from shardwise.files.urls import shown, unsafe_name_reason

T = TypeVar("T")


def read_each(
    reader: StorageReader,
    files: Sequence[str],
    read: Callable[[StorageReader, str], T],
    faults: FormatFaults,
) -> list[T]:
    """Read each file and return the results of valid ones. Failures are added to ``faults``."""

    def attempt(file: str) -> T | FormatError | StorageError:
        try:
            return read(reader, file)
        except (FormatError, StorageError) as error:
            return error

    valid: list[T] = []
    for result in checkpoint_index.each(reader, attempt, files):
        if isinstance(result, FormatError | StorageError):
            faults.add_error("damaged files", result)
        else:
            valid.append(result)
    return valid


def add_ignored(others: Iterable[tuple[KeyPath, str]], choice: WrapperChoice, index: IndexSoFar) -> None:
    """Record values that are not loaded: an optimizer as one, all others individually."""
    ignored = [f"{'.'.join(path)} (an optimizer's state)" for path in choice.others]
    ignored += [f"{'.'.join(path)} ({kind})" for path, kind in others if choice.model_key(path) is not None]
    index.ignored = list(dict.fromkeys([*index.ignored, *ignored]))


def add_tensors(
    tensors: Iterable[FoundTensor],
    choice: WrapperChoice,
    index: IndexSoFar,
    faults: FormatFaults,
) -> set[str]:
    """Add tensors with their entries. Return their keys."""
    index.wrapper = ".".join(choice.wrapper)
    keys: set[str] = set()
    for tensor in tensors:
        key = choice.model_key(tensor.path)
        if key is None:
            continue
        # Two files, or two paths of one file, may give the same key after the wrapper is left out.
        if key in keys or key in index.entries or key in index.composed:
            faults.add("keys held twice", f"{shown(key)}: at {shown('.'.join(tensor.path))}, and elsewhere")
            continue
        keys.add(key)
        add_tensor(key, tensor, index, faults)
    return keys


def add_tensor(key: str, tensor: FoundTensor, index: IndexSoFar, faults: FormatFaults) -> None:
    """Add a tensor with its entries."""
    if not numel(tensor.shape) and tensor.chunks:  # an entry of no bytes, wherever its first chunk is
        first = tensor.chunks[0].view
        empty = ByteRange(first.range.start, first.range.start)
        _add_view(key, StoredView(first.file, empty, tensor.dtype, Strided.contiguous(tensor.shape)), index, faults)
        return
    chunks = [chunk for chunk in tensor.chunks if numel(chunk.view.shape)]  # some ranks may have had none of it
    boxes = [Box(chunk.offsets, chunk.view.shape) for chunk in chunks]
    # One chunk is the tensor itself: its entry has the tensor's key, unless it is a view of a larger storage.
    if boxes == [Box.whole(tensor.shape)]:
        composition = _add_view(key, chunks[0].view, index, faults)
        if not isinstance(composition, Whole):
            index.composed[key] = Composed(tensor.dtype, tensor.shape, composition)
        return
    tiles: list[Tile] = []
    for box, chunk in zip(boxes, chunks, strict=True):
        tiles.append((box, _add_view(_chunk_key(key, box), chunk.view, index, faults)))
    tree = tiling(tensor.shape, tiles)
    if tree is None:
        faults.add(
            "tensors whose chunks overlap or leave gaps",
            f"{shown(key)} of shape {tensor.shape}: {len(boxes)} chunks with gaps or overlaps between them",
        )
        return
    index.composed[key] = Composed(tensor.dtype, tensor.shape, tree)


def _add_view(key: str, view: StoredView, index: IndexSoFar, faults: FormatFaults) -> Whole | View:
    """Add the entry of a view. Return the view of that entry."""
    # A view of a part of a storage: the storage is an entry of its own, as a flat tensor.
    composition: Whole | View = Whole(key)
    shape = view.shape
    if not view.is_whole:
        composition = View(f"{key} (storage)", view.strided)
        shape = (view.range.nbytes // view.dtype.itemsize,)
    entry = TensorEntry(composition.key, view.dtype, shape, view.file, view.range.start, view.range.stop)
    if index.entries.setdefault(composition.key, entry) is not entry:
        faults.add("keys held twice", f"{shown(composition.key)}: as a tensor, and as a part of one")
    return composition


def _chunk_key(key: str, box: Box) -> str:
    """Return the key of a chunk, in the form ``key[0:4, 8:16]``."""
    spans = ", ".join(f"{start}:{start + size}" for start, size in zip(box.offsets, box.sizes, strict=True))
    return f"{key}[{spans}]"


def merge_indexes(first: CheckpointIndex, second: CheckpointIndex, folder: str) -> CheckpointIndex:
    """Merge two indexes. Files and keys of the second get names that begin with ``folder`` and a slash."""
    # Compositions refer to entries by key, so their keys get the prefix, too.
    prefix = f"{folder}/"
    files = {prefix + file: nbytes for file, nbytes in second.files.items()}
    entries, composed = dict(first.entries), dict(first.composed)
    for key, entry in second.entries.items():
        entries[prefix + key] = replace(entry, key=prefix + key, file=prefix + entry.file)
    for key, item in second.composed.items():
        composition = checkpoint_index.add_prefix(item.composition, prefix)
        composed[prefix + key] = replace(item, composition=composition)
    return replace(first, files={**first.files, **files}, entries=entries, composed=composed)


MAX_INDEX_BYTES = 100_000_000
"""The longest index file that is read, the same as the longest header."""


def select_indexed(
    reader: StorageReader, name: str, suffix: str, layout: str, faults: FormatFaults
) -> FileSelection:
    """Return the files that an index names, each of which must end in ``suffix``."""
    what = f"{shown(name)} in {reader.root}"
    content = checkpoint_index.parse_object(read_limited(reader, name, MAX_INDEX_BYTES), what=what)
    mapped = content.get("weight_map")
    if not isinstance(mapped, dict):
        raise checkpoint_index.invalid_file(what, "it has no object named weight_map")
    if not mapped:
        raise checkpoint_index.invalid_file(what, "its weight_map is empty")
    weight_map = _usable_files(name, mapped, suffix, faults)
    metadata = content.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in metadata.items()}
    return FileSelection(layout, sorted(set(weight_map.values())), weight_map, texts)


def _usable_files(name: str, weight_map: dict[str, Any], suffix: str, faults: FormatFaults) -> dict[str, str]:
    """Return the index's map of keys to files. File names that must not be opened are faults."""
    for key, file in weight_map.items():
        if not isinstance(file, str):
            faults.add(f"keys without a file in {shown(name)}", f"{shown(key)}: {shown(repr(file))}, not a string")
    mapped = {key: file for key, file in weight_map.items() if isinstance(file, str)}
    unsafe: set[str] = set()
    for file in sorted(set(mapped.values())):
        reason = unsafe_name_reason(file) if file.endswith(suffix) else f"it does not end in {suffix}"
        if reason is not None:
            faults.add(f"file names refused in {shown(name)}", f"{shown(file)}: {reason}")
            unsafe.add(file)
    return {key: file for key, file in mapped.items() if file not in unsafe}


KeyPath: TypeAlias = tuple[str, ...]
"""Keys of nested dicts that lead to a value, such as ``("optimizer", "state", FQN, "exp_avg")``."""

MAX_DEPTH = 64
"""Limit on the nesting of dicts."""

_OPTIMIZER_STATE = frozenset({"state", "param_groups"})


@dataclass(frozen=True, slots=True)
class WrapperChoice:
    """Choice of the model's tensors: paths that begin with ``wrapper``, except the optimizer's.

    ``others`` are the paths of the optimizers. By default all tensors are chosen.
    """

    wrapper: KeyPath = ()
    others: tuple[KeyPath, ...] = ()

    def model_key(self, path: KeyPath) -> str | None:
        """Return the key of a tensor of the model, or None for other tensors."""
        if any(path[: len(other)] == other for other in self.others):
            return None
        return ".".join(path[len(self.wrapper) :])


def choose_model(paths: Collection[KeyPath]) -> WrapperChoice | None:
    """Return the choice of the model's tensors, or None if all belong to an optimizer.

    A dict is entered if it holds everything except optimizers. If there are several, none is entered, and all
    tensors keep their full paths as keys.

    ``{"model": {"a": tensor}, "optimizer": {...}}`` is entered, and ``a`` is a key. In ``{"model": {...}, "ema":
    {...}}``, keys are ``model.a`` and ``ema.a``.
    """
    wrapper: KeyPath = ()
    others: list[KeyPath] = []
    remaining = list(paths)
    while remaining:
        # One level at a time: leave out optimizers, and enter what is left if it is a single dict.
        depth = len(wrapper)
        inner = {path[depth] for path in remaining if len(path) > depth + 1}
        is_flat = any(len(path) == depth + 1 for path in remaining)
        if not is_flat and inner <= _OPTIMIZER_STATE:
            return None
        optimizers = {name for name in inner if name.lower().startswith("optim")}
        others += [(*wrapper, name) for name in sorted(optimizers)]
        remaining = [path for path in remaining if len(path) == depth + 1 or path[depth] not in optimizers]
        inner -= optimizers
        if is_flat or len(inner) != 1:
            break
        wrapper = (*wrapper, *inner)
    return WrapperChoice(wrapper, tuple(others)) if remaining or not paths else None


MAX_DIMS = 64
"""Limit of torch on the dimensions of a tensor."""

_MAX_CUTS = 32

Tile: TypeAlias = tuple[Box, Composition]
"""A box of a tensor, and the composition that fills it."""


@dataclass(frozen=True, slots=True)
class StoredView:
    """A strided view of the elements in a byte range of a file."""

    file: str
    range: ByteRange
    dtype: DType
    strided: Strided

    @property
    def shape(self) -> tuple[int, ...]:
        return self.strided.sizes

    @property
    def is_whole(self) -> bool:
        """True if the view is all of the range, row-major."""
        nbytes = self.strided.numel * self.dtype.itemsize
        return nbytes == self.range.nbytes and (self.strided.is_contiguous or not nbytes)

    def shifted(self, file: str, nbytes: int) -> StoredView:
        """Return the same view of the range that begins ``nbytes`` later, in ``file``."""
        moved = ByteRange(self.range.start + nbytes, self.range.stop + nbytes)
        return StoredView(file, moved, self.dtype, self.strided)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a tensor that begins at ``offsets``."""

    offsets: tuple[int, ...]
    view: StoredView


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor in nested dicts: its path, and its chunks, which must tile it."""

    path: KeyPath
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def find_strided_obstacle(strided: Strided, available: int) -> str | None:
    """Return the reason why a view cannot consist of distinct elements among ``available`` ones, or None."""
    if strided.numel == 0:
        return None
    if strided.stop > available:
        return f"it reaches to element {strided.stop} of a storage of {available}"
    # Ascending strides: each must exceed the reach of all smaller ones, or two indices are one element.
    reach = 0
    for stride, size in sorted(zip(strided.strides, strided.sizes, strict=True)):
        if size > 1:
            if stride <= reach:
                return "its elements share memory, as after expand()"
            reach += stride * (size - 1)
    return None


def tiling(shape: Sequence[int], boxes: Sequence[Tile]) -> Composition | None:
    """Return the tree that assembles boxes to a tensor of this shape, or None if they do not tile it.

    The boxes must form a grid, or a grid in a box of a grid, and so on, so that some cut through the whole leaves
    each box on one side. Sharding one dimension after the other gives such boxes. At most 32 cuts are nested.
    """
    # A first check that is cheap: a tiling has as many elements as the tensor. The cuts find all other faults.
    if len(shape) > MAX_DIMS or sum(box.numel for box, _ in boxes) != numel(shape):
        return None
    return _tiling(Box.whole(shape), list(boxes), _MAX_CUTS)


def _tiling(whole: Box, boxes: list[Tile], cuts: int) -> Composition | None:
    if len(boxes) == 1:
        return boxes[0][1] if boxes[0][0] == whole else None
    if cuts == 0:
        return None
    # Cut along the first dimension that can be cut, and go on within each part. Each level has fewer boxes.
    for dim in range(len(whole.sizes)):
        groups = _cut(whole, dim, boxes)
        if groups is None:
            return None
        if len(groups) > 1:
            # The first dimension with a cut suffices: other cuts remain within the groups.
            pieces: list[Composition] = []
            for box, members in groups:
                piece = _tiling(box, members, cuts - 1)
                if piece is None:
                    return None
                pieces.append(piece)
            return Joined(tuple(pieces), dim)
    return None


def _cut(whole: Box, dim: int, boxes: list[Tile]) -> list[tuple[Box, list[Tile]]] | None:
    """Return the boxes in groups along ``dim``, divided wherever no box is split, or None if there is a gap.

    Rows 0 to 2, 2 to 4 (two boxes side by side), and 4 to 6 are three groups of one, two and one box.
    """
    # `stop` is the farthest end so far. A box that begins there starts a new group, one beyond it leaves a gap.
    ordered = sorted(boxes, key=lambda item: item[0].offsets[dim])
    groups: list[tuple[Box, list[Tile]]] = []
    start = stop = whole.offsets[dim]
    members: list[Tile] = []
    for box, composition in ordered:
        first = box.offsets[dim]
        if first >= stop and members:  # all boxes before end here: a cut
            groups.append((whole.narrow(dim, start, stop - start), members))
            start, members = stop, []
        if first > stop:
            return None
        members.append((box, composition))
        stop = max(stop, first + box.sizes[dim])
    groups.append((whole.narrow(dim, start, stop - start), members))
    return groups if stop == whole.offsets[dim] + whole.sizes[dim] else None


METADATA = ".metadata"
_OPTIMIZER_FOLDERS = "optim*"


def no_model(reader: StorageReader, what: str) -> FormatError:
    """Return the error for a checkpoint of an optimizer only. It names the folders that may hold the model."""
    where = where_models_are(reader) or "Pass the folder or the file of the model, which is saved apart"
    return FormatError(f"{what} in {reader.root}: holds the state of an optimizer, not a model. {where}")


def find_distributed_folders(names: Iterable[str]) -> list[str]:
    """Return the folders one level down that hold a distributed checkpoint."""
    folders = (name.removesuffix(f"/{METADATA}") for name in names if name.endswith(f"/{METADATA}"))
    return sorted(folder for folder in folders if "/" not in folder)


def where_models_are(reader: StorageReader, names: Iterable[str] = (), *, only_models: bool = False) -> str:
    """Return a sentence on the distributed checkpoints in the folder and next to it. Empty if there are none.

    With ``only_models`` it is empty as well if all are of optimizers.
    """
    folders = [f"{reader.root}/{folder}" for folder in find_distributed_folders(names)] + _siblings(reader)
    optimizers = [folder for folder in folders if fnmatchcase(Path(folder).name, _OPTIMIZER_FOLDERS)]
    models = [folder for folder in folders if folder not in optimizers]
    if models:
        also = f" ({checkpoint_index.listed(map(shown, optimizers))}: an optimizer's state)" if optimizers else ""
        return f"Pass the folder of the model: {' or '.join(map(shown, models[:LISTED]))}{also}"
    if optimizers and not only_models:
        return (
            f"{checkpoint_index.listed(map(shown, optimizers))}: an optimizer's state, without the folder of a "
            "model next to it. That path works for merge_weights (optimizer.bin), and for load_accelerate_optimizer"
        )
    return ""


def _siblings(reader: StorageReader) -> list[str]:
    """Return the siblings of a local folder that hold a distributed checkpoint."""
    if not isinstance(reader, FilePlaces):
        return []
    root = Path(reader.root).absolute()
    try:
        others = [place for place in root.parent.iterdir() if place != root]
        return sorted(str(place) for place in others if (place / METADATA).is_file())
    except OSError:
        return []
