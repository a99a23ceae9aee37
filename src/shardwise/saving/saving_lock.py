"""Locks a folder, so that at most one save at a time writes into it.

[Note: The lock of a save] A save locks its folder with a file. The file identifies its holder, so that one left by
a dead process can be detected and taken over.

The file has a fixed name, and only one process can create it. Its content is written just after its creation. So a
lock that cannot be parsed is read again for two seconds. If it still cannot be, its process has died between the
two. Taking a lock over is a rename, of which only one of several succeeds.

Liveness of a process can be checked if its id has the same meaning here: same kernel and same PID namespace
(containers may share a host name, and even a folder, but not these). For other processes it is unknown. So a lock
is renewed during its save, and contains the interval: its modification time changes. If it does not change for a
multiple of that interval, the lock is stale. Clocks are not compared.

A process has a list of its active saves. A lock that it holds for any other save is stale, for example if a disk
error prevented its removal. Any later save of this process takes it over.

A lock is no fence by itself: it may be removed by hand, too early, or its process may have been stopped for long.
So the holder checks it again before and after the commit. The file that the last step renames is removed by the
next save before that reads the folder's state, so that the step fails ([Note: Checked twice] in
``saving/commit.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import dataclass

from shardwise.core.errors import StorageError
from shardwise.core.machine import ProcessId
from shardwise.files.storage import INCOMPLETE, StorageWriter

LOCK_FILE = "shardwise.saving"

_MAX_UNPARSED_S = 2.0
"""A lock that cannot be parsed after this time is that of a process that died while it wrote it."""

_POLL_S = 0.1

RENEWAL_S = 5.0
"""The time between two renewals of a lock."""

_MAX_MISSED = 6
"""The number of missed renewals after which a lock is stale."""


_ACTIVE: set[str] = set()
"""The ids of this process's saves that hold a lock, or are about to."""


def new_save_id() -> str:
    """Return a random id for a save, its lock and its files."""
    return secrets.token_hex(4)


def take_lock(writer: StorageWriter, save_id: str) -> None:
    """Lock the folder for the save of this process that ``save_id`` (8 hex digits) identifies.

    A lock is taken over if its process on this machine is dead, if it belongs to a finished save of this process,
    or if it comes from another machine or container and is not renewed at its interval (which takes half a minute
    to detect).

    Raises:
        StorageError: another save is in progress, or it cannot be determined whether its process is alive.
    """
    _ACTIVE.add(save_id)  # before the file is there: another thread would take a lock that is not active for stale
    try:
        _create_lock(writer, save_id)
        # Read back: another save may have taken the new lock for that of a process that died while it wrote it.
        require_lock(writer, save_id)
    except BaseException:
        _ACTIVE.discard(save_id)
        raise


def release_lock(writer: StorageWriter, save_id: str) -> None:
    """Remove the lock of this save, if it exists. Not durable before the names are synced.

    Raises:
        StorageError: the lock cannot be removed. The save is over all the same, and the lock is stale.
    """
    try:
        if holds_lock(writer, save_id):
            writer.remove(LOCK_FILE)
    finally:
        _ACTIVE.discard(save_id)


def holds_lock(writer: StorageWriter, save_id: str) -> bool:
    """Return True if the folder is locked by this save."""
    record = _LockRecord.from_bytes(writer.read(LOCK_FILE))
    return record is not None and record.save_id == save_id


def require_lock(writer: StorageWriter, save_id: str) -> None:
    """Require on any rank that it sees the lock of this save.

    Raises:
        StorageError: the lock is another save's, or does not exist.
    """
    content = writer.read(LOCK_FILE)
    if content is None:
        raise StorageError(
            f"{writer.root}: {LOCK_FILE}, which the first rank created there, is not visible. Save to a directory "
            "that all ranks share, and leave that file alone during the save"
        )
    record = _LockRecord.from_bytes(content)
    if record is None or record.save_id != save_id:
        raise _refusal(writer, record)


@dataclass(frozen=True, slots=True)
class _LockRecord:
    """Content of a lock file. ``renewed_s`` is the interval of renewals in seconds, or 0 for none."""

    process: ProcessId
    save_id: str
    renewed_s: float

    @classmethod
    def from_bytes(cls, content: bytes | None) -> _LockRecord | None:
        """Parse a lock file. Return None if it is not one."""
        try:
            fields = json.loads(content or b"")
            # Untrusted: another program may have written anything under this name. The interval is at most our
            # own, so that a lock cannot ask to be watched for hours.
            pid = int(fields["process"])
            process = ProcessId(str(fields["host"]), pid, str(fields["born"]), str(fields["space"]))
            return cls(process, str(fields["save_id"]), min(RENEWAL_S, float(fields["renewed_s"])))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def to_bytes(self) -> bytes:
        content = {
            "host": self.process.host,
            "process": self.process.pid,
            "born": self.process.start_time,
            "space": self.process.pid_namespace,
            "save_id": self.save_id,
            "renewed_s": self.renewed_s,
            "since": time.time(),
        }
        return json.dumps(content).encode()

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or has finished this save. False if it cannot be seen from here."""
        if not self.process.is_visible or self.process.pid <= 0:
            return False
        # A process whose id was given to another since has another start time, which has_ended() compares.
        has_finished = self.process.pid == os.getpid() and self.save_id not in _ACTIVE
        return has_finished or self.process.has_ended()


def _create_lock(writer: StorageWriter, save_id: str) -> None:
    """Create the lock file, after a stale one has been removed."""
    _take_over(writer)
    content = _LockRecord(ProcessId.here(), save_id, RENEWAL_S).to_bytes()
    try:
        writer.create(LOCK_FILE, len(content))
    except StorageError as error:
        existing = writer.read(LOCK_FILE)
        if existing is not None:
            raise _refusal(writer, _LockRecord.from_bytes(existing)) from error
        raise
    # Between the creation and this write the file is empty. Others that read it then wait (_MAX_UNPARSED_S).
    try:
        writer.write(LOCK_FILE, 0, [memoryview(content)])
        writer.sync(LOCK_FILE)
    except BaseException:
        with contextlib.suppress(StorageError):
            writer.remove(LOCK_FILE)
        raise


def _take_over(writer: StorageWriter) -> None:
    """Remove a stale lock.

    Raises:
        StorageError: the lock is not stale.
    """
    content = _require_stale(writer)
    if content is None:
        return
    # A rename, not a removal: only one of several savers that found the lock stale succeeds, and it can check what
    # it has taken. A removal might hit the new lock of a faster saver.
    aside = f".{LOCK_FILE}.{secrets.token_hex(4)}{INCOMPLETE}"
    try:
        writer.rename(LOCK_FILE, aside)
    except StorageError as error:
        if writer.read(LOCK_FILE) is not None:
            raise
        raise _refusal(writer, _LockRecord.from_bytes(content)) from error  # another save was faster
    if writer.read(aside) != content:  # the new lock of a faster saver: give it back
        writer.rename(aside, LOCK_FILE)
        raise _refusal(writer, None)
    writer.remove(aside)


def _require_stale(writer: StorageWriter) -> bytes | None:
    """Return the content of the lock file, or None if there is none.

    Raises:
        StorageError: the lock is not stale.
    """
    # An empty or partial file is a lock that is being written, or one of a process that died while it wrote it.
    content, deadline = writer.read(LOCK_FILE), time.monotonic() + _MAX_UNPARSED_S
    while content is not None and _LockRecord.from_bytes(content) is None:
        if time.monotonic() > deadline:
            return content
        time.sleep(_POLL_S)
        content = writer.read(LOCK_FILE)
    record = _LockRecord.from_bytes(content)
    if content is None:
        return None
    # is_over first: a process on this machine is checked at once, the lock of another is watched for half a minute.
    if record is None or not (record.is_over or _is_silent(writer, record)):
        raise _refusal(writer, record)
    return content


def _is_silent(writer: StorageWriter, record: _LockRecord) -> bool:
    """Watch the lock of a process that cannot be seen from here. Return True if it is not renewed.

    It has six intervals (half a minute) for a renewal. False at once for a lock without renewals.
    """
    if record.renewed_s <= 0 or record.process.is_visible:
        return False
    # The time itself is not compared with a clock, only with its own later values.
    first, deadline = _read_mtime_ns(writer), time.monotonic() + _MAX_MISSED * record.renewed_s
    while first is not None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if _read_mtime_ns(writer) != first:
            return False
    return first is not None


def _read_mtime_ns(writer: StorageWriter) -> int | None:
    """Return the modification time of the lock file in ns, or None if there is no lock."""
    try:
        # Opened, and not only os.stat: a network file system revalidates its cached attributes at open.
        with open(os.path.join(writer.root, LOCK_FILE), "rb") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except OSError:
        return None


def _refusal(writer: StorageWriter, record: _LockRecord | None) -> StorageError:
    holder = "its lock file cannot be read"
    if record is not None:
        holder = f"process {record.process.pid} on {record.process.host}"
    return StorageError(
        f"{writer.root}: another save is writing here ({holder}). Wait for it, or save to another directory. "
        f"If that process is gone, remove {LOCK_FILE}"
    )
