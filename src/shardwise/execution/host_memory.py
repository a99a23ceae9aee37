"""Fresh memory for tensors on the CPU: in few large blocks, so that the system can give it out in huge pages.

[Note: First touch] Most of the time of a load from a warm page cache goes into the first touch of fresh memory,
page by page. A huge page is one fault instead of 512. But shards are small, many of them smaller than a huge page,
so they are laid side by side in blocks. Every tensor still has a storage of its own, of its own size, at its place
in the block: saving one, or asking for its bytes, sees nothing of its neighbours. A block is given back when the
last of its tensors is gone.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence

import torch

_BLOCK_BYTES = 64 << 20
"""A block ends with the tensor that brings it to this size: small enough that memory is given back in parts."""

_ALIGNMENT = 64
"""Where tensors begin, as in torch's own allocator."""


class HostMemory:
    """Memory for tensors of known sizes, handed out in their order.

    Memory: the sum of the sizes; no page is touched before it is written to.

    Args:
        sizes: bytes of each tensor.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._places = _laid_out(sizes)

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor, uninitialised."""
        block, start, nbytes = next(self._places)
        if block is None:
            return torch.empty(tuple(size), dtype=dtype, device="cpu")
        return torch.frombuffer(block, dtype=dtype, count=nbytes // dtype.itemsize, offset=start).view(tuple(size))


def _laid_out(sizes: Sequence[int]) -> Iterator[tuple[mmap.mmap | None, int, int]]:
    """(block, where in it, bytes) of each size; no block for what is empty."""
    group: list[int] = []
    total = 0
    for index, nbytes in enumerate(sizes):
        group.append(nbytes)
        total += _aligned(nbytes)
        if total < _BLOCK_BYTES and index + 1 < len(sizes):
            continue
        block = _block(total) if total else None
        start = 0
        for item in group:
            yield (block if item else None), start, item
            start += _aligned(item)
        group, total = [], 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _block(nbytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
