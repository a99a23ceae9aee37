"""The ranks that act together, and how they stay together when one of them fails.

[Note: Together or not at all] A phase runs on every rank without communication; each rank catches what it raises.
At the end of the phase all ranks exchange their outcomes, and if any of them failed, all raise the same error. So
no rank is left waiting for another that is gone, and what a user reads does not depend on the rank.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist

from shardwise import errors
from shardwise.errors import CheckpointError, ConfigError, DisagreementError
from shardwise.execution.line import ANY_CALL, Line, Patience
from shardwise.execution.presence import keep_beating
from shardwise.models import _torch_private
from shardwise.storage import machine

T = TypeVar("T")

_LARGE_BYTES = 1 << 20
"""A message of this size or more is sent by a collective, once all ranks have met (a store is not made for it)."""

_COMPRESSED_BYTES = 1 << 14

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
        self._line: Line | None = None
        if size > 1:
            name = f"shardwise/{group.group_name if group is not None else 'all'}{purpose}"
            if around is not None:
                name += f"/in {around.joined_line()}"
            patience = patience or Patience()
            store = _torch_private.default_store()
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

        Ranks that meet in two threads at once tell these meetings apart by a ``purpose``. In a thread beside the
        one that computes only small things may be told: what is large travels by a collective.

        A ``call`` is what users call it. Ranks that meet in different calls all raise one DisagreementError.
        """
        if not dist.is_initialized():
            return cls(0, 1)
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is None:
            return
        if error is not None and not isinstance(error, (errors.ShardwiseError, _Stopped)):
            # Not raised by a meeting (Ctrl-C, say, or a mistake between two of them): nobody else knows of it.
            self._line.leave(f"{type(error).__name__}: {error}")
        elif self._around is None and not isinstance(error, errors.RankLostError):
            # All has been said: whoever is lost now is not missed.
            with contextlib.suppress(errors.RankLostError, DisagreementError):
                self._line.part()
        self._close()

    def together(self, function: Callable[[], T]) -> T:
        """Run ``function`` on every rank; returns its value if it succeeded everywhere.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, when it raised on any.
            RankLostError: a rank has been lost.
            DisagreementError: ranks are in different calls.
        """
        value, failure = self._attempt(function)
        outcomes = self._meet(None if failure is None else _Failure.of(failure))
        self._raise_any(outcomes, failure)
        return cast(T, value)

    def each(self, function: Callable[[], T]) -> list[T]:
        """Run ``function`` on every rank; every rank's value (picklable), by rank, if it succeeded everywhere.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) as of :meth:`together`.
        """
        value, failure = self._attempt(function)
        told = self._meet((None if failure is None else _Failure.of(failure), value))
        self._raise_any([outcome for outcome, _ in told], failure)
        return [found for _, found in told]

    def from_first(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the first rank and hand its value (picklable) to all.

        Collective: yes.
        """
        if self.size == 1:
            return self.together(function)
        value, failure = self._attempt(function) if self.rank == 0 else (None, None)
        outcome, shared = self._meet((None if failure is None else _Failure.of(failure), value), first_only=True)[0]
        if outcome is not None:
            raise outcome.to_error() from failure
        return cast(T, shared)

    def gather(self, value: T) -> list[T]:
        """Every rank's value (picklable), by rank. Collective: yes."""
        return self._meet(value)

    def require_equal(self, value: object, what: str) -> None:
        """Raise on every rank when a value differs between ranks. Collective: yes.

        Raises:
            DisagreementError: naming what differs and the ranks that do not have the first rank's value.
        """
        values = self.gather(value)
        others = [rank for rank, found in enumerate(values) if found != values[0]]
        if others:
            raise DisagreementError(f"{what} on rank {', '.join(map(str, others))} is not that of rank 0")

    def sum_words(self, values: Sequence[int]) -> list[int]:
        """Over all ranks, place by place, modulo 2**64. Collective: yes."""
        if self.size == 1:
            return [value % _WORD for value in values]
        device = _torch_private.object_device(self.group)
        signed = [(value + _WORD // 2) % _WORD - _WORD // 2 for value in values]

        def add() -> list[int]:
            words = torch.tensor(signed, dtype=torch.int64, device=device)
            work = dist.all_reduce(words, group=self.group, async_op=True)  # integers wrap around
            assert work is not None
            self.wait_for(work)
            return [value % _WORD for value in words.tolist()]

        self.require_equal(len(values), "the number of values that are added up")
        return self.together(add)

    def is_first_on_host(self) -> bool:
        """Whether this rank is the lowest one of those that see its machine's files. Collective: yes."""
        return self.is_first_of(machine.file_space())

    def is_first_of(self, place: str) -> bool:
        """Whether this rank is the lowest one that is at this place. Collective: yes."""
        return self.gather(place).index(place) == self.rank

    # While working

    def check(self) -> None:
        """To be called now and then in a long phase: leaves it when another rank has failed."""
        if self._line is not None and self._line.is_cut:
            raise _Stopped("left its work: another rank has failed, or the store did not answer")
        if self._around is not None:
            self._around.check()

    def wait_for(self, work: dist.Work) -> None:
        """Wait for a collective that was begun with ``async_op=True``, but not longer than all ranks live."""
        pause = 0.0001
        try:
            while not work.is_completed():
                self.check()
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        except _Stopped:
            _torch_private.keep_forever(self.group)
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
            if self._line is not None and not isinstance(error, _Stopped):
                self._line.cut()
            return None, error

    def _meet(self, value: Any, *, first_only: bool = False) -> list[Any]:
        """Every rank's value; with ``first_only`` the first rank's alone."""
        if self._line is None:
            return [value]
        speaks = self.rank == 0 or not first_only
        message = _encode(value) if speaks else b""
        is_large = len(message) >= _LARGE_BYTES
        messages = self._line.meet(_LARGE + len(message).to_bytes(8) if is_large else message)
        if any(item.startswith(_LARGE) for item in messages):
            messages = self.together(lambda: self._send_large(messages, message))
        return [_decode(item) for item in (messages[:1] if first_only else messages)]

    def _send_large(self, messages: list[bytes], own: bytes) -> list[bytes]:
        """The messages, with the large ones in place of their announcements. Every rank has come to send them."""
        device = _torch_private.object_device(self.group)
        found = list(messages)
        for rank, item in enumerate(messages):
            if not item.startswith(_LARGE):
                continue
            buffer = torch.empty(int.from_bytes(item[len(_LARGE) :]), dtype=torch.uint8)
            if rank == self.rank:
                buffer.numpy()[:] = memoryview(own)
            buffer = buffer.to(device)
            work = dist.broadcast(buffer, src=self._global_rank(rank), group=self.group, async_op=True)
            assert work is not None
            self.wait_for(work)
            found[rank] = buffer.cpu().numpy().tobytes()
        return found

    def _raise_any(self, outcomes: list[Any], failure: Exception | None) -> None:
        found = [(rank, item) for rank, item in enumerate(outcomes) if item is not None]
        if not found:
            return
        # Ranks that stopped because of another's failure have nothing to tell. Where that is all there is, the
        # failure is that of a rank of the world around this one.
        told = [(rank, item) for rank, item in found if item.kind != _Stopped.__name__]
        if not told and self._around is not None:
            raise _Stopped
        found = told or found
        if self.size == 1 and isinstance(failure, errors.ShardwiseError):
            raise failure
        rank, first = found[0]
        if len(found) == self.size and all(item == first for _, item in found):
            raise first.to_error() from failure
        raise first.at_rank(self._global_rank(rank)).to_error() from failure

    def _global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class _Stopped(Exception):
    """This rank left its work because another one has failed."""


_LARGE = b"l"
"""Begins, before its size in bytes, what is told in place of a message that comes by a collective."""


def _encode(value: Any) -> bytes:
    plain = pickle.dumps(value)
    return b"z" + zlib.compress(plain, 1) if len(plain) > _COMPRESSED_BYTES else b"p" + plain


def _decode(message: bytes) -> Any:
    return pickle.loads(zlib.decompress(message[1:]) if message[:1] == b"z" else message[1:])


@dataclass(frozen=True)
class _Failure:
    """An error as it travels between ranks."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        if isinstance(error, (errors.ShardwiseError, _Stopped)):
            return cls(type(error).__name__, str(error))
        return cls(CheckpointError.__name__, f"{type(error).__name__}: {error}")

    def at_rank(self, rank: int) -> _Failure:
        if self.message.startswith("rank "):
            return self
        return _Failure(self.kind, f"rank {rank}: {self.message}")

    def to_error(self) -> Exception:
        kind: type[errors.ShardwiseError] = getattr(errors, self.kind, CheckpointError)
        return kind(self.message)
