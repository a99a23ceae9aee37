"""Writes from memory straight to the disk, around the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# [Note: Around the page cache]
#
# A write by way of the page cache takes a page of memory for every page of the file, copies into it, and begins to
# be a write at the sync. Of a model that is soon as much memory as there is: the kernel then evicts what others
# have read, and waits. With O_DIRECT the device fetches the bytes itself. What it wants in return is that place in
# the file, place in memory and size are whole blocks, and tensors begin anywhere. So whole blocks are put
# together in a small buffer that is used again and again, and stays in the processor's caches; what is left at the
# ends of a range, less than a block, goes by way of the page cache. Ranges of both kinds never share a block, and
# so no page: to the kernel they are different parts of the file (open(2), O_DIRECT, warns of mixing them in one).
# A write by way of the page cache waits until nobody writes around it, and keeps others from it: some milliseconds
# each. So ends, and small writes, are put aside and written when the file is synced.
#
# Bytes so written are at the device when the call returns, which may still hold them in a cache of its own, and
# where they are is not noted durably: the sync does both, as ever.

BLOCK_BYTES = 4096
"""A page, and a multiple of the blocks of all common disks."""

LEAST_BYTES = 128 << 10
"""Of fewer bytes the copy into the page cache takes less time than a disk that answers at once."""

MOST_KEPT_BYTES = 4 << 20
"""What is put aside of a file, before it is written without waiting for the sync."""

_STEP_BYTES = 4 << 20
"""What one call writes: enough for a disk that works on many blocks at once, little enough for a cache."""

FILE_SYSTEMS = frozenset({"ext4", "xfs"})
"""Those on which O_DIRECT does what is said above. (Others copy all the same, compress, or are on a network.)"""


def whole_blocks(start: int, stop: int) -> tuple[int, int]:
    """The whole blocks within a range of a file: where they begin and end. None: two times the same place."""
    first = -(-start // BLOCK_BYTES) * BLOCK_BYTES
    return first, max(first, stop // BLOCK_BYTES * BLOCK_BYTES)


def open_around(path: str) -> int | None:
    """A descriptor that writes around the page cache; None where there is no such way to the file."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flag)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise


def is_refused(error: BaseException | None) -> bool:
    """Whether a file system says that it takes nothing around the page cache after all."""
    return isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)


class Blocks:
    """Buffers that begin at a page, kept for the next call. Memory: 4 MiB for each call at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        with self._lock:
            memory = self._idle.pop() if self._idle else None
        if memory is None:
            memory = mmap.mmap(-1, _STEP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pieces for the device to fetch
        try:
            yield memoryview(memory)
        finally:
            with self._lock:
                self._idle.append(memory)

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()


def cut(buffers: Sequence[memoryview], places: Sequence[int]) -> list[list[memoryview]]:
    """Buffers that follow each other, cut at these places, counted in bytes from their beginning, in order."""
    parts: list[list[memoryview]] = [[]]
    ahead = list(places)
    position = 0
    for buffer in buffers:
        while ahead and ahead[0] <= position + buffer.nbytes:
            size = ahead.pop(0) - position
            parts[-1].append(buffer[:size])
            parts.append([])
            buffer, position = buffer[size:], position + size
        parts[-1].append(buffer)
        position += buffer.nbytes
    return parts


def put_together(buffers: Sequence[memoryview], block: memoryview) -> Iterator[memoryview]:
    """The bytes of these buffers one after the other, each time as many of them as ``block`` holds, in it."""
    filled = 0
    for buffer in buffers:
        taken = 0
        while taken < buffer.nbytes:
            part = buffer[taken : taken + block.nbytes - filled]
            block[filled : filled + part.nbytes] = part
            taken += part.nbytes
            filled += part.nbytes
            if filled == block.nbytes:
                yield block
                filled = 0
    if filled:
        yield block[:filled]
