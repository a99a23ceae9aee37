"""Lets the ranks of a call act together, and fail together when one of them fails.

[Note: Together or not at all] A phase is a ``with`` block that runs on every rank without communication. At its
end all ranks exchange their outcomes, and if any of them failed, all raise the same error. So no rank waits for one
that has failed, and error messages do not depend on the rank.

The file also measures the times of a call's phases.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

import torch.distributed as dist

from shardwise.core.errors import ConfigError, RankLostError, RankMismatchError, ShardwiseError, TrainingError
from shardwise.core.formatting import format_ranks
from shardwise.core.phases import current_phases, phase
from shardwise.fsdp import torch_private
from shardwise.ranks.outcomes import Failure, Stopped, at_phase, attempt, decode, encode
from shardwise.ranks.timeouts import Timeouts

if TYPE_CHECKING:
    from shardwise.ranks.control_channel import ControlChannel


T = TypeVar("T")
R = TypeVar("R")

_CHECK_INTERVAL: Final = timedelta(seconds=0.1)
"""Time after which a rank that waits in a collective looks for failures of others."""


class Exchange:
    """A phase of a call: a block that this rank executes, at the end of which all ranks exchange their outcomes.

    See [Note: Together or not at all]. The block may be left by ``return``, ``break`` or ``continue``: this rank
    takes part in the exchange all the same. Ctrl-C and whatever else is no :class:`Exception` is not exchanged.

    Attributes:
        local: what this rank contributes (picklable). None if the block does not set it.
        reduce_fun: reduces the values of all ranks, on the first. A block may set it, to one that needs what the
            block makes.
        result: what all ranks have, once the block has ended.
    """

    def __init__(
        self, world: World, what: str, reduce_fun: Callable[[list[Any]], object], num_working: int
    ) -> None:
        self.local: Any = None
        self.reduce_fun = reduce_fun
        self.result: Any = None
        self._world = world
        self._num_working = num_working  # ranks, from the first on, that do something in the block
        self._what = what
        self._phase = phase(what)

    def __enter__(self) -> Self:
        self._phase.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.result = self._world._reduce(self.local, self.reduce_fun, self._num_working, self._what)
            # An error that an inner block has raised on all ranks ends this block on all ranks. A second meeting
            # would be one more than the others expect.
            elif isinstance(error, Exception) and not self._world._is_known_to_all(error):
                self._world._reduce(Failure.from_error(error), self.reduce_fun, self._num_working, self._what)
        finally:
            # After the exchange: a rank that waits in it is still in this phase, for messages.
            self._phase.__exit__(None, None, None)


def _reduce_to_nothing(_values: list[None]) -> None:
    """Reduce the outcomes of ranks that have only succeeded."""


class World:
    """The ranks of a process group, or one process alone (``group`` None and ``size`` 1).

    A call can expect the following sequence:

    1. :meth:`current` on every rank, with the name of the public function.
    2. ``with world:``: the rank joins the call. Ranks that are in different calls find out here. A world that lasts
       longer than a call (AdapterBank, the Trainer's steps) is not entered, and ranks find out in its first phase,
       and then by the names of its phases (:meth:`begin_call`).
    3. Phases, the same on every rank and in the same order::

           with world.collective("plan the save"):
               plan = plan_save(model, request)
           with world.broadcast("read headers") as exchange:
               if world.rank == 0:
                   exchange.local = read_headers(folder)
           index = exchange.result

       At the end of each, ranks meet. If one has failed, all raise the same error, and no phase follows. If one is
       lost, all later phases raise the same error again.
    4. In long phases, :meth:`check` from time to time: it raises Stopped if another rank has failed.
    5. The end of the ``with`` block: this rank has left the call. Its failure is no longer waited for.

    Attributes:
        channel: None for one process.
        global_ranks: the ranks of the group in the default group, which messages show.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None = None,
        timeouts: Timeouts | None = None,
        call: str = "a call",
        foreground: World | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.global_ranks: Sequence[int] = range(size)
        self.timeouts = timeouts or Timeouts()
        self.channel: ControlChannel | None = None
        self._call = call
        self._phase: AbstractContextManager[None] | None = None
        self._later_failure: Failure | None = None
        """The error after which ranks cannot meet again, without its traceback."""
        self._raised: weakref.ref[Exception] | None = None
        """The error that all ranks have raised. Its traceback must not keep the caller's tensors alive."""
        if size > 1:
            from shardwise.ranks.control_channel import ControlChannel

            # Groups with some of the same ranks meet under keys of their own.
            group_name = "all" if group is None else group.group_name
            self.global_ranks = dist.get_process_group_ranks(group)
            name, store, number = f"shardwise/{group_name}", torch_private.default_store(), None
            if foreground is not None and foreground.channel is not None:
                name, number = f"{name}/background", foreground.channel.number
            self.channel = ControlChannel(store, name, rank, self.global_ranks, self.timeouts, call, number)
            weakref.finalize(self, self.channel.close)

    @classmethod
    def current(
        cls,
        group: dist.ProcessGroup | None = None,
        timeouts: Timeouts | None = None,
        call: str = "a call",
        foreground: World | None = None,
    ) -> World:
        """Return the given group's ranks, else the default group's, else this process alone. Collective: no.

        Args:
            group: a process group, or None for the default one.
            timeouts: how long ranks wait for each other. None for the timeout that the process group was given, if
                it is not torch's default.
            call: name of the public function, for messages. Ranks that meet in different calls all raise one
                RankMismatchError.
            foreground: that of the call whose work this one goes on with on another thread, joined. None for a call
                of its own.
        """
        if not dist.is_initialized():
            return cls(0, 1, call=call)
        if dist.get_rank(group) < 0:
            raise ConfigError("process_group: this rank is not in it. Pass a group with every calling rank")
        if timeouts is None and (given_s := torch_private.get_given_timeout(group)) is not None:
            # The time of the process group is for slow ranks. A lost one is found by its heartbeat.
            limit_s = max(given_s, Timeouts().heartbeat_timeout_s)
            timeouts = Timeouts(join_timeout_s=limit_s, meeting_timeout_s=limit_s)
        return cls(dist.get_rank(group), dist.get_world_size(group), group, timeouts, call, foreground)

    def begin_call(self, name: str) -> None:
        """Name the public call of the next phases, for a world that lasts longer than a call. Collective: no.

        If ranks then meet in different calls, all raise one RankMismatchError in all later phases, and those that
        are not in the call of the first rank already in this one.
        """
        self._call = name

    def join(self) -> None:
        """Join the call, of which the ``with`` block is later or on another thread. Raises RankLostError."""
        if self.channel is not None:
            self.channel.join()

    def __enter__(self) -> Self:
        self.join()
        self._phase = phase(self._call)
        self._phase.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None
        if self.channel is None:
            return
        if error is not None and not isinstance(error, (ShardwiseError, Stopped)):
            # Not raised by a collective (Ctrl-C, or an error between two of them): other ranks do not know of it.
            self.channel.abort(f"{type(error).__name__}: {error}")
        elif not isinstance(error, RankLostError):
            # The first rank waits here until the others have read the last result. After a lost rank it would wait
            # for that one, too.
            self.channel.finish()
        # Last: a closed channel ends every wait.
        self.channel.close()

    # Phases

    def collective(self, what: str) -> Exchange:
        """Return a block in which all ranks work. It ends without an error if it succeeded everywhere.

        ``what`` names the phase in the errors of lost ranks, as in "plan the save".

        Collective: yes, at the end of the block.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, if the block raised on any.
            RankLostError: a rank has been lost.
            RankMismatchError: ranks are in different calls, or phases of a call. A rank whose phase is that of the
                first rank raises it in its next phase.
        """
        return Exchange(self, what, _reduce_to_nothing, num_working=self.size)

    def broadcast(self, what: str) -> Exchange:
        """Return a block in which the first rank works. ``result`` is its ``local`` on all ranks.

        Collective: yes, at the end of the block. Errors: as of :meth:`collective`.
        """
        return Exchange(self, what, itemgetter(0), num_working=1)

    def all_gather(self, what: str) -> Exchange:
        """Return a block in which all ranks work. ``result`` is the list of every rank's ``local``, by rank.

        Collective: yes, at the end of the block. Errors: as of :meth:`collective`.
        """
        return Exchange(self, what, list, num_working=self.size)

    def all_reduce(self, what: str, reduce_fun: Callable[[list[Any]], object] = list) -> Exchange:
        """Return a block in which all ranks work. ``result`` is ``reduce_fun`` of every rank's ``local``.

        It runs on the first rank, so that the store carries each value once, and the result for each rank. Equal
        values may arrive as one object. With ``values.extend`` of a list, the values stay on the first rank.

        Collective: yes, at the end of the block. Errors: as of :meth:`collective`, also those of ``reduce_fun``.
        """
        return Exchange(self, what, reduce_fun, num_working=self.size)

    # Exchanges of values that exist already: there is no block that could fail on this rank

    def all_reduce_object(self, value: T, reduce_fun: Callable[[list[T]], R]) -> R:
        """Return on every rank the result of ``reduce_fun`` for all values (picklable). Collective: yes."""
        return self._reduce(value, reduce_fun)

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's value (picklable) by rank. Collective: yes."""
        return self._reduce(value, list)

    def require_equal(self, value: object, what: str) -> None:
        """Raise on every rank when a value (picklable) differs between ranks. Collective: yes.

        Raises:
            RankMismatchError: a value differs. The message names ``what`` and the ranks whose value is not that of
                the first rank.
        """
        if mismatched := self.all_reduce_object(value, self.find_mismatched):
            raise RankMismatchError(f"{what} on rank {mismatched.text} is not that of rank {self.global_ranks[0]}")

    def find_mismatched(self, values: Sequence[object]) -> MismatchedRanks | None:
        """Return the ranks whose values, by rank, are not the first rank's. None if all are equal."""
        ranks = [rank for rank, value in enumerate(values) if value != values[0]]
        return MismatchedRanks(ranks[0], format_ranks(ranks, self.global_ranks)) if ranks else None

    def is_first_at(self, place: str) -> bool:
        """Return True on the lowest rank of those that pass the same ``place``. Collective: yes."""
        return self.all_gather_object(place).index(place) == self.rank

    # While working

    def check(self) -> None:
        """Raise Stopped if another rank has failed, or no phase may follow. Long phases call this periodically.

        Raises:
            Stopped: another rank has failed, or ranks cannot meet again after an earlier error.
        """
        if self._later_failure is not None:
            raise Stopped("left its work: ranks cannot meet again")
        if self.channel is not None and self.channel.is_interrupted:
            raise Stopped("left its work: another rank has failed, or the store did not answer")

    def fail_later_phases(self, error: ShardwiseError) -> None:
        """Have all later phases raise this error, because ranks have left each other in a collective of torch's.

        Collective: no, but all ranks call it.
        """
        self._later_failure = Failure(type(error).__name__, str(error))

    def wait_for(self, work: dist.Work, group: dist.ProcessGroup | None = None, *, on_host: bool = False) -> None:
        """Wait for a collective begun with ``async_op=True``, or raise Stopped once another rank has failed.

        Args:
            work: the collective.
            group: its ranks. None for those of this world.
            on_host: True if its tensors are on the CPU. Then waiting adds nothing to the time that it takes.
        """
        pause = 0.0001
        try:
            # Not work.wait(), which waits for a rank that has failed as long as the backend's timeout.
            while not work.is_completed():
                self.check()
                if on_host:
                    with suppress(RuntimeError):  # not done in this time, or failed, which the last wait raises
                        work.wait(_CHECK_INTERVAL)
                else:  # on a device, a wait with a timeout that passes would end the communicator
                    time.sleep(pause)
                    pause = min(2 * pause, 0.01)
        except Stopped:
            # The collective is still in progress. Destroying its group would wait for it.
            torch_private.keep_forever(group or self.group)
            raise
        work.wait()  # raises its error, if it failed

    def _reduce(
        self,
        local: T | Failure,
        reduce_fun: Callable[[list[T]], R],
        num_working: int | None = None,
        what: str = "",
    ) -> R:
        """Return on every rank the result of ``reduce_fun`` on the first rank, for the values of all.

        ``num_working`` (default: all) and ``what``: as of :class:`Exchange`.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, if ``local`` is a failure on any of them, or
                ``reduce_fun`` raises.
        """
        channel, outcome = self.channel, cast(object, local)
        if channel is None:
            return self._reduce_alone(local, reduce_fun)
        if self._later_failure is not None:
            raise self._remember(self._later_failure.to_error())
        if isinstance(local, Failure) and not local.is_stop:
            channel.interrupt()  # before the report: ranks that are still at work leave it at once
        name = f"{self._call} ({what})" if what else self._call
        # All ranks but the first send their outcome, and wait for the result that the first one makes.
        try:
            if self.rank:
                result = decode(channel.report(encode(local), name))
            else:
                reports = channel.gather()
                # Equal messages are decoded once: most ranks of a large world report the same. One that cannot be
                # decoded counts as a failure of its rank, of which the others learn.
                values = {message: attempt(decode, message) for message in set(reports)}
                inputs = [local, *(values[message] for message in reports)]
                failure = Failure.among(inputs, num_working or self.size, channel.global_ranks)
                outcome = failure or attempt(reduce_fun, cast(list[T], inputs))
                message = encode(outcome)
                # A rank that fails reports it at the end of an outer phase, or of an earlier one.
                channel.publish(message, "" if isinstance(outcome, Failure) else name)
                # Decoded here, too: the first rank gets what the others get, also if it could not be pickled.
                result = decode(message)
        except (RankLostError, RankMismatchError, TrainingError) as error:
            self.fail_later_phases(error)
            if channel.store_loss() and isinstance(local, Failure) and not local.is_stop:
                # The first rank has ended, maybe because of this failure, of which this rank has the details.
                raise self._remember(local.at_rank(channel.global_ranks[self.rank]).to_error()) from local.cause
            raise self._remember(at_phase(error, current_phases())) from error.__cause__
        if not isinstance(result, Failure):
            return cast(R, result)
        # The caller may end the process now, and the store with it. In a "with world" block, __exit__ waits.
        if self._phase is None:
            channel.finish()
        # The traceback is on the rank that failed: messages carry none.
        raise self._remember(result.to_error()) from (outcome.cause if isinstance(outcome, Failure) else None)

    def _remember(self, error: ShardwiseError) -> ShardwiseError:
        """Remember an error that every rank raises now. See :meth:`_is_known_to_all`."""
        self._raised = weakref.ref(error)
        return error

    def _is_known_to_all(self, error: Exception) -> bool:
        """Return whether no rank has to be told of an error: a block within this one has raised it on every rank.

        Alone, a process raises shardwise's own errors as they are.
        """
        if self._raised is not None and self._raised() is error:
            return True
        return self.channel is None and isinstance(error, (ShardwiseError, Stopped))

    def _reduce_alone(self, local: T | Failure, reduce_fun: Callable[[list[T]], R]) -> R:
        """Return the reduction of one value, or raise a failure: shardwise's own errors as they are."""
        outcome = local if isinstance(local, Failure) else attempt(reduce_fun, [local])
        if not isinstance(outcome, Failure):
            return outcome
        if isinstance(outcome.cause, (ShardwiseError, Stopped)):
            raise outcome.cause
        raise self._remember(outcome.to_error()) from outcome.cause


@dataclass(frozen=True, slots=True)
class MismatchedRanks:
    """Ranks that do not have the first rank's value.

    Attributes:
        first: the lowest of them, in the group.
        text: all of them in the default group, abbreviated for messages.
    """

    first: int
    text: str


def repr_digest(value: object) -> bytes:
    """Return the SHA-256 of a value's ``repr``, for comparison between ranks."""
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).digest()


@dataclass
class Clock:
    """Seconds by phase, in order. Time in a nested phase counts for the inner phase only."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        # _inner is the time of the phases within the innermost one that is open, in seconds.
        start, before, self._inner = time.perf_counter(), self._inner, 0.0
        with phase(name):
            yield
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inner
        self._inner = before + elapsed
