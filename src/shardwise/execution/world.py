"""Lets the ranks of a call act together, and fail together when one of them fails.

[Note: Together or not at all] A phase runs on every rank without communication, and each rank catches its
exceptions. At the end of the phase all ranks exchange their outcomes, and if any of them failed, all raise the same
error. So no rank waits for a lost one, and error messages do not depend on the rank.

Also the progress bar of a call, on the first rank, and the times of its phases.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Protocol, Self, TypeVar, cast

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from shardwise import errors
from shardwise.errors import ConfigError, RankMismatchError
from shardwise.execution import Timeouts
from shardwise.execution.outcomes import SILENT, Failure, Stopped, decode, encode
from shardwise.models import pretrained, torch_api
from shardwise.observing import phase
from shardwise.report.names import shown_ranks

if TYPE_CHECKING:
    from shardwise.execution.control_channel import ControlChannel


T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

ANY_CALL = "another call"
"""The name of calls that have none."""


class World:
    """The ranks of a process group, or one process alone (``group`` None and ``size`` 1).

    A context manager: at the end of the block this rank has left the call.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None = None,
        timeouts: Timeouts | None = None,
        around: World | None = None,
        purpose: str = "",
        call: str = ANY_CALL,
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.timeouts = timeouts or Timeouts()
        self.meetings: ControlChannel | None = None
        self._around = around
        self._settled: BaseException | None = None
        """The error of the last meeting, on every rank."""
        self._call = call
        self._mark: contextlib.AbstractContextManager[None] | None = None
        """The phase of this block, for whoever observes this process."""
        if size > 1:
            name = f"shardwise/{group.group_name if group is not None else 'all'}{purpose}"
            if around is not None and around.meetings is not None:
                name += f"/in {around.meetings.name}/{around.meetings.join()}"
            from shardwise.execution.control_channel import ControlChannel

            global_ranks = dist.get_process_group_ranks(group)
            self.meetings = ControlChannel(torch_api.default_store(), name, rank, global_ranks, self.timeouts, call)
            self.while_waiting = None if around is None else around.check
            weakref.finalize(self, self.meetings.close)

    @classmethod
    def current(
        cls,
        group: dist.ProcessGroup | None = None,
        timeouts: Timeouts | None = None,
        around: World | None = None,
        purpose: str = "",
        call: str = ANY_CALL,
    ) -> World:
        """The given group, else the default group, else this process alone. Collective: no.

        Args:
            group: a process group, or None for the default one.
            timeouts: how long ranks wait for each other.
            around: a larger world, in a phase of which the ranks of the group act: they leave their work when that
                one does.
            purpose: separates meetings that the same ranks hold in two threads at once.
            call: name of the public function, for messages. Ranks that meet in different calls all raise one
                RankMismatchError.
        """
        if not dist.is_initialized():
            return cls(0, 1, call=call)
        if dist.get_rank(group) < 0:
            raise ConfigError(
                "process_group: this rank is not in it. Pass a group that contains every calling rank"
            )
        return cls(dist.get_rank(group), dist.get_world_size(group), group, timeouts, around, purpose, call)

    @property
    def place(self) -> float:
        """The rank as a fraction of the size, from 0 to below 1."""
        return self.rank / self.size

    def __enter__(self) -> Self:
        if self.meetings is not None:
            self.meetings.join()
        self._mark = contextlib.nullcontext() if self._call == ANY_CALL else phase(self._call)
        self._mark.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if self.meetings is None:
            return
        is_known = isinstance(error, (errors.ShardwiseError, Stopped)) or error is self._settled
        if error is not None and not is_known:
            # Not raised by a meeting (Ctrl-C, say, or a mistake between two of them): nobody else knows of it.
            self.meetings.leave(f"{type(error).__name__}: {error}")
        elif self._around is None and not isinstance(error, errors.RankLostError):
            self.meetings.part()
        self.meetings.close()

    def run_all(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Run ``function`` on every rank. Return its value if it succeeded everywhere.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, if it raised on any.
            RankLostError: a rank has been lost.
            RankMismatchError: ranks are in different calls.
        """
        own: list[T] = []
        self._meet(partial(_keep, own, partial(function, *args, **keywords)), len)
        return own[0]

    def map_reduce(
        self, map_fun: Callable[P, T], reduce_fun: Callable[[list[T]], R], *args: P.args, **keywords: P.kwargs
    ) -> R:
        """Run ``map_fun`` on every rank, and ``reduce_fun`` on the first rank with all results.

        Return its value on every rank. Values are picklable. Equal results may be one object. The store carries
        each value once, and the result for each rank.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) as in :meth:`run_all`, also for errors of ``reduce_fun``.
        """
        return self._meet(partial(map_fun, *args, **keywords), reduce_fun)

    def all_reduce_object(self, value: T, reduce_fun: Callable[[list[T]], R]) -> R:
        """Return on every rank the result of ``reduce_fun`` for all values (picklable). Collective: yes."""
        return self._meet(lambda: value, reduce_fun)

    def all_gather(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> list[T]:
        """Run ``function`` on every rank.

        Return every rank's value (picklable) by rank, if it succeeded everywhere.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) as in :meth:`run_all`.
        """
        first, *others = self._meet(partial(function, *args, **keywords), _without_repeats)
        return [first, *(others * (self.size - 1) if len(others) == 1 else others)]

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's value (picklable) by rank. Collective: yes."""
        return self.all_gather(lambda: value)

    def broadcast(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Run ``function`` on the first rank. Return its value (picklable) on all. Collective: yes."""
        return self._meet(
            lambda: function(*args, **keywords) if self.rank == 0 else None,
            lambda values: cast(T, values[0]),
            asked=1,
        )

    def gather(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> list[T]:
        """Run ``function`` on every rank.

        Return all values (picklable) by rank on the first rank, and an empty list elsewhere.

        Collective: yes.
        """
        found: list[T] = []
        self._meet(partial(function, *args, **keywords), found.extend)
        return found

    def require_equal(self, value: object, what: str) -> None:
        """Raise on every rank when a value (picklable) differs between ranks. Collective: yes.

        Raises:
            RankMismatchError: a value differs. The message has the difference and the ranks without the first
                rank's value.
        """
        if odd := self.all_reduce_object(value, MismatchedRanks.among):
            raise RankMismatchError(f"{what} on rank {odd.shown} is not that of rank 0")

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Sum over all ranks, place by place, modulo 2**64. Collective: yes."""
        unsigned = np.array([value % (1 << 64) for value in values], dtype=np.uint64)
        total = self.all_reduce_object(unsigned, partial(np.sum, axis=0, dtype=np.uint64))
        return [int(value) for value in total.tolist()]

    def is_first_of(self, place: str) -> bool:
        """Return True on the lowest rank that is at this place. Collective: yes."""

        def firsts(places: list[str]) -> set[int]:
            return set({place: rank for rank, place in reversed(list(enumerate(places)))}.values())

        return self.rank in self.all_reduce_object(place, firsts)

    # While working

    def check(self) -> None:
        """Leave a long phase if another rank has failed. Call it periodically.

        Raises:
            Stopped: another rank has failed.
        """
        if self.meetings is not None and self.meetings.is_cut:
            raise Stopped("left its work: another rank has failed, or the store did not answer")
        if self._around is not None:
            self._around.check()

    def cut(self) -> None:
        """Announce that this rank has failed, before it reports its error at the next meeting."""
        if self.meetings is not None:
            self.meetings.cut()

    def wait_for(self, work: dist.Work) -> None:
        """Wait for a collective that was begun with ``async_op=True``, but not longer than all ranks live."""
        pause = 0.0001
        try:
            while not work.is_completed():
                self.check()
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        except Stopped:
            torch_api.keep_forever(self.group)
            raise
        work.wait()

    @property
    def while_waiting(self) -> Callable[[], None] | None:
        """Called now and then while this rank waits for the others."""
        return None if self.meetings is None else self.meetings.while_waiting

    @while_waiting.setter
    def while_waiting(self, function: Callable[[], None] | None) -> None:
        if self.meetings is not None:
            self.meetings.while_waiting = function

    def tell_progress(self, total: int) -> None:
        """Report this rank's progress to the first rank."""
        if self.meetings is not None:
            self.meetings.tell_progress(total)

    def heard_progress(self, own: int) -> int:
        """Return the last reported sum of all ranks' progress on the first rank, and this rank's own elsewhere."""
        return own if self.meetings is None or self.rank else own + self.meetings.others_progress

    def _meet(self, tell: Callable[[], T], conclude: Callable[[list[T]], R], asked: int | None = None) -> R:
        """Return the first rank's conclusion from all messages. ``asked`` ranks (default: all) could have failed.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, if ``tell`` failed on any, or ``conclude``.
        """
        meetings = self.meetings
        if meetings is None:
            return _alone(lambda: conclude([tell()]))
        failure: Exception | None = None
        own: T | Failure
        message = SILENT
        try:
            own = tell()
            message = encode(own) if self.rank else SILENT
        except Exception as error:
            if not isinstance(error, Stopped):
                meetings.cut()
            failure, own = error, Failure.of(error)
            message = encode(own)

        def answer_to(said: dict[int, bytes]) -> bytes:
            nonlocal failure
            values = {one: decode(one) for one in {*said.values(), SILENT}}
            told = [own, *(values[said.get(rank, SILENT)] for rank in range(1, self.size))]
            found = Failure.among(told, asked or self.size, meetings.global_ranks)
            if found is not None:
                return encode(found)
            try:
                return encode(conclude(cast(list[T], told)))
            except Exception as error:
                failure = error
                return encode(Failure.of(error))

        try:
            answer = decode(meetings.meet(message, answer_to))
        except errors.RankLostError:
            if not meetings.has_lost_store or failure is None or isinstance(failure, Stopped):
                raise
            # The first rank has ended, maybe of this very failure, which this rank knows better than any other.
            raise Failure.of(failure).at_rank(meetings.global_ranks[self.rank]).to_error() from failure
        if not isinstance(answer, Failure):
            return cast(R, answer)
        # Ranks that stopped because of another's failure have nothing to tell. Where that is all there is, the
        # failure is that of a rank of the world around this one.
        if answer.is_stop and self._around is not None:
            raise Stopped
        self._settled = answer.to_error()
        if self._mark is None:  # in no block, at whose end the first rank waits for the others to have read this
            meetings.part()
        raise self._settled from failure


def _without_repeats(told: list[T]) -> list[T]:
    """Return the first rank's value and those of the others: one value if all of these are the same object."""
    return told[:2] if all(value is told[1] for value in told[2:]) else told


def _keep(values: list[T], function: Callable[[], T]) -> None:
    values.append(function())


def _alone(function: Callable[[], T]) -> T:
    try:
        return function()
    except errors.ShardwiseError:
        raise
    except Exception as error:
        raise Failure.of(error).to_error() from error


@dataclass(frozen=True, slots=True)
class MismatchedRanks:
    """Ranks that do not have the first rank's value.

    Attributes:
        first: the lowest of them.
        shown: all of them, in a few words.
    """

    first: int
    shown: str

    @classmethod
    def among(cls, values: Sequence[object]) -> MismatchedRanks | None:
        """Return the ranks with differing values, or None if all are equal."""
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        return cls(odd[0], shown_ranks(odd)) if odd else None


def digest_of(value: object) -> bytes:
    """Return the SHA-256 of a value's ``repr``, for comparison between ranks."""
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).digest()


class Progress(Protocol):
    """Receiver of byte counts as they arrive."""

    def advance(self, nbytes: int) -> None: ...


class ProgressBar:
    """A bar of bytes with rate and time left. No output if there is no terminal or transformers' bars are off.

    Every rank has one and adds its own bytes. The first rank's shows the last reported sum of all ranks.
    """

    def __init__(self, label: str, world: World, total_bytes: int, *, enabled: bool) -> None:
        shown = enabled and world.rank == 0 and pretrained.progress_bars_enabled()
        self._world = world
        self._own = 0
        self._bar = tqdm(
            total=total_bytes,
            desc=label,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=None if shown else True,  # None: only when stderr is a terminal
            leave=False,
            dynamic_ncols=True,
            mininterval=0.2,
        )

    def advance(self, nbytes: int) -> None:
        self._own += nbytes
        self._world.tell_progress(self._own)
        self._show()

    def _show(self) -> None:
        self._bar.update(max(0, self._world.heard_progress(self._own) - self._bar.n))

    def __enter__(self) -> Self:
        self._world.while_waiting = self._show
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._world.while_waiting = None
        self._world.tell_progress(0)
        self._bar.close()


@dataclass
class Clock:
    """Seconds by phase, in order. Those of a phase within another count for the inner one only."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, before, self._inner = time.perf_counter(), self._inner, 0.0
        with phase(name):
            yield
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inner
        self._inner = before + elapsed
