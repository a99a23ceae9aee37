"""Refuses a load that memory will not hold, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from shardwise.errors import ConfigError, PlacementError
from shardwise.report.forecast_parts import RankForecast
from shardwise.report.sizes import in_bytes


@dataclass(frozen=True, slots=True)
class Available:
    """Free memory where a rank runs, in bytes; None for what nobody knows.

    ``pools`` are what host memory is taken from at once, with what each has left: the machine (named "") and the
    control groups with a limit. Ranks of one machine may share some of them. Empty, ``host_bytes`` is the
    machine's.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    pools: Mapping[str, int] = field(default_factory=dict)

    def by_pool(self) -> Mapping[str, int | None]:
        """What each pool has left; where none is known, the machine."""
        return self.pools or {"": self.host_bytes}


@dataclass(frozen=True, slots=True)
class RequireMemory:
    """Refuse a load that does not fit into the memory that is free, less ``reserve_bytes`` of each kind."""

    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        if self.reserve_bytes < 0:
            raise ConfigError(f"reserve_bytes={self.reserve_bytes} is negative; 0 lets a load use all that is free")


@dataclass(frozen=True, slots=True)
class TryAnyway:
    """Load whatever the forecast says of memory."""


MemoryCheck: TypeAlias = RequireMemory | TryAnyway
"""What to do about a load that does not fit into the memory that is free."""


def require_fits(forecast: RankForecast, available: Available, check: MemoryCheck) -> None:
    """Refuse a load that does not fit, before anything is read.

    Raises:
        PlacementError: naming the rank, what it needs, what there is, and what to do.
    """
    if isinstance(check, TryAnyway):
        return
    needs = (
        ("device", forecast.device_bytes, available.device_bytes),
        ("host", forecast.host_bytes, available.host_bytes),
    )
    faults = [
        f"{in_bytes(need)} of {kind} memory, of which {in_bytes(free)} is free"
        + (f" and {in_bytes(check.reserve_bytes)} is to stay so" if check.reserve_bytes else "")
        for kind, need, free in needs
        if free is not None and need > free - check.reserve_bytes
    ]
    if faults:
        raise PlacementError(
            f"rank {forecast.rank} needs {', and '.join(faults)}; load on more ranks, in a smaller dtype, or with "
            "the shards offloaded to the host (Sharding(offload_policy=CPUOffloadPolicy())); "
            "LoadOptions(memory_check=TryAnyway()) loads all the same"
        )
