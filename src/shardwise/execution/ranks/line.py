"""Sends small messages between ranks over the process group's store, and notices ranks that are gone.

[Note: Nobody waits in a collective] A collective waits as long as its slowest rank, and hangs when one is gone.
So ranks meet here first, over the key-value store that torch has for rendezvous. Each rank has one thread for
it, which delivers what the rank says, waits for what the others say, and beats once a second while its rank
works or waits. The first rank watches every beat, the others watch the first rank's. A beat that stops means a
process that was killed, has ended or is stopped: whoever notices first publishes that, and every rank raises the
same error. A rank that fails in its work says so at once, and the others can stop theirs (:attr:`Line.is_cut`).
Only when all ranks have met does a collective carry what is large.

A rank says which call it is in as it comes. The n-th line of a rank meets the n-th of every other; where they are
not in the same call, whoever comes last finds out, all of them raise the same error, and their next lines meet
again. A rank that has not come yet is missed by its pulse ([Note: A pulse] in ``execution/ranks/whereabouts.py``).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from shardwise.errors import ConfigError, DisagreementError, RankLostError
from shardwise.execution.ranks.lost_ranks import Talk
from shardwise.execution.ranks.messages import KeyStore
from shardwise.execution.ranks.whereabouts import Pulses

T = TypeVar("T")

ANY_CALL = "another call"
"""Of calls that do not say what they are."""

_QUIET_S = 0.005
"""After a meeting, a rank that does not come to the next one so soon is at work: nobody waits for its line."""

_MOST_UNTIDY = 100

_DEAF = 1.5
"""After so many times the silence without an answer, the store itself is taken for lost."""

_HASTY = 0.5
"""A rank that is asked to stop waits for silent ones, or for the store, only for this part of the silence."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for each other, in seconds.

    Attributes:
        beat_s: between two signs of life.
        silence_s: without a sign of life, after which a rank counts as lost, in a call or since its last one.
        join_s: for a rank to come to the call at all; until then it may be busy with something else.
    """

    beat_s: float = 1.0
    silence_s: float = 18.0
    join_s: float = 1800.0

    def __post_init__(self) -> None:
        if not 0 < self.beat_s < self.silence_s <= self.join_s or not math.isfinite(self.silence_s):
            raise ConfigError(
                f"{self}: a beat is shorter than the silence, and that not longer than the wait to join"
            )


class Line:
    """One rank's end of the line; ``meet`` is called by one thread at a time.

    Args:
        store: torch's key-value store, shared by the ranks.
        name: what sets this line apart from others in the same store; the same on all ranks.
        rank: this rank, of ``size``.
        patience: how long to wait.
        numbers: what the ranks are called in messages, where they are some of many.
        call: what this rank is doing, for messages; the same on all ranks, else none of them does it.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        patience: Patience,
        numbers: Sequence[int] | None = None,
        call: str = ANY_CALL,
    ) -> None:
        self.call = call
        self.number = 0
        """Which of this rank's lines of that name this is, from 1; 0 before it has joined."""
        self.rank = rank
        self.numbers = numbers or range(size)
        self.size = size
        self.patience = patience
        self.progress = 0
        """A number this rank publishes with its beats."""
        self.total_progress = 0
        """On the first rank: the sum of all ranks' numbers, as last heard."""
        self.is_closing = False
        self.while_waiting: Callable[[], None] | None = None
        """Called about once a beat by a rank that waits in :meth:`meet`; what it raises ends the wait."""
        self.name = name
        self._keys = KeyStore(store, name)
        self._pulses = Pulses(store)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._cut = threading.Event()
        self._heard = time.monotonic()
        self._silent_since = math.inf
        self._verdict: Exception | None = None
        self._store_error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name=f"shardwise-line-{rank}", daemon=True)
        self._thread.start()

    @property
    def is_cut(self) -> bool:
        """Whether some rank has failed or is lost, or the store is, so that there is no use in working on."""
        return self._cut.is_set() or self._is_deaf

    @property
    def _is_deaf(self) -> bool:
        return time.monotonic() - self._heard > _DEAF * self.patience.silence_s

    def lost(self, *, in_haste: bool = False) -> RankLostError | None:
        """What was found to be lost while this rank works: another rank, or the store; None for nothing.

        Asks nobody, so that it answers whatever is lost. ``in_haste``: silence counts as a loss earlier.
        """
        if isinstance(self._verdict, RankLostError):
            return self._verdict
        if self._store_error is not None:
            return _store_lost(self._store_error)
        limit_s, now = self.patience.silence_s * (_HASTY if in_haste else 1), time.monotonic()
        if now - self._heard > limit_s:
            return _deaf(now - self._heard)
        if in_haste and now - self._silent_since > limit_s:
            told = f"no sign of life from other ranks for {now - self._silent_since:.0f} s"
            return RankLostError(f"{told}, and this one was asked to stop")
        return None

    @property
    def has_lost_store(self) -> bool:
        """Whether the store is gone, or does not answer."""
        return self._store_error is not None or self._is_deaf

    def join(self) -> None:
        """Let the other ranks know that this one has come: from now on it is missed when it falls silent.

        Raises:
            RankLostError: the store is gone, or does not answer.
        """
        self._order(lambda _: None)

    def meet(self, message: bytes, conclude: Callable[[dict[int, bytes]], bytes], at_once_bytes: int = 0) -> bytes:
        """Wait for all ranks; the first rank's answer to what all of them say.

        A message may be empty: that tells only that this rank has come, and costs no more. ``conclude`` makes the
        answer of the messages that are not, by rank: on the first rank, in the thread of whoever calls, so that
        this rank beats meanwhile; up to ``at_once_bytes`` of messages, which take no time, on the line's thread. It
        raises nothing, since the others wait for it.

        Raises:
            RankLostError: naming the rank that is gone, or that never came.
            DisagreementError: ranks are in different calls; their next lines meet again.
        """
        if self.rank:
            return self._order(lambda talk: talk.meet(message))
        said: dict[int, bytes] = {0: message} if message else {}

        def hear(talk: Talk) -> bytes | None:
            said.update(talk.hear())
            if sum(map(len, said.values())) > at_once_bytes:
                return None
            answer = conclude(said)
            talk.answer(answer)
            return answer

        found = self._order(hear)
        answer = conclude(said) if found is None else found
        if found is None:
            self._order(lambda talk: talk.answer(answer))
        return answer

    def _order(self, task: Callable[[Talk], T]) -> T:
        order = _Order(task)
        self._orders.put(order)
        while True:
            try:
                return cast(T, order.answer.result(timeout=self.patience.beat_s))
            except NotYet:
                if self.while_waiting is not None:
                    self.while_waiting()
                if self._is_deaf:
                    raise _deaf(_DEAF * self.patience.silence_s) from None

    def part(self) -> None:
        """Leave after the last meeting; the first rank not before the others."""
        self._order(lambda talk: talk.part())

    def cut(self) -> None:
        """Tell the other ranks that this one has failed and will say how at the next meeting."""
        self._orders.put(_Order(lambda talk: talk.cut()))

    def leave(self, cause: str) -> None:
        """Tell the other ranks that this one leaves the call and will not come to another meeting."""
        self._orders.put(_Order(lambda talk: talk.leave(cause)))

    def find_lost(self) -> None:
        """Find out who is lost, if anybody is. Takes as long as it takes to be sure that nobody is.

        Raises:
            RankLostError: naming the rank.
        """
        patience = self.patience
        self._order(lambda talk: talk.find_lost(patience.silence_s + 4 * patience.beat_s))

    def close(self) -> None:
        """End the thread, and with it this rank's beats; a meeting that is going on is left."""
        self.is_closing = True
        self._orders.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self.patience.beat_s)

    # The thread

    def _serve(self) -> None:
        talk: Talk | None = None
        while True:
            is_untidy = talk is not None and talk.untidy > 0
            try:
                order = self._orders.get(timeout=_QUIET_S if is_untidy else self.patience.beat_s)
            except Empty:
                if talk is not None and is_untidy:
                    self._tidy(talk)
                elif talk is not None:
                    self._while_working(talk)
                continue
            if order is None:
                if talk is not None:
                    self._tidy(talk)
                return
            try:
                if talk is None:
                    self.heard()  # nobody has asked the store for anything before
                    talk = Talk(self._keys, self._pulses, self)
                    self.number = talk.number
                order.answer.set_result(order.carry_out(talk))
                if talk.untidy > _MOST_UNTIDY:
                    self._tidy(talk)
            except Exception as error:
                self._cut.set()
                if not isinstance(error, (RankLostError, DisagreementError)):
                    # What was found out while this rank worked: the store may have ended with who held it.
                    self._store_error = error
                    error = self._verdict or _store_lost(error)
                order.answer.set_exception(error)

    def _tidy(self, talk: Talk) -> None:
        try:
            talk.tidy()
        except Exception:  # the store is gone, as the next meeting says
            self._cut.set()

    def _while_working(self, talk: Talk) -> None:
        try:
            talk.beat()
        except Exception as error:  # the next meeting says what is wrong
            self._cut.set()
            if isinstance(error, (RankLostError, DisagreementError)):
                self._verdict = error
            else:
                self._store_error = error

    def heard(self) -> None:
        """Note that the store answered just now."""
        self._heard = time.monotonic()
        self._store_error = None

    def note_silence(self, since: float) -> None:
        """Note when the rank that has been silent for longest was heard."""
        self._silent_since = since

    def note_cut(self) -> None:
        """Note that some rank has failed, or is lost."""
        self._cut.set()

    def note_meeting(self) -> None:
        """Note that all ranks have met: what was cut is behind them."""
        self._cut.clear()


@dataclass(slots=True)
class _Order:
    """What the rank asks its thread to do."""

    carry_out: Callable[[Talk], object]
    answer: Future[object] = field(default_factory=Future)


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
