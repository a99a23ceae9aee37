"""Lets the ranks of one call exchange small messages over torch's key-value store.

[Note: Nobody waits in a collective] A collective waits as long as its slowest rank, and hangs when one is gone. So
ranks meet here first: each hands the first rank a message, which may be empty, and reads the one answer that the
first rank makes of all. A meeting ends with an error when the detector
(:class:`~shardwise.execution.failure_detection.Detector`) finds that a rank is lost: the rank that finds out first
publishes the verdict, and every rank raises it. A rank that fails announces it at once, so that the others can
stop.

The n-th call of a rank meets the n-th of every other. Where these are not the same call, all ranks raise an error
that names two of them, and their next calls meet again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeAlias, TypeVar

from shardwise.errors import CheckpointError, RankLostError, RankMismatchError
from shardwise.execution import Timeouts
from shardwise.execution.failure_detection import KeyStore, ProcessPlace, alive_keys, detector_of
from shardwise.report.names import shown_ranks

Conclude: TypeAlias = Callable[[dict[int, bytes]], bytes]
"""Makes the answer to all ranks from their messages."""

T = TypeVar("T")
P = ParamSpec("P")

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


class ControlChannel:
    """One rank's end of a call's meetings.

    Args:
        store: torch's key-value store, shared by the ranks.
        name: the same on all ranks of one group.
        rank: this rank in the group.
        global_ranks: the ranks of the group in the default group.
        timeouts: how long to wait.
        call: description of this rank's call, the same on all ranks.
    """

    def __init__(
        self, store: Any, name: str, rank: int, global_ranks: Sequence[int], timeouts: Timeouts, call: str
    ) -> None:
        self.rank, self.global_ranks, self.size = rank, global_ranks, len(global_ranks)
        self.timeouts = timeouts
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
        self._detector = detector_of(store, global_ranks[rank])

    @property
    def is_cut(self) -> bool:
        """Return True if some rank has failed or is lost, or the store is: there is no use in working on."""
        return self._cut_step == self._step or self._verdict is not None or self.has_lost_store

    @property
    def has_lost_store(self) -> bool:
        return self._store_error is not None or self._unheard_s > _DEAF * self.timeouts.heartbeat_timeout_s

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
        limit_s = self.timeouts.heartbeat_timeout_s * (_HASTY if in_haste else 1)
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
        """Announce that this rank has reached the call. Return the number of this call among those of its name.

        Raises:
            RankLostError: the store is gone, or does not answer.
        """
        return self._ask(lambda _: int(self._joined().prefix.rpartition("/line")[2]))

    def meet(self, message: bytes, conclude: Conclude) -> bytes:
        """Wait for all ranks. Return the answer that the first rank derives from the messages of all ranks.

        An empty message only announces this rank's arrival. ``conclude`` is called on the first rank, on another
        thread, and raises nothing, since the others wait for it.

        Raises:
            RankLostError: naming the rank that is gone, or that never came.
            RankMismatchError: ranks are in different calls.
        """
        if self.rank == 0:
            return self._ask(self._lead, conclude)
        return self._ask(self._attend, message)

    def part(self) -> None:
        """Leave after the last meeting, the first rank when all have read the answer: the store may end with it.

        A rank that is lost now is not missed.
        """
        if self.rank == 0 and self._step:
            with contextlib.suppress(RankLostError, RankMismatchError):
                self._ask(self._await_others)

    def cut(self) -> None:
        """Announce that this rank has failed and will report its error at the next meeting."""
        step = self._cut_step = self._step
        self._start(lambda keys: keys.put(f"{step}/cut", b""))

    def leave(self, cause: str) -> None:
        """Announce that this rank leaves the call and will not reach another meeting."""
        number = self.global_ranks[self.rank]
        text = f"rank {number} ({ProcessPlace.here()}) has left the call: {cause}"
        with contextlib.suppress(Exception):
            self._start(self._publish, _LOST, text).result(timeout=self.timeouts.heartbeat_interval_s)

    def find_lost(self) -> None:
        """Wait until the detector is sure whether a rank is lost.

        Raises:
            RankLostError: naming the rank.
        """
        deadline = time.monotonic() + self.timeouts.heartbeat_timeout_s + 4 * self.timeouts.heartbeat_interval_s
        while self._verdict is None and not self.has_lost_store and time.monotonic() < deadline:
            time.sleep(_LAST_POLL_S)
        if self._verdict is not None or self.has_lost_store:
            self._ask(self._follow)

    def close(self) -> None:
        """End a meeting in progress. The heartbeat continues."""
        self._is_closed = True
        self._detector.remove(self)

    @property
    def others_progress(self) -> int:
        """Return the last reported progress of the ranks that this one watches, summed."""
        signs = [self._detector.signs.get(number) for number in self._watched]
        return sum(sign.progress for sign in signs if sign is not None)

    def tell_progress(self, total: int) -> None:
        self._detector.progress = total

    def _ask(self, task: Callable[Concatenate[KeyStore, P], T], *args: P.args, **keywords: P.kwargs) -> T:
        answer = self._start(task, *args, **keywords)
        while True:
            try:
                return answer.result(timeout=self.timeouts.heartbeat_interval_s)
            except TimeoutError:
                if self.while_waiting is not None:
                    self.while_waiting()
                if self._unheard_s > _DEAF * self.timeouts.heartbeat_timeout_s:
                    raise _deaf(self._unheard_s) from None

    def _start(self, task: Callable[Concatenate[KeyStore, P], T], *args: P.args, **keywords: P.kwargs) -> Future[T]:
        """Run the task on a thread of its own: a store that cannot be reached may never answer."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(task(self._joined(), *args, **keywords))
            except (RankLostError, RankMismatchError) as error:
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
        own = f"rank {self.global_ranks[self.rank]} is in {self._call}"
        first = keys.set_first("call", own)
        if first.partition(" is in ")[2] != self._call:
            self._publish(
                keys,
                _OTHER_CALL,
                f"{own}, where {first}: a call was skipped, or made by some ranks alone. Every rank has to make "
                "the same calls in the same order. The next call starts in step",
            )
        self._since = time.monotonic()
        self._tell_at = self._since + TELL_S
        self._detector.add(self, self.timeouts.heartbeat_interval_s)
        return keys

    def _lead(self, keys: KeyStore, conclude: Conclude) -> bytes:
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
                raise RankLostError(f"rank {self.global_ranks[self.rank]} has left the call")
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
        deadline = time.monotonic() + max(
            2 * self.timeouts.heartbeat_interval_s, _GRACE * self.timeouts.heartbeat_timeout_s
        )
        while self.rank == 0 and heard < self.size - 1 and time.monotonic() < deadline:
            time.sleep(_LAST_POLL_S)
            heard = keys.count("heard", 0)
        kind, _, text = verdict.partition("\n")
        error: type[CheckpointError] = RankMismatchError if kind == _OTHER_CALL else RankLostError
        raise error(text)

    # On the detector's thread

    @property
    def _watched(self) -> Sequence[int]:
        """Ranks in the default group: the first rank watches all others, these watch the first one."""
        return self.global_ranks[1:] if self.rank == 0 else self.global_ranks[:1]

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
            if self._verdict is None and sign is not None and sign.is_lost(self.timeouts.heartbeat_timeout_s):
                heartbeat_timeout_s = time.monotonic() - sign.since
                cause = f"no sign of life for {heartbeat_timeout_s:.0f} s (killed, ended or stopped)"
                cause = "its process has ended" if sign.has_ended else cause
                text = f"rank {number} ({sign.place}) is lost: {cause}. Check its output, and the "
                self._publish(keys, _LOST, f"{text}kernel log (dmesg) for the OOM killer")
        if self._step == 0 and self._verdict is None:
            self._look_for_absent(keys, [number for number, sign in signs.items() if sign is None])

    def _look_for_absent(self, keys: KeyStore, unknown: list[int]) -> None:
        now = time.monotonic()
        if unknown and now > self._tell_at:
            self._tell_at = now + TELL_AGAIN_S
            _log.warning("%s", waiting_for(unknown, self.size, address_of(self._store)))
        if now - self._since > self.timeouts.join_timeout_s:
            for rank, number in enumerate(self.global_ranks):
                if not keys.has(f"here/{rank}"):
                    waited = f"within {now - self._since:.0f} s. Every rank has to make it"
                    self._publish(keys, _LOST, f"rank {number} has not reached this call {waited}")
                    return


def waiting_for(ranks: Sequence[int], size: int, address: str) -> str:
    """Return a message that names ranks that have not reached the call."""
    return f"waiting for rank{'s' * (len(ranks) > 1)} {shown_ranks(ranks)} of {size} at {address}"


def _deaf(silent_s: float) -> RankLostError:
    return RankLostError(
        f"the store through which the ranks meet has not answered for {silent_s:.0f} s. The process that holds it "
        "(the launcher, or rank 0) is stopped or unreachable"
    )


def _store_lost(error: Exception) -> RankLostError:
    lost = RankLostError(
        "the store through which the ranks meet is gone. The process that holds it (the launcher, or rank 0) has "
        "ended, or cannot be reached. Check its output"
    )
    lost.__cause__ = error
    return lost


def address_of(store: Any) -> str:
    """Host and port of a store, or its file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else getattr(store, "path", "one store")
