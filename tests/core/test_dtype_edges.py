"""The edges of boxes, strides, ranges and dtypes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.tensors import Box, ByteRange, DType, Strided, casts_safely, coalesce, follows, numel

strided = st.integers(0, 3).flatmap(
    lambda dims: st.builds(
        Strided, st.integers(0, 5), st.tuples(*[st.integers(0, 3)] * dims), st.tuples(*[st.integers(0, 12)] * dims)
    )
)


def elements(view: Strided) -> list[int]:
    """Every place, in order."""
    return [
        view.offset + sum(index * stride for index, stride in zip(indices, view.strides, strict=True))
        for indices in itertools.product(*(range(size) for size in view.sizes))
    ]


@given(strided)
def test_views_by_their_elements(view: Strided) -> None:
    places = elements(view)
    assert view.numel == len(places)
    assert view.stop == (max(places) + 1 if places else view.offset)
    if places:
        is_run = places == list(range(view.offset, view.offset + len(places)))
        assert view.is_contiguous == is_run


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 9))
def test_a_contiguous_view_is_a_run(sizes: list[int], offset: int) -> None:
    view = Strided.contiguous(sizes, offset)
    assert elements(view) == list(range(offset, offset + math.prod(sizes)))
    assert view.is_contiguous
    assert Strided.contiguous(sizes).offset == 0


def test_strides_past_an_empty_dimension() -> None:
    assert Strided.contiguous((2, 0, 3)).strides == (3, 3, 1)
    assert numel(()) == 1


def test_boxes() -> None:
    box = Box((1, 0), (2, 3))
    assert box.numel == 6
    assert box.is_within((3, 3))
    assert not box.is_within((2, 3))
    assert not box.is_within((3, 2))
    assert not box.is_within((3, 3, 1))
    assert not box.is_within((3,))
    assert Box.whole([3, 4]) == Box((0, 0), (3, 4))
    assert Box((0,), (0,)).numel == 0
    assert Box((0,), (2,)).intersect(Box((2,), (2,))) is None
    assert Box((0,), (3,)).intersect(Box((2,), (2,))) == Box((2,), (1,))
    for offsets, sizes, words in (
        ((0,), (1, 1), "differ in length"),
        ((-1,), (1,), "negative offset or size"),
        ((0,), (-1,), "negative offset or size"),
    ):
        with pytest.raises(ValueError, match=words):
            Box(offsets, sizes)


def test_ranges() -> None:
    assert ByteRange(3, 8).nbytes == 5
    assert ByteRange(0, 0).nbytes == 0
    with pytest.raises(ValueError, match="not a byte range"):
        ByteRange(-1, 2)
    ranges = [ByteRange(6, 7), ByteRange(0, 4), ByteRange(1, 2)]
    assert coalesce(ranges, max_gap_bytes=1) == [ByteRange(0, 4), ByteRange(6, 7)]
    assert coalesce(ranges, max_gap_bytes=2) == [ByteRange(0, 7)]
    assert coalesce([], max_gap_bytes=0) == []


def test_which_dtypes_take_anothers_values() -> None:
    kinds = {"bool": DType.BOOL, "int": DType.U8, "float": DType.F16, "complex": DType.C64}
    for (less, source), (more, target) in itertools.combinations(kinds.items(), 2):
        assert casts_safely(source, target), (less, more)
        assert not casts_safely(target, source), (more, less)
    wide = (DType.F16, DType.BF16, DType.F32, DType.F64)
    for source, target in itertools.product(DType, DType):
        expected = source is target or (source in wide and (target in wide or target is DType.C64))
        assert follows(source, target) is expected, (source, target)
