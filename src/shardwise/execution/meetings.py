"""Lets the ranks of one call exchange small messages over torch's key-value store.

[Note: Nobody waits in a collective] A collective waits as long as its slowest rank, and hangs when one is gone. So
ranks meet here first: each hands the first rank a message, which may be empty, and reads the one answer that the
first rank makes of all. A meeting ends with an error when the detector
(:class:`Detector`) finds that a rank is lost: the rank that finds out first
publishes the verdict, and every rank raises it. A rank that fails in its work says so at once, and the others can
stop theirs.

The n-th call of a rank meets the n-th of every other. Where these are not the same call, all ranks raise an error
that names two of them, and their next calls meet again.

[Note: Heartbeats] Each process has one thread that counts in the store, from its first call until it ends, over a
connection of its own, since the other one may be held by whoever waits for a key. Ranks of a call watch the first
rank, and the first rank watches all others. A count that stops means a process that was killed, is stopped or is
unreachable. On one machine the process itself is looked at as well: it is known at once when it has ended, and a
count that pauses (a library may not let other threads run) means nothing while the process runs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Self, TypeVar

from shardwise.errors import CheckpointError, DisagreementError, RankLostError
from shardwise.execution import Patience
from shardwise.report.names import shown_ranks
from shardwise.storage import machine

T = TypeVar("T")

_log = logging.getLogger(__name__)

_FIRST_POLL_S, _LAST_POLL_S = 0.0001, 0.05
_LATENESS = 0.05
"""The part of its wait by which a rank may notice its end too late."""

_SPOKE = 1 << 32
"""Added by a rank that has a message to the number of those that have come to a meeting."""

_GRACE = 0.25
"""The part of the silence for which the first rank stays when a rank is lost, so that busy ones can read it."""

_DEAF = 1.5
"""After this many silences without an answer, the store itself is lost."""

_HASTY = 0.5
"""A rank that is asked to stop waits for others, or for the store, only for this part of the silence."""

TELL_S, TELL_AGAIN_S = 5.0, 30.0
"""Seconds after which a rank that has made no call yet is logged, and logged again."""

_LOST, _OTHER_CALL = "lost", "other call"
"""Kinds of verdicts; each is written before its text."""


class Meetings:
    """One rank's end of a call's meetings.

    Args:
        store: torch's key-value store, shared by the ranks.
        name: the same on all ranks of one group.
        rank: this rank in the group.
        numbers: the ranks of the group in the default group.
        patience: how long to wait.
        call: what this rank is doing; the same on all ranks.
    """

    def __init__(
        self, store: Any, name: str, rank: int, numbers: Sequence[int], patience: Patience, call: str
    ) -> None:
        self.rank, self.numbers, self.size = rank, numbers, len(numbers)
        self.patience = patience
        self.name = name
        self.while_waiting: Callable[[], None] | None = None
        """Called about once a beat by a rank that waits; an exception it raises ends the wait."""
        self._call = call
        self._store = store
        self._keys: KeyStore | None = None
        self._step = 0
        self._used: list[str] = []
        self._cut_step = -1
        self._verdict: str | None = None
        self._error: Exception | None = None
        self._is_closed = False
        self._joining = threading.Lock()
        self._since = self._tell_at = math.inf
        self._detector = detector_of(store, numbers[rank])

    @property
    def is_cut(self) -> bool:
        """Return True if some rank has failed or is lost, or the store is: there is no use in working on."""
        return self._cut_step == self._step or self._verdict is not None or self.has_lost_store

    @property
    def has_lost_store(self) -> bool:
        return self._store_error is not None or self._unheard_s > _DEAF * self.patience.silence_s

    @property
    def _store_error(self) -> Exception | None:
        return self._error or self._detector.error

    @property
    def _unheard_s(self) -> float:
        return time.monotonic() - self._detector.heard_s

    def lost(self, *, in_haste: bool = False) -> RankLostError | None:
        """The loss that was found while this rank works: another rank, or the store. Does not use the store.

        ``in_haste``: silence counts as a loss earlier.
        """
        if self._verdict is not None and self._verdict.startswith(_LOST):
            return RankLostError(self._verdict.partition("\n")[2])
        if self._store_error is not None:
            return _store_lost(self._store_error)
        limit_s = self.patience.silence_s * (_HASTY if in_haste else 1)
        if self._unheard_s > limit_s:
            return _deaf(self._unheard_s)
        signs = [self._detector.signs.get(number) for number in self._watched]
        seen = [max(sign.since, self._since) for sign in signs if sign is not None]
        silent_s = time.monotonic() - min(seen, default=math.inf)
        if in_haste and silent_s > limit_s:
            return RankLostError(
                f"no sign of life from other ranks for {silent_s:.0f} s, and this one was asked to stop"
            )
        return None

    # Called by the rank

    def join(self) -> int:
        """Let the other ranks know that this one has come; the number of this call among those of its name.

        Raises:
            RankLostError: the store is gone, or does not answer.
        """
        return self._ask(lambda _: int(self._joined().prefix.rpartition("/line")[2]))

    def meet(self, message: bytes, conclude: Callable[[dict[int, bytes]], bytes]) -> bytes:
        """Wait for all ranks; the answer that the first rank concludes from the other ranks' messages, by rank.

        An empty message tells only that this rank has come. ``conclude`` is called on the first rank, on another
        thread, and raises nothing, since the others wait for it.

        Raises:
            RankLostError: naming the rank that is gone, or that never came.
            DisagreementError: ranks are in different calls.
        """
        if self.rank == 0:
            return self._ask(lambda keys: self._lead(keys, conclude))
        return self._ask(lambda keys: self._attend(keys, message))

    def part(self) -> None:
        """Leave after the last meeting, the first rank when all have read the answer: the store may end with it.

        A rank that is lost now is not missed.
        """
        if self.rank == 0 and self._step:
            with contextlib.suppress(RankLostError, DisagreementError):
                self._ask(self._await_others)

    def cut(self) -> None:
        """Tell the other ranks that this one has failed and will say how at the next meeting."""
        step = self._cut_step = self._step
        self._start(lambda keys: keys.put(f"{step}/cut", b""))

    def leave(self, cause: str) -> None:
        """Tell the other ranks that this one leaves the call and will not come to another meeting."""
        number = self.numbers[self.rank]
        text = f"rank {number} ({ProcessPlace.here()}) has left the call: {cause}"
        with contextlib.suppress(Exception):
            self._start(lambda keys: self._publish(keys, _LOST, text)).result(timeout=self.patience.beat_s)

    def find_lost(self) -> None:
        """Wait until the detector is sure whether a rank is lost.

        Raises:
            RankLostError: naming the rank.
        """
        deadline = time.monotonic() + self.patience.silence_s + 4 * self.patience.beat_s
        while self._verdict is None and not self.has_lost_store and time.monotonic() < deadline:
            time.sleep(_LAST_POLL_S)
        if self._verdict is not None or self.has_lost_store:
            self._ask(self._follow)

    def close(self) -> None:
        """End a meeting that is going on. The heartbeat goes on."""
        self._is_closed = True
        self._detector.remove(self)

    @property
    def others_progress(self) -> int:
        """The sum of the progress of the ranks that this one watches, as last heard."""
        signs = [self._detector.signs.get(number) for number in self._watched]
        return sum(sign.progress for sign in signs if sign is not None)

    def tell_progress(self, total: int) -> None:
        self._detector.progress = total

    def _ask(self, task: Callable[[KeyStore], T]) -> T:
        answer = self._start(task)
        while True:
            try:
                return answer.result(timeout=self.patience.beat_s)
            except TimeoutError:
                if self.while_waiting is not None:
                    self.while_waiting()
                if self._unheard_s > _DEAF * self.patience.silence_s:
                    raise _deaf(self._unheard_s) from None

    def _start(self, task: Callable[[KeyStore], T]) -> Future[T]:
        """Run the task on a thread of its own: a store that cannot be reached may never answer."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(task(self._joined()))
            except (RankLostError, DisagreementError) as error:
                answer.set_exception(error)
            except Exception as error:
                self._error = error
                answer.set_exception(self.lost() or _store_lost(error))

        threading.Thread(target=run, name=f"shardwise-meeting-{self.rank}", daemon=True).start()
        return answer

    # On the thread of a task

    def _joined(self) -> KeyStore:
        with self._joining:
            self._keys = self._keys or self._join()
        return self._keys

    def _join(self) -> KeyStore:
        number = KeyStore(self._store, self.name).count(f"lines/{self.rank}", 1)
        keys = KeyStore(self._store, f"{self.name}/line{number}")
        keys.put(f"here/{self.rank}", b"")
        own = f"rank {self.numbers[self.rank]} is in {self._call}"
        first = keys.set_first("call", own)
        if first.partition(" is in ")[2] != self._call:
            self._publish(
                keys,
                _OTHER_CALL,
                f"{own}, where {first}: a call was skipped, or made by some ranks alone; every rank has to make "
                "the same calls in the same order. The next call of all ranks is in step",
            )
        self._since = time.monotonic()
        self._tell_at = self._since + TELL_S
        self._detector.add(self, self.patience.beat_s)
        return keys

    def _lead(self, keys: KeyStore, conclude: Callable[[dict[int, bytes]], bytes]) -> bytes:
        step, came = self._step, 0

        def have_come() -> bool:
            nonlocal came
            came = keys.count(f"{step}/in", 0)
            return came % _SPOKE == self.size - 1

        self._wait(keys, have_come)
        if keys.has("lost"):  # the others have given this rank up since
            self._follow(keys)
        speakers = list(range(1, self.size)) if came >= _SPOKE else []
        if came // _SPOKE < len(speakers):
            speakers = [rank for rank in speakers if keys.has(f"{step}/{rank}")]
        messages = keys.take([f"{step}/{rank}" for rank in speakers])
        self._step += 1
        answer = conclude(dict(zip(speakers, messages, strict=True)))
        used = [*keys.put(f"{step}/all", answer), *(f"{step}/{word}" for word in ("in", "out", "cut"))]
        keys.forget(self._used)  # everybody has left the meeting before
        self._used = used
        return answer

    def _attend(self, keys: KeyStore, message: bytes) -> bytes:
        step = self._step
        used = keys.put(f"{step}/{self.rank}", message) if message else []
        keys.count(f"{step}/in", 1 + _SPOKE * bool(message))
        self._wait(keys, lambda: keys.has(f"{step}/all"))
        [answer] = keys.take([f"{step}/all"])
        self._step += 1
        keys.forget(used)
        keys.count(f"{step}/out", 1)
        return answer

    def _await_others(self, keys: KeyStore) -> None:
        self._wait(keys, lambda: keys.count(f"{self._step - 1}/out", 0) == self.size - 1)
        keys.forget([*self._used, "call", *(f"here/{rank}" for rank in range(self.size))])
        self._used = []

    def _wait(self, keys: KeyStore, is_done: Callable[[], bool]) -> None:
        """Poll, the less often the longer it takes."""
        start = time.monotonic()
        while not is_done():
            if self._is_closed:
                raise RankLostError(f"rank {self.numbers[self.rank]} has left the call")
            if self._verdict is not None and not is_done():  # a rank that has left has met this one before
                self._follow(keys)
            waited_s = time.monotonic() - start
            time.sleep(min(max(_FIRST_POLL_S, waited_s * _LATENESS), _LAST_POLL_S))

    def _publish(self, keys: KeyStore, kind: str, text: str) -> None:
        """Make this the verdict, unless another rank has published one."""
        self._verdict = keys.set_first("lost", f"{kind}\n{text}")

    def _follow(self, keys: KeyStore) -> NoReturn:
        """Raise the verdict, on the first rank not before the others have read it: the store may end with it."""
        verdict = self._verdict = self._verdict or keys.set_first("lost", f"{_LOST}\nthe store is lost")
        heard = keys.count("heard", 1)
        deadline = time.monotonic() + max(2 * self.patience.beat_s, _GRACE * self.patience.silence_s)
        while self.rank == 0 and heard < self.size - 1 and time.monotonic() < deadline:
            time.sleep(_LAST_POLL_S)
            heard = keys.count("heard", 0)
        kind, _, text = verdict.partition("\n")
        error: type[CheckpointError] = DisagreementError if kind == _OTHER_CALL else RankLostError
        raise error(text)

    # On the detector's thread

    @property
    def _watched(self) -> Sequence[int]:
        """Ranks in the default group: the first rank watches all others, these watch the first one."""
        return self.numbers[1:] if self.rank == 0 else self.numbers[:1]

    def look(self, store: Any) -> None:
        """Look for failures and verdicts of other ranks, and for lost ranks."""
        if self._keys is None:
            return
        keys = KeyStore(store, self._keys.prefix)
        step = self._step
        if keys.has(f"{step}/cut"):
            self._cut_step = step
        if self._verdict is None and keys.has("lost"):
            self._verdict = keys.set_first("lost", "")
        self._detector.look_for(alive_keys(store), self._watched)
        signs = {number: self._detector.signs.get(number) for number in self._watched}
        for number, sign in signs.items():
            if self._verdict is None and sign is not None and sign.is_lost(self.patience.silence_s):
                silence_s = time.monotonic() - sign.since
                cause = f"no sign of life for {silence_s:.0f} s; it was killed, has ended, or is stopped"
                cause = "its process has ended" if sign.has_ended else cause
                text = f"rank {number} ({sign.place}) is lost: {cause}; look at its own output, and at the "
                self._publish(keys, _LOST, f"{text}system's log for a process killed for want of memory")
        if self._step == 0 and self._verdict is None:
            self._look_for_absent(keys, [number for number, sign in signs.items() if sign is None])

    def _look_for_absent(self, keys: KeyStore, unknown: list[int]) -> None:
        now = time.monotonic()
        if unknown and now > self._tell_at:
            self._tell_at = now + TELL_AGAIN_S
            _log.warning("%s", waiting_for(unknown, self.size, address_of(self._store)))
        if now - self._since > self.patience.join_s:
            for rank, number in enumerate(self.numbers):
                if not keys.has(f"here/{rank}"):
                    waited = f"within {now - self._since:.0f} s; every rank has to make it"
                    self._publish(keys, _LOST, f"rank {number} has not come to this call {waited}")
                    return


def waiting_for(ranks: Sequence[int], size: int, address: str) -> str:
    """A message that names ranks that have not come to where all meet."""
    return f"waiting for rank{'s' * (len(ranks) > 1)} {shown_ranks(ranks)} of {size} at {address}"


def _deaf(silent_s: float) -> RankLostError:
    return RankLostError(
        f"the store through which the ranks meet has not answered for {silent_s:.0f} s; the process that holds it "
        "(the launcher, or rank 0) is stopped or unreachable"
    )


def _store_lost(error: Exception) -> RankLostError:
    lost = RankLostError(
        "the store through which the ranks meet is gone; the process that holds it (the launcher, or rank 0) has "
        "ended, or cannot be reached; look at its own output"
    )
    lost.__cause__ = error
    return lost


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
        """Set a key; returns the names of all keys set, for :meth:`forget`. The key itself is set last."""
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
        """Set a key unless it is there; its value, whoever set it."""
        return bytes(self.store.compare_set(f"{self.prefix}/{key}", "", value)).decode()

    def count(self, key: str, more: int) -> int:
        return int(self.store.add(f"{self.prefix}/{key}", more))

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.store.delete_key(f"{self.prefix}/{key}")


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a rank's process is. Host names are for people: containers may share one."""

    host: str
    process: int
    born: str
    space: str

    @classmethod
    def here(cls) -> Self:
        process = os.getpid()
        return cls(socket.gethostname(), process, machine.born(process), machine.process_space())

    def has_ended(self) -> bool:
        """Return True if the process is known to be gone: its number means the same here, and it is not there."""
        return self.space == machine.process_space() and machine.born(self.process) != self.born

    def is_running(self) -> bool:
        """Return True if the process is known to be there, and not stopped."""
        is_here = self.space == machine.process_space() and machine.born(self.process) == self.born
        return is_here and not machine.is_stopped(self.process)

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}"


@dataclass(slots=True)
class Sign:
    """A process's last heartbeat as ``told``, and since when it has been that one."""

    place: ProcessPlace
    told: bytes
    since: float

    @property
    def has_ended(self) -> bool:
        return self.told == _ENDED or self.place.has_ended()

    def is_lost(self, silence_s: float) -> bool:
        return self.has_ended or (time.monotonic() - self.since > silence_s and not self.place.is_running())

    @property
    def progress(self) -> int:
        return 0 if self.told == _ENDED else int(self.told.split()[1])


class Detector:
    """The heartbeat of this process in one store, and those of others.

    Attributes:
        heard_s: when the store answered last, by the monotonic clock.
        error: what broke the connection to the store, if anything did.
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

    def add(self, watcher: Any, beat_s: float) -> None:
        """Call ``watcher.look(store)`` once a heartbeat, on the detector's thread and over its connection."""
        self._watchers.add(watcher)
        if beat_s < self._beat_s:
            self._beat_s = beat_s
            self._awake.set()

    def remove(self, watcher: Any) -> None:
        self._watchers.discard(watcher)

    def end(self) -> None:
        """Say that this process ends."""
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


def address_of(store: Any) -> str:
    """Host and port of a store, or its file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else getattr(store, "path", "one store")
