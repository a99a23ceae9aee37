"""The line between ranks: small messages over the process group's store, and news of who is still there.

[Note: Nobody waits in a collective] A collective waits as long as its slowest rank, and hangs when one is gone.
So ranks meet here first, over the key-value store that torch has for rendezvous. Each rank has one thread for
it, which delivers what the rank says, waits for what the others say, and beats once a second while its rank
works or waits. The first rank watches every beat, the others watch the first rank's. A beat that stops means a
process that was killed, has ended or is stopped: whoever notices first publishes that, and every rank raises the
same error. A rank that fails in its work says so at once, and the others can stop theirs (:attr:`Line.is_cut`).
Only when all ranks have met does a collective carry what is large.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from shardwise.errors import ConfigError, RankLostError

_FIRST_POLL_S = 0.0001
_LAST_POLL_S = 0.05
_LATENESS = 0.05
"""By what part of its wait a rank may notice its end too late."""


_DEAF = 1.5
"""After so many times the silence without an answer, the store itself is taken for lost."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for each other, in seconds.

    Attributes:
        beat_s: between two signs of life.
        silence_s: without a sign of life, after which a rank counts as lost.
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
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        patience: Patience,
        numbers: Sequence[int] | None = None,
    ) -> None:
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
        self._keys = _Keys(store, name)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._cut = threading.Event()
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name=f"shardwise-line-{rank}", daemon=True)
        self._thread.start()

    @property
    def is_cut(self) -> bool:
        """Whether some rank has failed or is lost, or the store is, so that there is no use in working on."""
        return self._cut.is_set() or self._is_deaf

    @property
    def _is_deaf(self) -> bool:
        return time.monotonic() - self._heard > _DEAF * self.patience.silence_s

    def join(self) -> None:
        """Let the other ranks know that this one has come: from now on it is missed when it falls silent.

        Raises:
            RankLostError: the store is gone, or does not answer.
        """
        self._order(lambda talk: [])

    def meet(self, message: bytes) -> list[bytes]:
        """Wait for all ranks; every rank's message, by rank.

        Raises:
            RankLostError: naming the rank that is gone, or that never came.
        """
        return self._order(lambda talk: talk.meet(message))

    def _order(self, task: Callable[[_Talk], list[bytes]]) -> list[bytes]:
        order = _Order(task)
        self._orders.put(order)
        while True:
            try:
                return order.answer.result(timeout=self.patience.beat_s)
            except NotYet:
                if self.while_waiting is not None:
                    self.while_waiting()
                if self._is_deaf:
                    raise RankLostError(
                        "the store through which the ranks meet has not answered for "
                        f"{_DEAF * self.patience.silence_s:.0f} s; the process that holds it (the launcher, or "
                        "rank 0) is stopped or unreachable"
                    ) from None

    def part(self) -> None:
        """Leave after the last meeting; the first rank not before the others."""
        self._order(lambda talk: talk.part())

    def cut(self) -> None:
        """Tell the other ranks that this one has failed and will say how at the next meeting."""
        self._orders.put(_Order(lambda talk: talk.cut()))

    def leave(self, cause: str) -> None:
        """Tell the other ranks that this one leaves the call and will not come to another meeting."""
        self._orders.put(_Order(lambda talk: talk.leave(cause)))

    def close(self) -> None:
        """End the thread, and with it this rank's beats; a meeting that is going on is left."""
        self.is_closing = True
        self._orders.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self.patience.beat_s)

    # The thread

    def _serve(self) -> None:
        talk: _Talk | None = None
        while True:
            try:
                order = self._orders.get(timeout=self.patience.beat_s)
            except Empty:
                if talk is not None:
                    self._while_working(talk)
                continue
            if order is None:
                return
            try:
                if talk is None:
                    talk = _Talk(self._keys, self)
                order.answer.set_result(order.carry_out(talk))
            except Exception as error:
                self._cut.set()
                order.answer.set_exception(error if isinstance(error, RankLostError) else _store_lost(error))

    def _while_working(self, talk: _Talk) -> None:
        try:
            talk.beat()
        except Exception:  # the next meeting says what is wrong
            self._cut.set()

    def heard(self) -> None:
        """Note that the store answered just now."""
        self._heard = time.monotonic()

    def note_cut(self) -> None:
        """Note that some rank has failed, or is lost."""
        self._cut.set()

    def note_meeting(self) -> None:
        """Note that all ranks have met: what was cut is behind them."""
        self._cut.clear()


@dataclass(slots=True)
class _Order:
    """What the rank asks its thread to do."""

    carry_out: Callable[[_Talk], list[bytes]]
    answer: Future[list[bytes]] = field(default_factory=Future)


class _Keys:
    """The store under a prefix. All values are bytes."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def has(self, key: str) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}"]))

    def find(self, key: str) -> bytes | None:
        return self.get_all([key])[0] if self.has(key) else None

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Values that are known to be there."""
        names = [f"{self._prefix}/{key}" for key in keys]
        if self._store.has_extended_api():
            return [bytes(value) for value in self._store.multi_get(names)]
        return [bytes(self._store.get(name)) for name in names]

    def set_first(self, key: str, value: bytes) -> bytes:
        """Set a key unless it is there; its value, whoever set it."""
        return bytes(self._store.compare_set(f"{self._prefix}/{key}", "", value.decode()))

    def count(self, key: str, more: int) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", more))

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(f"{self._prefix}/{key}")

    def below(self, name: str) -> _Keys:
        return _Keys(self._store, f"{self._prefix}/{name}")


class _Talk:
    """What the line's thread does with the store, from this rank's first meeting on."""

    def __init__(self, keys: _Keys, line: Line) -> None:
        self._line = line
        # A rank's n-th line meets the n-th of every other rank.
        self._keys = keys.below(f"line{keys.count(f'lines/{line.rank}', 1)}")
        self._step = 0
        self._beats = 0
        self._last_beat = -math.inf
        now = time.monotonic()
        others = range(1, line.size) if line.rank == 0 else (0,)
        self._watched = {rank: _Sign(since=now) for rank in others}
        self._keys.set(f"joined/{line.rank}", f"host {socket.gethostname()}, process {os.getpid()}".encode())
        self.beat()

    def meet(self, message: bytes) -> list[bytes]:
        """Everybody's messages: each rank hands in its own, the first rank hands out all of them."""
        line, step = self._line, self._step
        self._keys.set(f"{step}/{line.rank}", message)
        if line.rank == 0:
            members = [f"{step}/{rank}" for rank in range(line.size)]
            self._wait(lambda: self._keys.count(f"{step}/in", 0) == line.size - 1)
            self._heed_verdict()  # all came, but they may have given this rank up since
            messages = self._keys.get_all(members)
            self._keys.set(f"{step}/all", _pack(messages))
            if step:  # who has come to this meeting has left the one before
                before = (*range(line.size), "in", "all", "out", "cut")
                self._keys.forget([f"{step - 1}/{key}" for key in before])
        else:
            self._keys.count(f"{step}/in", 1)
            self._wait(lambda: self._keys.has(f"{step}/all"))
            messages = _unpack(self._keys.get_all([f"{step}/all"])[0])
            self._keys.count(f"{step}/out", 1)
        self._step += 1
        line.note_meeting()
        return messages

    def part(self) -> list[bytes]:
        """Wait until all have left the last meeting: the store may end with the first rank's process."""
        line, last = self._line, self._step - 1
        if line.rank == 0 and last >= 0:
            self._wait(lambda: self._keys.count(f"{last}/out", 0) == line.size - 1)
        return []

    def cut(self) -> list[bytes]:
        """Of the work before the next meeting."""
        self._line.note_cut()
        self._keys.set(f"{self._step}/cut", b"1")
        return []

    def leave(self, cause: str) -> list[bytes]:
        line = self._line
        name = f"rank {line.numbers[line.rank]} ({self._place_of(line.rank)})"
        self._keys.set_first("lost", f"{name} has left the call: {cause}".encode())
        return []

    def beat(self) -> None:
        """A sign of life, and a look at the others'."""
        line, now = self._line, time.monotonic()
        if now - self._last_beat >= line.patience.beat_s / 2:
            self._last_beat = now
            self._beats += 1
            self._keys.set(f"beat/{line.rank}", f"{self._beats} {line.progress}".encode())
            if self._keys.has(f"{self._step}/cut"):
                line.note_cut()
            line.heard()
            self._watch(now)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Poll, the less often the longer it takes, and beat meanwhile."""
        start = time.monotonic()
        while not is_done():
            if self._line.is_closing:
                raise RankLostError(f"rank {self._line.numbers[self._line.rank]} has left the call")
            self._line.heard()
            waited = time.monotonic() - start
            time.sleep(min(max(_FIRST_POLL_S, waited * _LATENESS), _LAST_POLL_S))
            self.beat()

    def _watch(self, now: float) -> None:
        """Raise when a rank is lost.

        Raises:
            RankLostError: naming it; the first verdict is everybody's.
        """
        line = self._line
        self._heed_verdict()
        joined = [rank for rank, sign in self._watched.items() if sign.beat or self._keys.has(f"beat/{rank}")]
        beats = dict(zip(joined, self._keys.get_all([f"beat/{rank}" for rank in joined]), strict=True))
        for rank, sign in self._watched.items():
            beat = beats.get(rank)
            if beat != sign.beat:
                sign.beat, sign.since = beat, now
            silence = now - sign.since
            if silence > (line.patience.join_s if beat is None else line.patience.silence_s):
                lost = self._lost(rank, silence, has_joined=beat is not None)
                self._raise(self._keys.set_first("lost", lost.encode()))
        line.total_progress = line.progress + sum(int(beat.split()[1]) for beat in beats.values())

    def _heed_verdict(self) -> None:
        verdict = self._keys.find("lost")
        if verdict is not None:
            self._raise(verdict)

    def _lost(self, rank: int, silence: float, *, has_joined: bool) -> str:
        number = self._line.numbers[rank]
        if not has_joined:
            return f"rank {number} has not come to this call within {silence:.0f} s; every rank has to make it"
        return (
            f"rank {number} ({self._place_of(rank)}) is lost: no sign of life for {silence:.0f} s; it was killed, "
            "has ended, or is stopped; look at its own output, and at the system's log for a process killed for "
            "want of memory"
        )

    def _place_of(self, rank: int) -> str:
        return (self._keys.find(f"joined/{rank}") or b"").decode()

    def _raise(self, verdict: bytes) -> NoReturn:
        """Not before the others have read it, too: the store may end with the first rank's process."""
        line = self._line
        heard = self._keys.count("heard", 1)
        deadline = time.monotonic() + 2 * line.patience.beat_s
        while line.rank == 0 and heard < line.size - 1 and time.monotonic() < deadline:
            time.sleep(_LAST_POLL_S)
            heard = self._keys.count("heard", 0)
        raise RankLostError(verdict.decode())


@dataclass(slots=True)
class _Sign:
    """A rank's last beat, and since when it is that one."""

    since: float
    beat: bytes | None = None


def _store_lost(error: Exception) -> RankLostError:
    lost = RankLostError(
        "the store through which the ranks meet is gone; the process that holds it (the launcher, or rank 0) has "
        "ended, or cannot be reached; look at its own output"
    )
    lost.__cause__ = error
    return lost


def _pack(messages: Sequence[bytes]) -> bytes:
    head = len(messages).to_bytes(4) + b"".join(len(message).to_bytes(4) for message in messages)
    return head + b"".join(messages)


def _unpack(packed: bytes) -> list[bytes]:
    count = int.from_bytes(packed[:4])
    sizes = [int.from_bytes(packed[4 + 4 * item : 8 + 4 * item]) for item in range(count)]
    messages: list[bytes] = []
    start = 4 + 4 * count
    for size in sizes:
        messages.append(packed[start : start + size])
        start += size
    return messages
