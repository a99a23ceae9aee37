"""Tells from an exception what it was that broke."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

_COLLECTIVE = re.compile(
    r"gloo|nccl|hccl|xccl|connection (closed|reset|refused)|broken pipe|socket|process group|watchdog",
    re.IGNORECASE,
)
"""In what the backends of process groups raise; gloo raises nothing but a RuntimeError."""

_MEMORY = re.compile(r"out of memory|DefaultCPUAllocator|can.t allocate memory|not enough memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this process, or its device, has no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, dist.DistError) and _tells(_MEMORY, error)


def is_of_a_collective(error: BaseException) -> bool:
    """Whether ranks could not exchange what they had to; the cause may be on another rank."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _tells(_COLLECTIVE, error))


def _tells(pattern: re.Pattern[str], error: BaseException) -> bool:
    return pattern.search(str(error)) is not None
