"""Fingerprints add up, and tell bytes apart."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.fingerprints import MODULUS, fingerprint

SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 5000, 200_000]


def content(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@given(data=st.data())
def test_parts_add_up_to_the_whole(data):
    nbytes = data.draw(st.sampled_from(SIZES))
    cuts = sorted(data.draw(st.lists(st.integers(0, nbytes), max_size=4)))
    whole = memoryview(content(nbytes))
    parts = [fingerprint(whole[start:stop], start) for start, stop in pairwise([0, *cuts, nbytes])]
    assert sum(parts) % MODULUS == fingerprint(whole)


@given(data=st.data())
def test_one_flipped_bit_is_another(data):
    nbytes = data.draw(st.sampled_from(SIZES[1:]))
    position, bit = data.draw(st.integers(0, nbytes - 1)), data.draw(st.integers(0, 7))
    one = content(nbytes)
    other = one.copy()
    other[position] ^= 1 << bit
    assert fingerprint(memoryview(one)) != fingerprint(memoryview(other))


@given(first=st.integers(0, 380), second=st.integers(0, 380))
def test_runs_that_changed_places_are_another(first, second):
    one = content(390 * 512).reshape(390, 512)
    other = one.copy()
    other[[first, second]] = one[[second, first]]
    is_same = fingerprint(memoryview(one.reshape(-1))) == fingerprint(memoryview(other.reshape(-1)))
    assert is_same == (first == second)
