"""Reads and writes many buffers in few system calls."""

from __future__ import annotations

from collections.abc import Sequence

CALL_BYTES = 0x7FFFF000
"""The most one call reads or writes on Linux (``MAX_RW_COUNT``, read(2))."""

CALL_BUFFERS = 1024
"""The most buffers one preadv or pwritev call takes on Linux (``IOV_MAX``)."""


def as_bytes(buffers: Sequence[memoryview]) -> tuple[list[memoryview], int]:
    """The buffers that are not empty, as bytes, and how many bytes they have together."""
    flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    return flat, sum(buffer.nbytes for buffer in flat)


def one_call(buffers: Sequence[memoryview], first: int) -> Sequence[memoryview]:
    """As many buffers from ``first`` on as one system call takes; the last one may be cut."""
    batch: list[memoryview] = []
    room = CALL_BYTES
    for buffer in buffers[first : first + CALL_BUFFERS]:
        batch.append(buffer[:room])
        room -= batch[-1].nbytes
        if room == 0:
            break
    return batch


def advance(buffers: list[memoryview], first: int, count: int) -> int:
    """The first buffer not done with after ``count`` more bytes; what is done of it is cut off in place."""
    while first < len(buffers) and count >= buffers[first].nbytes:
        count -= buffers[first].nbytes
        first += 1
    if count:
        buffers[first] = buffers[first][count:]
    return first
