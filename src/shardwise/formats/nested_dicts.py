"""Tensors in a nest of dicts: where in it the model is, and views and chunks that have to make up wholes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardwise.formats.checkpoint_index import ComposedPart, Joined
from shardwise.tensors import Box, ByteRange, DType, Strided, numel

Path = tuple[str, ...]

MAX_DEPTH = 64
"""As deep as dicts may be nested."""

_OPTIMIZER_STATE = frozenset({"state", "param_groups"})


@dataclass(frozen=True, slots=True)
class WrapperChoice:
    """Which tensors are the model's: those whose paths begin with ``wrapper``, less the optimizer's.

    ``others`` are the paths of the optimizers beside the model.
    """

    wrapper: Path
    others: tuple[Path, ...]

    def key_of(self, path: Path) -> str | None:
        """The key of a tensor of the model; None for another's."""
        if any(path[: len(other)] == other for other in self.others):
            return None
        return ".".join(path[len(self.wrapper) :])


def choose_model(paths: Collection[Path]) -> WrapperChoice | None:
    """What of the tensors at these paths is the model; None when they are all an optimizer's.

    A dict is entered where everything but optimizers is in it. Where there are several, none is chosen: all
    tensors keep their whole paths as keys.
    """
    wrapper: Path = ()
    others: list[Path] = []
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
        """Whether it is all of the range, row by row."""
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


def why_not_strided(strided: Strided, available: int) -> str | None:
    """Why a view cannot be one of ``available`` elements, each of which it sees once; None when it can."""
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
    """The tree that puts boxes together to a whole of this shape; None when they do not tile it.

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
    """The boxes in groups, cut along ``dim`` wherever no box is cut in two; None where there is a hole."""
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
