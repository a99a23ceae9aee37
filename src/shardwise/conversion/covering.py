"""The smallest boxes that are easily found around strided elements."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.conversion.copies import Copy, copies
from shardwise.conversion.expression import Expression, Opaque
from shardwise.tensors import Box, Strided, contiguous_strides


def needed_boxes(expression: Expression, box: Box) -> dict[str, list[Box]]:
    """Boxes of the stored leaves, by key, that hold all that a box of the expression is made of.

    Those of one leaf do not overlap. They may hold more than is needed where elements lie apart.
    """
    found: dict[str, list[Box]] = {}
    for copy in copies(expression, box):
        assert not isinstance(copy.leaf, Opaque)
        _add(found.setdefault(copy.leaf.key, []), _box_of(copy))
    return found


def covering_box(view: Strided, shape: Sequence[int]) -> Box:
    """A box around the elements ``view`` of a row-major tensor of this shape (there is at least one)."""
    strides = contiguous_strides(shape)
    first = _index(view.offset, shape)
    last = list(first)
    for size, stride in sorted(zip(view.sizes, view.strides, strict=True), key=lambda axis: -axis[1]):
        dim = next((d for d, step in enumerate(strides) if step <= stride and shape[d] > 1), None)
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


def _box_of(copy: Copy) -> Box:
    return covering_box(copy.source, copy.leaf.shape)


def _add(boxes: list[Box], box: Box) -> None:
    """Add a box to those that do not overlap, joined with those that it would overlap."""
    while overlapping := [other for other in boxes if other.intersect(box) is not None]:
        for other in overlapping:
            boxes.remove(other)
            box = _around(box, other)
    boxes.append(box)


def _around(box: Box, other: Box) -> Box:
    starts = [min(pair) for pair in zip(box.offsets, other.offsets, strict=True)]
    stops = [
        max(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
    ]
    return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def _index(place: int, shape: Sequence[int]) -> list[int]:
    found: list[int] = []
    for size in reversed(shape):
        place, index = divmod(place, size)
        found.append(index)
    return found[::-1]
