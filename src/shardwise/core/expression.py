"""Lazy expressions over stored tensors.

A parameter of a model is an expression whose leaves are tensors of a checkpoint. Most nodes only move elements
(:class:`Concat`, :class:`Stack`, :class:`Slice`, :class:`Permute`, :class:`Reshape`), so any box of the parameter
maps to strided boxes of the leaves, see :func:`shardwise.core.computed.copies`. Nodes that compute
(:class:`~shardwise.core.computed.Computed`) are leaves, too. Their operations name the input boxes
of each block.

Nodes are built by the lower-case functions, which validate and simplify. A new node implements :class:`Expression`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from shardwise.core.regions import Axis, Region, clip, drop_dim, find_overlapped_ranges, flatten, unflatten
from shardwise.core.tensors import DType, Strided, numel

Shape: TypeAlias = tuple[int, ...]


class Expression(ABC):
    """A tensor composed of stored tensors. Base class of all nodes.

    A node moves elements of its ``sources``, or is a leaf. ``signature`` is the node without its sources: nodes
    with equal signatures over sources of equal shapes are equivalent. A stored tensor's does not contain its key.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # at run time, dataclass would take these for defaults of the nodes' fields

        @property
        def shape(self) -> Shape: ...

        @property
        def dtype(self) -> DType:
            """Dtype of the elements. If sources have several, that of the first."""

        @property
        def sources(self) -> tuple[Expression, ...]: ...

    @property
    @abstractmethod
    def signature(self) -> Hashable: ...

    def with_sources(self, sources: Sequence[Expression]) -> Expression:
        """The same node over other sources, of the same shapes."""
        assert not sources
        return self

    @abstractmethod
    def source_regions(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        """Yield the regions of the sources that a region of this node consists of.

        See [Note: Regions] in ``core/regions.py``.
        """

    def leaves(self, region: Region) -> Iterator[tuple[Leaf, Region]]:
        """Yield the regions of the leaves that a region of this expression consists of."""
        for source, piece in self.source_regions(region):
            yield from source.leaves(piece)

    def __str__(self) -> str:
        sources = [str(source) for source in self.sources]
        middle = [f"... {len(sources) - 2} more ..."] if len(sources) > 3 else sources[1:-1]
        return f"{type(self).__name__}({', '.join([*sources[:1], *middle, *sources[1:][-1:]])})"


class Leaf(Expression):
    """Leaf of an expression: elements that are stored or computed."""

    __slots__ = ()

    def source_regions(self, region: Region) -> Iterator[tuple[Expression, Region]]:
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
    def signature(self) -> Hashable:
        return "stored", self.shape, self.dtype.label

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class _Combined(Expression):
    """Several sources, joined along ``dim``."""

    sources: tuple[Expression, ...]
    dim: int
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.sources[0].dtype

    def with_sources(self, sources: Sequence[Expression]) -> Expression:
        return replace(self, sources=tuple(sources))


@dataclass(frozen=True, slots=True)
class Concat(_Combined):
    """``torch.cat`` of the sources."""

    @property
    def signature(self) -> Hashable:
        return "concat", self.dim

    def source_regions(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        dim = self.dim
        # Sources of 4 and 6 rows: rows 3 to 5 are row 3 of the first source, and rows 0 and 1 of the second.
        starts = [0, *accumulate(source.shape[dim] for source in self.sources)]
        for index in find_overlapped_ranges(region, dim, starts):
            for piece in clip(region, dim, starts[index], starts[index + 1]):
                yield self.sources[index], piece.with_origin(dim, piece.origin[dim] - starts[index])


@dataclass(frozen=True, slots=True)
class Stack(_Combined):
    """``torch.stack`` of the sources: ``dim`` is the new dimension."""

    @property
    def signature(self) -> Hashable:
        return "stack", self.dim

    def source_regions(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        along = [axis for axis in region.axes if axis.dim == self.dim]
        if len(along) < 2:  # fast path for hundreds of experts
            # Step n of the only axis is in source origin + step * n, and in the target it is stride * n further on.
            bare = drop_dim(region, self.dim)
            (axis,) = along or [Axis(1, 0, self.dim, 1)]
            for number in range(axis.size):
                source = self.sources[region.origin[self.dim] + axis.step * number]
                yield source, Region(bare.origin, bare.target + axis.stride * number, bare.axes)
            return
        for index in find_overlapped_ranges(region, self.dim, range(len(self.sources) + 1)):
            for piece in clip(region, self.dim, index, index + 1):
                yield self.sources[index], drop_dim(piece, self.dim)


@dataclass(frozen=True, slots=True)
class _Rearranged(Expression):
    """All or some elements of one source, in another order."""

    source: Expression
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.source.dtype

    @property
    def sources(self) -> tuple[Expression, ...]:
        return (self.source,)

    def with_sources(self, sources: Sequence[Expression]) -> Expression:
        (source,) = sources
        return replace(self, source=source)


@dataclass(frozen=True, slots=True)
class Slice(_Rearranged):
    """The indices ``start, start + step, ...`` of ``dim``, of which there are ``shape[dim]``."""

    dim: int
    start: int
    step: int

    @property
    def signature(self) -> Hashable:
        return "slice", self.dim, self.start, self.step, self.shape

    def source_regions(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        # With start 1 and step 3, indices 1 and 2 of the slice are 4 and 7 of the source.
        dim, step = self.dim, self.step
        axes = tuple(replace(a, step=a.step * step) if a.dim == dim else a for a in region.axes)
        shifted = region.with_origin(dim, self.start + step * region.origin[dim])
        yield self.source, replace(shifted, axes=axes)


@dataclass(frozen=True, slots=True)
class Permute(_Rearranged):
    """Dimension ``d`` of the result is dimension ``dims[d]`` of the source."""

    dims: tuple[int, ...]

    @property
    def signature(self) -> Hashable:
        return "permute", self.dims

    def source_regions(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        # With dims (2, 0, 1), dimension 0 of the result is dimension 2 of the source.
        origin = [0] * len(self.dims)
        for dim, source_dim in enumerate(self.dims):
            origin[source_dim] = region.origin[dim]
        axes = tuple(replace(axis, dim=self.dims[axis.dim]) for axis in region.axes)
        yield self.source, replace(region, origin=tuple(origin), axes=axes)


@dataclass(frozen=True, slots=True)
class Reshape(_Rearranged):
    """The same elements in row-major order under another shape."""

    @property
    def signature(self) -> Hashable:
        return "reshape", self.shape

    def source_regions(self, region: Region) -> Iterator[tuple[Expression, Region]]:
        # Both shapes have the same flat order. A box of this shape may be several regions of the other one.
        for piece in unflatten(flatten(region, self.shape), self.source.shape):
            yield self.source, piece


@dataclass(frozen=True, slots=True)
class Unstored(Expression):
    """Elements that the checkpoint lacks, next to others that it has (new rows of a resized vocabulary).

    Nothing is copied to them. They are initialized.
    """

    shape: Shape
    dtype: DType

    @property
    def sources(self) -> tuple[Expression, ...]:
        return ()

    @property
    def signature(self) -> Hashable:
        return "unstored", self.shape

    def source_regions(self, _region: Region) -> Iterator[tuple[Expression, Region]]:
        return iter(())


def concat(sources: Sequence[Expression], dim: int) -> Expression:
    """Build ``torch.cat``. All shapes are equal except in ``dim``."""
    if not sources:
        raise ValueError("nothing to concatenate")
    first = sources[0].shape
    if len({(len(source.shape), *source.shape[:dim], *source.shape[dim + 1 :]) for source in sources}) > 1:
        raise ValueError(f"cannot concatenate shapes {[source.shape for source in sources]} along {dim}")
    if len(sources) == 1:
        return sources[0]
    size = sum(source.shape[dim] for source in sources)
    return Concat(tuple(sources), dim, (*first[:dim], size, *first[dim + 1 :]))


def stack(sources: Sequence[Expression], dim: int) -> Expression:
    """Build ``torch.stack``. All shapes are equal."""
    if not sources:
        raise ValueError("nothing to stack")
    first = sources[0].shape
    if any(source.shape != first for source in sources):
        raise ValueError(f"cannot stack different shapes {sorted({p.shape for p in sources})}")
    shape = (*first[:dim], len(sources), *first[dim:])
    return reshape(sources[0], shape) if len(sources) == 1 else Stack(tuple(sources), dim, shape)


def slice_dim(source: Expression, dim: int, start: int, size: int, step: int = 1) -> Expression:
    """Build a slice of ``size`` indices of ``dim``, from ``start`` on. ``step`` is positive."""
    bound = source.shape[dim]
    if step < 1 or size < 0 or start < 0 or (size and start + step * (size - 1) >= bound):
        raise ValueError(f"slice {start}, {size} x {step} is outside dimension {dim} of {source.shape}")
    if start == 0 and size == bound and step == 1:
        return source
    return Slice(source, (*source.shape[:dim], size, *source.shape[dim + 1 :]), dim, start, step)


def permute(source: Expression, dims: Sequence[int]) -> Expression:
    """Build ``torch.permute``."""
    if sorted(dims) != list(range(len(source.shape))):
        raise ValueError(f"{tuple(dims)} does not permute the dimensions of {source.shape}")
    if isinstance(source, Permute):
        dims, source = [source.dims[dim] for dim in dims], source.source
    if list(dims) == sorted(dims):
        return source
    return Permute(source, tuple(source.shape[d] for d in dims), tuple(dims))


def reshape(source: Expression, shape: Sequence[int]) -> Expression:
    """Build ``torch.reshape``. No size is -1."""
    shape = tuple(shape)
    if numel(shape) != numel(source.shape):
        raise ValueError(f"cannot reshape {source.shape} to {shape}")
    if isinstance(source, Reshape):
        source = source.source
    return source if source.shape == shape else Reshape(source, shape)


def iter_stored_leaves(expression: Expression) -> Iterator[Stored]:
    """Yield all stored tensors in order, including inputs of computations, once for each use."""
    if isinstance(expression, Stored):
        yield expression
    for source in expression.sources:
        yield from iter_stored_leaves(source)


def iter_leaves(expression: Expression) -> Iterator[Leaf]:
    """Yield the leaves in order, without the inputs of computed ones."""
    if isinstance(expression, Leaf):
        yield expression
        return
    for source in expression.sources:
        yield from iter_leaves(source)


def get_stored_key(expression: Expression) -> str | None:
    """Return the key of an expression that is one unchanged stored tensor, or None."""
    return expression.key if isinstance(expression, Stored) else None


def count_stored_rows(expression: Expression) -> int | None:
    """Return how many leading rows are stored if the expression ends in missing rows, else None."""
    if isinstance(expression, Concat) and expression.dim == 0 and isinstance(expression.sources[-1], Unstored):
        return expression.shape[0] - expression.sources[-1].shape[0]
    return None


def substitute(expression: Expression, leaves: Mapping[str, Expression]) -> Expression:
    """Replace the stored tensors of an expression. ``leaves`` has the replacements, of the same shapes, by key."""
    if isinstance(expression, Stored):
        return leaves[expression.key]
    return expression.with_sources([substitute(source, leaves) for source in expression.sources])


def structure(expression: Expression) -> tuple[Hashable, tuple[str, ...]]:
    """Return an expression without the keys of its leaves, and these keys in order of first appearance.

    Expressions of equal structures have equal copies for equal boxes, except for their keys.
    """
    numbers: dict[str, int] = {}
    return _without_keys(expression, numbers), tuple(numbers)


def _without_keys(node: Expression, numbers: dict[str, int]) -> Hashable:
    if isinstance(node, Stored):
        return numbers.setdefault(node.key, len(numbers)), node.signature
    return node.signature, *(_without_keys(source, numbers) for source in node.sources)


def as_strided(source: Expression, strided: Strided) -> Expression:
    """Build ``torch.as_strided`` of a flat source.

    Steps of the largest stride become rows of a reshape, those of the next stride its columns, and so on. If the
    last row would end beyond the source, it is a part of its own.

    Sizes (3, 2) with strides (1, 4) and offset 1 are the elements 1, 5, 2, 6, 3, 7: elements 1 to 8 become a
    (2, 4), of which columns 0 to 2 are taken and transposed.

    Raises:
        ValueError: the view reaches beyond the source, or elements overlap.
    """
    if len(source.shape) != 1 or strided.stop > source.shape[0]:
        raise ValueError(f"{strided} is no view of {source.shape} elements")
    if strided.numel == 0:
        return reshape(slice_dim(source, 0, 0, 0), strided.sizes)
    axes = zip(strided.strides, strided.sizes, range(len(strided.sizes)), strict=True)
    steps = [(stride, size, dim) for stride, size, dim in axes if size > 1]
    steps.sort(key=itemgetter(0), reverse=True)
    rows = _rows(source, strided.offset, [(stride, size) for stride, size, _ in steps])
    # Back from the order of strides to that of the dimensions. Those of one step return with the last reshape.
    order = [dim for _, _, dim in steps]  # the dimension of each dimension of ``rows``
    ordered = permute(rows, [order.index(dim) for dim in sorted(order)])
    return reshape(ordered, strided.sizes)


def _rows(source: Expression, offset: int, steps: Sequence[tuple[int, int]]) -> Expression:
    """Replace the last dimension of the source by one for each (stride, size), which are in descending order."""
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
    # Rows of one stride begin early enough for the last one to end within the source, if that is possible. It
    # always is for a single row, so the recursion ends.
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


@dataclass(frozen=True, slots=True)
class Bindings:
    """The outcome of applying renames and conversions to the keys of a checkpoint.

    Attributes:
        matched: every expression that a tensor of the model could be, by its name. A plan reports more than one.
        primary: the first result of the conversion that a tensor comes from, by the tensor's name. transformers
            chooses the dtype of all results by it.
        unmatched: the renamed key, by key, if the model has no tensor of that name.
        errors: a sentence for each conversion that failed, with the names of its results.
        leftover: expressions of unmatched keys, by renamed key. The model may get a tensor of that name later.
        wrapped: keys that match without what wrappers add to names.
    """

    matched: Mapping[str, tuple[Expression, ...]]
    primary: Mapping[str, str] = field(default_factory=dict)
    unmatched: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    leftover: Mapping[str, Expression] = field(default_factory=dict)
    wrapped: Sequence[str] = ()
