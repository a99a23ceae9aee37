"""Finds out whether an accelerator computes the bits of the CPU.

See [Note: Bits of devices] in ``core/computed.py``.
"""

from functools import cache

import torch

from shardwise.transfer.staging import HostStaging

_NUMBERS = 1024
_SPREAD = 2_654_435_761
"""Multiples of it, as bits of float32, spread over all exponents and both signs."""


@cache
def matches_cpu_bitwise(device: torch.device) -> bool:
    """Return whether an accelerator's results are bitwise the CPU's. Tried once for each, which synchronizes it.

    Some flush subnormal numbers to zero, or divide approximately.
    """
    bits = torch.arange(_NUMBERS, dtype=torch.int64, device="cpu") * _SPREAD % (1 << 32) - (1 << 31)
    numbers = bits.to(torch.int32).view(torch.float32)
    expected, staging = _results(numbers), HostStaging(1 << 15, is_pinned=True)
    results = staging.stage(_results(staging.stage(numbers).to(device)))
    # As integers, which tell -0.0 from 0.0.
    return torch.equal(results.view(torch.int32), expected.view(torch.int32))


def _results(numbers: torch.Tensor) -> torch.Tensor:
    """Return results of each operation that blocks use, with 0 for NaN."""
    others = numbers.flip(0)
    results = [  # each (_NUMBERS,), float32
        numbers * others,
        numbers - others,
        numbers / others,
        numbers.clamp(min=1e-38).reciprocal(),
        numbers.bfloat16().float(),
        numbers.half().float(),
    ]
    stacked = torch.stack(results)
    return torch.where(stacked.isnan(), 0, stacked)
