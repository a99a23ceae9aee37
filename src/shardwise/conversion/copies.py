"""Boxes pushed down to the leaves: what to copy, from where, to where.

[Note: Regions] A set of indices of a node is kept as an affine map. ``origin`` is the index of its first element;
every axis of the iteration moves along exactly one dimension of the node, by ``step`` indices, and by ``stride``
elements in the target. Several axes may move along the same dimension (the mixed-radix digits that a reshape
leaves behind), so a column interleave stays one strided copy and not a box for every column. Moving a region
through a node keeps this form or splits the region into a few of the same form:

* a permutation renames dimensions, a slice scales them;
* a concatenation or stack clips the region to each part (:func:`_clip`);
* a reshape flattens all dimensions into one, then splits dimensions off it, last first (:func:`_split`).

Splitting may, in the worst case, unroll an axis into single steps; it is exact always and compact for everything
that model conversions do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from shardwise.conversion.expression import Concat, Expression, Hole, Opaque, Permute, Reshape, Slice, Stack, Stored
from shardwise.tensors import Box, Strided, contiguous_strides


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a leaf, and where they go.

    ``source`` counts elements of the leaf as it is stored (row-major), ``target`` counts elements of the memory
    the box was asked into. Both have the same ``sizes``, iterated in the same order.
    """

    leaf: Stored | Opaque
    source: Strided
    target: Strided

    @property
    def numel(self) -> int:
        return self.source.numel

    def blocks(self, max_span: int) -> Iterator[Copy]:
        """The same copy in parts, none of which spans more than ``max_span`` (at least 1) elements of the leaf."""
        span = self.source.stop - self.source.offset
        if span <= max_span:
            yield self
            return
        axis = max(range(len(self.source.sizes)), key=lambda item: self.source.strides[item])
        size, stride = self.source.sizes[axis], self.source.strides[axis]
        rest = span - stride * (size - 1)
        steps = max(1, (max_span - rest) // stride + 1)
        for first in range(0, size, steps):
            count = min(steps, size - first)
            yield from Copy(
                self.leaf, _along(self.source, axis, first, count), _along(self.target, axis, first, count)
            ).blocks(max_span)


def _along(view: Strided, axis: int, first: int, count: int) -> Strided:
    """``count`` steps of one axis from ``first`` on; the axis goes where there is one step only."""
    offset = view.offset + first * view.strides[axis]
    middle = ((count,), (view.strides[axis],)) if count > 1 else ((), ())
    sizes = view.sizes[:axis] + middle[0] + view.sizes[axis + 1 :]
    return Strided(offset, sizes, view.strides[:axis] + middle[1] + view.strides[axis + 1 :])


def copies(expression: Expression, box: Box, into: Strided | None = None) -> list[Copy]:
    """The copies that fill ``box`` of the expression, each of its elements exactly once, but for those of a hole.

    ``into`` says where the box lies in the target's memory (default: a contiguous tensor of the box's sizes).
    An empty box needs no copies.
    """
    if not box.is_within(expression.shape):
        raise ValueError(f"{box} is not within {expression.shape}")
    into = Strided.contiguous(box.sizes) if into is None else into
    if into.sizes != box.sizes:
        raise ValueError(f"{into} does not have the sizes of {box}")
    if box.numel == 0:
        return []
    axes = tuple(
        _Axis(size, stride, dim, 1)
        for dim, (size, stride) in enumerate(zip(box.sizes, into.strides, strict=True))
        if size > 1
    )
    region = _Region(box.offsets, into.offset, axes)
    return [_copy(leaf, part, contiguous_strides(leaf.shape)) for leaf, part in _regions(expression, region)]


def pieces(
    expression: Expression, held: Mapping[str, Sequence[tuple[Box, Strided]]], box: Box | None = None
) -> Iterator[Copy]:
    """The copies that take what is ``held`` of the leaves to its places in a box of the expression.

    The other direction of :func:`copies`: here ``source`` counts elements of the memory in which a leaf's box is
    held, and ``target`` those of a row-major tensor of the box's sizes. Together, the holders of all of a leaf make
    all elements that the box has of it.

    Args:
        expression: without opaque leaves.
        held: by key, boxes of the leaf (without overlap) and where each lies in memory.
        box: of the expression; None is all of it.
    """
    box = Box.whole(expression.shape) if box is None else box
    if not box.is_within(expression.shape):
        raise ValueError(f"{box} is not within {expression.shape}")
    if box.numel == 0:
        return
    axes = tuple(
        _Axis(size, stride, dim, 1)
        for dim, (size, stride) in enumerate(zip(box.sizes, contiguous_strides(box.sizes), strict=True))
        if size > 1
    )
    for leaf, region in _regions(expression, _Region(box.offsets, 0, axes)):
        assert isinstance(leaf, Stored)
        for part, memory in held.get(leaf.key, ()):
            clipped = [region]
            for dim, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                clipped = [piece for each in clipped for piece in _clip(each, dim, start, start + size)]
            for piece in clipped:
                inside = tuple(at - first for at, first in zip(piece.origin, part.offsets, strict=True))
                yield _copy(leaf, replace(piece, origin=inside), memory.strides, memory.offset)


@dataclass(frozen=True, slots=True)
class _Axis:
    """``size`` > 1 steps: each moves ``stride`` elements in the target, ``step`` indices along ``dim``."""

    size: int
    stride: int
    dim: int
    step: int

    @property
    def span(self) -> int:
        return self.step * (self.size - 1)


@dataclass(frozen=True, slots=True)
class _Region:
    """See [Note: Regions]. ``target`` is the place of the first element in the target's memory."""

    origin: tuple[int, ...]
    target: int
    axes: tuple[_Axis, ...]

    def with_origin(self, dim: int, value: int) -> _Region:
        return replace(self, origin=(*self.origin[:dim], value, *self.origin[dim + 1 :]))

    def restricted(self, axis: _Axis, first: int, count: int) -> _Region:
        """Only the steps ``first .. first + count`` of one axis."""
        axes = tuple(other for other in self.axes if other is not axis)
        if count > 1:
            axes = (*axes, replace(axis, size=count))
        moved = self.with_origin(axis.dim, self.origin[axis.dim] + axis.step * first)
        return replace(moved, target=self.target + axis.stride * first, axes=axes)


def _regions(expression: Expression, region: _Region) -> Iterator[tuple[Stored | Opaque, _Region]]:
    """A region of an expression as regions of its leaves."""
    match expression:
        case Stored() | Opaque():
            yield expression, region
        case Concat(parts, dim):
            starts = [0, *accumulate(part.shape[dim] for part in parts)]
            for index in _parts_touched(region, dim, starts):
                for piece in _clip(region, dim, starts[index], starts[index + 1]):
                    yield from _regions(parts[index], piece.with_origin(dim, piece.origin[dim] - starts[index]))
        case Stack(parts, dim):
            starts = list(range(len(parts) + 1))
            for index in _parts_touched(region, dim, starts):
                for piece in _clip(region, dim, index, index + 1):
                    yield from _regions(parts[index], _without_dim(piece, dim))
        case Slice(source, dim, start, step):
            axes = tuple(replace(a, step=a.step * step) if a.dim == dim else a for a in region.axes)
            moved = region.with_origin(dim, start + step * region.origin[dim])
            yield from _regions(source, replace(moved, axes=axes))
        case Permute(source, dims):
            origin = [0] * len(dims)
            for dim, source_dim in enumerate(dims):
                origin[source_dim] = region.origin[dim]
            axes = tuple(replace(axis, dim=dims[axis.dim]) for axis in region.axes)
            yield from _regions(source, replace(region, origin=tuple(origin), axes=axes))
        case Hole():
            pass
        case Reshape(source, shape):
            for piece in _unflatten(_flatten(region, shape), source.shape):
                yield from _regions(source, piece)


def _parts_touched(region: _Region, dim: int, starts: list[int]) -> range:
    first = region.origin[dim]
    last = first + sum(axis.span for axis in region.axes if axis.dim == dim)
    return range(bisect_right(starts, first) - 1, bisect_right(starts, last))


def _without_dim(region: _Region, dim: int) -> _Region:
    """The region without a dimension along which it does not move."""
    axes = tuple(replace(axis, dim=axis.dim - 1) if axis.dim > dim else axis for axis in region.axes)
    return replace(region, origin=(*region.origin[:dim], *region.origin[dim + 1 :]), axes=axes)


def _clip(region: _Region, dim: int, start: int, stop: int) -> Iterator[_Region]:
    """The part of the region whose index along ``dim`` is in ``start .. stop``."""
    along = [axis for axis in region.axes if axis.dim == dim]
    first = region.origin[dim]
    last = first + sum(axis.span for axis in along)
    if last < start or first >= stop:
        return
    if first >= start and last < stop:
        yield region
        return
    axis = max(along, key=lambda item: item.step)
    rest = last - first - axis.span
    touched_from = max(0, -((first + rest - start) // axis.step))
    touched_to = min(axis.size, (stop - 1 - first) // axis.step + 1)
    inside_from = max(touched_from, -((first - start) // axis.step))
    inside_to = max(min(touched_to, (stop - 1 - rest - first) // axis.step + 1), inside_from)
    if inside_to > inside_from:
        yield region.restricted(axis, inside_from, inside_to - inside_from)
    else:
        inside_from = inside_to = touched_to
    for index in (*range(touched_from, inside_from), *range(inside_to, touched_to)):
        yield from _clip(region.restricted(axis, index, 1), dim, start, stop)


def _flatten(region: _Region, shape: tuple[int, ...]) -> _Region:
    """The same elements as indices of the flat, row-major tensor."""
    strides = contiguous_strides(shape)
    origin = sum(index * stride for index, stride in zip(region.origin, strides, strict=True))
    axes = tuple(_Axis(a.size, a.stride, 0, a.step * strides[a.dim]) for a in region.axes)
    return _Region((origin,), region.target, axes)


def _unflatten(region: _Region, shape: tuple[int, ...]) -> Iterator[_Region]:
    """A flat region as regions of a tensor of this shape."""
    if len(shape) == 0:
        yield replace(region, origin=())
        return
    pieces = [region]
    for size in reversed(shape[1:]):
        pieces = [part for piece in pieces for part in _split(piece, size)]
    yield from pieces


def _split(region: _Region, inner: int) -> Iterator[_Region]:
    """Dimension 0, an index ``x``, replaced by the two dimensions ``x // inner, x % inner``."""
    outer_index, inner_index = divmod(region.origin[0], inner)
    digits = [axis for axis in region.axes if axis.dim == 0 and axis.step % inner]
    reach = sum(axis.span for axis in digits)
    if inner_index + reach < inner:
        axes = tuple(_split_axis(axis, inner) for axis in region.axes)
        yield _Region((outer_index, inner_index, *region.origin[1:]), region.target, axes)
        return
    # Some digit carries into the outer dimension. Where the others stay below its step, it divides into the
    # steps up to the first carry, whole turns, and the steps after the last carry.
    axis = max(digits, key=lambda item: item.step)
    below = inner_index % axis.step + reach - axis.span
    if inner % axis.step == 0 and below < axis.step:
        turn = inner // axis.step
        head = min(-(inner_index // axis.step) % turn, axis.size)
        turns, tail = divmod(axis.size - head, turn)
        if head:
            yield from _split(region.restricted(axis, 0, head), inner)
        if turns:
            middle = region.restricted(axis, head, turn)
            repeat = _Axis(turns, axis.stride * turn, 0, inner)
            yield from _split(replace(middle, axes=(*middle.axes, repeat) if turns > 1 else middle.axes), inner)
        if tail:
            yield from _split(region.restricted(axis, axis.size - tail, tail), inner)
        return
    axis = min(digits, key=lambda item: item.size)
    for index in range(axis.size):
        yield from _split(region.restricted(axis, index, 1), inner)


def _split_axis(axis: _Axis, inner: int) -> _Axis:
    if axis.dim > 0:
        return replace(axis, dim=axis.dim + 1)
    if axis.step % inner == 0:
        return replace(axis, step=axis.step // inner)
    return replace(axis, dim=1)


def _copy(leaf: Stored | Opaque, region: _Region, strides: tuple[int, ...], start: int = 0) -> Copy:
    """From a region of a leaf whose elements lie in memory from ``start`` on, by these strides."""
    offset = start + sum(index * stride for index, stride in zip(region.origin, strides, strict=True))
    axes = sorted(((a.step * strides[a.dim], a.stride, a.size) for a in region.axes), reverse=True)
    merged: list[tuple[int, int, int]] = []
    for source_stride, target_stride, size in axes:
        if merged and merged[-1][:2] == (source_stride * size, target_stride * size):
            merged[-1] = (source_stride, target_stride, merged[-1][2] * size)
        else:
            merged.append((source_stride, target_stride, size))
    sizes = tuple(size for _, _, size in merged)
    source = Strided(offset, sizes, tuple(stride for stride, _, _ in merged))
    return Copy(leaf, source, Strided(region.target, sizes, tuple(stride for _, stride, _ in merged)))
