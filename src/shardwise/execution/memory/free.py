"""How much memory is free where this rank runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.planning.forecasts.memory_check import Available

if TYPE_CHECKING:
    import torch

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""A limit of this size or more is none (the first version of control groups writes a huge number)."""


def available_memory(home: torch.device) -> Available:
    """Free memory of the host, and of the accelerator, in bytes; None where it cannot be known.

    Of an accelerator: with what torch has taken and not given to a tensor, which it gives to the next.
    Of the host: what can be had without swapping, and not more than the control groups of this process allow.
    """
    device_bytes = None
    if home.type != "cpu":
        from shardwise.models.accelerators import free_memory

        device_bytes = free_memory(home)
    pools = host_pools()
    return Available(device_bytes, min(pools.values(), default=None), pools)


def host_pools(meminfo: Path = _MEMINFO, own_group: Path = _OWN_GROUP, groups: Path = _GROUPS) -> dict[str, int]:
    """Free bytes of the machine, named "", and of the control groups that limit this process, by their folders."""
    pools = _rooms(own_group, groups)
    system = _system(meminfo)
    return pools if system is None else {"": system, **pools}


def _system(meminfo: Path) -> int | None:
    for line in _text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _rooms(own_group: Path, groups: Path) -> dict[str, int]:
    """What each control group that limits the memory of this process has left."""
    rooms: dict[str, int] = {}
    for line in _text(own_group).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root, limit, usage = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            root, limit, usage = groups, "memory.max", "memory.current"
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            room = _room(place, limit, usage)
            if room is not None:
                rooms[str(place)] = room
            if place == root:
                break
    return rooms


def _room(folder: Path, limit: str, usage: str) -> int | None:
    most, used = _number(folder / limit), _number(folder / usage)
    if most is None or used is None or most >= _NO_LIMIT:
        return None
    statistics = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    cache = sum(int(statistics.get(name, 0)) for name in ("inactive_file", "active_file"))
    return max(0, most - used + cache)  # the page cache gives way


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
