"""A number that tells the bytes of a tensor apart, which ranks can work out in parts.

[Note: Fingerprints] The bytes of a tensor, padded with zeros, are little-endian words of 64 bits. The fingerprint
is the sum of word ``i`` times ``weight(i)``, modulo 2**64. Weights are odd, so a change of one word never goes
unseen, and mixed (splitmix64), so moved words do not either. The sum of the parts is the fingerprint of the whole:
who holds bytes ``start .. stop`` adds these, with zeros around them. It is for finding damage, not against
forgery.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

_WORD = 8
LANES = 1 << 14
"""Words in a block."""

MODULUS = 1 << 64


def fingerprint(data: memoryview, start: int = 0) -> int:
    """Of these bytes, which lie at byte ``start`` of the tensor. Memory: two blocks of 128 KiB."""
    total = 0
    for block, first, words in _words(data, start):
        if words.ndim == 2:
            weights = [block_weight(block + number) for number in range(len(words))]
            sums = np.einsum("ij,j->i", words, lane_weights()).tolist()
            total += sum(weight * found for weight, found in zip(weights, sums, strict=True))
        else:
            lanes = lane_weights()[first : first + len(words)]
            total += block_weight(block) * int(np.einsum("i,i->", words, lanes))
    return total % MODULUS


def _words(data: memoryview, start: int) -> Iterator[tuple[int, int, Any]]:
    """(block, place in it, words) that cover the bytes, from word to word; whole blocks are rows of words."""
    span = _WORD * LANES
    flat = np.frombuffer(data, dtype=np.uint8)
    place, stop = start, start + len(flat)
    while place < stop:
        block = place // span
        whole = (stop - place) // span if place % span == 0 else 0
        edge = place + whole * span if whole else min(stop, (block + 1) * span)
        part = flat[place - start : edge - start]
        if whole and part.ctypes.data % _WORD == 0:
            yield block, 0, part.view("<u8").reshape(whole, LANES)
            place = edge
            continue
        edge = min(edge, (block + 1) * span)
        part = part[: edge - place]
        head = place % _WORD
        if head or len(part) % _WORD or (part.ctypes.data % _WORD):
            padded = np.zeros(-(-(head + len(part)) // _WORD) * _WORD, dtype=np.uint8)
            padded[head : head + len(part)] = part
            part = padded
        yield block, place % span // _WORD, part.view("<u8")
        place = edge


def _mixed(number: Any) -> Any:
    """splitmix64's finaliser."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(number, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@cache
def lane_weights() -> Any:
    """Of the words of a block: ``weight(i)`` is that of its place in its block times :func:`block_weight`."""
    return _mixed(np.arange(LANES, dtype=np.uint64)) | np.uint64(1)


@cache
def block_weight(block: int) -> int:
    """Of a block, by its number."""
    return int(_mixed(LANES + block)) | 1
