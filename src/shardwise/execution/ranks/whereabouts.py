"""Where a rank's process runs, whether it lives between two calls, and how many processors it has there.

[Note: A pulse] While a rank is in a call its line beats (:mod:`~shardwise.execution.ranks.line`). Between calls
nobody waits for it, and it may be busy for hours; but it may also be killed then, and the others would find out
only by its not coming. So each process that has been in a call has a pulse until it ends: one thread that counts in
the store, over a connection of its own, since the store's may be held by whoever waits for a key. Who waits for a
rank that has not come looks at its pulse, and, where both run on one machine, at its process.

[Note: Processors of a rank] Threads of one process that compute in many short steps wait for each other between any
two (Python's lock), and ranks that share processors for each other's threads. So a rank computes on as many threads
as it has processors for itself. What counts is what the system allows each process to run on, for how much of the
time (the quota of a container), and which ranks are on the same machine, not what a launcher has put into the
environment.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from shardwise.execution.ranks.messages import KeyStore
from shardwise.storage import machine

_ENDED = b"ended"

_AT_LEAST_EVERY_S = 1.0

_LAST_WORDS_S = 1.0
"""How long a process that ends waits for its pulse to say so."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a rank's process is. Host names are for people: containers may share one."""

    host: str
    process: int
    born: str
    space: str

    @classmethod
    def here(cls) -> Self:
        """Of this process."""
        process = os.getpid()
        return cls(socket.gethostname(), process, machine.born(process), machine.process_space())

    @classmethod
    def of(cls, told: bytes) -> Self:
        """As it was encoded."""
        return cls(**json.loads(told))

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def has_ended(self) -> bool:
        """Whether the process is known to be gone, which can be seen from where its number means the same."""
        return self.space == machine.process_space() and machine.born(self.process) != self.born

    def is_running(self) -> bool:
        """Whether the process is known to be there, and not stopped."""
        if self.space != machine.process_space() or machine.born(self.process) != self.born:
            return False
        return not machine.is_stopped(self.process)

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}"


class _Beating:
    """The signs of life of this process in one store, from now until the process or the store ends."""

    def __init__(self, store: Any, rank: int, beat_s: float) -> None:
        self.process = os.getpid()
        self.beat_s = beat_s
        self._rank = rank
        self._store = weakref.ref(store)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="shardwise-pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say that this process ends, where there is still somebody to say it to."""
        if self.process == os.getpid():
            self._ended.set()
            self._thread.join(timeout=_LAST_WORDS_S)

    def _own_keys(self) -> KeyStore:
        store: Any = self._store()
        return _keys(store.clone() if hasattr(store, "clone") else store)

    def _beat(self) -> None:
        try:
            keys, beats = self._own_keys(), 0
            keys.set(f"place/{self._rank}", ProcessPlace.here().encode())
            while self._store() is not None:
                beats += 1
                keys.set(f"pulse/{self._rank}", f"{beats} {self.beat_s}".encode())
                if self._ended.wait(min(self.beat_s, _AT_LEAST_EVERY_S)):
                    keys.set(f"pulse/{self._rank}", _ENDED)
                    return
        except Exception:  # the store is gone: there is nobody to beat for
            return


_pulses: weakref.WeakKeyDictionary[Any, _Beating] = weakref.WeakKeyDictionary()


def keep_beating(store: Any, rank: int, beat_s: float) -> None:
    """Let this process have a pulse in a store, as often as this at least; ``rank`` is among all that use it."""
    pulse = _pulses.get(store)
    if pulse is None or pulse.process != os.getpid():
        pulse = _pulses[store] = _Beating(store, rank, beat_s)
    pulse.beat_s = min(pulse.beat_s, beat_s)


@atexit.register
def _end_all() -> None:
    for pulse in list(_pulses.values()):
        pulse.end()


@dataclass(frozen=True, slots=True)
class Pulse:
    """A rank's pulse as it was found; it has changed when another one is found later."""

    told: bytes

    @property
    def has_ended(self) -> bool:
        """Whether the process has said that it ends."""
        return self.told == _ENDED

    @property
    def beat_s(self) -> float:
        return 0.0 if self.has_ended else float(self.told.split()[1])


class Pulses:
    """The pulses of other ranks, by their numbers among all that use the store."""

    def __init__(self, store: Any) -> None:
        self.address = address_of(store)
        self._keys = _keys(store)
        self._known: set[int] = set()

    def find(self, ranks: list[int]) -> dict[int, Pulse]:
        """Of those that have been in a call before."""
        self._known.update(rank for rank in ranks if rank not in self._known and self._keys.has(f"pulse/{rank}"))
        found = [rank for rank in ranks if rank in self._known]
        told = self._keys.get_all([f"pulse/{rank}" for rank in found]) if found else []
        return {rank: Pulse(value) for rank, value in zip(found, told, strict=True)}

    def place(self, rank: int) -> ProcessPlace:
        """Of a rank that has a pulse."""
        return ProcessPlace.of(self._keys.get_all([f"place/{rank}"])[0])


def address_of(store: Any) -> str:
    """Where ranks meet: host and port, or a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else getattr(store, "path", "one store")


def _keys(store: Any) -> KeyStore:
    return KeyStore(store, "shardwise/alive")


@dataclass(frozen=True, slots=True)
class ProcessorSet:
    """The processors that a process may run on: the bits of ``mask``, on a machine.

    ``quotas`` are its control groups that have a limit, each with how many processors all in it may use.
    """

    machine: str
    mask: int
    quotas: tuple[tuple[str, float], ...] = ()

    @classmethod
    def here(cls) -> ProcessorSet:
        """Of this process."""
        space = machine.group_space()
        quotas = ((f"{space}{folder}", most) for folder, most in machine.processor_quotas().items())
        return cls(machine.boot(), sum(1 << number for number in machine.processors()), tuple(quotas))

    @property
    def count(self) -> int:
        return max(1, int(min([self.mask.bit_count(), *(most for _, most in self.quotas)])))


@dataclass(frozen=True, slots=True)
class ProcessorShares:
    """How many processors each rank has: ``usual``, but for the ranks in ``others``."""

    usual: int
    others: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Sequence[ProcessorSet]) -> ProcessorShares:
        """Each processor, and quota, is shared evenly by the ranks that may use it. Every rank has one at least."""
        alike = Counter(told)
        sharers: Counter[tuple[str, int]] = Counter()
        members: Counter[str] = Counter()
        for own, ranks in alike.items():
            sharers.update({(own.machine, number): ranks for number in _bits(own.mask)})
            members.update({group: ranks for group, _ in own.quotas})
        shares = {
            own: min(
                [
                    sum(1 / sharers[own.machine, number] for number in _bits(own.mask)),
                    *(most / members[group] for group, most in own.quotas),
                ]
            )
            for own in alike
        }
        by_rank = [max(1, int(shares[own] + 1e-6)) for own in told]
        usual = Counter(by_rank).most_common(1)[0][0]
        return cls(usual, {rank: share for rank, share in enumerate(by_rank) if share != usual})

    def on(self, rank: int) -> int:
        """Of a rank; at least one."""
        return self.others.get(rank, self.usual)


def _bits(mask: int) -> Iterator[int]:
    return (number for number in range(mask.bit_length()) if mask >> number & 1)
