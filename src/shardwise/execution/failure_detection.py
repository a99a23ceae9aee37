"""Detects lost processes by heartbeats in the store of the process group.

[Note: Heartbeats] Each process has one thread that counts in the store, from its first call until it ends, over a
connection of its own, since the other one may be held by whoever waits for a key. Ranks of a call watch the first
rank, and the first rank watches all others. A count that stops means a process that was killed, is stopped or is
unreachable. On one machine the process itself is checked as well: its end is detected at once, and a paused
heartbeat (a library may block other threads) does not count while the process runs.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from shardwise.storage import machine

_ENDED = b"ended"


_BEAT_S = 1.0


_LAST_WORDS_S = 1.0


_PART_BYTES = 1 << 22
"""A larger value is stored in several: torch's store takes 8 MiB at most."""


class KeyStore:
    """torch's key-value store under a prefix, for values of any size."""

    def __init__(self, store: Any, prefix: str) -> None:
        self.store = store
        self.prefix = prefix

    def put(self, key: str, value: bytes) -> list[str]:
        """Set a key. Returns the names of all keys set, for :meth:`forget`. The key itself is set last."""
        parts = [value[at : at + _PART_BYTES] for at in range(0, len(value), _PART_BYTES)] or [b""]
        names = [f"{key}/{number}" for number in range(1, len(parts))]
        for name, part in zip(names, parts[1:], strict=True):
            self.store.set(f"{self.prefix}/{name}", part)
        self.store.set(f"{self.prefix}/{key}", len(names).to_bytes(4) + parts[0])
        return [key, *names]

    def take(self, keys: Sequence[str]) -> list[bytes]:
        """Values put under keys that are there."""
        values = []
        for key, found in zip(keys, self._get(keys), strict=True):
            more, value = int.from_bytes(found[:4]), found[4:]
            values.append(value + b"".join(self._get([f"{key}/{number}" for number in range(1, more + 1)])))
        return values

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        names = [f"{self.prefix}/{key}" for key in keys]
        if names and self.store.has_extended_api():
            return [bytes(value) for value in self.store.multi_get(names)]
        return [bytes(self.store.get(name)) for name in names]

    def has(self, key: str) -> bool:
        return bool(self.store.check([f"{self.prefix}/{key}"]))

    def set_first(self, key: str, value: str) -> str:
        """Set a key unless it exists. Return its value."""
        return bytes(self.store.compare_set(f"{self.prefix}/{key}", "", value)).decode()

    def count(self, key: str, more: int) -> int:
        return int(self.store.add(f"{self.prefix}/{key}", more))

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.store.delete_key(f"{self.prefix}/{key}")


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Location of a rank's process. Host names are for messages, because containers may share one."""

    host: str
    process: int
    born: str
    space: str

    @classmethod
    def here(cls) -> Self:
        process = os.getpid()
        return cls(socket.gethostname(), process, machine.born(process), machine.process_space())

    def has_ended(self) -> bool:
        """Return True if the process has certainly ended: its id has the same meaning here, and does not exist."""
        return self.space == machine.process_space() and machine.born(self.process) != self.born

    def is_running(self) -> bool:
        """Return True if the process certainly exists and is not stopped."""
        is_here = self.space == machine.process_space() and machine.born(self.process) == self.born
        return is_here and not machine.is_stopped(self.process)

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}"


@dataclass(slots=True)
class Sign:
    """Last heartbeat of a process (``told``), and the time since when it is unchanged."""

    place: ProcessPlace
    told: bytes
    since: float

    @property
    def has_ended(self) -> bool:
        return self.told == _ENDED or self.place.has_ended()

    def is_lost(self, heartbeat_timeout_s: float) -> bool:
        return self.has_ended or (
            time.monotonic() - self.since > heartbeat_timeout_s and not self.place.is_running()
        )

    @property
    def progress(self) -> int:
        return 0 if self.told == _ENDED else int(self.told.split()[1])


class Detector:
    """The heartbeat of this process in one store, and those of others.

    Attributes:
        heard_s: when the store answered last, by the monotonic clock.
        error: the failure of the connection to the store, if any.
        progress: a number published with each heartbeat.
        signs: the last heartbeat of the processes looked for, by rank among all that use the store.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.process = os.getpid()
        self.heard_s = time.monotonic()
        self.error: Exception | None = None
        self.progress = 0
        self.signs: dict[int, Sign] = {}
        self._beat_s = _BEAT_S
        self._rank = rank
        self._store = weakref.ref(store)
        self._watchers: set[Any] = set()
        self._has_ended = False
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shardwise-heartbeat-{rank}", daemon=True)
        self._thread.start()

    def add(self, watcher: Any, heartbeat_interval_s: float) -> None:
        """Call ``watcher.look(store)`` once a heartbeat, on the detector's thread and over its connection."""
        self._watchers.add(watcher)
        if heartbeat_interval_s < self._beat_s:
            self._beat_s = heartbeat_interval_s
            self._awake.set()

    def remove(self, watcher: Any) -> None:
        self._watchers.discard(watcher)

    def end(self) -> None:
        """Announce that this process ends."""
        self._has_ended = True
        self._awake.set()
        if self.process == os.getpid():
            self._thread.join(timeout=_LAST_WORDS_S)

    def look_for(self, keys: KeyStore, ranks: Iterable[int]) -> None:
        """Update the signs of these ranks. A process that was never in a call has none."""
        found = [rank for rank in ranks if rank in self.signs or keys.has(f"beat/{rank}")]
        for rank, told in zip(found, keys.take([f"beat/{rank}" for rank in found]), strict=True):
            sign = self.signs.get(rank)
            if sign is None:
                [place] = keys.take([f"place/{rank}"])
                self.signs[rank] = Sign(ProcessPlace(**json.loads(place)), told, time.monotonic())
            elif told != sign.told:
                sign.told, sign.since = told, time.monotonic()

    def _run(self) -> None:
        try:
            store = self._connection()
            keys, beats = alive_keys(store), 0
            keys.put(f"place/{self._rank}", json.dumps(asdict(ProcessPlace.here())).encode())
            while self._store() is not None and not self._has_ended:
                beats += 1
                keys.put(f"beat/{self._rank}", f"{beats} {self.progress}".encode())
                for watcher in tuple(self._watchers):
                    watcher.look(store)
                self.heard_s = time.monotonic()
                self._awake.wait(self._beat_s)
                self._awake.clear()
            if self._has_ended:
                keys.put(f"beat/{self._rank}", _ENDED)
        except Exception as error:  # the store is gone
            self.error = error

    def _connection(self) -> Any:
        store: Any = self._store()
        return store.clone() if hasattr(store, "clone") else store


def alive_keys(store: Any) -> KeyStore:
    """The keys of all heartbeats."""
    return KeyStore(store, "shardwise/alive")


_detectors: weakref.WeakKeyDictionary[Any, dict[int, Detector]] = weakref.WeakKeyDictionary()


def detector_of(store: Any, rank: int) -> Detector:
    """The detector of this process, which is ``rank`` among all that use the store. The heartbeat begins here."""
    own = _detectors.setdefault(store, {})
    if rank not in own or own[rank].process != os.getpid():
        own[rank] = Detector(store, rank)
    return own[rank]


@atexit.register
def _end_all() -> None:
    for own in list(_detectors.values()):
        for detector in own.values():
            detector.end()
