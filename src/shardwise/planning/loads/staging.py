"""Divides the budget of host memory among the workers of a load."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planning.loads.schedule import SEGMENT_ALIGNMENT

_HOST_BYTES = 4 << 20
"""What one worker stages at most for tensors in host memory: it stays in the cache between read and copy."""

_DEVICE_BYTES = 32 << 20
"""The same for tensors on an accelerator: large enough that the transfer runs at full speed."""

_LEAST_BYTES = 1 << 18
"""With less than this a worker is not worth its thread."""

_DEVICE_SLABS = 2
"""One is on its way to the device while the other is read into."""


@dataclass(frozen=True, slots=True)
class Staging:
    """The number of workers, the bytes that each can stage at once, and the host memory that all of it takes."""

    workers: int
    nbytes: int
    total_bytes: int


def staging_within(budget_bytes: int, concurrency: int, *, on_device: bool) -> Staging:
    """At most ``concurrency`` workers with staging within a budget, for tensors on an accelerator or the host."""
    slabs = _DEVICE_SLABS if on_device else 1
    workers = max(1, min(concurrency, budget_bytes // (slabs * _LEAST_BYTES)))
    share = min(_DEVICE_BYTES if on_device else _HOST_BYTES, budget_bytes // (slabs * workers))
    nbytes = max(SEGMENT_ALIGNMENT, share // SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT)
    # torch rounds pinned blocks up to a power of two; a slab that is one wastes nothing.
    if on_device:
        nbytes = 1 << (nbytes.bit_length() - 1)
    return Staging(workers, nbytes, slabs * workers * nbytes)


@dataclass(frozen=True, slots=True)
class ComputingShare:
    """How a budget is shared where values are computed: half is for blocks, half for the staging of their inputs.

    ``most_bytes`` are those of a block that each worker can make beside the others; one that cannot be cut so small
    is made alone.
    """

    staging_bytes: int
    most_bytes: int

    @classmethod
    def of(cls, budget_bytes: int, concurrency: int) -> ComputingShare:
        half = budget_bytes // 2
        return cls(half, max(1, half // staging_within(half, concurrency, on_device=False).workers))
