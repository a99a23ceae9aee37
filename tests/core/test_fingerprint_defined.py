"""The fingerprint of bytes, against its definition: it is in files, so that it may never change."""

import random

import pytest

from shardwise.transfer.fingerprints import MODULUS, fingerprint

BLOCK_WORDS = 1 << 14
BLOCK_BYTES = 8 * BLOCK_WORDS


def mixed(number: int) -> int:
    """splitmix64's finalizer, on Python's numbers."""
    number = (number + 0x9E3779B97F4A7C15) % MODULUS
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % MODULUS
    return number ^ (number >> 31)


WORD_WEIGHTS = [mixed(position) | 1 for position in range(BLOCK_WORDS)]


def defined(data: bytes, start: int) -> int:
    """Word by word."""
    padded = bytes(start % 8) + data
    padded += bytes(-len(padded) % 8)
    total = 0
    for number in range(len(padded) // 8):
        block, position = divmod(start // 8 + number, BLOCK_WORDS)
        word = int.from_bytes(padded[8 * number : 8 * number + 8], "little")
        total += word * WORD_WEIGHTS[position] * (mixed(BLOCK_WORDS + block) | 1)
    return total % MODULUS


@pytest.mark.parametrize("start", [0, 3, 8, BLOCK_BYTES - 5, BLOCK_BYTES, 3 * BLOCK_BYTES - 8])
@pytest.mark.parametrize("nbytes", [0, 1, 8, 21, BLOCK_BYTES - 1, BLOCK_BYTES + 16, 2 * BLOCK_BYTES + 7])
def test_it_is_what_it_is_defined_as(start: int, nbytes: int) -> None:
    content = random.Random(f"{start} {nbytes}").randbytes(nbytes + 1)
    for shift in (0, 1):  # memory that is aligned, and memory that is not
        part = memoryview(content)[shift : shift + nbytes]
        assert fingerprint(part, start) == defined(bytes(part), start)


def test_parts_add_up() -> None:
    content = random.Random(0).randbytes(2 * BLOCK_BYTES + 100)
    whole = fingerprint(memoryview(content))
    for cut in (1, 8, 77, BLOCK_BYTES - 3, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 99):
        parts = fingerprint(memoryview(content)[:cut]) + fingerprint(memoryview(content)[cut:], cut)
        assert parts % MODULUS == whole


def test_it_has_not_changed() -> None:
    assert fingerprint(memoryview(b"shardwise")) == 0x8B457C12A145BA1A
    assert fingerprint(memoryview(bytes(range(256)) * 600)) == 0xF6948D8C1B1DBC80
