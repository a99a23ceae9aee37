"""Writes that bypass the page cache (O_DIRECT): descriptors, aligned buffers, limits."""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Final

# [Note: Around the page cache]
#
# A write through the page cache needs a page of memory for every page of the file, copies into it, and reaches the
# disk only at the sync. For a model this is soon as much memory as there is: the kernel then evicts what others
# have read, and waits. With O_DIRECT the device fetches the bytes itself. With free memory, on ext4, a merge of 3.4
# GB takes 0.45 of the time, a first checkpoint 0.3, later ones 0.7, and a save 0.86 (benchmarks/README.md).
# File offset, memory address and size must be multiples of a block, and tensors begin
# anywhere. So full blocks are assembled in a small buffer that is reused; the ends of a range, less than a block
# each, go through the page cache. Ranges of both kinds never share a block, and so no page: to the kernel they are
# different parts of the file (open(2), O_DIRECT, warns of mixing them in one). A buffered write waits until all
# direct writes have ended, and blocks others: some milliseconds each. So ends, and small writes, are deferred until
# the file is synced.
#
# Bytes written directly are at the device when the call returns, which may still hold them in its own cache, and
# their location is not recorded durably: the sync does both, as always.

BLOCK_BYTES: Final = 4096
"""A page, and a multiple of the blocks of all common disks."""


MIN_DIRECT_BYTES: Final = 128 << 10
"""Smaller writes go through the page cache: the copy takes less time than a request to the disk."""


MAX_DEFERRED_BYTES: Final = 4 << 20
"""The maximum number of deferred bytes of a file, before they are written without waiting for the sync."""


_STEP_BYTES: Final = 4 << 20
"""The bytes of one call: enough for a disk that works on many blocks at once, and small enough for a cache."""


FILE_SYSTEMS: Final = frozenset({"ext4", "xfs"})
"""File systems on which O_DIRECT behaves as described. (Others copy anyway, compress, or are on a network.)"""


def open_direct(descriptor: int) -> int | None:
    """Return a second descriptor of a file, which writes around the page cache, or None if there cannot be one."""
    try:
        # Not by its name, which may be that of another save's file by now. /proc leads to the file itself.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):  # the file system has no such writes, or there is no /proc
            return None
        raise


def new_buffer() -> memoryview:
    """Allocate a page-aligned buffer for :func:`assemble`.

    It is in a huge page if the kernel has one, so that a request to the disk has few parts. Checkpoints of 1.4 GB
    by four ranks take 0.8 of the time.
    """
    memory = mmap.mmap(-1, _STEP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def assemble(buffers: Iterable[memoryview], start: int, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the concatenated bytes of these buffers in chunks with their file offsets, beginning at ``start``.

    Each chunk is assembled in ``buffer``. All chunks but the first begin at a block boundary of the file.
    """
    # From byte 5000 on, the first chunk has 3192 bytes, up to byte 8192. All others have the size of the buffer.
    filled, size = 0, -start % BLOCK_BYTES or buffer.nbytes
    for source in buffers:
        # A buffer may end within a chunk, and a chunk may take several buffers.
        while source.nbytes:
            piece = source[: size - filled]
            buffer[filled : filled + piece.nbytes] = piece
            filled, source = filled + piece.nbytes, source[piece.nbytes :]
            if filled == size:
                yield start, buffer[:filled]
                start, filled, size = start + filled, 0, buffer.nbytes
    if filled:
        yield start, buffer[:filled]
