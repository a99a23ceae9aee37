"""A tensor in blocks that are one run each."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.tensors import Box, Strided, row_blocks


def places(box: Box, shape: tuple[int, ...]) -> list[int]:
    """The elements of a row-major tensor that are in the box, in its order."""
    strides = Strided.contiguous(shape).strides
    found = [0]
    for offset, size, stride in zip(box.offsets, box.sizes, strides, strict=True):
        found = [base + index * stride for base in found for index in range(offset, offset + size)]
    return found


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 40))
def test_blocks_follow_each_other_and_are_as_large_as_they_may_be(sizes: list[int], most: int) -> None:
    shape = tuple(sizes)
    blocks = row_blocks(shape, most)
    runs = [places(block, shape) for block in blocks]
    assert [place for run in runs for place in run] == list(range(math.prod(shape)))
    assert all(len(run) <= most for run in runs)
    if math.prod(shape) <= most and runs:
        assert blocks == [Box.whole(shape)]


@pytest.mark.parametrize(
    ("shape", "most", "sizes"),
    [
        ((4, 6), 12, [(2, 6), (2, 6)]),
        ((4, 6), 11, [(1, 6)] * 4),
        ((2, 6), 4, [(1, 4), (1, 2)] * 2),
        ((3,), 0, [(1,)] * 3),  # one element at least
        ((), 0, [()]),
        ((3, 0), 5, []),
    ],
)
def test_sizes_of_blocks(shape: tuple[int, ...], most: int, sizes: list[tuple[int, ...]]) -> None:
    assert [block.sizes for block in row_blocks(shape, most)] == sizes
