"""Regions of tensors: affine maps from axes to dimensions.

[Note: Regions] A set of indices of a node is represented as an affine map. ``origin`` is the index of its first
element. Every axis of the iteration moves along exactly one dimension of the node, by ``step`` indices, and by
``stride`` elements in the target. Several axes may move along the same dimension (the mixed-radix digits after a
reshape), so a column interleave is one strided copy instead of a box for every column. Pushing a region down a node
yields one or a few regions:

* a permutation renames dimensions, and a slice scales them.
* a concatenation or stack clips the region to each source (:func:`clip`).
* a reshape flattens all dimensions into one, then splits dimensions off it, last first (:func:`unflatten`).

Splitting is exact. In the worst case it unrolls an axis into single steps, which no conversion of transformers
needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from shardwise.core.tensors import Box, Strided, contiguous_strides


@dataclass(frozen=True, slots=True)
class Axis:
    """``size`` > 1 steps, each of ``stride`` elements in the target and of ``step`` indices along ``dim``."""

    size: int
    stride: int
    dim: int
    step: int

    @property
    def span(self) -> int:
        return self.step * (self.size - 1)


@dataclass(frozen=True, slots=True)
class Region:
    """See [Note: Regions]. ``target`` is the offset of the first element in the target's memory."""

    origin: tuple[int, ...]
    target: int
    axes: tuple[Axis, ...]

    @classmethod
    def from_box(cls, box: Box, into: Strided) -> Region:
        """Return the region of a box whose elements are copied to ``into``."""
        axes: list[Axis] = []
        for dim, (size, stride) in enumerate(zip(box.sizes, into.strides, strict=True)):
            if size > 1:
                axes.append(Axis(size, stride, dim, 1))
        return cls(box.offsets, into.offset, tuple(axes))

    @property
    def bounds(self) -> Box:
        """The smallest box that contains the region."""
        sizes = [1] * len(self.origin)
        for axis in self.axes:
            sizes[axis.dim] += axis.span
        return Box(self.origin, tuple(sizes))

    def within(self, box: Box) -> Iterator[Region]:
        """Yield the part of the region that is in a box, relative to the box's first element."""
        # One dimension after the other. Each may cut a region into several.
        regions = [self]
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            regions = [piece for region in regions for piece in clip(region, dim, start, start + size)]
        for region in regions:
            yield replace(
                region, origin=tuple(at - first for at, first in zip(region.origin, box.offsets, strict=True))
            )

    def to_strided(self, strides: Sequence[int], start: int = 0) -> tuple[Strided, Strided]:
        """Return the layouts in the source and in the target, in the same order, with descending strides.

        The source has these strides, and its first element is at ``start``.
        """
        offset = start + sum(index * stride for index, stride in zip(self.origin, strides, strict=True))
        axes = sorted(((a.step * strides[a.dim], a.stride, a.size) for a in self.axes), reverse=True)
        # Two axes are one if the outer stride is the inner extent on both sides, as for full rows.
        merged: list[tuple[int, int, int]] = []
        for source_stride, target_stride, size in axes:
            if merged and merged[-1][:2] == (source_stride * size, target_stride * size):
                merged[-1] = (source_stride, target_stride, merged[-1][2] * size)
            else:
                merged.append((source_stride, target_stride, size))
        sizes = tuple(size for _, _, size in merged)
        source = Strided(offset, sizes, tuple(stride for stride, _, _ in merged))
        return source, Strided(self.target, sizes, tuple(stride for _, stride, _ in merged))

    def with_origin(self, dim: int, value: int) -> Region:
        return Region((*self.origin[:dim], value, *self.origin[dim + 1 :]), self.target, self.axes)

    def restrict(self, axis: Axis, first: int, count: int) -> Region:
        """Keep only the steps ``first <= i < first + count`` of one axis."""
        axes = tuple(other for other in self.axes if other is not axis)
        if count > 1:
            axes = (*axes, Axis(count, axis.stride, axis.dim, axis.step))
        shifted = self.with_origin(axis.dim, self.origin[axis.dim] + axis.step * first)
        return Region(shifted.origin, self.target + axis.stride * first, axes)


def find_overlapped_ranges(region: Region, dim: int, starts: Sequence[int]) -> range:
    """Return the indices of the ranges that a region overlaps. Range i is ``starts[i] <= x < starts[i + 1]``."""
    first = region.origin[dim]
    last = first + sum(axis.span for axis in region.axes if axis.dim == dim)
    return range(bisect_right(starts, first) - 1, bisect_right(starts, last))


def drop_dim(region: Region, dim: int) -> Region:
    """Return the region without a dimension and without the axes along it."""
    axes: list[Axis] = []
    for axis in region.axes:
        if axis.dim != dim:  # those after it move down by one
            axes.append(Axis(axis.size, axis.stride, axis.dim - (axis.dim > dim), axis.step))
    return Region((*region.origin[:dim], *region.origin[dim + 1 :]), region.target, tuple(axes))


def clip(region: Region, dim: int, start: int, stop: int) -> Iterator[Region]:
    """Yield the part of the region with ``start <= index < stop`` along ``dim``.

    With two axes along ``dim``, 4 steps of 8 and 8 steps of 1, the region has the indices 0 to 31. Clipped to
    ``4 <= index < 24`` it is one region of the outer steps 1 and 2 (8 to 23), and the inner steps 4 to 7 of the
    outer step 0.
    """
    along = [axis for axis in region.axes if axis.dim == dim]
    first = region.origin[dim]
    last = first + sum(axis.span for axis in along)
    if last < start or first >= stop:
        return
    if first >= start and last < stop:
        yield region
        return
    # The steps of the largest axis are of three kinds: outside, across a bound, and inside with all inner steps.
    # Those inside stay one region. At each bound, steps are clipped one by one along the inner axes.
    axis = max(along, key=attrgetter("step"))
    inner_span = last - first - axis.span
    # Step i of the axis covers first + i * step to first + i * step + inner_span. Touched are steps that overlap
    # the bounds, inside those that are within. In the example: touched 0 to 2, inside 1 and 2.
    touched_from = max(0, -((first + inner_span - start) // axis.step))
    touched_to = min(axis.size, (stop - 1 - first) // axis.step + 1)
    inside_from = max(touched_from, -((first - start) // axis.step))
    inside_to = max(min(touched_to, (stop - 1 - inner_span - first) // axis.step + 1), inside_from)
    if inside_to > inside_from:
        yield region.restrict(axis, inside_from, inside_to - inside_from)
    else:
        inside_from = inside_to = touched_to
    for index in (*range(touched_from, inside_from), *range(inside_to, touched_to)):
        yield from clip(region.restrict(axis, index, 1), dim, start, stop)


def flatten(region: Region, shape: tuple[int, ...]) -> Region:
    """Return the same elements as indices of the flattened tensor."""
    strides = contiguous_strides(shape)
    origin = sum(index * stride for index, stride in zip(region.origin, strides, strict=True))
    axes = tuple(Axis(a.size, a.stride, 0, a.step * strides[a.dim]) for a in region.axes)
    return Region((origin,), region.target, axes)


def unflatten(region: Region, shape: tuple[int, ...]) -> Iterator[Region]:
    """Yield regions of a tensor of this shape that make up a region of the flattened tensor."""
    if len(shape) == 0:
        yield replace(region, origin=())
        return
    pieces = [region]
    for size in reversed(shape[1:]):
        pieces = [inner for piece in pieces for inner in _split(piece, size)]
    yield from pieces


def _split(region: Region, inner: int) -> Iterator[Region]:
    """Replace dimension 0, an index ``x``, by the two dimensions ``x // inner, x % inner``."""
    outer_index, inner_index = divmod(region.origin[0], inner)
    digits = [axis for axis in region.axes if axis.dim == 0 and axis.step % inner]
    reach = sum(axis.span for axis in digits)
    if inner_index + reach < inner:
        # The inner index never carries: each axis moves along one of the two dimensions only.
        axes = tuple(_split_axis(axis, inner) for axis in region.axes)
        yield Region((outer_index, inner_index, *region.origin[1:]), region.target, axes)
        return
    # Some digit carries into the outer dimension. If the others stay below its step, it divides into the steps up
    # to the first carry, whole turns, and the steps after the last carry.
    axis = max(digits, key=attrgetter("step"))
    below = inner_index % axis.step + reach - axis.span
    # With inner 12, steps of 4 carry after 3. Of 8 steps from index 4 on, the head is 4 and 8, and two turns of 3
    # follow: 12, 16, 20 and 24, 28, 32.
    if inner % axis.step == 0 and below < axis.step:
        turn = inner // axis.step
        head = min(-(inner_index // axis.step) % turn, axis.size)
        turns, tail = divmod(axis.size - head, turn)
        if head:
            yield from _split(region.restrict(axis, 0, head), inner)
        if turns:
            middle = region.restrict(axis, head, turn)
            repeat = Axis(turns, axis.stride * turn, 0, inner)
            if turns > 1:
                middle = replace(middle, axes=(*middle.axes, repeat))
            yield from _split(middle, inner)
        if tail:
            yield from _split(region.restrict(axis, axis.size - tail, tail), inner)
        return
    # No pattern is known: the shortest axis is unrolled, which always ends, and may yield many regions.
    axis = min(digits, key=attrgetter("size"))
    for index in range(axis.size):
        yield from _split(region.restrict(axis, index, 1), inner)


def _split_axis(axis: Axis, inner: int) -> Axis:
    if axis.dim > 0:
        return replace(axis, dim=axis.dim + 1)
    if axis.step % inner == 0:
        return replace(axis, step=axis.step // inner)
    return replace(axis, dim=1)
