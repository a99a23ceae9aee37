"""Boxes, strides and byte ranges."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.tensors import Box, ByteRange, DType, coalesce, find_dtype

intervals = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (pair[0], pair[1]))
boxes = st.lists(intervals, min_size=3, max_size=3).map(
    lambda dims: Box(tuple(start for start, _ in dims), tuple(size for _, size in dims))
)


def indices(box):
    spans = [set(range(start, start + size)) for start, size in zip(box.offsets, box.sizes, strict=True)]
    return spans


@given(boxes, boxes)
def test_an_intersection_holds_the_common_indices(one, other):
    common = one.intersect(other)
    expected = [a & b for a, b in zip(indices(one), indices(other), strict=True)]
    if common is None:
        assert not all(expected)
    else:
        assert indices(common) == expected


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30)), max_size=20), st.integers(0, 10))
def test_coalesced_ranges_cover_everything_and_nothing_far_from_it(pairs, gap):
    ranges = [ByteRange(start, start + size) for start, size in pairs]
    joined = coalesce(ranges, max_gap_bytes=gap)
    covered = {byte for item in joined for byte in range(item.start, item.stop)}
    wanted = {byte for item in ranges for byte in range(item.start, item.stop)}
    assert wanted <= covered
    assert all(any(abs(byte - near) <= gap for near in wanted) for byte in covered - wanted)
    assert all(after.start - before.stop > gap for before, after in itertools.pairwise(joined))


def test_a_range_that_runs_backwards_is_refused():
    with pytest.raises(ValueError, match="not a byte range"):
        ByteRange(3, 2)


def test_every_dtype_is_found_by_its_name():
    assert all(find_dtype(dtype.label) is dtype for dtype in DType if dtype is not DType.OTHER)
    assert find_dtype("OTHER") is None
    assert find_dtype("F33") is None
