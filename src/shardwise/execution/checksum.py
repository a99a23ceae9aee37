"""A number that tells tensors apart, computed where they are."""

from __future__ import annotations

import torch

from shardwise.models.view import raw_bytes

_BLOCK = 1 << 20
_WORD_BYTES = 8
_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3


def checksum(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's elements, in their order: the same on every device.

    A weighted sum of 64-bit words with odd weights, so that no change of one word goes unseen. It is for tensors
    that are equal or have nothing to do with each other, not against forgery.
    Memory: blocks of 8 MiB; a copy of a tensor that is not contiguous.
    """
    flat = raw_bytes(tensor)
    if not flat.numel():
        return 0
    words_at_once = min(_BLOCK, -(-flat.numel() // _WORD_BYTES))
    weights = torch.arange(1, 2 * words_at_once, 2, dtype=torch.int64, device=flat.device)
    total = 0
    for start in range(0, flat.numel(), _BLOCK * _WORD_BYTES):
        block = flat[start : start + _BLOCK * _WORD_BYTES]
        rest = block.numel() % _WORD_BYTES
        if rest or block.storage_offset() % _WORD_BYTES:
            block = torch.nn.functional.pad(block, (0, -block.numel() % _WORD_BYTES))
        words = block.view(torch.int64)
        total = (total * _PRIME + int((words * weights[: words.numel()]).sum())) & _MASK
    return total
