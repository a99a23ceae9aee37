"""Fingerprints add up, and tell bytes apart."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.tensors.fingerprint import MODULUS, fingerprint, sector_fingerprint

KINDS = [fingerprint, sector_fingerprint]
SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 5000, 200_000]


def content(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_parts_add_up_to_the_whole(kind, data):
    nbytes = data.draw(st.sampled_from(SIZES))
    cuts = sorted(data.draw(st.lists(st.integers(0, nbytes), max_size=4)))
    whole = memoryview(content(nbytes))
    parts = [kind(whole[start:stop], start) for start, stop in pairwise([0, *cuts, nbytes])]
    assert sum(parts) % MODULUS == kind(whole)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_one_flipped_bit_is_another(kind, data):
    nbytes = data.draw(st.sampled_from(SIZES[1:]))
    position, bit = data.draw(st.integers(0, nbytes - 1)), data.draw(st.integers(0, 7))
    one = content(nbytes)
    other = one.copy()
    other[position] ^= 1 << bit
    assert kind(memoryview(one)) != kind(memoryview(other))


@pytest.mark.parametrize("kind", KINDS)
@given(first=st.integers(0, 380), second=st.integers(0, 380))
def test_sectors_that_changed_places_are_another(kind, first, second):
    one = content(390 * 512).reshape(390, 512)
    other = one.copy()
    other[[first, second]] = one[[second, first]]
    is_same = kind(memoryview(one.reshape(-1))) == kind(memoryview(other.reshape(-1)))
    assert is_same == (first == second)


def test_whole_sectors_are_weighed_as_words_are():
    """By another way, one sector at a time."""
    data = content(64 * 1024, seed=3)
    sums = data.view("<u8").reshape(-1, 64).sum(axis=1, dtype=np.uint64)
    assert sector_fingerprint(memoryview(data)) == fingerprint(memoryview(sums.view(np.uint8)))
