"""Defines lazy expressions over stored tensors, and the regions of indices that are pushed through them.

A parameter of a model is an expression whose leaves are tensors of a checkpoint. Most nodes
only move elements (:class:`Concat`, :class:`Stack`, :class:`Slice`, :class:`Permute`, :class:`Reshape`), so any box
of the parameter can be traced to strided boxes of the leaves, see :func:`shardwise.conversion.computed.copies`.
What computes is a leaf, too (:class:`~shardwise.conversion.computed.Computed`): it says which boxes of its inputs
it needs.

Nodes are built by the lower-case functions, which validate and simplify. A new one answers what
:class:`Expression` asks, and nothing outside of this package looks at classes of nodes.

[Note: Regions] A set of indices of a node is kept as an affine map. ``origin`` is the index of its first element;
every axis of the iteration moves along exactly one dimension of the node, by ``step`` indices, and by ``stride``
elements in the target. Several axes may move along the same dimension (the mixed-radix digits that a reshape
leaves behind), so a column interleave stays one strided copy and not a box for every column. Moving a region
through a node keeps this form or splits the region into a few of the same form:

* a permutation renames dimensions, a slice scales them;
* a concatenation or stack clips the region to each part (:func:`clip`);
* a reshape flattens all dimensions into one, then splits dimensions off it, last first (:func:`unflatten`).

Splitting may, in the worst case, unroll an axis into single steps; it is exact always and compact for everything
that model conversions do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from shardwise.tensors import Box, DType, Strided, contiguous_strides, numel

Shape: TypeAlias = tuple[int, ...]


class Expression(ABC):
    """A tensor that is made of stored ones: what every node of an expression answers.

    A node moves elements, of its ``sources``, or is a leaf. What it is but for its sources is its ``form``: nodes
    of equal forms over sources of equal shapes do the same.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # as attributes these would be taken for defaults of the nodes' fields

        @property
        def shape(self) -> Shape: ...

        @property
        def dtype(self) -> DType:
            """Of the elements; where parts have several, that of the first."""

        @property
        def sources(self) -> tuple[Expression, ...]: ...

    @property
    @abstractmethod
    def form(self) -> Hashable: ...

    def over(self, sources: Sequence[Expression]) -> Expression:
        """The same node over other sources, of the same shapes."""
        assert not sources
        return self

    @abstractmethod
    def moved(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        """The regions of the sources that a region of this node is made of (see [Note: Regions])."""

    def leaves(self, region: Region) -> Iterator[tuple[Leaf, Region]]:
        """The regions of the leaves that a region of this expression is made of."""
        for source, part in self.moved(region):
            yield from source.leaves(part)

    def __str__(self) -> str:
        parts = [str(part) for part in self.sources]
        middle = [f"... {len(parts) - 2} more ..."] if len(parts) > 3 else parts[1:-1]
        return f"{type(self).__name__}({', '.join([*parts[:1], *middle, *parts[1:][-1:]])})"


class Leaf(Expression):
    """Where moving ends: elements that are stored, or computed."""

    __slots__ = ()

    def moved(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        yield self, region

    def leaves(self, region: Region) -> Iterator[tuple[Leaf, Region]]:
        yield self, region


@dataclass(frozen=True, slots=True)
class Stored(Leaf):
    """A tensor of the checkpoint, whole."""

    key: str
    shape: Shape
    dtype: DType

    @property
    def sources(self) -> tuple[Expression, ...]:
        return ()

    @property
    def form(self) -> Hashable:
        return "stored", self.shape, self.dtype.label

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class _OfParts(Expression):
    """Several sources, put together along ``dim``."""

    sources: tuple[Expression, ...]
    dim: int
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.sources[0].dtype

    def over(self, sources: Sequence[Expression]) -> Expression:
        return replace(self, sources=tuple(sources))


@dataclass(frozen=True, slots=True)
class Concat(_OfParts):
    """The parts one after the other along ``dim``."""

    @property
    def form(self) -> Hashable:
        return "concat", self.dim

    def moved(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        dim = self.dim
        starts = [0, *accumulate(part.shape[dim] for part in self.sources)]
        for index in parts_touched(region, dim, starts):
            for piece in clip(region, dim, starts[index], starts[index + 1]):
                yield self.sources[index], piece.with_origin(dim, piece.origin[dim] - starts[index])


@dataclass(frozen=True, slots=True)
class Stack(_OfParts):
    """The parts, all of one shape, along a new dimension ``dim``."""

    @property
    def form(self) -> Hashable:
        return "stack", self.dim

    def moved(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        along = [axis for axis in region.axes if axis.dim == self.dim]
        if len(along) < 2:  # of hundreds of experts, each gives the same
            bare = without_dim(region, self.dim)
            (axis,) = along or [Axis(1, 0, self.dim, 1)]
            for number in range(axis.size):
                source = self.sources[region.origin[self.dim] + axis.step * number]
                yield source, Region(bare.origin, bare.target + axis.stride * number, bare.axes)
            return
        for index in parts_touched(region, self.dim, range(len(self.sources) + 1)):
            for piece in clip(region, self.dim, index, index + 1):
                yield self.sources[index], without_dim(piece, self.dim)


@dataclass(frozen=True, slots=True)
class _Moved(Expression):
    """The elements of one source in another order, or some of them."""

    source: Expression
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def sources(self) -> tuple[Expression, ...]:
        return (self.source,)

    def over(self, sources: Sequence[Expression]) -> Expression:
        (source,) = sources
        return replace(self, source=source)


@dataclass(frozen=True, slots=True)
class Slice(_Moved):
    """The indices ``start, start + step, ...`` of ``dim``, ``shape[dim]`` of them."""

    dim: int
    start: int
    step: int

    @property
    def form(self) -> Hashable:
        return "slice", self.dim, self.start, self.step, self.shape

    def moved(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        dim, step = self.dim, self.step
        axes = tuple(replace(a, step=a.step * step) if a.dim == dim else a for a in region.axes)
        moved = region.with_origin(dim, self.start + step * region.origin[dim])
        yield self.source, replace(moved, axes=axes)


@dataclass(frozen=True, slots=True)
class Permute(_Moved):
    """Dimension ``d`` of the result is dimension ``dims[d]`` of the source."""

    dims: tuple[int, ...]

    @property
    def form(self) -> Hashable:
        return "permute", self.dims

    def moved(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        origin = [0] * len(self.dims)
        for dim, source_dim in enumerate(self.dims):
            origin[source_dim] = region.origin[dim]
        axes = tuple(replace(axis, dim=self.dims[axis.dim]) for axis in region.axes)
        yield self.source, replace(region, origin=tuple(origin), axes=axes)


@dataclass(frozen=True, slots=True)
class Reshape(_Moved):
    """The same elements in row-major order under another shape."""

    @property
    def form(self) -> Hashable:
        return "reshape", self.shape

    def moved(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        for piece in unflatten(flatten(region, self.shape), self.source.shape):
            yield self.source, piece


@dataclass(frozen=True, slots=True)
class Hole(Expression):
    """Elements that no checkpoint holds, beside others that one does (rows of a vocabulary that has grown).

    Nothing is copied from it: whoever fills the tensor fills them, too.
    """

    shape: Shape
    dtype: DType

    @property
    def sources(self) -> tuple[Expression, ...]:
        return ()

    @property
    def form(self) -> Hashable:
        return "hole", self.shape

    def moved(self, _region: Region) -> Iterator[tuple[Expression, Region]]:
        return iter(())


def concat(parts: Sequence[Expression], dim: int) -> Expression:
    """``torch.cat``: all parts agree in every dimension but ``dim``."""
    if not parts:
        raise ValueError("nothing to concatenate")
    first = parts[0].shape
    for part in parts:
        if len(part.shape) != len(first) or any(
            a != b for d, (a, b) in enumerate(zip(part.shape, first, strict=True)) if d != dim
        ):
            raise ValueError(f"cannot concatenate shapes {[p.shape for p in parts]} along {dim}")
    if len(parts) == 1:
        return parts[0]
    size = sum(part.shape[dim] for part in parts)
    return Concat(tuple(parts), dim, (*first[:dim], size, *first[dim + 1 :]))


def stack(parts: Sequence[Expression], dim: int) -> Expression:
    """``torch.stack``: all parts have the same shape."""
    if not parts:
        raise ValueError("nothing to stack")
    first = parts[0].shape
    if any(part.shape != first for part in parts):
        raise ValueError(f"cannot stack different shapes {sorted({p.shape for p in parts})}")
    shape = (*first[:dim], len(parts), *first[dim:])
    return reshape(parts[0], shape) if len(parts) == 1 else Stack(tuple(parts), dim, shape)


def slice_dim(source: Expression, dim: int, start: int, size: int, step: int = 1) -> Expression:
    """``size`` indices of ``dim`` from ``start`` in steps of ``step`` (positive)."""
    bound = source.shape[dim]
    if step < 1 or size < 0 or start < 0 or (size and start + step * (size - 1) >= bound):
        raise ValueError(f"slice {start}, {size} x {step} is outside dimension {dim} of {source.shape}")
    if start == 0 and size == bound and step == 1:
        return source
    return Slice(source, (*source.shape[:dim], size, *source.shape[dim + 1 :]), dim, start, step)


def permute(source: Expression, dims: Sequence[int]) -> Expression:
    """``torch.permute``."""
    if sorted(dims) != list(range(len(source.shape))):
        raise ValueError(f"{tuple(dims)} does not permute the dimensions of {source.shape}")
    if isinstance(source, Permute):
        dims, source = [source.dims[dim] for dim in dims], source.source
    if list(dims) == sorted(dims):
        return source
    return Permute(source, tuple(source.shape[d] for d in dims), tuple(dims))


def reshape(source: Expression, shape: Sequence[int]) -> Expression:
    """``torch.reshape`` with all sizes given."""
    shape = tuple(shape)
    if numel(shape) != numel(source.shape):
        raise ValueError(f"cannot reshape {source.shape} to {shape}")
    if isinstance(source, Reshape):
        source = source.source
    return source if source.shape == shape else Reshape(source, shape)


def stored_leaves(expression: Expression) -> Iterator[Stored]:
    """Every stored tensor below, in order, also those that are computed with; repeated where it is used twice."""
    if isinstance(expression, Stored):
        yield expression
    for source in expression.sources:
        yield from stored_leaves(source)


def leaves_of(expression: Expression) -> Iterator[Leaf]:
    """The leaves, in order; not what those are made of that are computed."""
    if isinstance(expression, Leaf):
        yield expression
        return
    for source in expression.sources:
        yield from leaves_of(source)


def key_of(expression: Expression) -> str | None:
    """The key of an expression that is one stored tensor as it is; None of any other."""
    return expression.key if isinstance(expression, Stored) else None


def rows_stored(expression: Expression) -> int | None:
    """How many of the first rows a checkpoint holds, where it holds no more; None where nothing is missing."""
    if isinstance(expression, Concat) and expression.dim == 0 and isinstance(expression.sources[-1], Hole):
        return expression.shape[0] - expression.sources[-1].shape[0]
    return None


def substitute(expression: Expression, leaves: Mapping[str, Expression]) -> Expression:
    """The same expression over other stored tensors: ``leaves`` maps the keys in it to what replaces them.

    The replacements have the shapes of what they replace (not checked: callers key their memo by shape). What
    computes stays the same operation, on other inputs.
    """
    if isinstance(expression, Stored):
        return leaves[expression.key]
    return expression.over([substitute(source, leaves) for source in expression.sources])


def skeleton(expression: Expression) -> tuple[Hashable, tuple[str, ...]]:
    """What an expression is but for the keys of its leaves, and these keys in the order in which they first appear.

    Expressions of equal skeletons have the same copies for the same box, with the keys exchanged one by one.
    """
    (found,), keys = skeletons([expression])
    return found, keys


def skeletons(expressions: Sequence[Expression]) -> tuple[tuple[Hashable, ...], tuple[str, ...]]:
    """What several are but for the keys of their leaves, and the keys of all, each once."""
    numbers: dict[str, int] = {}

    def bare(node: Expression) -> Hashable:
        if isinstance(node, Stored):
            return numbers.setdefault(node.key, len(numbers)), node.form
        return node.form, *map(bare, node.sources)

    found = tuple(map(bare, expressions))
    return found, tuple(numbers)


@dataclass(frozen=True, slots=True)
class Axis:
    """``size`` > 1 steps: each moves ``stride`` elements in the target, ``step`` indices along ``dim``."""

    size: int
    stride: int
    dim: int
    step: int

    @property
    def span(self) -> int:
        return self.step * (self.size - 1)


@dataclass(frozen=True, slots=True)
class Region:
    """See [Note: Regions]. ``target`` is the place of the first element in the target's memory."""

    origin: tuple[int, ...]
    target: int
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, box: Box, into: Strided) -> Region:
        """A box of a tensor, whose elements go to ``into``."""
        axes = tuple(
            Axis(size, stride, dim, 1)
            for dim, (size, stride) in enumerate(zip(box.sizes, into.strides, strict=True))
            if size > 1
        )
        return cls(box.offsets, into.offset, axes)

    @property
    def bounds(self) -> Box:
        """The smallest box that holds the region."""
        sizes = [1] * len(self.origin)
        for axis in self.axes:
            sizes[axis.dim] += axis.span
        return Box(self.origin, tuple(sizes))

    def within(self, box: Box) -> Iterator[Region]:
        """The part of the region that lies in a box, counted from the box's first element."""
        parts = [self]
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            parts = [piece for part in parts for piece in clip(part, dim, start, start + size)]
        for part in parts:
            inside = tuple(at - first for at, first in zip(part.origin, box.offsets, strict=True))
            yield replace(part, origin=inside)

    def strided(self, strides: Sequence[int], start: int = 0) -> tuple[Strided, Strided]:
        """(where its elements are, where they go), in the same order, widest steps first.

        ``strides`` and ``start`` say how the tensor lies in memory.
        """
        offset = start + sum(index * stride for index, stride in zip(self.origin, strides, strict=True))
        axes = sorted(((a.step * strides[a.dim], a.stride, a.size) for a in self.axes), reverse=True)
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

    def restricted(self, axis: Axis, first: int, count: int) -> Region:
        """Only the steps ``first .. first + count`` of one axis."""
        axes = tuple(other for other in self.axes if other is not axis)
        if count > 1:
            axes = (*axes, Axis(count, axis.stride, axis.dim, axis.step))
        moved = self.with_origin(axis.dim, self.origin[axis.dim] + axis.step * first)
        return Region(moved.origin, self.target + axis.stride * first, axes)


def parts_touched(region: Region, dim: int, starts: Sequence[int]) -> range:
    """The numbers of the parts that a region touches; part i begins at ``starts[i]``, the last start is the end."""
    first = region.origin[dim]
    last = first + sum(axis.span for axis in region.axes if axis.dim == dim)
    return range(bisect_right(starts, first) - 1, bisect_right(starts, last))


def without_dim(region: Region, dim: int) -> Region:
    """The region without a dimension; how it moves along that is left out."""
    axes = tuple(
        Axis(axis.size, axis.stride, axis.dim - (axis.dim > dim), axis.step)
        for axis in region.axes
        if axis.dim != dim
    )
    return Region((*region.origin[:dim], *region.origin[dim + 1 :]), region.target, axes)


def clip(region: Region, dim: int, start: int, stop: int) -> Iterator[Region]:
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
        yield from clip(region.restricted(axis, index, 1), dim, start, stop)


def flatten(region: Region, shape: tuple[int, ...]) -> Region:
    """The same elements as indices of the flat, row-major tensor."""
    strides = contiguous_strides(shape)
    origin = sum(index * stride for index, stride in zip(region.origin, strides, strict=True))
    axes = tuple(Axis(a.size, a.stride, 0, a.step * strides[a.dim]) for a in region.axes)
    return Region((origin,), region.target, axes)


def unflatten(region: Region, shape: tuple[int, ...]) -> Iterator[Region]:
    """A flat region as regions of a tensor of this shape."""
    if len(shape) == 0:
        yield replace(region, origin=())
        return
    pieces = [region]
    for size in reversed(shape[1:]):
        pieces = [part for piece in pieces for part in _split(piece, size)]
    yield from pieces


def _split(region: Region, inner: int) -> Iterator[Region]:
    """Dimension 0, an index ``x``, replaced by the two dimensions ``x // inner, x % inner``."""
    outer_index, inner_index = divmod(region.origin[0], inner)
    digits = [axis for axis in region.axes if axis.dim == 0 and axis.step % inner]
    reach = sum(axis.span for axis in digits)
    if inner_index + reach < inner:
        axes = tuple(_split_axis(axis, inner) for axis in region.axes)
        yield Region((outer_index, inner_index, *region.origin[1:]), region.target, axes)
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
            repeat = Axis(turns, axis.stride * turn, 0, inner)
            yield from _split(replace(middle, axes=(*middle.axes, repeat) if turns > 1 else middle.axes), inner)
        if tail:
            yield from _split(region.restricted(axis, axis.size - tail, tail), inner)
        return
    axis = min(digits, key=lambda item: item.size)
    for index in range(axis.size):
        yield from _split(region.restricted(axis, index, 1), inner)


def _split_axis(axis: Axis, inner: int) -> Axis:
    if axis.dim > 0:
        return replace(axis, dim=axis.dim + 1)
    if axis.step % inner == 0:
        return replace(axis, step=axis.step // inner)
    return replace(axis, dim=1)


def view(source: Expression, strided: Strided) -> Expression:
    """``torch.as_strided`` of a flat source, where no element is seen twice.

    The steps of the widest stride become rows of a reshape, the next their columns, and so on inwards. Where the
    last row would end beyond the source, it is taken by itself.

    Raises:
        ValueError: for a view that reaches beyond the source, or sees elements twice.
    """
    if len(source.shape) != 1 or strided.stop > source.shape[0]:
        raise ValueError(f"{strided} is no view of {source.shape} elements")
    if strided.numel == 0:
        return reshape(slice_dim(source, 0, 0, 0), strided.sizes)
    steps = [
        (stride, size, dim)
        for dim, (size, stride) in enumerate(zip(strided.sizes, strided.strides, strict=True))
        if size > 1
    ]
    steps.sort(key=lambda step: step[0], reverse=True)
    made = _rows(source, strided.offset, [(stride, size) for stride, size, _ in steps])
    order = [dim for _, _, dim in steps]
    ordered = permute(made, [order.index(dim) for dim in sorted(order)])
    return reshape(ordered, strided.sizes)


def _rows(source: Expression, offset: int, steps: Sequence[tuple[int, int]]) -> Expression:
    """The last dimension of the source replaced by one for each (stride, size), widest stride first."""
    *outer, length = source.shape
    dim = len(outer)
    if not steps:
        return reshape(slice_dim(source, dim, offset, 1), outer)
    (stride, size), *inner = steps
    if not inner:
        return slice_dim(source, dim, offset, size, stride)
    reach = sum(step * (count - 1) for step, count in inner)
    if stride <= reach:
        raise ValueError(f"steps of {stride} see elements twice")
    # Rows of one stride each, from so far before the first element that the last row ends within the source. (One
    # row can always be had so, which ends this.)
    start = min(offset, length - size * stride)
    if start >= 0 and offset - start + reach < stride:
        rows = reshape(slice_dim(source, dim, start, size * stride), (*outer, size, stride))
        return _rows(rows, offset - start, inner)
    return concat(
        [
            _rows(source, offset, [(stride, size - 1), *inner]),
            _rows(source, offset + stride * (size - 1), [(stride, 1), *inner]),
        ],
        dim,
    )
