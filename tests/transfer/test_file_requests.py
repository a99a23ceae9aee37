"""Schedules of reads: every byte that is needed is asked for once, within the policy and the staging memory."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.computed import Copy, copies
from shardwise.core.expression import Stored, permute
from shardwise.core.tensors import Box, DType, Strided
from shardwise.files.checkpoint_index import TensorEntry
from shardwise.files.storage import ReadPolicy
from shardwise.transfer.file_requests import align, copies_by_run, iter_segments, plan_requests


def policy(gap: int = 0, request: int = 1 << 20) -> ReadPolicy:
    return ReadPolicy(gap, request, 1, is_remote=False)


def entry(shape: tuple[int, ...], start: int = 0, file: str = "f", dtype: DType = DType.U8) -> TensorEntry:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return TensorEntry("key", dtype, shape, file, start, start + nbytes)


def indices(view: Strided) -> list[int]:
    grid = np.zeros(view.sizes, dtype=int) + view.offset
    for axis, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True)):
        steps = np.arange(size) * stride
        grid += steps.reshape([-1 if dim == axis else 1 for dim in range(len(view.sizes))])
    return [int(index) for index in grid.reshape(-1)]


boxes = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4)).flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        st.tuples(*(st.integers(0, size - 1) for size in shape)).flatmap(
            lambda offsets: st.tuples(
                st.just(offsets),
                st.tuples(*(st.integers(1, size - offset) for size, offset in zip(shape, offsets, strict=True))),
            )
        ),
        st.permutations(range(3)),
    )
)


@given(boxes, st.integers(0, 30))
def test_runs_are_the_same_elements_and_cut_at_every_gap_that_is_too_wide(case, max_gap):
    shape, (offsets, sizes), dims = case
    stored = Stored("key", shape, DType.U8)
    order = tuple(dims)
    box = Box(tuple(offsets[d] for d in order), tuple(sizes[d] for d in order))
    for copy in copies(permute(stored, order), box):
        wanted = sorted(zip(indices(copy.source), indices(copy.target), strict=True))
        parts = list(copies_by_run(copy, max_gap=max_gap))
        found = sorted(
            pair for part in parts for pair in zip(indices(part.source), indices(part.target), strict=True)
        )
        assert found == wanted
        for part in parts:
            held = sorted(indices(part.source))
            gaps = [after - before - 1 for before, after in itertools.pairwise(held)]
            assert max(gaps, default=0) <= max_gap


@given(boxes, st.integers(0, 30), st.integers(1, 40), st.integers(1, 60), st.booleans())
def test_segments_hold_their_copies_and_keep_to_the_sizes(case, gap, block, request, needs_staging):
    shape, (offsets, sizes), _ = case
    place = entry(shape, start=1000)
    rules = policy(gap, request)
    for copy in copies(Stored("key", shape, DType.U8), Box(offsets, sizes)):
        found: list[int] = []
        for segment in iter_segments(copy, 3, place, needs_staging=needs_staging, policy=rules, block_bytes=block):
            assert segment.target == 3
            held = indices(segment.copy.source)
            assert segment.bytes.start == 1000 + min(held)
            assert segment.bytes.stop == 1000 + max(held) + 1
            assert segment.bytes.nbytes <= (request if segment.is_direct else min(block, request))
            if segment.is_direct:
                assert not needs_staging
                assert held == list(range(held[0], held[0] + len(held)))
                targets = indices(segment.copy.target)
                assert targets == list(range(targets[0], targets[0] + len(targets)))
            found += held
        assert sorted(found) == sorted(indices(copy.source))


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 300), st.integers(1, 90), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 50),
    st.integers(90, 400),
    st.sampled_from([256, 1024]),
    st.floats(0, 0.99),
)
def test_requests_hold_every_segment_once_and_keep_to_the_policy(pieces, gap, request, staging, start_at):
    segments = []
    for number, (file, start, nbytes, is_direct) in enumerate(pieces):
        copy = Copy(Stored("key", (400,), DType.U8), Strided(start, (nbytes,), (1,)), Strided(0, (nbytes,), (1,)))
        segments += [
            (file, segment)
            for segment in iter_segments(
                copy,
                number,
                entry((400,), file=file),
                needs_staging=not is_direct,
                policy=policy(gap, request),
                block_bytes=256,
            )
        ]
    requests = plan_requests(segments, policy(gap, request), staging_bytes=staging, start_at=start_at)
    held = [(item.file, segment) for item in requests for segment in item.segments]
    assert sorted(held, key=repr) == sorted(segments, key=repr)
    for item in requests:
        assert item.bytes.nbytes <= request
        position, staged, gaps = item.bytes.start, 0, 0
        for segment in item.segments:
            assert segment.bytes.start >= position
            gaps += segment.bytes.start - position
            staged += align(segment.bytes.start - position)
            staged += 0 if segment.is_direct else align(segment.bytes.nbytes)
            position = segment.bytes.stop
        assert position == item.bytes.stop
        assert gaps * 64 <= item.bytes.nbytes
        assert staged <= staging or len(item.segments) == 1
    places = [(item.file, item.bytes.start) for item in requests]
    assert any(places[first:] + places[:first] == sorted(places) for first in range(len(places)))


def test_adjacent_ranges_are_one_request_and_distant_ones_are_others():
    def at(start: int, nbytes: int) -> tuple[str, object]:
        copy = Copy(Stored("key", (9000,), DType.U8), Strided(start, (nbytes,), (1,)), Strided(0, (nbytes,), (1,)))
        (segment,) = iter_segments(copy, 0, entry((9000,)), needs_staging=False, policy=policy(10), block_bytes=1)
        return "f", segment

    found = plan_requests([at(0, 1000), at(1000, 500), at(1505, 500), at(8000, 4)], policy(10), staging_bytes=4096)
    wanted = [(0, 2005, 3), (8000, 8004, 1)]
    assert [(item.bytes.start, item.bytes.stop, len(item.segments)) for item in found] == wanted
