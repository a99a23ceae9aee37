"""Touches fresh pages, huge or small, and times it. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import time
from functools import cache

from shardwise.execution.memory.free import host_pools
from shardwise.planning.loads.pages import MeasuredPages, Way, Weighing

PORTION_BYTES = 2 << 20
"""What is touched at once: a huge page."""

# madvise(2); the last one is not named in Python's mmap module before 3.14.
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 14, 15, 23

_IS_LINUX = sys.platform == "linux"

_LOOK_BYTES = 512 << 20
"""What is touched to learn whether huge pages pay: more than a process that has just ended leaves behind."""

_LOOK_SHARE = 16
"""But no more than one part in this many of what is free."""

_DECIDED = 8
"""After as many portions in small pages, one after the other, it is decided that huge ones do not pay."""


def begin_small(address: int, nbytes: int) -> None:
    """Have fresh memory, which begins at a page, touched in small pages until something else is said of it.

    Once for much of it: advice keeps other threads of the process from touching anything meanwhile.
    """
    if _IS_LINUX:
        _libc().madvise(address, nbytes, MADV_NOHUGEPAGE)


def populate(address: int, nbytes: int, way: Way) -> float:
    """Have pages behind memory that has begun small; the processor seconds it took.

    What is there already stays as it is. Where the system cannot, it is touched when it is written to.
    """
    if not _IS_LINUX:
        return 0.0
    began = time.thread_time()
    libc = _libc()
    if way is Way.HUGE:
        libc.madvise(address, nbytes, MADV_HUGEPAGE)  # a kernel without huge pages refuses
    libc.madvise(address, nbytes, MADV_POPULATE_WRITE)
    return time.thread_time() - began


@cache
def can_populate() -> bool:
    """Whether the kernel touches pages when told to (Linux 5.14); else touches cannot be timed."""
    if not _IS_LINUX:
        return False
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        try:
            page.madvise(MADV_POPULATE_WRITE)
        except (OSError, ValueError):
            return False
    return True


def huge_pages_pay() -> bool:
    """Whether huge pages are the cheaper ones on this machine now, by touching up to 512 MiB that are free.

    For memory that others allocate, who can be told once. Takes some hundredths of a second.
    """
    if not can_populate():
        return True
    free = min(host_pools().values(), default=_LOOK_BYTES * _LOOK_SHARE)
    look_bytes = min(_LOOK_BYTES, free // _LOOK_SHARE) // PORTION_BYTES * PORTION_BYTES
    weighing = Weighing(MeasuredPages())
    in_small = 0
    with contextlib.closing(
        mmap.mmap(-1, look_bytes + PORTION_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ) as memory:
        first = ctypes.c_char.from_buffer(memory)
        start = -(-ctypes.addressof(first) // PORTION_BYTES) * PORTION_BYTES
        del first  # else the memory cannot be closed
        begin_small(start, look_bytes)
        for number in range(look_bytes // PORTION_BYTES):
            way = weighing.next()
            weighing.took(way, PORTION_BYTES, populate(start + number * PORTION_BYTES, PORTION_BYTES, way))
            in_small = in_small + 1 if way is Way.SMALL else 0
            if in_small == _DECIDED:
                return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
