"""Lets the ranks of a call act together, and fail together when one of them fails.

[Note: Together or not at all] A phase runs on every rank without communication; each rank catches what it raises.
At the end of the phase all ranks exchange their outcomes, and if any of them failed, all raise the same error. So
no rank is left waiting for another that is gone, and what a user reads does not depend on the rank.

Longer than other files: it is one class, whose ways to meet all end in one settlement.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, cast

import torch
import torch.distributed as dist

from shardwise import errors
from shardwise.errors import ConfigError, DisagreementError
from shardwise.execution.ranks.line import ANY_CALL, Line, Patience
from shardwise.execution.ranks.messages import (
    SILENT,
    Failure,
    OddRanks,
    Outcome,
    Said,
    Stopped,
    decode,
    decoded,
    encode,
    packed,
    unpacked,
)
from shardwise.execution.ranks.whereabouts import keep_beating
from shardwise.models import torch_words
from shardwise.observing import phases

T = TypeVar("T")
R = TypeVar("R")

_LARGE_BYTES = 1 << 20
"""A message of this size or more is sent by a collective, once all ranks have met (a store is not made for it).

Less than that, of all ranks, is put together in no time."""

_ANSWERED_BYTES = 1 << 26
"""What the store may hand out in one meeting: of an answer as many copies as there are ranks."""

_WORD = 1 << 64


class World:
    """The ranks of a process group, or one process alone (``group`` None and ``size`` 1).

    A context manager: at the end of the block nothing is heard of this rank any more.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None = None,
        patience: Patience | None = None,
        around: World | None = None,
        purpose: str = "",
        call: str = ANY_CALL,
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self._around = around
        self._settled: BaseException | None = None
        """What the last meeting has raised, on every rank."""
        self._line: Line | None = None
        self._large_bytes = min(_LARGE_BYTES, _ANSWERED_BYTES // size)
        """An answer of this size or more is sent by a collective."""
        self._is_beside = bool(purpose)
        self._call = call
        self._marks: list[contextlib.AbstractContextManager[None]] = []
        """Of the blocks that this one is in, for whoever observes this process."""
        if size > 1:
            name = f"shardwise/{group.group_name if group is not None else 'all'}{purpose}"
            if around is not None:
                name += f"/in {around.joined_line()}"
            patience = patience or Patience()
            store = torch_words.default_store()
            keep_beating(store, dist.get_rank(), patience.beat_s)
            self._line = Line(store, name, rank, size, patience, dist.get_process_group_ranks(group), call)
            if around is not None:
                self._line.while_waiting = around.check
            self._close: Callable[[], object] = weakref.finalize(self, self._line.close)

    @classmethod
    def current(
        cls,
        group: dist.ProcessGroup | None = None,
        patience: Patience | None = None,
        around: World | None = None,
        purpose: str = "",
        call: str = ANY_CALL,
    ) -> World:
        """The given group, else the default group, else this process alone. Collective: no.

        Ranks of a group that act in a phase of a larger world, ``around``, leave their work when that one does:
        whoever failed or is lost there may be one of theirs, or never have come to them.

        Ranks that meet in two threads at once tell these meetings apart by a ``purpose``. Answers come through the
        store there, however large; no rank may have more than a megabyte to tell, which would travel by a
        collective.

        A ``call`` is what users call it. Ranks that meet in different calls all raise one DisagreementError.
        """
        if not dist.is_initialized():
            return cls(0, 1, call=call)
        if dist.get_rank(group) < 0:
            raise ConfigError("this rank is not in the process group it was given")
        return cls(dist.get_rank(group), dist.get_world_size(group), group, patience, around, purpose, call)

    @property
    def line(self) -> Line | None:
        """Through which these ranks meet; None where there is one rank."""
        return self._line

    @property
    def place(self) -> float:
        """Where this rank is among all: from 0 to, but for, 1."""
        return self.rank / self.size

    def joined_line(self) -> str:
        """The line of these ranks, the same on all of them, and another one for each of their calls."""
        assert self._line is not None, "a group within one process alone"
        if not self._line.number:
            self._line.join()
        return f"{self._line.name}/{self._line.number}"

    def __enter__(self) -> Self:
        if self._line is not None:
            self._line.join()
        mark = contextlib.nullcontext() if self._call == ANY_CALL else phases.phase(self._call)
        mark.__enter__()
        self._marks.append(mark)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._marks.pop().__exit__(None, None, None)
        if self._line is None:
            return
        is_known = isinstance(error, (errors.ShardwiseError, Stopped)) or error is self._settled
        if error is not None and not is_known:
            # Not raised by a meeting (Ctrl-C, say, or a mistake between two of them): nobody else knows of it.
            self._line.leave(f"{type(error).__name__}: {error}")
        elif self._around is None and not isinstance(error, errors.RankLostError):
            self._part(self._line)
        self._close()

    @staticmethod
    def _part(line: Line) -> None:
        """Stay until all have read the last answer. All has been said: whoever is lost now is not missed."""
        with contextlib.suppress(errors.RankLostError, DisagreementError):
            line.part()

    def together(self, function: Callable[[], T]) -> T:
        """Run ``function`` on every rank; returns its value if it succeeded everywhere.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, when it raised on any.
            RankLostError: a rank has been lost.
            DisagreementError: ranks are in different calls.
        """
        value, failure = self._attempt(function)
        self._settle(SILENT, failure, lambda _: SILENT, at_once_bytes=_LARGE_BYTES)
        return cast(T, value)

    def all_reduce(self, tell: Callable[[], T], conclude: Callable[[list[T]], R]) -> R:
        """Run ``tell`` on every rank, and ``conclude`` on the first with what all told; its value, on every rank.

        Values are picklable; those told that are equal may be one object. An error that ``conclude`` raises is
        everybody's. Bytes: what each rank tells, and the conclusion for each; ``O(size)`` where both are small.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) as of :meth:`together`.
        """
        if self._line is None:
            return self.together(lambda: conclude([tell()]))
        message, failure = self._attempt(lambda: encode(tell()))
        return cast(R, decode(self._settle(message, failure, lambda said: encode(conclude(decoded(said))))))

    def each(self, function: Callable[[], T]) -> list[T]:
        """Run ``function`` on every rank; every rank's value (picklable), by rank, if it succeeded everywhere.

        Values that are equal may be one object. For what every rank needs to know of each: a conclusion is had for
        less by :meth:`all_reduce`. Bytes: for each rank, what differs between them all.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) as of :meth:`together`.
        """
        if self._line is None:
            return [self.together(function)]
        message, failure = self._attempt(lambda: encode(function()))
        return unpacked(self._settle(message, failure, packed, at_once_bytes=_LARGE_BYTES))

    def from_first(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the first rank and hand its value (picklable) to all.

        Collective: yes.
        """
        if self._line is None:
            return self.together(function)
        message, failure = self._attempt(lambda: encode(function())) if self.rank == 0 else (SILENT, None)
        answer = self._settle(message, failure, lambda said: said[0], asked=1, at_once_bytes=_LARGE_BYTES)
        return cast(T, decode(answer))

    def to_first(self, function: Callable[[], T]) -> list[T]:
        """Run ``function`` on every rank; on the first rank every rank's value (picklable), by rank; else nothing.

        Collective: yes.
        """
        found: list[T] = []
        self.all_reduce(function, found.extend)
        return found

    def gather(self, value: T) -> list[T]:
        """Every rank's value (picklable), by rank; see :meth:`each`. Collective: yes."""
        return self.each(lambda: value)

    def require_equal(self, value: object, what: str) -> None:
        """Raise on every rank when a value (picklable) differs between ranks. Collective: yes.

        Raises:
            DisagreementError: naming what differs and the ranks that do not have the first rank's value.
        """
        if odd := self.all_reduce(lambda: value, OddRanks.among):
            raise DisagreementError(f"{what} on rank {odd.shown} is not that of rank 0")

    def sum_words(self, values: Sequence[int]) -> list[int]:
        """Over all ranks, place by place, modulo 2**64. Collective: yes."""
        if self.size == 1:
            return [value % _WORD for value in values]
        device = torch_words.object_device(self.group)
        signed = [(value + _WORD // 2) % _WORD - _WORD // 2 for value in values]

        def add() -> list[int]:
            words = torch.tensor(signed, dtype=torch.int64, device=device)
            work = dist.all_reduce(words, group=self.group, async_op=True)  # integers wrap around
            assert work is not None
            self.wait_for(work)
            return [value % _WORD for value in words.tolist()]

        self.require_equal(len(values), "the number of values that are added up")
        return self.together(add)

    def is_first_of(self, place: str) -> bool:
        """Whether this rank is the lowest one that is at this place. Collective: yes."""

        def firsts(places: list[str]) -> set[int]:
            return set({place: rank for rank, place in reversed(list(enumerate(places)))}.values())

        return self.rank in self.all_reduce(lambda: place, firsts)

    # While working

    def check(self) -> None:
        """To be called now and then in a long phase: leaves it when another rank has failed."""
        if self._line is not None and self._line.is_cut:
            raise Stopped("left its work: another rank has failed, or the store did not answer")
        if self._around is not None:
            self._around.check()

    def cut(self) -> None:
        """Let the other ranks know that this one has failed, before it says how at the next meeting."""
        if self._line is not None:
            self._line.cut()

    def wait_for(self, work: dist.Work) -> None:
        """Wait for a collective that was begun with ``async_op=True``, but not longer than all ranks live."""
        pause = 0.0001
        try:
            while not work.is_completed():
                self.check()
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        except Stopped:
            torch_words.keep_forever(self.group)
            raise
        work.wait()

    @property
    def while_waiting(self) -> Callable[[], None] | None:
        """What to do now and then while this rank waits for the others."""
        return None if self._line is None else self._line.while_waiting

    @while_waiting.setter
    def while_waiting(self, function: Callable[[], None] | None) -> None:
        if self._line is not None:
            self._line.while_waiting = function

    def tell_progress(self, total: int) -> None:
        """Let the first rank know how much this one has done so far."""
        if self._line is not None:
            self._line.progress = total

    def heard_progress(self, own: int) -> int:
        """What all ranks have done, as far as the first rank has heard; on the others, their own."""
        line = self._line
        return own if line is None else max(own, own - line.progress + line.total_progress)

    # Meetings

    def _attempt(self, function: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return function(), None
        except Exception as error:
            if self._line is not None and not isinstance(error, Stopped):
                self._line.cut()
            return None, error

    def _settle(
        self,
        message: bytes | None,
        failure: Exception | None,
        conclude: Callable[[Said], bytes],
        asked: int | None = None,
        at_once_bytes: int = 0,
    ) -> bytes:
        """What the first rank concludes of all messages. See [Note: Meetings cost what was said].

        ``asked`` is how many ranks have been asked for something, all of them unless it says otherwise; for
        ``at_once_bytes`` see :meth:`~shardwise.execution.ranks.line.Line.meet`.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, when any has a ``failure``, or the first rank
                could not conclude.
        """
        if self._line is None:
            if failure is not None and not isinstance(failure, errors.ShardwiseError):
                raise Failure.of(failure).to_error() from failure
            if failure is not None:
                raise failure
            return SILENT
        own = message or SILENT if failure is None else Failure.of(failure).encode()

        def answer_to(said: Said) -> bytes:
            nonlocal failure
            if (outcome := Outcome.among(said, asked or self.size)) is not None:
                return outcome.encode()
            try:
                return conclude(said)
            except Exception as error:
                failure = error
                return Outcome(Failure.of(error), None).encode()

        try:
            answer = self._meet(self._line, own, answer_to, at_once_bytes)
        except errors.RankLostError:
            if not self._line.has_lost_store or failure is None or isinstance(failure, Stopped):
                raise
            # The first rank has ended, maybe of this very failure, which this rank knows better than any other.
            raise Failure.of(failure).at_rank(self._global_rank(self.rank)).to_error() from failure
        if (outcome := Outcome.in_answer(answer)) is not None:
            # Ranks that stopped because of another's failure have nothing to tell. Where that is all there is, the
            # failure is that of a rank of the world around this one.
            if outcome.failure.is_stop and self._around is not None:
                raise Stopped
            self._settled = outcome.to_error(self._global_rank)
            if not self._marks:  # in no block, at whose end the first rank waits for the others to have read this
                self._part(self._line)
            raise self._settled from failure
        return answer

    def _meet(self, line: Line, message: bytes, conclude: Callable[[Said], bytes], at_once_bytes: int) -> bytes:
        """The answer, on every rank. What is large comes by collectives, when all have met."""
        heard: dict[int, bytes] = {}
        answers: list[bytes] = []

        def make() -> bytes:
            answers.append(conclude(heard))
            is_large = len(answers[0]) >= self._large_bytes and not self._is_beside
            return _LARGE_ANSWER + len(answers[0]).to_bytes(8) if is_large else answers[0]

        def hear(said: Said) -> bytes:
            heard.update(said)
            sizes = {rank: int.from_bytes(item[1:]) for rank, item in said.items() if item.startswith(_LARGE)}
            return _LARGE + encode(sizes) if sizes else make()

        is_large = len(message) >= _LARGE_BYTES
        answer = line.meet(_LARGE + len(message).to_bytes(8) if is_large else message, hear, at_once_bytes)
        if answer.startswith(_LARGE):
            sizes = decode(answer[len(_LARGE) :])
            heard.update(
                self.together(lambda: {rank: self._send(rank, size, message) for rank, size in sizes.items()})
            )
            answer = line.meet(SILENT, lambda _: make())
        if answer.startswith(_LARGE_ANSWER):
            size = int.from_bytes(answer[len(_LARGE_ANSWER) :])
            answer = self.together(lambda: self._send(0, size, answers[0] if answers else SILENT))
        return answer

    def _send(self, source: int, nbytes: int, own: bytes) -> bytes:
        """What the source has (``own`` there), on every rank. Every rank has come to send it."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if source == self.rank:
            buffer.numpy()[:] = memoryview(own)
        buffer = buffer.to(torch_words.object_device(self.group))
        work = dist.broadcast(buffer, src=self._global_rank(source), group=self.group, async_op=True)
        assert work is not None
        self.wait_for(work)
        return buffer.cpu().numpy().tobytes()

    def _global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


_LARGE, _LARGE_ANSWER = b"l", b"L"
"""Begin what is told in place of a message, or of an answer, that comes by a collective: its size in bytes."""
