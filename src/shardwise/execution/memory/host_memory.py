"""Allocates host memory for tensors in few large blocks, in the page size that is cheaper here and now.

[Note: First touch] Most of the time of a load from a warm page cache goes into the first touch of fresh memory,
page by page. A huge page is one fault instead of 512, and many small ones are cheaper when the system is asked for
them at once. But shards are small, many of them smaller than a huge page, so they are laid side by side in blocks.
Every tensor still has a storage of its own, of its own size, at its place in the block: saving one, or asking for
its bytes, sees nothing of its neighbours. A block is given back when the last of its tensors is gone. Which pages
is decided portion by portion ([Note: Looking at pages] in ``planning/loads/pages.py``).
"""

from __future__ import annotations

import bisect
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from shardwise.execution.memory.first_touch import PORTION_BYTES, begin_small, can_populate, populate
from shardwise.planning.loads.pages import HugePages, MeasuredPages, Pages, Way, Weighing
from shardwise.report.load_report import TouchedPages

_BLOCK_BYTES = 64 << 20
"""A block ends with the tensor that brings it to this size: small enough that memory is given back in parts."""

_ALIGNMENT = 64
"""Where tensors begin, as in torch's own allocator."""

_MOST_PORTIONS = 1 << 14
"""Each change from huge to small pages is an entry in the kernel's list of a process's memory; it takes 65,530."""


class HostMemory:
    """Memory for tensors of known sizes, handed out in their order.

    Memory: the sum of the sizes; little of it is touched before it is asked for by :meth:`touch`, or written to.

    Args:
        sizes: bytes of each tensor.
        pages: in which pages it is touched.
    """

    def __init__(self, sizes: Sequence[int], pages: Pages = MeasuredPages()) -> None:  # noqa: B008 - frozen
        self._lock = threading.Lock()
        self._cannot_look = pages == MeasuredPages() and not can_populate()
        self._weighing = Weighing(HugePages() if self._cannot_look else pages)
        self._blocks: list[_Slab] = []
        self._portion_bytes = _portion_bytes(sum(sizes))
        self._places = self._laid_out(sizes)

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor, uninitialised."""
        block, start, nbytes = next(self._places)
        if block is None:
            return torch.empty(tuple(size), dtype=dtype, device="cpu")
        return block.tensor(start, nbytes, dtype).view(tuple(size))

    def touch(self, address: int, nbytes: int) -> None:
        """Have pages behind these bytes, where they are of this memory. For any thread, right before it writes."""
        index = bisect.bisect_right(self._blocks, address, key=lambda block: block.address) - 1
        if index >= 0:
            block = self._blocks[index]
            block.touch(address - block.address, min(address + nbytes, block.stop) - block.address, self._populate)

    def touch_rest(self) -> None:
        """Have pages behind all that has been taken."""
        for block in self._blocks:
            block.touch(0, block.nbytes, self._populate)

    def report(self) -> TouchedPages:
        """In which pages this memory has been touched."""
        with self._lock:
            found = self._weighing.report()
        return replace(found, reason="since this kernel cannot tell what they cost") if self._cannot_look else found

    def _populate(self, address: int, nbytes: int) -> None:
        with self._lock:
            way = self._weighing.next() if nbytes == self._portion_bytes else Way.SMALL
        seconds = populate(address, nbytes, way)
        if nbytes == self._portion_bytes:  # the end of a block, which is no huge page, says nothing
            with self._lock:
                self._weighing.took(way, nbytes, seconds)

    def _laid_out(self, sizes: Sequence[int]) -> Iterator[tuple[_Slab | None, int, int]]:
        """(block, where in it, bytes) of each size; no block for what is empty."""
        group: list[int] = []
        total = 0
        for index, nbytes in enumerate(sizes):
            group.append(nbytes)
            total += _aligned(nbytes)
            if total < _BLOCK_BYTES and index + 1 < len(sizes):
                continue
            block = None
            if total:
                block = _Slab(total, self._portion_bytes)
                bisect.insort(self._blocks, block, key=lambda item: item.address)
            start = 0
            for item in group:
                yield (block if item else None), start, item
                start += _aligned(item)
            group, total = [], 0


class _Slab:
    """Anonymous memory that begins with a portion."""

    def __init__(self, nbytes: int, portion_bytes: int) -> None:
        self.nbytes = nbytes
        self._portion_bytes = portion_bytes
        self._memory = mmap.mmap(-1, nbytes + portion_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self.address = -(-start // portion_bytes) * portion_bytes
        self._offset = self.address - start
        begin_small(self.address, nbytes)
        self._touched = bytearray(-(-nbytes // portion_bytes))
        self._lock = threading.Lock()

    @property
    def stop(self) -> int:
        return self.address + self.nbytes

    def tensor(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat, of these bytes of the block."""
        return torch.frombuffer(
            self._memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=self._offset + start
        )

    def touch(self, start: int, stop: int, populate: Callable[[int, int], None]) -> None:
        """Have the portions that hold these bytes populated, each by one thread."""
        size = self._portion_bytes
        for number in range(start // size, -(-stop // size)):
            with self._lock:
                is_touched, self._touched[number] = self._touched[number], 1
            if not is_touched:
                first = number * size
                populate(self.address + first, min(size, self.nbytes - first))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _portion_bytes(nbytes: int) -> int:
    huge_pages = -(-nbytes // (PORTION_BYTES * _MOST_PORTIONS))
    return PORTION_BYTES * max(1, huge_pages)
