"""Boxes of the leaves that hold all a box of an expression is made of; and blocks that lie in one piece."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.core.random_expressions import Grower, random_box, view

from shardwise.core.computed import copies_from_shards, merge_overlapping
from shardwise.core.regions import Region
from shardwise.core.tensors import Box, Strided


def cut(array, box):
    return array[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


@given(seed=st.integers(0, 2**32))
def test_a_box_is_made_of_the_boxes_that_it_needs(seed):
    rng = random.Random(seed)
    grower = Grower(rng)
    expression, array = grower.grow(rng.randint(0, 5))
    box = random_box(rng, expression.shape)
    made = np.full(box.numel, -7)
    around: dict[str, list[Box]] = {}
    for leaf, region in expression.leaves(Region.from_box(box, Strided.contiguous(box.sizes))) if box.numel else ():
        around.setdefault(leaf.key, []).append(region.bounds)
    for key, parts in ((key, merge_overlapping(boxes)) for key, boxes in around.items()):
        assert all(part.is_within(grower.leaves[key].shape) for part in parts)
        times = np.zeros(grower.leaves[key].shape, int)
        for part in parts:
            times[tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))] += 1
            memory = np.ascontiguousarray(cut(grower.leaves[key], part)).reshape(-1)
            for copy in copies_from_shards(expression, {key: [(part, Strided.contiguous(part.sizes))]}, box):
                view(made, copy.target)[...] = view(memory, copy.source)
        assert times.max(initial=0) <= 1  # parts do not overlap
    wanted = cut(array, box)
    assert np.array_equal(made.reshape(wanted.shape), wanted)
