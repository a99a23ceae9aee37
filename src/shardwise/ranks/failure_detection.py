"""Detects lost processes by heartbeats in the store of the process group.

[Note: Heartbeats] Each process has one thread that counts in the store, from its first call until it ends, over a
connection of its own, since a thread that waits for a key may hold the other. Ranks of a call watch the first
rank, and the first rank watches all others. A count that stops means a process that was killed, is stopped or is
unreachable. On one machine the process itself is checked as well: its end is detected at once, and a paused
heartbeat (a library may block other threads) does not count while the process runs. Times are those in which this
process runs: all ranks may be stopped for a while and go on (Ctrl-Z, ``docker pause``, ``scontrol suspend``).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from shardwise.core.machine import ProcessId, running_s
from shardwise.ranks.slow_ranks import WARN_AGAIN_S, Meeting, RankStatus, find_wait

_log = logging.getLogger(__name__)

_ENDED = b"ended"
"""The heartbeat of a process that has ended in order."""

_INTERVAL_S = 1.0
_JOIN_S = 1.0

_CHUNK_BYTES = 1 << 22
"""A larger value is stored in chunks: torch's store takes 8 MiB at most."""


class KeyStore:
    """torch's key-value store under a prefix, for values of any size."""

    def __init__(self, store: Any, prefix: str) -> None:
        self.store = store
        self.prefix = prefix

    def set(self, key: str, value: bytes) -> list[str]:
        """Set a key. Return the names of all keys that were set, the key itself last, for :meth:`delete`."""
        chunks = [value[start : start + _CHUNK_BYTES] for start in range(0, len(value), _CHUNK_BYTES)] or [b""]
        names = [*(f"{key}/{number}" for number in range(1, len(chunks))), key]
        # The first chunk has the number of the others in its first 4 bytes. It is set last: a reader that finds the
        # key finds all of them.
        first = (len(chunks) - 1).to_bytes(4) + chunks[0]
        for name, chunk in zip(names, [*chunks[1:], first], strict=True):
            self.store.set(f"{self.prefix}/{name}", chunk)
        return names

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are set."""
        values = []
        for key, first in zip(keys, self._get(keys), strict=True):
            others = [f"{key}/{number}" for number in range(1, int.from_bytes(first[:4]) + 1)]
            values.append(first[4:] + b"".join(self._get(others)))
        return values

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        names = [f"{self.prefix}/{key}" for key in keys]
        if names and self.store.has_extended_api():  # one request for all
            return [bytes(value) for value in self.store.multi_get(names)]
        return [bytes(self.store.get(name)) for name in names]

    def has(self, key: str) -> bool:
        return bool(self.store.check([f"{self.prefix}/{key}"]))

    def set_default(self, key: str, value: str) -> str:
        """Set a key unless it exists. Return its value."""
        return bytes(self.store.compare_set(f"{self.prefix}/{key}", "", value)).decode()

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(f"{self.prefix}/{key}", amount))

    def count(self, key: str) -> int:
        """Return the sum of what was added. Unlike adding 0, it writes nothing to the file of a FileStore."""
        return int(self._get([key])[0]) if self.has(key) else 0

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.store.delete_key(f"{self.prefix}/{key}")


def heartbeat_keys(store: Any) -> KeyStore:
    """Return the keys of all heartbeats."""
    return KeyStore(store, "shardwise/alive")


@dataclass(slots=True)
class Heartbeat:
    """The last heartbeat of a process, and when it was first seen, by :func:`running_s`."""

    process: ProcessId
    value: bytes
    since_s: float

    @property
    def status(self) -> RankStatus | None:
        """Status of the process when it was sent. None once it has ended."""
        text = self.value.decode().partition(" ")[2]
        return RankStatus.from_json(text) if text else None

    def loss(self, timeout_s: float) -> str | None:
        """Return why the process counts as lost, or None if it does not."""
        silent_s = running_s() - self.since_s
        # has_ended() and is_running() know only processes of this machine. For others both return False.
        if self.value == _ENDED or self.process.has_ended():
            return "its process has ended"
        if silent_s > timeout_s and not self.process.is_running():
            busy = "busy for so long in code that lets no other Python thread run"
            return f"no sign of life for {silent_s:.0f} s (killed, ended, stopped, or {busy})"
        return None


class Detector:
    """The heartbeat of this process in one store, and those of others.

    Attributes:
        answered_s: when the store answered last, by :func:`running_s`.
        has_started: set after the first heartbeat, or when there will be none.
        error: the exception that ended the heartbeat thread, if any.
        heartbeats: those of the watched processes, by rank among all that use the store.
        meetings: those in which this rank waits, by their keys.
        calls: number of calls that this rank has begun, by the name under which ranks meet.
        waits_for: description of the rank that this one has been waiting for, "" for none.
        watchers: their ``watch(store)`` is called at each heartbeat, on its thread and over its connection.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.pid = os.getpid()
        self.answered_s = running_s()
        self.has_started = threading.Event()
        self.error: Exception | None = None
        self.heartbeats: dict[int, Heartbeat] = {}
        self.meetings: dict[str, Meeting] = {}
        self.calls: dict[str, int] = {}
        self.waits_for = ""
        self._warn_at = 0.0
        self._interval_s = _INTERVAL_S
        self._rank = rank
        # Weak: the thread ends when the process group is destroyed, and must not keep the store open.
        self._store = weakref.ref(store)
        self.watchers: set[Any] = set()
        self._has_ended = False
        self._awake = threading.Event()
        # Last: the thread uses the attributes above.
        self._thread = threading.Thread(target=self._run, name=f"shardwise-heartbeat-{rank}", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    @property
    def unanswered_s(self) -> float:
        return running_s() - self.answered_s

    def add(self, watcher: Any, interval_s: float) -> None:
        """Add a watcher that needs heartbeats in this interval."""
        self.watchers.add(watcher)
        if interval_s < self._interval_s:
            self._interval_s = interval_s
            self._awake.set()

    def end(self) -> None:
        """Announce that this process ends."""
        self._has_ended = True
        self._awake.set()
        if self.pid == os.getpid():  # a forked child has the object, and not its thread
            self._thread.join(timeout=_JOIN_S)

    def update(self, keys: KeyStore, ranks: Iterable[int]) -> None:
        """Update the heartbeats of these ranks. A process that was never in a call has none."""
        # get() would wait for a key that is not set.
        present = [rank for rank in ranks if rank in self.heartbeats or keys.has(f"beat/{rank}")]
        # The times are those of this process. Clocks of machines are not compared.
        for rank, value in zip(present, keys.get([f"beat/{rank}" for rank in present]), strict=True):
            heartbeat = self.heartbeats.get(rank)
            if heartbeat is None:
                [content] = keys.get([f"process/{rank}"])
                self.heartbeats[rank] = Heartbeat(ProcessId(**json.loads(content)), value, running_s())
            elif value != heartbeat.value:
                heartbeat.value, heartbeat.since_s = value, running_s()

    def _run(self) -> None:
        try:
            store: Any = self._store()
            # A connection of its own: a thread that waits for a key may hold the other one.
            store = store.clone() if hasattr(store, "clone") else store
            keys, count = heartbeat_keys(store), 0
            # Before the first heartbeat: whoever sees that reads this.
            keys.set(f"process/{self._rank}", json.dumps(asdict(ProcessId.here())).encode())
            while self._store() is not None and not self._has_ended:
                count += 1
                meetings = dict(self.meetings)  # once: other threads enter and leave meetings in between
                status = RankStatus.here(meetings, self.waits_for, dict(self.calls))
                keys.set(f"beat/{self._rank}", f"{count} {status.to_json()}".encode())
                self.has_started.set()
                for watcher in tuple(self.watchers):
                    watcher.watch(store)
                # After the watchers, which have updated the heartbeats of others.
                self._name_slow_ranks(status, meetings)
                # Only when all requests of this round have been answered. If one hangs, the time is not renewed.
                self.answered_s = running_s()
                self._awake.wait(self._interval_s)
                self._awake.clear()
            if self._has_ended:
                keys.set(f"beat/{self._rank}", _ENDED)
        except Exception as error:  # the store is gone, or a watcher failed
            self.error = error
        finally:
            self.has_started.set()

    def _name_slow_ranks(self, local: RankStatus, meetings: Mapping[str, Meeting]) -> None:
        """Log which rank this one has been waiting for, after ten seconds and then every minute."""
        others = {rank: status for rank, beat in self.heartbeats.items() if (status := beat.status) is not None}
        waited_s, self.waits_for = find_wait(self._rank, local, meetings, others)
        now = time.monotonic()
        if not self.waits_for:
            self._warn_at = 0.0
        elif now >= self._warn_at:
            self._warn_at = now + WARN_AGAIN_S
            since = datetime.now() - timedelta(seconds=waited_s)
            text = f"rank {self._rank} has been waiting for {waited_s:.0f} s, since {since:%H:%M:%S}"
            _log.warning("%s, for %s", text, self.waits_for)


_detectors: weakref.WeakKeyDictionary[Any, dict[int, Detector]] = weakref.WeakKeyDictionary()


def describe_wait() -> str:
    """Describe the rank that this process has been waiting for for ten seconds or more. "" for none."""
    detectors = [detector for by_rank in _detectors.values() for detector in by_rank.values()]
    return next((detector.waits_for for detector in detectors if detector.waits_for), "")


def get_detector(store: Any, rank: int) -> Detector:
    """Return the detector of this process, which is ``rank`` among all that use the store. Starts the heartbeat."""
    by_rank = _detectors.setdefault(store, {})
    # A forked child has its parent's detector, whose thread it does not have.
    if rank not in by_rank or by_rank[rank].pid != os.getpid():
        by_rank[rank] = Detector(store, rank)
    return by_rank[rank]
