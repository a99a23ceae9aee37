"""Which machine this is, and whose processes can be seen from here; containers may share a host name."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_NAMESPACE = "/proc/self/ns/pid"


@cache
def boot() -> str:
    """This run of this machine's kernel: equal for all containers on it, another after it has started again.

    The host's name where the kernel does not say.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"host {socket.gethostname()}"


def process_space() -> str:
    """The processes whose numbers mean the same here: one kernel, one namespace (containers have their own)."""
    try:
        return f"{boot()}/{os.stat(_PROCESS_NAMESPACE).st_ino}"
    except OSError:
        return f"{boot()}/{socket.gethostname()}"
