"""Lets the ranks of one call exchange small messages over torch's key-value store.

[Note: No rank waits in a collective] A collective waits as long as its slowest rank, and hangs when one is gone. So
ranks meet here first: each sends the first rank a report, which may be empty, and reads the one result that the
first rank makes of all. A meeting ends with an error when the detector
(:class:`~shardwise.ranks.failure_detection.Detector`) finds that a rank is lost: the rank that finds out first
publishes the verdict, and every rank raises it. A rank that fails announces it at once, so that the others can
stop.

The n-th call of a rank meets the n-th of every other. If these are not the same call, all ranks raise an error
that names two of them, and their next calls meet again. The result of a meeting has the name of the first rank's: a
rank that is in another one raises, and all ranks do in the next meeting of the call.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist

from shardwise.core.errors import RankLostError, RankMismatchError, ShardwiseError
from shardwise.core.formatting import format_ranks
from shardwise.core.machine import ProcessId, running_s
from shardwise.ranks.failure_detection import KeyStore, get_detector, heartbeat_keys
from shardwise.ranks.outcomes import Failure
from shardwise.ranks.slow_ranks import Meeting
from shardwise.ranks.timeouts import Timeouts

T = TypeVar("T")
P = ParamSpec("P")

_log = logging.getLogger(__name__)

_FIRST_POLL_S, _LAST_POLL_S = 0.0001, 0.05
_POLL_FRACTION = 0.05
"""The time between two polls, as a fraction of the time waited so far."""

_REPORT = 1 << 32
"""Added by a rank that has sent a report to the number of those that have arrived at a meeting."""

_VERDICT_FRACTION = 0.25
"""The fraction of the timeout for which the first rank waits until busy ranks have read a verdict."""

_VERDICT_CHARACTERS = 1 << 20
"""A longer verdict is cut: torch's store takes 8 MiB at most."""

_STORE_FACTOR = 1.25
"""The store is lost when it has not answered for this many timeouts."""

ADVICE_ON_WAITS = "Find out what it does, or raise the timeout of the process group (ddp_timeout)"
"""What to do if a rank that lives was not waited for any longer."""

_OUT_OF_STEP = (
    "a call was skipped, or made by some ranks alone. Make the same calls in the same order on every rank"
)
"""The reason of a mismatch, and what to do."""

ADVICE_ON_ENDS = "Check its output, and the kernel log (dmesg) for the OOM killer"

WARN_S, WARN_AGAIN_S = 5.0, 30.0
"""Seconds after which a rank that has made no call yet is logged, and logged again."""


class ControlChannel:
    """One rank's end of a call's meetings.

    Args:
        store: torch's key-value store, shared by the ranks.
        name: the same on all ranks of one group.
        rank: this rank in the group.
        global_ranks: the ranks of the group in the default group.
        timeouts: how long to wait.
        call: description of this rank's call, the same on all ranks.
        number: of the call among those with this name, the same on all ranks. None to count it when it is joined.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        global_ranks: Sequence[int],
        timeouts: Timeouts,
        call: str,
        number: int | None = None,
    ) -> None:
        self.rank, self.global_ranks, self.size = rank, global_ranks, len(global_ranks)
        self.timeouts = timeouts
        self._name = name
        self._call = call
        self.number = number
        self._store = store
        self._keys: KeyStore | None = None
        self._meeting_number = 0
        self._keys_to_delete: list[str] = []
        self._failed_meeting = -1
        self._verdict: Failure | None = None
        self._is_closed = False
        self._joining = threading.Lock()
        # By running_s(): when this rank joined the call, when it next warns of absent ranks, and since when it
        # waits in a meeting. inf: not yet, or in none.
        self._joined_s = self._warn_at = self._waiting_s = math.inf
        self._detector = get_detector(store, global_ranks[rank])

    @property
    def is_interrupted(self) -> bool:
        """Return True if some rank has failed or is lost, or the store is lost."""
        return (
            self._failed_meeting == self._meeting_number
            or self._verdict is not None
            or self.store_loss() is not None
        )

    def loss(self) -> ShardwiseError | None:
        """Return the loss of a rank or of the store that was detected. Does not use the store."""
        if self._verdict is not None and self._verdict.kind != RankMismatchError.__name__:
            return self._verdict.to_error()
        return self.store_loss()

    def store_loss(self) -> RankLostError | None:
        """Return the error of a store that is gone, or that does not answer."""
        # Longer than the timeout of a rank, so that a lost rank is named rather than the store that it holds.
        error, limit_s = self._detector.error, _STORE_FACTOR * self.timeouts.heartbeat_timeout_s
        if error is None and self._detector.unanswered_s < limit_s:
            return None
        # The limit, not the time that has passed: the text has to be the same on all ranks.
        fault = "is gone" if error is not None else f"has not answered for {limit_s:.0f} s"
        lost = RankLostError(
            f"the store of the process group {fault}. The process that holds it (the launcher, or rank 0) has "
            "ended, is stopped, or cannot be reached. Check its output"
        )
        lost.__cause__ = error
        return lost

    # Called by the rank

    def join(self) -> None:
        """Announce that this rank has reached the call.

        Raises:
            RankLostError: the store is gone, or does not answer.
        """
        self._run(KeyStore.delete, ())  # deletes nothing: every task joins before it begins

    def gather(self) -> list[bytes]:
        """On the first rank: wait for all ranks. Return the reports of the others.

        The other ranks wait until :meth:`publish` is called.

        Raises:
            RankLostError: a rank is lost, or has not come. The message has its rank.
            RankMismatchError: ranks are in different calls.
        """
        return self._run(self._gather)

    def publish(self, result: bytes, name: str = "") -> None:
        """On the first rank: end the meeting. Raises as :meth:`gather` does.

        Ranks that are in a meeting with another ``name`` raise RankMismatchError, and all in their next meeting.
        With "", names are not compared.
        """
        self._run(self._publish, name.encode() + b"\n" + result)

    def report(self, message: bytes, name: str = "") -> bytes:
        """On another rank: send a report, and wait for the result. Raises as :meth:`gather` does."""
        return self._run(self._report, message, name)

    def finish(self) -> None:
        """Leave after the last meeting, the first rank when all have read the result: the store may end with it.

        A rank that is lost now is ignored.
        """
        if self.rank == 0 and self._meeting_number:
            with contextlib.suppress(ShardwiseError):
                self._run(self._finish)

    def interrupt(self) -> None:
        """Announce that this rank has failed and will report its error at the next meeting."""
        step = self._failed_meeting = self._meeting_number
        self._start(KeyStore.set, f"{step}/failed", b"")

    def abort(self, cause: str, kind: type[ShardwiseError] = RankLostError) -> None:
        """Announce that this rank leaves the call and will not reach another meeting. The others raise ``kind``."""
        number = self.global_ranks[self.rank]
        text = f"rank {number} ({ProcessId.here()}) has left the call: {cause}"
        # The error of this rank counts, not one of the store. Ranks that cannot read this miss its heartbeat.
        with contextlib.suppress(Exception):
            self._start(self._announce, kind(text)).result(timeout=self.timeouts.heartbeat_interval_s)

    def await_verdict(self) -> None:
        """Wait until the detector has decided whether a rank is lost.

        Raises:
            ShardwiseError: naming the rank, of the kind with which it has left.
        """
        # A few intervals more than the timeout, because a verdict is published and read with heartbeats.
        deadline = time.monotonic() + self.timeouts.heartbeat_timeout_s + 4 * self.timeouts.heartbeat_interval_s
        while self._verdict is None and self.store_loss() is None and time.monotonic() < deadline:
            time.sleep(_LAST_POLL_S)
        if self._verdict is not None or self.store_loss() is not None:
            self._run(self._raise_verdict)

    def close(self) -> None:
        """End a meeting in progress. The heartbeat continues."""
        self._is_closed = True
        self._detector.watchers.discard(self)

    def _run(self, task: Callable[Concatenate[KeyStore, P], T], *args: P.args, **keywords: P.kwargs) -> T:
        future = self._start(task, *args, **keywords)
        while True:
            try:
                return future.result(timeout=self.timeouts.heartbeat_interval_s)
            except TimeoutError:  # the thread may hang in the store forever
                if loss := self.store_loss():
                    raise loss from loss.__cause__

    def _start(self, task: Callable[Concatenate[KeyStore, P], T], *args: P.args, **keywords: P.kwargs) -> Future[T]:
        """Run the task on a thread of its own: a store that cannot be reached may never answer."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task(self._joined_keys(), *args, **keywords))
            except ShardwiseError as error:
                future.set_exception(error)
            except Exception as error:
                self._detector.error = error
                future.set_exception(self.loss() or error)

        thread = threading.Thread(target=run, name=f"shardwise-meeting-{self.rank}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The system allows no more threads. On this one then: the others have to hear of what fails for it.
            if "can't start new thread" not in str(error):  # the interpreter ends
                raise
            run()
        return future

    # On the thread of a task

    def _joined_keys(self) -> KeyStore:
        with self._joining:
            self._keys = self._keys or self._join()
        return self._keys

    def _join(self) -> KeyStore:
        # A number of its own for each call of this rank. The n-th call of a rank meets the n-th of the others.
        if self.number is None:
            self.number = KeyStore(self._store, self._name).add(f"calls/{self.rank}", 1)
            self._detector.calls[self._name] = self.number
        keys = KeyStore(self._store, f"{self._name}/call{self.number}")
        # Before "here": a rank that is here, and has never had a heartbeat, would not be missed.
        self._detector.has_started.wait()
        keys.set(f"here/{self.rank}", b"")
        local = f"rank {self.global_ranks[self.rank]} is in {self._call}"
        first = keys.set_default("call", local)  # atomic: all ranks compare with the one that came first
        if first.partition(" is in ")[2] != self._call:
            text = f"{local}, and {first}: {_OUT_OF_STEP}. The next calls meet again"
            self._announce(keys, RankMismatchError(text))
        self._joined_s = running_s()
        self._warn_at = self._joined_s + WARN_S
        # Last: from here on the detector's thread uses this channel.
        self._detector.add(self, self.timeouts.heartbeat_interval_s)
        return keys

    def _gather(self, keys: KeyStore) -> list[bytes]:
        num_reports, others = 0, range(1, self.size)
        with self._in_meeting(keys, self._meeting_number):
            for _ in self._polls(keys):
                # One counter for both: a poll has two small requests to the store, whatever the number of ranks.
                num_reports, num_arrived = divmod(keys.count(f"{self._meeting_number}/in"), _REPORT)
                if num_arrived == len(others):
                    break
        # After all have come: this rank was late, and they may have given it up in the meantime.
        if keys.has("verdict"):
            self._raise_verdict(keys)
        # Reports that are empty are not sent. If only some are not, each rank's key has to be looked for.
        senders: Sequence[int] = others[:num_reports]  # all, or none
        if 0 < num_reports < len(others):
            senders = [rank for rank in others if keys.has(f"{self._meeting_number}/{rank}")]
        reports = dict(zip(senders, keys.get([f"{self._meeting_number}/{rank}" for rank in senders]), strict=True))
        return [reports.get(rank, b"") for rank in others]

    def _publish(self, keys: KeyStore, result: bytes) -> None:
        step = self._meeting_number
        # Before the result is set: a rank that reads it may enter the next meeting at once, and fail there.
        self._meeting_number += 1
        used = [*keys.set(f"{step}/all", result), *(f"{step}/{name}" for name in ("in", "out", "failed"))]
        # Keys of the meeting before, not of this one: all ranks have left that, since they have come to this one.
        keys.delete(self._keys_to_delete)
        self._keys_to_delete = used

    def _report(self, keys: KeyStore, message: bytes, name: str) -> bytes:
        step = self._meeting_number
        used = keys.set(f"{step}/{self.rank}", message) if message else []
        # After the report is set: the first rank reads it as soon as the counter says that all have come.
        keys.add(f"{step}/in", 1 + _REPORT * bool(message))
        with self._in_meeting(keys, step):
            for _ in self._polls(keys):
                if keys.has(f"{step}/all"):
                    break
        [named_result] = keys.get([f"{step}/all"])
        first_name, _, result = named_result.partition(b"\n")
        self._meeting_number += 1
        keys.delete(used)  # the first rank has read it
        if first_name and first_name != name.encode():
            first = f"rank {self.global_ranks[0]} is in {first_name.decode()}"
            local = f"rank {self.global_ranks[self.rank]} is in {name}"
            self._announce(keys, RankMismatchError(f"{first}, and {local}: {_OUT_OF_STEP}"))
            self._raise_verdict(keys)
        # Last: the first rank may end, and the store with it, once all have done this.
        keys.add(f"{step}/out", 1)
        return result

    def _finish(self, keys: KeyStore) -> None:
        for _ in self._polls(keys):
            if keys.count(f"{self._meeting_number - 1}/out") == self.size - 1:
                break
        keys.delete([*self._keys_to_delete, "call", *(f"here/{rank}" for rank in range(self.size))])
        self._keys_to_delete = []

    @contextlib.contextmanager
    def _in_meeting(self, keys: KeyStore, step: int) -> Iterator[None]:
        """Have this rank's heartbeats say that it waits in a meeting."""
        key = f"{keys.prefix}/{step}"
        self._detector.meetings[key] = Meeting(time.monotonic(), self.global_ranks)
        self._waiting_s = running_s()
        try:
            yield
        finally:
            self._waiting_s = math.inf
            self._detector.meetings.pop(key, None)

    def _polls(self, keys: KeyStore) -> Iterator[None]:
        """Yield before each poll of the caller, the less often the longer it takes. Raise a verdict."""
        start = time.monotonic()
        while True:
            # Read before the poll and raised after it: a rank that has left the call may have come to this meeting
            # before, and then the meeting succeeds.
            verdict = self._verdict
            yield
            if self._is_closed:
                raise RankLostError(f"rank {self.global_ranks[self.rank]} has left the call")
            if verdict is not None:
                self._raise_verdict(keys)
            waited_s = time.monotonic() - start
            time.sleep(min(max(_FIRST_POLL_S, waited_s * _POLL_FRACTION), _LAST_POLL_S))

    def _announce(self, keys: KeyStore, error: ShardwiseError) -> Failure:
        """Publish the verdict, unless another rank has. Return the published one, which all ranks raise."""
        verdict = f"{type(error).__name__}\n{error}"[:_VERDICT_CHARACTERS]
        kind, _, text = keys.set_default("verdict", verdict).partition("\n")
        self._verdict = Failure(kind, text)
        return self._verdict

    def _raise_verdict(self, keys: KeyStore) -> NoReturn:
        """Raise the verdict, on the first rank not before the others have read it: the store may end with it."""
        verdict = self._verdict or self._announce(keys, RankLostError("the store is lost"))
        num_readers = keys.add("readers", 1)
        deadline = time.monotonic() + _VERDICT_FRACTION * self.timeouts.heartbeat_timeout_s
        while self.rank == 0 and num_readers < self.size - 1 and time.monotonic() < deadline:
            time.sleep(_LAST_POLL_S)
            num_readers = keys.count("readers")
        raise verdict.to_error()

    # On the detector's thread

    def watch(self, store: Any) -> None:
        """Look for failures and verdicts of other ranks, and for lost ranks."""
        if self._keys is None:
            return
        # Over the detector's own connection: a thread that waits for a key may hold the other one.
        keys = KeyStore(store, self._keys.prefix)
        step = self._meeting_number  # once: the thread of a task may go on to the next meeting in between
        if keys.has(f"{step}/failed"):
            self._failed_meeting = step
        if self._verdict is None and keys.has("verdict"):
            self._announce(keys, RankLostError())  # reads the one that is there
        # The others wait for the first rank only, which tells them of all else by a verdict.
        watched = self.global_ranks[1:] if self.rank == 0 else self.global_ranks[:1]
        self._detector.update(heartbeat_keys(store), watched)
        heartbeats = self._detector.heartbeats
        for number in watched:
            beat = heartbeats.get(number)
            if beat and self._verdict is None and (cause := beat.loss(self.timeouts.heartbeat_timeout_s)):
                text = f"rank {number} ({beat.process}) is lost: {cause}. {ADVICE_ON_ENDS}"
                self._announce(keys, RankLostError(text))
        # Before the first meeting only: who has been in a meeting has joined.
        if self._meeting_number == 0 and self._verdict is None:
            self._find_absent(keys, [number for number in watched if number not in heartbeats])
        if self._verdict is None:
            self._find_departed(keys, step, watched)
        waited_s = running_s() - self._waiting_s
        if self._verdict is None and waited_s > self.timeouts.meeting_timeout_s:
            slow = self._detector.waits_for or "another rank"
            self._announce(keys, RankLostError(f"waited for {waited_s:.0f} s for {slow}. {ADVICE_ON_WAITS}"))

    def _find_departed(self, keys: KeyStore, step: int, watched: Sequence[int]) -> None:
        """Announce a rank that has begun a later call, while this one waits for it in a meeting of this call.

        It may still be in this call, too: a generator that it has left, and not closed.
        """
        key = f"{keys.prefix}/{step}"
        meeting, begun = self._detector.meetings.get(key), self._detector.calls.get(self._name)
        if meeting is None or begun is None:
            return
        later = []
        for number in watched:
            beat = self._detector.heartbeats.get(number)
            if beat and (status := beat.status) and status.calls.get(self._name, 0) > begun:
                later.append(number)
        # Looked up after the heartbeats: a rank that makes the same calls begins a later one after this meeting,
        # whose result stays until this rank has read it. (The first rank, which makes it, does not wait any more.)
        if later and not keys.has(f"{step}/all") and self._detector.meetings.get(key) is meeting:
            text = f"rank {later[0]} has begun another call, and rank {self.global_ranks[self.rank]} waits for it"
            error = RankMismatchError(f"{text} in {self._call}: {_OUT_OF_STEP}. The next calls meet again")
            self._announce(keys, error)

    def _find_absent(self, keys: KeyStore, unknown: list[int]) -> None:
        now = running_s()
        if unknown and now > self._warn_at:
            self._warn_at = now + WARN_AGAIN_S
            size = dist.get_world_size() if dist.is_initialized() else self.size
            _log.warning("%s", waiting_for(unknown, size, self._store))
        # Every rank that is not here is announced, but only the first announcement becomes the verdict.
        if now - self._joined_s > self.timeouts.join_timeout_s:
            for rank, number in enumerate(self.global_ranks):
                if not keys.has(f"here/{rank}"):
                    text = f"rank {number} has not reached {self._call} within {now - self._joined_s:.0f} s"
                    advice = "Make the call on every rank, or pass a process_group of those that make it"
                    self._announce(keys, RankLostError(f"{text}. {advice}"))


def waiting_for(ranks: Sequence[int], size: int, store: Any) -> str:
    """Return a message that names ranks that have not arrived, and the store's host and port, or its file."""
    # PrefixStores wrap the store that has an address.
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    address = f"{store.host}:{store.port}" if hasattr(store, "port") else getattr(store, "path", "one store")
    return f"waiting for rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)} of {size} at {address}"
