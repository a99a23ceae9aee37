"""At most one save at a time writes into a folder."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from shardwise.errors import StorageError
from shardwise.storage import StorageWriter

LOCK_FILE = "shardwise.saving"


def take_lock(writer: StorageWriter, token: str) -> None:
    """Mark the folder as being saved to by this process.

    A mark left by a process of this machine that is gone is taken over. Object stores cannot tell who came first:
    nothing is marked there.

    Raises:
        StorageError: another save is going on, or its process died on another machine.
    """
    if not writer.policy.has_random_writes:
        return
    mark = {"host": socket.gethostname(), "process": os.getpid(), "born": _born(os.getpid()), "token": token}
    if LOCK_FILE in writer.list():
        _refuse_unless_dead(writer)
        writer.remove(LOCK_FILE)
    writer.create(LOCK_FILE, 0)  # an error when somebody else was faster
    writer.replace(LOCK_FILE, json.dumps(mark | {"since": time.time()}).encode())


def release_lock(writer: StorageWriter) -> None:
    """Take the mark away."""
    if writer.policy.has_random_writes:
        writer.remove(LOCK_FILE)


def _refuse_unless_dead(writer: StorageWriter) -> None:
    try:
        mark = json.loads(writer.read(LOCK_FILE) or b"")
        host, process, born = str(mark["host"]), int(mark["process"]), str(mark["born"])
    except (ValueError, KeyError, TypeError):
        host, process, born = "unknown", 0, ""
    if host == socket.gethostname() and process and _born(process) != born:
        return
    raise StorageError(
        f"{writer.root}: another save is writing here (process {process} on {host}); wait for "
        "it, or save to another "
        f"directory. If that process is gone, remove {LOCK_FILE} from the directory"
    )


def _born(process: int) -> str:
    """When a process of this machine began, in ticks since the machine did; "" where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        return "alive"
    return "alive"
