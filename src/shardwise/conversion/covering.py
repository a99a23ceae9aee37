"""Covers elements that lie apart with boxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.conversion.expression import Expression
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
