"""Lazy expressions over stored tensors.

A parameter of a model is an expression whose leaves are tensors of a checkpoint. Structural nodes only move
elements (:class:`Concat`, :class:`Stack`, :class:`Slice`, :class:`Permute`, :class:`Reshape`), so any box of the
parameter can be traced to strided boxes of the leaves, see :func:`shardwise.conversion.copies.copies`. An
:class:`Opaque` leaf computes; it is evaluated whole.

Nodes are built by the lower-case functions, which validate and simplify; every node knows its ``shape``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from shardwise.tensors import DType, Strided, numel

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint, whole."""

    key: str
    shape: Shape
    dtype: DType

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class Opaque:
    """One output of an operation that is not a mere movement of elements.

    ``operation`` takes the whole inputs (torch tensors, in the order of ``inputs``) and returns a mapping from
    output names to whole outputs; ``output`` names the one meant here. All outputs of one operation share the
    ``operation`` object, by which an executor recognises that it need run only once.
    """

    label: str
    output: str
    shape: Shape
    inputs: tuple[Expression, ...]
    operation: Callable[[Sequence[Any]], Mapping[str, Any]] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.label}({', '.join(map(str, self.inputs))})[{self.output}]"


@dataclass(frozen=True, slots=True)
class Concat:
    """The parts one after the other along ``dim``."""

    parts: tuple[Expression, ...]
    dim: int
    shape: Shape

    def __str__(self) -> str:
        return f"Concat({_summary(self.parts)}, dim={self.dim})"


@dataclass(frozen=True, slots=True)
class Stack:
    """The parts, all of one shape, along a new dimension ``dim``."""

    parts: tuple[Expression, ...]
    dim: int
    shape: Shape

    def __str__(self) -> str:
        return f"Stack({_summary(self.parts)}, dim={self.dim})"


@dataclass(frozen=True, slots=True)
class Slice:
    """The indices ``start, start + step, ...`` of ``dim``, ``shape[dim]`` of them."""

    source: Expression
    dim: int
    start: int
    step: int
    shape: Shape

    def __str__(self) -> str:
        stop = self.start + self.step * self.shape[self.dim]
        step = f":{self.step}" if self.step != 1 else ""
        return f"Slice({self.source}, dim={self.dim}, {self.start}:{stop}{step})"


@dataclass(frozen=True, slots=True)
class Permute:
    """Dimension ``d`` of the result is dimension ``dims[d]`` of the source."""

    source: Expression
    dims: tuple[int, ...]
    shape: Shape

    def __str__(self) -> str:
        return f"Permute({self.source}, {self.dims})"


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in row-major order under another shape."""

    source: Expression
    shape: Shape

    def __str__(self) -> str:
        return f"Reshape({self.source}, {self.shape})"


@dataclass(frozen=True, slots=True)
class Hole:
    """Elements that no checkpoint holds, beside others that one does (rows of a vocabulary that has grown).

    Nothing is copied from it: whoever fills the tensor fills them, too.
    """

    shape: Shape

    def __str__(self) -> str:
        return f"Hole{self.shape}"


Expression: TypeAlias = Stored | Opaque | Concat | Stack | Slice | Permute | Reshape | Hole


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
    return Slice(source, dim, start, step, (*source.shape[:dim], size, *source.shape[dim + 1 :]))


def permute(source: Expression, dims: Sequence[int]) -> Expression:
    """``torch.permute``."""
    if sorted(dims) != list(range(len(source.shape))):
        raise ValueError(f"{tuple(dims)} does not permute the dimensions of {source.shape}")
    if list(dims) == sorted(dims):
        return source
    return Permute(source, tuple(dims), tuple(source.shape[d] for d in dims))


def reshape(source: Expression, shape: Sequence[int]) -> Expression:
    """``torch.reshape`` with all sizes given."""
    shape = tuple(shape)
    if numel(shape) != numel(source.shape):
        raise ValueError(f"cannot reshape {source.shape} to {shape}")
    if isinstance(source, Reshape):
        source = source.source
    return source if source.shape == shape else Reshape(source, shape)


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
    # Rows of one stride each, from so far before the first element that the last row ends within the source.
    start = min(offset, length - size * stride)
    if start >= 0 and offset - start + reach < stride:
        rows = reshape(slice_dim(source, dim, start, size * stride), (*outer, size, stride))
        return _rows(rows, offset - start, inner)
    if size == 1:
        row = _rows(source, offset, inner)
        return reshape(row, (*outer, 1, *row.shape[dim:]))
    return concat(
        [
            _rows(source, offset, [(stride, size - 1), *inner]),
            _rows(source, offset + stride * (size - 1), [(stride, 1), *inner]),
        ],
        dim,
    )


def stored_leaves(expression: Expression) -> Iterator[Stored]:
    """Every stored tensor below, in order, inputs of opaque leaves included; repeated where it is used twice."""
    match expression:
        case Stored():
            yield expression
        case Opaque(inputs=inputs):
            for source in inputs:
                yield from stored_leaves(source)
        case Concat(parts=parts) | Stack(parts=parts):
            for part in parts:
                yield from stored_leaves(part)
        case Slice(source=source) | Permute(source=source) | Reshape(source=source):
            yield from stored_leaves(source)
        case Hole():
            pass


def rows_stored(expression: Expression) -> int | None:
    """How many of the first rows a checkpoint holds, where it holds no more; None where nothing is missing."""
    if isinstance(expression, Concat) and expression.dim == 0 and isinstance(expression.parts[-1], Hole):
        return expression.shape[0] - expression.parts[-1].shape[0]
    return None


def stored_dtype(expression: Expression) -> DType:
    """The dtype of a tensor of the checkpoint, whose leaves all have the same one."""
    return next(stored_leaves(expression)).dtype


def substitute(expression: Expression, leaves: Mapping[str, Expression]) -> Expression:
    """The same expression over other leaves: ``leaves`` maps the keys in it to what replaces them.

    The replacements have the shapes of what they replace (not checked: callers key their memo by shape). An opaque
    leaf stays the same operation, on other inputs.
    """
    match expression:
        case Stored(key=key):
            return leaves[key]
        case Concat(parts, dim, shape):
            return Concat(tuple(substitute(part, leaves) for part in parts), dim, shape)
        case Stack(parts, dim, shape):
            return Stack(tuple(substitute(part, leaves) for part in parts), dim, shape)
        case Slice(source, dim, start, step, shape):
            return Slice(substitute(source, leaves), dim, start, step, shape)
        case Permute(source, dims, shape):
            return Permute(substitute(source, leaves), dims, shape)
        case Reshape(source, shape):
            return Reshape(substitute(source, leaves), shape)
        case Hole():
            return expression
        case Opaque(inputs=inputs):
            return replace(expression, inputs=tuple(substitute(source, leaves) for source in inputs))


def skeleton(expression: Expression) -> tuple[Hashable, tuple[str, ...]]:
    """What an expression is but for the keys of its leaves, and these keys in the order in which they first appear.

    Expressions of equal skeletons have the same copies for the same box, with the keys exchanged one by one. An
    opaque leaf is like itself only.
    """
    numbers: dict[str, int] = {}

    def bare(node: Expression) -> Hashable:
        match node:
            case Stored(key, shape, dtype):
                return numbers.setdefault(key, len(numbers)), shape, dtype.label
            case Opaque(output=output, operation=operation):
                return "opaque", id(operation), output
            case Concat(parts, dim):
                return "concat", dim, *map(bare, parts)
            case Stack(parts, dim):
                return "stack", dim, *map(bare, parts)
            case Slice(source, dim, start, step, shape):
                return "slice", dim, start, step, shape, bare(source)
            case Permute(source, dims):
                return "permute", dims, bare(source)
            case Reshape(source, shape):
                return "reshape", shape, bare(source)
            case Hole(shape):
                return "hole", shape

    found = bare(expression)
    return found, tuple(numbers)


def _summary(parts: Sequence[Expression]) -> str:
    if len(parts) <= 3:
        return ", ".join(map(str, parts))
    return f"{parts[0]}, ... {len(parts) - 2} more ..., {parts[-1]}"
