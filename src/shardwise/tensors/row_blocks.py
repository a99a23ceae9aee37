"""A tensor in blocks that lie in one piece each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from shardwise.tensors.box import Box
from shardwise.tensors.strided import numel


def row_blocks(shape: Sequence[int], max_numel: int) -> list[Box]:
    """The tensor in boxes that are one run of a row-major tensor each, in order, of ``max_numel`` elements at most.

    (Of one element at least.) A tensor without elements has no blocks.
    """
    if not numel(shape):
        return []
    split = len(shape)
    inner = 1
    while split and inner * shape[split - 1] <= max_numel:
        split -= 1
        inner *= shape[split]
    if not split:
        return [Box.whole(shape)]
    dim, step = split - 1, max(1, max_numel // inner)
    boxes: list[Box] = []
    for lead in product(*(range(size) for size in shape[:dim])):
        for first in range(0, shape[dim], step):
            count = min(step, shape[dim] - first)
            boxes.append(
                Box((*lead, first, *(0 for _ in shape[split:])), (*(1 for _ in lead), count, *shape[split:]))
            )
    return boxes
