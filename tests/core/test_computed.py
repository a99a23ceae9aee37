"""Blocks of what is computed, and the boxes that an expression is made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.files.scaled import scaled, scales_of

from shardwise.core.computed import SmallestBlocks, computes, iter_computed_leaves, split_aligned
from shardwise.core.expression import Stored, concat, stack
from shardwise.core.tensors import Box, DType


def counted(boxes, shape):
    found = np.zeros(shape, dtype=int)
    for box in boxes:
        found[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] += 1
    return found


@st.composite
def asked(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    unit = tuple(draw(st.integers(1, 3)) for _ in shape)
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        starts = [draw(st.integers(0, size - 1)) for size in shape]
        sizes = [draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)]
        boxes.append(Box(tuple(starts), tuple(sizes)))
    return shape, unit, boxes, draw(st.integers(0, 40))


@given(asked())
def test_blocks_are_whole_units_that_hold_what_is_requested(case):
    shape, unit, boxes, most = case
    found = list(split_aligned(boxes, shape, unit, most))
    times = counted(found, shape)
    assert times.max() == 1
    assert (times >= np.minimum(counted(boxes, shape), 1)).all()
    for box in found:
        for at, size, step, length in zip(box.offsets, box.sizes, unit, shape, strict=True):
            assert at % step == 0
            assert (at + size) % step == 0 or at + size == length
        assert box.numel <= most or all(size <= step for size, step in zip(box.sizes, unit, strict=True))


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (30, [(5, 6)]),
        (29, [(4, 6), (1, 6)]),
        (12, [(2, 6), (2, 6), (1, 6)]),
        (11, [(2, 4), (2, 2), (2, 4), (2, 2), (1, 6)]),
        (3, [(2, 2)] * 6 + [(1, 2)] * 3),
    ],
)
def test_a_block_is_as_large_as_it_may_be(most, sizes):
    assert [box.sizes for box in split_aligned([Box.whole((5, 6))], (5, 6), (2, 2), most)] == sizes


def test_the_memory_of_the_smallest_block_counts_what_it_is_computed_of():
    weight, scales = Stored("w", (6, 8), DType.F32), Stored("s", scales_of((6, 8)), DType.F32)
    node = scaled(weight, scales)
    assert SmallestBlocks().nbytes(node) == 8 * 4 + 4  # two by two elements there and back, and a scale
    above = scaled(node, scales)
    assert SmallestBlocks().nbytes(above) == 2 * (8 * 4 + 4)
    assert str(above) == "Scale(Scale(w, s)[scaled], s)[scaled]"
    assert list(iter_computed_leaves(concat([above, weight], 0))) == [above]
    assert (computes(concat([weight, node], 0)), computes(weight)) == (True, False)
    assert stack([weight, Stored("h", (6, 8), DType.F16)], 0).dtype is DType.F32
