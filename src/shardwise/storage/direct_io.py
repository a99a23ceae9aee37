"""Writes that bypass the page cache (O_DIRECT): descriptors, aligned buffers, limits."""

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Final

# [Note: Around the page cache]
#
# A write by way of the page cache takes a page of memory for every page of the file, copies into it, and begins
# to be a write at the sync. Of a model that is soon as much memory as there is: the kernel then evicts what
# others have read, and waits. With O_DIRECT the device fetches the bytes itself; a save of 768 MiB to ext4 takes
# 0.6 of the time (median of five). Place in the file, place in memory and size must be whole blocks, and tensors
# begin anywhere. So whole blocks are put together in a small buffer that is used again and again; what is left at
# the ends of a range, less than a block, goes by way of the page cache. Ranges of both kinds never share a block,
# and so no page: to the kernel they are different parts of the file (open(2), O_DIRECT, warns of mixing them in
# one). A write by way of the page cache waits until nobody writes around it, and keeps others from it: some
# milliseconds each. So ends, and small writes, are put aside and written when the file is synced.
#
# Bytes so written are at the device when the call returns, which may still hold them in a cache of its own, and
# where they are is not noted durably: the sync does both, as ever.

BLOCK_BYTES: Final = 4096
"""A page, and a multiple of the blocks of all common disks."""


LEAST_BYTES: Final = 128 << 10
"""Of fewer bytes the copy into the page cache takes less time than a disk that answers at once."""


MOST_KEPT_BYTES: Final = 4 << 20
"""The bytes of a file that are put aside at most, before they are written without waiting for the sync."""


_STEP_BYTES: Final = 4 << 20
"""The bytes that one call writes: enough for a disk that works on many blocks at once, and fits in a cache."""


FILE_SYSTEMS: Final = frozenset({"ext4", "xfs"})
"""Those on which O_DIRECT does what is said above. (Others copy all the same, compress, or are on a network.)"""


def open_direct(path: str) -> int | None:
    """Return a descriptor that writes around the page cache, or None if the file system does not support it."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise


def new_block() -> memoryview:
    """Allocate a page-aligned buffer for :func:`put_together`."""
    return memoryview(mmap.mmap(-1, _STEP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def put_together(buffers: Iterable[memoryview], start: int, block: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the concatenated bytes of these buffers in parts with their file offsets, beginning at ``start``.

    Each part is assembled in ``block``. All parts but the first begin at a block boundary of the file.
    """
    filled, room = 0, -start % BLOCK_BYTES or block.nbytes
    for buffer in buffers:
        while buffer.nbytes:
            part = buffer[: room - filled]
            block[filled : filled + part.nbytes] = part
            filled, buffer = filled + part.nbytes, buffer[part.nbytes :]
            if filled == room:
                yield start, block[:filled]
                start, filled, room = start + filled, 0, block.nbytes
    if filled:
        yield start, block[:filled]
