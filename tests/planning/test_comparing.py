"""Which bytes of copies are compared."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.formats.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.planning.loads import comparing
from shardwise.planning.loads.comparing import BLOCK_BYTES, ComparedBytes, SampledBlocks, WholeFiles, portions
from shardwise.tensors import DType


def index_of(files: dict[str, list[int]], around: int = 100) -> CheckpointIndex:
    """Files of tensors of these sizes, with so many bytes before the first and after the last."""
    entries, sizes = {}, {}
    for file, nbytes in files.items():
        place = around
        for number, size in enumerate(nbytes):
            key = f"{file}.{number}"
            entries[key] = TensorEntry(key, DType.U8, (size,), file, place, place + size)
            place += size
        sizes[file] = place + around
    return CheckpointIndex("here", sizes, entries, {}, "several files without an index")


SIZES = st.dictionaries(st.sampled_from("ab"), st.lists(st.integers(0, 12 * BLOCK_BYTES), max_size=4), max_size=2)


@given(SIZES, st.integers(0, 200))
def test_whole_files_are_compared_byte_by_byte(files, around):
    index = index_of(files, around)
    found = portions(index, WholeFiles())
    for file, nbytes in index.files.items():
        ranges = [item for portion in found if portion.file == file for item in portion.ranges]
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])][: len(ranges)]
        assert (ranges[-1][1] if ranges else 0) == nbytes
    for portion in found:
        ((start, stop),) = portion.ranges
        assert start < stop
        entry = index.entries.get(portion.key)
        within = [
            item
            for item in index.entries.values()
            if item.file == portion.file and item.start < stop and start < item.stop
        ]
        assert within == ([entry] if entry else [])


def test_long_ranges_are_compared_in_pieces(monkeypatch):
    monkeypatch.setattr(comparing, "_PIECE_BYTES", 40)
    found = portions(index_of({"a": [90]}, around=10), WholeFiles())
    ranges = [(0, 10), (10, 50), (50, 90), (90, 100), (100, 110)]
    keys = ["", "a.0", "a.0", "a.0", ""]
    assert found == [ComparedBytes("a", key, (where,)) for key, where in zip(keys, ranges, strict=True)]


@given(SIZES, st.integers(0, 200), st.integers(2, 11))
def test_of_every_tensor_some_blocks_are_compared(files, around, count):
    index = index_of(files, around)
    found = portions(index, SampledBlocks(count))
    assert found == portions(index, SampledBlocks(count))
    sampled = {portion.key: portion.ranges for portion in found if portion.key}
    assert set(sampled) == {entry.key for entry in index.entries.values() if entry.nbytes}
    for key, ranges in sampled.items():
        entry = index.entries[key]
        if entry.nbytes <= count * BLOCK_BYTES:
            assert ranges == ((entry.start, entry.stop),)
            continue
        assert len(ranges) == count
        assert all(stop - start == BLOCK_BYTES for start, stop in ranges)
        assert (ranges[0][0], ranges[-1][1]) == (entry.start, entry.stop)
        between = (entry.nbytes - 2 * BLOCK_BYTES) / max(1, count - 2)
        for number, (start, stop) in enumerate(ranges[1:-1]):  # each in its part of what is between
            low = entry.start + BLOCK_BYTES + number * between
            assert int(low) <= start
            assert stop <= low + between + 1 or between < BLOCK_BYTES
    for file, nbytes in index.files.items():
        (frame,) = (portion for portion in found if portion.file == file and not portion.key)
        ends = ((0, around), (nbytes - around, nbytes)) if files[file] else ((0, nbytes), (nbytes, nbytes))
        assert frame.ranges == tuple((start, stop) for start, stop in ends if start < stop)


def test_blocks_lie_elsewhere_in_every_tensor():
    index = index_of({"a": [400 * BLOCK_BYTES] * 600})
    found = [portion for portion in portions(index, SampledBlocks(10)) if portion.key]
    places = [[start - index.entries[item.key].start for start, _ in item.ranges[1:-1]] for item in found]
    for number in range(8):
        assert len({place[number] for place in places}) > 590
    # Anywhere in its part, which is of more than 49 blocks, and nowhere else.
    for number, starts in enumerate(zip(*places, strict=True)):
        low, high = (BLOCK_BYTES + 398 * BLOCK_BYTES * end // 8 for end in (number, number + 1))
        assert low <= min(starts) < low + 5 * BLOCK_BYTES
        assert high - 6 * BLOCK_BYTES < max(starts) <= high - BLOCK_BYTES


def test_many_tensors_have_fewer_blocks_and_long_frames_are_not_read(monkeypatch):
    index = index_of({"a": [20 * BLOCK_BYTES] * 5})
    for most, count in ((5 * 7, 7), (5 * 7 + 4, 7), (5 * 8, 8), (5 * 9, 8), (5, 2), (0, 2)):
        monkeypatch.setattr(comparing, "_MOST_SAMPLED_BYTES", most * BLOCK_BYTES)
        found = portions(index, SampledBlocks())
        assert {len(portion.ranges) for portion in found if portion.key} == {count}, most
    monkeypatch.setattr(comparing, "_MOST_FRAME_BYTES", 30)
    frame = portions(index, SampledBlocks())[0]
    end = index.files["a"]
    assert frame == ComparedBytes("a", "", ((0, 30), (end - 30, end)))
    assert [item.file for item in itertools.chain(portions(index_of({}), SampledBlocks()))] == []


def test_the_first_and_the_last_block_are_two():
    assert SampledBlocks(2).blocks_per_tensor == 2
    with pytest.raises(ConfigError, match="blocks_per_tensor=1"):
        SampledBlocks(1)
