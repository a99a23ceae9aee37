"""Checksums of blocks: whatever is read of a file is compared, in whatever pieces it was written and is read."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.files import flip_bit

from shardwise import FormatError
from shardwise.checkpoints import header
from shardwise.checkpoints.header import BlockSums, CheckedReader, content_nbytes, with_checksums
from shardwise.core.tensors import gaps
from shardwise.transfer.fingerprints import digest

BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(header, "BLOCK_BYTES", BLOCK)


@given(st.integers(0, 5000))
def test_sizes_with_and_without_checksums(nbytes):
    assert content_nbytes(with_checksums(nbytes)) == nbytes


def written(folder, nbytes, seed=0):
    """A file that was written in pieces, and a function that opens it."""
    rng = random.Random(seed)
    content, sums, at = rng.randbytes(nbytes), BlockSums(nbytes), 0
    while at < nbytes:
        stop = min(nbytes, at + rng.randint(1, 3 * BLOCK))
        sums.add(at, memoryview(content)[at:stop])
        at = stop
    (folder / "data").write_bytes(content + sums.to_bytes())
    sizes = {"data": with_checksums(nbytes)}
    return content, lambda: CheckedReader(
        folder, {"data": digest(sums.to_bytes())}, sizes, lambda *_: "some tensor"
    )


@pytest.mark.parametrize("nbytes", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 7])
def test_every_range_is_read_in_any_buffers(tmp_path, nbytes):
    content, opened = written(tmp_path, nbytes)
    rng = random.Random(1)
    with opened() as reader:
        for _ in range(40):
            start, stop = sorted(rng.choices(range(nbytes + 1), k=2))
            middle = rng.randint(start, stop)
            parts = [bytearray(middle - start), bytearray(stop - middle)]
            reader.read_vectored("data", start, [memoryview(part) for part in parts])
            assert b"".join(parts) == content[start:stop]
        reader.require("data", 0, nbytes)
        assert reader.checked_bytes == nbytes


def test_a_flipped_bit_is_found_in_its_block_alone(tmp_path):
    _, opened = written(tmp_path, 4 * BLOCK)
    flip_bit(tmp_path / "data", 2 * BLOCK + 5)
    for start, stop in [(2 * BLOCK, 3 * BLOCK), (2 * BLOCK + 9, 2 * BLOCK + 10), (0, 4 * BLOCK), (190, 193)]:
        with opened() as reader, pytest.raises(FormatError, match=r"some tensor \(bytes 128..192 of data\)"):
            reader.read("data", start, stop)
    with opened() as reader:
        reader.read("data", 0, 2 * BLOCK)
        reader.read("data", 3 * BLOCK, 4 * BLOCK)
        assert [block for _, block in reader.blocks if not reader.is_sound("data", block)] == [2]


def test_gaps_are_what_no_run_covers():
    assert gaps([(4, 6), (1, 2)], 9) == [(0, 1), (2, 4), (6, 9)]
    assert gaps([(0, 9)], 9) == []
    assert gaps([], 3) == [(0, 3)]
