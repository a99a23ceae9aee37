"""Slabs of powers of two for blocks of any sizes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.transfer.distributed_chunks import pack_slabs


@given(st.lists(st.integers(0, 300).map(lambda number: 64 * number), max_size=40))
def test_every_block_has_a_place_of_its_own(sizes):
    slabs, places = pack_slabs(sizes)
    assert all(slab & (slab - 1) == 0 for slab in slabs)
    taken = sorted((slab, start, start + size) for size, (slab, start) in zip(sizes, places, strict=True) if size)
    assert all(stop <= slabs[slab] for slab, _, stop in taken)
    for (slab, _, stop), (other, start, _) in itertools.pairwise(taken):
        assert slab != other or stop <= start


@pytest.mark.parametrize("mebibytes", [[1.25] * 30, [129] * 40, [500, 500, 33, 33, 0.5]])
def test_little_is_lost(mebibytes):
    """One slab for all would be half empty where their sum is just more than a power of two."""
    sizes = [int(number * (1 << 20)) for number in mebibytes]
    assert sum(pack_slabs(sizes)[0]) <= 1.13 * sum(sizes)
