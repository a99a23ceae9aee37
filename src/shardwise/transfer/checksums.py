"""Checksums of tensors, equal on every device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from shardwise.fsdp.named_tensors import raw_bytes
from shardwise.fsdp.torch_private import synchronize_streams, to_device
from shardwise.transfer.fingerprints import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    MODULUS,
    block_weight,
    fingerprint,
    word_weights,
)
from shardwise.transfer.staging import HostStaging, as_memoryview, row_slices


def as_bytes(value: object) -> torch.Tensor:
    """Return a number, or text, as a tensor of bytes, to be compared like other tensors."""
    return torch.from_numpy(np.frombuffer(repr(value).encode(), dtype=np.uint8).copy())


_CHUNK_BYTES = 64 << 20
"""Bytes that are copied, or processed at once on an accelerator: a multiple of a fingerprint's block."""


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the fingerprint of each tensor's elements, in row-major order.

    See [Note: Fingerprints] in ``transfer/fingerprints.py``.

    Memory: on the host none, or 64 MiB for tensors that are not contiguous, on an accelerator twice that much.
    """
    sums = [_on_host(tensor) if tensor.device.type == "cpu" else _on_device(tensor) for tensor in tensors]
    on_device = [value for value in sums if isinstance(value, torch.Tensor)]
    # One copy to the host for all, after the kernels of all have been queued. It waits for the device.
    if on_device:
        stacked = torch.stack([value.to(on_device[0].device) for value in on_device])
        numbers = iter(HostStaging(stacked.nbytes, is_pinned=True).stage(stacked).tolist())
        sums = [next(numbers) if isinstance(value, torch.Tensor) else value for value in sums]
    return [int(value) % MODULUS for value in sums]


def _on_host(tensor: torch.Tensor) -> int:
    total, start = 0, 0
    # Contiguous memory is read in place. Anything else is copied, chunk by chunk.
    run_bytes = tensor.nbytes if tensor.is_contiguous() else _CHUNK_BYTES
    for run in _runs(tensor, run_bytes):
        total += fingerprint(as_memoryview(run), start)
        start += run.numel()
    return total


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a scalar on the tensor's device. Overflow of int64 is arithmetic modulo 2**64."""
    weights_in_block = _word_weights(tensor.device)  # (BLOCK_WORDS,)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for run in _runs(tensor, _CHUNK_BYTES):
        # A run may begin within a block. Zeros before and after it add nothing to the sum.
        first, head = divmod(start, BLOCK_BYTES)
        padded = torch.nn.functional.pad(run, (head, -(head + run.numel()) % BLOCK_BYTES))
        words = padded.view(torch.int64).view(-1, BLOCK_WORDS)  # (blocks, words of a block)
        # The block's weight is applied to the sum of its words. torch lacks arithmetic of uint64, and products
        # of int64 have the same bits.
        weights = np.array([block_weight(first + number) for number in range(len(words))], np.uint64)
        on_device = to_device(torch.from_numpy(weights.view(np.int64)), words.device)
        total += ((words * weights_in_block).sum(1) * on_device).sum()
        start += run.numel()
    return total


@cache
def _word_weights(device: torch.device) -> torch.Tensor:
    weights = to_device(torch.from_numpy(word_weights().view("<i8")), device)
    synchronize_streams([weights])  # other streams use it
    return weights


def _runs(tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield the elements in order, as flat bytes, in runs of at most ``nbytes``."""
    for rows in row_slices(tensor.shape, nbytes // tensor.element_size()):
        yield raw_bytes(tensor[rows])
