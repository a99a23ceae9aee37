"""A limit on memory that the kernel enforces: a memory cgroup of one process."""

import contextlib
import os
import uuid
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_PREFIX = "shardwise-benchmark-"


def why_not() -> str | None:
    """Why no limit can be set here; None when it can."""
    try:
        group = _create()
    except OSError as error:
        return f"no memory cgroup can be made: {error}"
    group.rmdir()
    return None


def enter(limit_bytes: int) -> str:
    """Move this process into a new group with this limit; its folder.

    What the process holds already stays charged to its old group: the limit is on what it allocates from now on,
    pages of files that it is the first to read included (those are given up when it gets tight). Beyond the limit
    the kernel kills the process.
    """
    group = _create()
    limit = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
    (group / limit).write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    return str(group)


def clean_up() -> None:
    """Remove the groups of processes that have ended."""
    for root in (_V1, _V2):
        for group in root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                group.rmdir()


def _create() -> Path:
    root = _V1 if (_V1 / "memory.limit_in_bytes").exists() else _V2
    group = root / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    group.mkdir()
    if not any((group / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        group.rmdir()
        raise OSError(f"{root} has no memory controller for new groups")
    return group
