"""Expressions seen otherwise: covered with boxes, row by row, as strided views; and bindings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.conversion.expression import (
    Concat,
    Expression,
    Permute,
    Stack,
    concat,
    permute,
    reshape,
    slice_dim,
    stack,
)
from shardwise.conversion.region import Region
from shardwise.tensors import Box, Strided, contiguous_strides

_FEW = 8192
"""Boxes of one expression, which may be a stack of hundreds of experts; interleaved columns would be more."""


def leaf_boxes(expression: Expression) -> list[Box]:
    """Boxes, without overlap, that make up an expression; of one leaf each, as far as a few boxes can say that."""
    whole = Box.whole(expression.shape)
    if not whole.numel:
        return [whole]
    regions = expression.leaves(Region.of(whole, Strided.contiguous(whole.sizes)))
    targets = [region.strided(contiguous_strides(leaf.shape))[1] for leaf, region in regions]
    if len(targets) > _FEW:
        return [whole]
    boxes = [covering_box(target, expression.shape) for target in targets]
    if all(box.numel == target.numel for box, target in zip(boxes, targets, strict=True)):
        return boxes  # each holds nothing else
    return apart(boxes)


def apart(boxes: Iterable[Box]) -> list[Box]:
    """The boxes, those that overlap joined to one around them."""
    found: list[Box] = []
    for box in boxes:
        while overlapping := [other for other in found if other.intersect(box) is not None]:
            for other in overlapping:
                found.remove(other)
                box = _around(box, other)
        found.append(box)
    return found


def _around(box: Box, other: Box) -> Box:
    starts = [min(pair) for pair in zip(box.offsets, other.offsets, strict=True)]
    stops = [
        max(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
    ]
    return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def covering_box(view: Strided, shape: Sequence[int]) -> Box:
    """A box around the elements ``view`` of a row-major tensor of this shape (there is at least one)."""
    strides = contiguous_strides(shape)
    first = _index(view.offset, shape)
    last = list(first)
    for size, stride in sorted(zip(view.sizes, view.strides, strict=True), key=lambda axis: -axis[1]):
        dim = next((d for d, step in enumerate(strides) if step <= stride), None)
        if size < 2 or dim is None:
            continue
        reach = stride // strides[dim] * (size - 1)
        if stride % strides[dim] == 0 and last[dim] + reach < shape[dim]:
            last[dim] += reach
            continue
        # The axis runs on into other dimensions: everything between its ends, in the order of the elements.
        place = sum(index * step for index, step in zip(last, strides, strict=True)) + stride * (size - 1)
        end = _index(min(place, strides[0] * shape[0] - 1), shape)
        differing = next((d for d, pair in enumerate(zip(first, end, strict=True)) if pair[0] != pair[1]), 0)
        for d in range(differing, len(shape)):
            first[d], last[d] = (0, shape[d] - 1) if d > differing else (first[d], max(last[d], end[d]))
    return Box(tuple(first), tuple(stop - start + 1 for start, stop in zip(first, last, strict=True)))


def _index(place: int, shape: Sequence[int]) -> list[int]:
    found: list[int] = []
    for size in reversed(shape):
        place, index = divmod(place, size)
        found.append(index)
    return found[::-1]


@dataclass(frozen=True, slots=True)
class Bindings:
    """The outcome of applying renames and conversions to the keys of a checkpoint.

    ``offers`` has, for a name of the model, every expression that claims to be it (more than one is a fault that
    a plan reports). ``unmatched`` maps the keys that lead to nothing the model has to the name they were given.
    ``leaders`` names, for a tensor made by a conversion, the first tensor that the conversion makes (transformers
    chooses the dtype of all by it). ``faults`` are conversions that could not be understood: a sentence for each,
    with the names that it leaves without a value. ``strays`` are expressions of what is unmatched, by the name it
    was given: the model may come to have it.
    """

    offers: Mapping[str, tuple[Expression, ...]]
    leaders: Mapping[str, str] = field(default_factory=dict)
    unmatched: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, Sequence[str]] = field(default_factory=dict)
    strays: Mapping[str, Expression] = field(default_factory=dict)


def rows_apart(expression: Expression) -> tuple[Expression, ...] | None:
    """Expressions of each index of the first dimension, without it, where they share no stored tensor.

    So stacked experts are those that they are stacked of. None where a stored tensor goes on from one index to the
    next, or may do so.
    """
    match expression:
        case Stack(sources, 0):
            return sources
        case Stack(sources, dim):
            rows = _of_each(sources)
            return None if rows is None else tuple(stack(row, dim - 1) for row in rows)
        case Concat(sources, dim) if dim > 0:
            rows = _of_each(sources)
            return None if rows is None else tuple(concat(row, dim - 1) for row in rows)
        case Permute(source, _, (0, *others)):
            found = rows_apart(source)
            return None if found is None else tuple(permute(row, [dim - 1 for dim in others]) for row in found)
    return None


def _of_each(sources: Iterable[Expression]) -> list[tuple[Expression, ...]] | None:
    """By index, what it is of each source."""
    rows: list[tuple[Expression, ...]] = []
    for source in sources:
        found = rows_apart(source)
        if found is None:
            return None
        rows.append(found)
    return list(zip(*rows, strict=True))


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
