"""Tensors that are not one run of bytes: views of a storage, and chunks that make up a whole. Plain data.

What is stored row-major in one run is an entry by itself. Any other tensor is made of entries, by a small tree
whose leaves are entries, whole or seen through strides, and whose nodes put parts one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.tensors import Box, ByteRange, Code, DType, Form4, Strided, numel

MAX_DIMS = 64
"""As many dimensions as a tensor of torch may have."""

_MAX_CUTS = 32


@dataclass(frozen=True, slots=True)
class Whole:
    """An entry, by key, as it is."""

    key: str


@dataclass(frozen=True, slots=True)
class View:
    """Elements of an entry that is a flat run of them."""

    key: str
    strided: Strided


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts one after the other along a dimension."""

    parts: tuple[ComposedPart, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """Elements that are stored in few bits, times the scales of their blocks.

    Attributes:
        values: the elements, row by row.
        scales: one for each block.
        shape: of the elements.
        unit: sizes of a block, by dimension; those at an end may be smaller.
        code: what the stored bytes stand for.
        has_exponents: scales are exponents of 2, counted from -127.
        overall: one number, and 1 or -1: all scales are multiplied by it, or divided.
        swaps: the last two dimensions are exchanged in the end.
    """

    values: Whole
    scales: Whole
    shape: tuple[int, ...]
    unit: tuple[int, ...]
    code: Code
    has_exponents: bool = False
    overall: tuple[Whole, int] | None = None
    swaps: bool = False

    @property
    def parts(self) -> tuple[Whole, ...]:
        """All that is stored of it."""
        return (self.values, self.scales, *([] if self.overall is None else [self.overall[0]]))


@dataclass(frozen=True, slots=True)
class Nested:
    """What scales that are bytes stand for.

    Attributes:
        scales: what 256 of them are scaled by.
        offset: is added to all.
        numbers: of the 256 bytes.
    """

    scales: Whole
    offset: float
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FourBits:
    """Elements of four bits as bitsandbytes packs them, times the scales of their blocks.

    Attributes:
        values: the packed bytes, row by row.
        scales: one for each block.
        shape: of the elements; rows are whole blocks.
        block: elements of a row with one scale.
        form: what four bits stand for.
        dtype: that numbers had before they were packed.
        nested: where scales are bytes, what these stand for.
    """

    values: Whole
    scales: Whole
    shape: tuple[int, ...]
    block: int
    form: Form4
    dtype: DType
    nested: Nested | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all that is stored of it."""
        return (self.values.key, self.scales.key, *([] if self.nested is None else [self.nested.scales.key]))


ComposedPart: TypeAlias = Whole | View | Joined | Scaled | FourBits


@dataclass(frozen=True, slots=True)
class Composed:
    """A tensor that is made of entries."""

    dtype: DType
    shape: tuple[int, ...]
    part: ComposedPart


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
