"""How much memory is free where this rank runs, and the least that a call can work with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardwise.errors import ConfigError
from shardwise.planning.forecasts.own_forecast import Available
from shardwise.storage.machine import GROUPS, OWN_GROUP, ControlGroup, control_groups, text_of

if TYPE_CHECKING:
    import torch


_MEMINFO = Path("/proc/meminfo")
_NO_LIMIT = 1 << 60
"""A limit of this size or more is none (the first version of control groups writes a huge number)."""


def available_memory(home: torch.device) -> Available:
    """Free memory of the host, and of the accelerator, in bytes; None where it cannot be known.

    Of an accelerator: with what torch has taken and not given to a tensor, which it gives to the next.
    Of the host: what can be had without swapping, and not more than the control groups of this process allow.
    """
    device_bytes = None
    if home.type != "cpu":
        from shardwise.models.torch_words import free_memory

        device_bytes = free_memory(home)
    pools = host_pools()
    return Available(device_bytes, min(pools.values(), default=None), pools)


def host_pools(meminfo: Path = _MEMINFO, own_group: Path = OWN_GROUP, groups: Path = GROUPS) -> dict[str, int]:
    """Free bytes of the machine, named "", and of the control groups that limit this process, by their folders."""
    pools = _rooms(own_group, groups)
    system = _system(meminfo)
    return pools if system is None else {"": system, **pools}


def _system(meminfo: Path) -> int | None:
    for line in text_of(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _rooms(own_group: Path, groups: Path) -> dict[str, int]:
    """What each control group that limits the memory of this process has left."""
    found = ((group.folder, _room(group)) for group in control_groups("memory", own_group, groups))
    return {str(folder): room for folder, room in found if room is not None}


def _room(group: ControlGroup) -> int | None:
    limit, usage = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if group.is_of_first_version
        else ("memory.max", "memory.current")
    )
    most, used = group.number(limit), group.number(usage)
    if most is None or used is None or most >= _NO_LIMIT:
        return None
    statistics = dict(line.split() for line in group.text("memory.stat").splitlines())
    cache = sum(int(statistics.get(name, 0)) for name in ("inactive_file", "active_file"))
    return max(0, most - used + cache)  # the page cache gives way


_PAGE_BYTES: Final = 4096


def require_budget(budget_bytes: int) -> None:
    """Raise for a budget, of any call, that no page goes into.

    Raises:
        ConfigError: naming it.
    """
    if not isinstance(budget_bytes, (int, float)):
        raise ConfigError(f"budget_bytes={budget_bytes!r} is no number of bytes; pass one, as in 1 << 30")
    if budget_bytes < _PAGE_BYTES:
        raise ConfigError(f"budget_bytes={budget_bytes} is less than a page ({_PAGE_BYTES})")
