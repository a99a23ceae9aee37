"""Checksums of tensors, equal on every device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from shardwise.execution.memory import memory_of
from shardwise.models.view import raw_bytes
from shardwise.planning.fingerprints import LANES, MODULUS, SPAN_BYTES, block_weight, fingerprint, lane_weights
from shardwise.tensors import row_blocks


def as_bytes(value: object) -> torch.Tensor:
    """A number, or text, as a tensor that is compared like any other."""
    return torch.from_numpy(np.frombuffer(repr(value).encode(), dtype=np.uint8).copy())


_BLOCK_BYTES = 64 << 20
"""Of what is copied, or taken at once on an accelerator. A multiple of what a block of a fingerprint has."""


def checksum(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's elements, in their order: see :func:`checksums`."""
    return checksums([tensor])[0]


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The fingerprint of each tensor's elements, in their order: the same on every device ([Note: Fingerprints]).

    Memory: on the host nothing, or 64 MiB for tensors that are not contiguous, on an accelerator twice that much.
    """
    found = [_on_host(tensor) if tensor.device.type == "cpu" else _on_device(tensor) for tensor in tensors]
    moved = [value for value in found if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack([value.to(moved[0].device) for value in moved]).tolist() if moved else ())
    return [(next(numbers) if isinstance(value, torch.Tensor) else value) % MODULUS for value in found]


def _on_host(tensor: torch.Tensor) -> int:
    total, start = 0, 0
    for run in runs_of(tensor, tensor.nbytes if tensor.is_contiguous() else _BLOCK_BYTES):
        total += fingerprint(memory_of(run), start)
        start += run.numel()
    return total


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """One number, on the tensor's device. Integers wrap around there as they do modulo 2**64."""
    lanes = _lanes(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for run in runs_of(tensor, _BLOCK_BYTES):
        first, head = divmod(start, SPAN_BYTES)
        padded = torch.nn.functional.pad(run, (head, -(head + run.numel()) % SPAN_BYTES))
        words = padded.view(torch.int64).view(-1, LANES)
        weights = [_signed(block_weight(first + number)) for number in range(len(words))]
        total += ((words * lanes).sum(1) * torch.tensor(weights, device=words.device)).sum()
        start += run.numel()
    return total


@cache
def _lanes(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(lane_weights().view("<i8")).to(device)


def _signed(weight: int) -> int:
    return weight - MODULUS if weight >= MODULUS // 2 else weight


def runs_of(tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    """The elements in order, as flat bytes, so many at a time."""
    if not tensor.numel():
        return
    if tensor.is_contiguous() and tensor.nbytes <= nbytes:
        yield raw_bytes(tensor)
        return
    for box in row_blocks(tensor.shape, max(1, nbytes // tensor.element_size())):
        part = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
        yield raw_bytes(tensor[part])
