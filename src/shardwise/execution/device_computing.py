"""Evaluation of blocks on an accelerator, with the bits of the CPU. See [Note: Bits of devices]."""

from collections.abc import Sequence
from functools import cache
from typing import cast

import torch

from shardwise.conversion.computed import ComputeTask, DeviceOperation
from shardwise.execution.staging import HostStaging

_NUMBERS = 1024
_SPREAD = 2_654_435_761
"""Its multiples, as bits, have all exponents and signs."""


@cache
def has_bits_of_cpu(device: torch.device) -> bool:
    """Return whether arithmetic of an accelerator has the CPU's bits. Tried once on each, which waits for it.

    Some flush subnormal numbers to zero, or divide approximately.
    """
    bits = torch.arange(_NUMBERS, dtype=torch.int64, device="cpu") * _SPREAD % (1 << 32) - (1 << 31)
    numbers = bits.to(torch.int32).view(torch.float32)
    expected, staging = _results(numbers), HostStaging(1 << 15, is_pinned=True)
    found = staging.stage(_results(staging.stage(numbers).to(device)))
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


def _results(numbers: torch.Tensor) -> torch.Tensor:
    """Return results of each operation that blocks use, with 0 for NaN."""
    others = numbers.flip(0)
    results = [
        numbers * others,
        numbers - others,
        numbers / others,
        numbers.clamp(min=1e-38).reciprocal(),
        numbers.bfloat16().float(),
        numbers.half().float(),
    ]
    found = torch.stack(results)
    return torch.where(found.isnan(), 0, found)


@torch.no_grad()
def evaluate_on_device(
    task: ComputeTask, values: Sequence[torch.Tensor], most_bytes: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the outputs of a block, and whether the CPU has to evaluate it. Waits for nothing."""
    outputs, is_bad = cast(DeviceOperation, task.operation).evaluate_on_device(task.block, values, most_bytes)
    return dict(outputs), is_bad
