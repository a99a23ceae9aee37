"""Marks a folder, so that at most one save at a time writes into it.

[Note: The mark of a save] A save marks its folder with a file. The lock file identifies its holder, so that one
left by a dead process can be detected and taken over.

On a file system it is a file of one name, which only one process can create. It is filled just after: one that
cannot be read yet is looked at again for a moment, then it was left by whoever died in between. Taking over is a
rename, of which only one of several succeeds. An object store may have no file that only one can create (it depends
on the store, its age, and the client), and removes whatever has a name. There every save has a mark of a name of
its own: it makes it, and then lists the folder. Of two saves that begin at once, at least the later one sees the
other and gives up. A lock that is taken over is removed by its own name, so never another's by mistake. The store
must list written files consistently, as S3, Google's, Azure's, HDFS and SFTP do. Otherwise the lock is advisory.

Liveness of a process can be checked if its id has the same meaning here: same kernel and same PID namespace
(containers may share a host name, and even a folder, but not these). For other processes it is unknown. So a lock
is renewed during its save, and contains the interval. On a file system its modification time changes, on a store
that of a small companion file. If it does not change for a multiple of that interval, the lock is stale. Clocks are
not compared.

A process has a list of its own saves in progress. A lock of its own for another save is stale, for example if a
disk error prevented its removal. Any later save of this process takes it over.

A mark is no fence by itself: it may be removed by hand, too early, or its process may have been stopped for long.
So the holder checks it again before and after the commit. The file that the last step renames is removed by the
next save before that reads the folder's state, so that the step fails ([Note: Asked again] in
``execution/committing.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from enum import Enum

from shardwise.errors import StorageError
from shardwise.storage.contract import INCOMPLETE, StorageWriter
from shardwise.storage.machine import born, process_space

LOCK_FILE = "shardwise.saving"

_OWN = re.compile(rf"{re.escape(LOCK_FILE)}\.([0-9a-f]{{8}})")
"""Marks on an object store."""

_BEAT = ".beat"
"""Ends the name of the file that is written again and again beside such a mark."""

_FILLED_S = 2.0
"""After so long a mark that is not filled is that of a process that died."""

_LOOK_S = 0.1

RENEWED_S = 5.0
"""Between two renewals of a mark."""

_MISSED = 6
"""After so many renewals that did not come a mark counts as left."""


_GOING_ON: set[str] = set()
"""The tokens of the saves of this process that hold a mark, or are about to."""


class LockHolder(Enum):
    """Holder of the lease."""

    OURS = "this save's"
    NOBODYS = "nobody's"
    ANOTHERS = "another save's"


def new_save_id() -> str:
    """Return a random id for a save, its lease and its files."""
    return secrets.token_hex(4)


class HeldLock:
    """The mark of this save, which is renewed until it is released."""

    def __init__(self, writer: StorageWriter, save_id: str) -> None:
        self._writer = writer
        self.save_id = save_id
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="shardwise-mark", daemon=True)
        self._thread.start()

    def whose(self) -> LockHolder:
        """Return the current lease holder."""
        return read_lock(self._writer, self.save_id)

    def require(self) -> None:
        """Raises StorageError when the mark is not this save's any more."""
        require_lock(self._writer, self.save_id)

    def release(self) -> None:
        """Remove the lock, if it exists. Not durable before the names are synced. May be called again.

        Raises:
            StorageError: the mark cannot be removed. The save is over all the same, and the mark counts as left.
        """
        self._ended.set()
        self._thread.join()
        try:
            release_lock(self._writer, self.save_id)
        finally:
            _GOING_ON.discard(self.save_id)

    def _renew(self) -> None:
        count = 0
        while not self._ended.wait(RENEWED_S):
            with contextlib.suppress(OSError, StorageError):  # whoever commits finds out
                if read_lock(self._writer, self.save_id) is not LockHolder.OURS:
                    continue  # it was taken over
                count += 1
                if _has_one_name(self._writer):
                    os.utime(os.path.join(self._writer.root, LOCK_FILE))
                else:
                    self._writer.replace(_name(self._writer, self.save_id) + _BEAT, str(count).encode())


def take_lock(writer: StorageWriter, save_id: str) -> HeldLock:
    """Mark the folder as being saved to by this process, for the save that ``save_id`` (8 hex digits) names.

    A lock is taken over if its process on this machine is dead, if it belongs to a finished save of this process,
    or if it comes from another machine or container and is not renewed at its interval (which takes half a minute
    to detect).

    Raises:
        StorageError: another save is in progress, or its process died on another machine that does not renew locks.
    """
    _GOING_ON.add(save_id)
    try:
        if _has_one_name(writer):
            _create(writer, save_id)
        else:
            _list_own(writer, save_id)
        require_lock(writer, save_id)
        return HeldLock(writer, save_id)
    except BaseException:
        _GOING_ON.discard(save_id)
        raise


def read_lock(writer: StorageWriter, save_id: str) -> LockHolder:
    """Return the current lease holder as this writer sees it.

    On an object store other saves may be acquiring the lease as well.
    """
    found = writer.read(_name(writer, save_id))
    if found is None:
        if _has_one_name(writer) or not _marks(writer.list()):
            return LockHolder.NOBODYS
        return LockHolder.ANOTHERS
    mark = _SaverMark.of(found)
    return LockHolder.OURS if mark is not None and mark.save_id == save_id else LockHolder.ANOTHERS


def require_lock(writer: StorageWriter, save_id: str) -> None:
    """Every rank can look whether it sees the mark of this save.

    Raises:
        StorageError: it is another one's, or not there.
    """
    file = _name(writer, save_id)
    found = writer.read(file)
    if found is None:
        raise StorageError(
            f"{writer.root}: {file}, which the first rank made there, is not to be seen. Save to a directory "
            "that all ranks share, and leave that file alone meanwhile"
        )
    mark = _SaverMark.of(found)
    if mark is None or mark.save_id != save_id:
        raise _refusal(writer, file, mark)


def release_lock(writer: StorageWriter, save_id: str) -> None:
    """Take the mark of this save away, if it is there."""
    file = _name(writer, save_id)
    mark = _SaverMark.of(writer.read(file) or b"")
    if mark is not None and mark.save_id == save_id:
        writer.remove(file)
    if not _has_one_name(writer):
        writer.remove(file + _BEAT)


def _has_one_name(writer: StorageWriter) -> bool:
    """Only one of several processes can create a file, and renaming it is one step."""
    return writer.policy.has_random_writes


def _name(writer: StorageWriter, save_id: str) -> str:
    return LOCK_FILE if _has_one_name(writer) else f"{LOCK_FILE}.{save_id}"


def _marks(files: Collection[str]) -> set[str]:
    return {file for file in files if _OWN.fullmatch(file)}


@dataclass(frozen=True, slots=True)
class _SaverMark:
    """Record of a lease: host, process, start time of the process, and id of the save.

    ``space`` identifies the PID namespace, "" for a lock of an older version. ``renewed_s`` is 0 for never.
    """

    host: str
    process: int
    born: str
    save_id: str
    renewed_s: float
    space: str = ""

    @classmethod
    def of(cls, content: bytes) -> _SaverMark | None:
        """Parse a lease file. Return None if it is not one."""
        try:
            found = json.loads(content)
            who = str(found["host"]), int(found["process"]), str(found["born"]), str(found["save_id"])
            renewed_s = min(float(found.get("renewed_s", 0.0)), RENEWED_S)
            return cls(*who, renewed_s, str(found.get("space", "")))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    @classmethod
    def own(cls, save_id: str) -> _SaverMark:
        process = os.getpid()
        return cls(socket.gethostname(), process, born(process), save_id, RENEWED_S, process_space())

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self) | {"since": time.time()}).encode()

    @property
    def is_from_here(self) -> bool:
        """True if its process id has the same meaning here."""
        return self.space == process_space() if self.space else self.host == socket.gethostname()

    @property
    def is_left(self) -> bool:
        """True if the process has certainly ended, or has finished this save."""
        if not self.is_from_here or self.process <= 0:
            return False
        is_over = self.process == os.getpid() and self.save_id not in _GOING_ON
        return is_over or born(self.process) != self.born


def _create(writer: StorageWriter, save_id: str) -> None:
    """The mark of one name, once a left one is gone."""
    _take_over(writer)
    content = _SaverMark.own(save_id).to_bytes()
    try:
        writer.create(LOCK_FILE, len(content))
    except StorageError as error:
        found = writer.read(LOCK_FILE)
        if found is not None:
            raise _refusal(writer, LOCK_FILE, _SaverMark.of(found)) from error
        raise
    try:
        writer.write(LOCK_FILE, 0, [memoryview(content)])
        writer.sync(LOCK_FILE)
    except BaseException:
        with contextlib.suppress(StorageError):
            writer.remove(LOCK_FILE)
        raise


def _take_over(writer: StorageWriter) -> None:
    """Remove a mark that was left.

    Raises:
        StorageError: there is one that was not.
    """
    deadline = time.monotonic() + _FILLED_S
    content = writer.read(LOCK_FILE)
    while content is not None and _SaverMark.of(content) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        content = writer.read(LOCK_FILE)
    if content is None:
        return
    mark = _SaverMark.of(content)
    if mark is not None and not mark.is_left and not _is_silent(writer, LOCK_FILE, mark):
        raise _refusal(writer, LOCK_FILE, mark)
    aside = f".{LOCK_FILE}.{secrets.token_hex(4)}{INCOMPLETE}"
    try:
        writer.rename(LOCK_FILE, aside)
    except StorageError as error:
        if writer.read(LOCK_FILE) is not None:
            raise
        raise _refusal(writer, LOCK_FILE, mark) from error  # somebody else was faster
    if writer.read(aside) != content:
        writer.rename(aside, LOCK_FILE)
        raise _refusal(writer, LOCK_FILE, None)
    writer.remove(aside)


def _list_own(writer: StorageWriter, save_id: str) -> None:
    """Create a lock under its own name.

    Return it after all others are found stale, and no further one has appeared.
    """
    left = _marks(writer.list())
    for file in sorted(left):
        _require_left(writer, file)
    own = _name(writer, save_id)
    try:
        writer.replace(own, _SaverMark.own(save_id).to_bytes())
        for file in sorted(_marks(writer.list()) - left - {own}):
            _require_left(writer, file, is_patient=False)
            left.add(file)
    except BaseException:
        with contextlib.suppress(StorageError):
            writer.remove(own)
        raise
    for file in sorted(left):
        writer.remove(file)
        writer.remove(file + _BEAT)


def _require_left(writer: StorageWriter, file: str, *, is_patient: bool = True) -> None:
    """``is_patient`` waits for a renewal, which nobody may do who has a mark that is not renewed yet."""
    content = writer.read(file)
    if content is None:
        return
    mark = _SaverMark.of(content)
    if mark is None or not (mark.is_left or (is_patient and _is_silent(writer, file, mark))):
        raise _refusal(writer, file, mark)


def _is_silent(writer: StorageWriter, file: str, mark: _SaverMark) -> bool:
    """Return whether a mark of another machine that is to be renewed has not been for a while.

    Waits for that while.
    """
    if mark.renewed_s <= 0 or mark.is_from_here:
        return False
    first, deadline = _changed_at(writer, file), time.monotonic() + _MISSED * mark.renewed_s
    while first is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_S if _has_one_name(writer) else max(_LOOK_S, mark.renewed_s / 4))
        if _changed_at(writer, file) != first:
            return False
    return first is not None


def _changed_at(writer: StorageWriter, file: str) -> object:
    """Return a value that changes with each renewal of a lease, or None if there is no lease."""
    if not _has_one_name(writer):
        return None if writer.read(file) is None else (writer.read(file + _BEAT) or b"")
    try:
        with open(os.path.join(writer.root, file), "rb") as opened:  # which asks a network file system anew
            return os.fstat(opened.fileno()).st_mtime_ns
    except OSError:
        return None


def _refusal(writer: StorageWriter, file: str, mark: _SaverMark | None) -> StorageError:
    who = "its lock file cannot be read" if mark is None else f"process {mark.process} on {mark.host}"
    return StorageError(
        f"{writer.root}: another save is writing here ({who}). Wait for it, or save to another directory. If that "
        f"process is gone, remove {file} from the directory"
    )
