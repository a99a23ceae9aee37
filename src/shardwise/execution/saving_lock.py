"""At most one save at a time writes into a folder.

[Note: The mark of a save] A save marks its folder with a file that only one process can create. The mark says who
made it, so that one left by a process that is gone can be told and taken over. A mark is filled just after it is
created: one that cannot be read yet is looked at again for a moment, then it was left by whoever died in between.
Taking over is a rename, of which only one of several succeeds. A mark may also be removed by hand, too early. So
whoever made it looks before the commit whether it is still there: two saves may then write, but not both commit.

Of a process on another machine nobody can tell whether it lives. A mark may be renewed while its save goes on (its
time of modification changes, again and again), and says so. Where such a mark does not change for as long as a
patient watcher looks, it was left. Clocks are not compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.errors import StorageError
from shardwise.storage import StorageWriter
from shardwise.storage.writer import INCOMPLETE

LOCK_FILE = "shardwise.saving"

_FILLED_S = 2.0
"""After so long a mark that is not filled is that of a process that died."""

_LOOK_S = 0.1

RENEWED_S = 5.0
"""Between two renewals of a mark."""

_MISSED = 6
"""After so many renewals that did not come a mark counts as left."""


def take_lock(writer: StorageWriter, token: str, *, renewed_s: float = 0.0) -> None:
    """Mark the folder as being saved to by this process, for the save that ``token`` names.

    A mark left by a process of this machine that is gone is taken over, and one from another machine that is not
    renewed as it says (which takes half a minute to find out). Object stores cannot tell who came first: nothing is
    marked there. With ``renewed_s`` this mark is going to be renewed as often, by a :class:`Renewal`.

    Raises:
        StorageError: another save is going on, or its process died on another machine.
    """
    if not writer.policy.has_random_writes:
        return
    _take_over(writer)
    process = os.getpid()
    mark = {"host": socket.gethostname(), "process": process, "born": _born(process), "token": token}
    mark["renewed_s"] = renewed_s
    content = json.dumps(mark | {"since": time.time()}).encode()
    try:
        writer.create(LOCK_FILE, len(content))
    except StorageError as error:
        found = writer.read(LOCK_FILE)
        if found is not None:
            raise _refusal(writer, _Mark.of(found)) from error
        raise
    try:
        writer.write(LOCK_FILE, 0, [memoryview(content)])
        writer.sync(LOCK_FILE)
    except BaseException:
        with contextlib.suppress(StorageError):
            writer.remove(LOCK_FILE)
        raise
    require_lock(writer, token)


def require_lock(writer: StorageWriter, token: str) -> None:
    """Every rank can look whether it sees the mark of this save.

    Raises:
        StorageError: it is another one's, or not there.
    """
    if not writer.policy.has_random_writes:
        return
    found = writer.read(LOCK_FILE)
    if found is None:
        raise StorageError(
            f"{writer.root}: {LOCK_FILE}, which the first rank made there, is not to be seen; save to a directory "
            "that all ranks share, and leave that file alone meanwhile"
        )
    mark = _Mark.of(found)
    if mark is None or mark.token != token:
        raise _refusal(writer, mark)


def release_lock(writer: StorageWriter, token: str) -> None:
    """Take the mark of this save away, if it is there."""
    if not writer.policy.has_random_writes:
        return
    mark = _Mark.of(writer.read(LOCK_FILE) or b"")
    if mark is not None and mark.token == token:
        writer.remove(LOCK_FILE)


class Renewal:
    """Renews the mark in a local folder, from the beginning of a block to its end, on a thread of its own."""

    def __init__(self, root: str | os.PathLike[str], renewed_s: float) -> None:
        self._file = Path(root, LOCK_FILE)
        self._renewed_s = renewed_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="shardwise-mark", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._ended.wait(self._renewed_s):
            with contextlib.suppress(OSError):  # it was taken over: whoever commits finds out
                os.utime(self._file)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Who saves: a process, when it was born, on a host; and which of its saves. ``renewed_s`` is 0 for never."""

    host: str
    process: int
    born: str
    token: str
    renewed_s: float

    @classmethod
    def of(cls, content: bytes) -> _Mark | None:
        """What a mark says; None when it says nothing."""
        try:
            found = json.loads(content)
            who = str(found["host"]), int(found["process"]), str(found["born"]), str(found["token"])
            return cls(*who, min(float(found.get("renewed_s", 0.0)), RENEWED_S))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    @property
    def is_left(self) -> bool:
        """Whether the process is known to be gone."""
        return self.host == socket.gethostname() and self.process > 0 and _born(self.process) != self.born


def _take_over(writer: StorageWriter) -> None:
    """Remove a mark that was left.

    Raises:
        StorageError: there is one that was not.
    """
    deadline = time.monotonic() + _FILLED_S
    content = writer.read(LOCK_FILE)
    while content is not None and _Mark.of(content) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        content = writer.read(LOCK_FILE)
    if content is None:
        return
    mark = _Mark.of(content)
    if mark is not None and not mark.is_left and not _is_silent(writer, mark):
        raise _refusal(writer, mark)
    aside = f".{LOCK_FILE}.{secrets.token_hex(4)}{INCOMPLETE}"
    try:
        writer.rename(LOCK_FILE, aside)
    except StorageError as error:
        if writer.read(LOCK_FILE) is not None:
            raise
        raise _refusal(writer, mark) from error  # somebody else was faster
    if writer.read(aside) != content:
        writer.rename(aside, LOCK_FILE)
        raise _refusal(writer, None)
    writer.remove(aside)


def _is_silent(writer: StorageWriter, mark: _Mark) -> bool:
    """Whether a mark of another machine that is to be renewed has not been for a while. Waits for that while."""
    if mark.renewed_s <= 0 or mark.host == socket.gethostname():
        return False
    first, deadline = _changed_at(writer), time.monotonic() + _MISSED * mark.renewed_s
    while first is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        if _changed_at(writer) != first:
            return False
    return first is not None


def _changed_at(writer: StorageWriter) -> int | None:
    """When the mark was last changed, by the clock of the file system; None where there is none."""
    try:
        with open(os.path.join(writer.root, LOCK_FILE), "rb") as file:  # which asks a network file system anew
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _refusal(writer: StorageWriter, mark: _Mark | None) -> StorageError:
    who = "it has not said who it is" if mark is None else f"process {mark.process} on {mark.host}"
    return StorageError(
        f"{writer.root}: another save is writing here ({who}); wait for it, or save to another directory. If that "
        f"process is gone, remove {LOCK_FILE} from the directory"
    )


def _born(process: int) -> str:
    """When a process of this machine began, in ticks since the machine did; "" where there is none that lives."""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else numbers[18]
    except (OSError, IndexError, ValueError):
        pass
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except OSError:
        return "alive"
    return "alive"
