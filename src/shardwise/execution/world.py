"""The ranks that act together, and how they stay together when one of them fails.

[Note: Together or not at all] A phase runs on every rank without communication; each rank catches what it raises.
At the end of the phase all ranks exchange their outcomes, and if any of them failed, all raise the same error. So
no rank is left waiting for another that is gone, and what a user reads does not depend on the rank.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from shardwise import errors
from shardwise.errors import CheckpointError, ConfigError, DisagreementError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of a process group, or one process alone (``group`` None and ``size`` 1)."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> World:
        """The given group, else the default group, else this process alone."""
        if not dist.is_initialized():
            return cls(0, 1)
        if dist.get_rank(group) < 0:
            raise ConfigError("this rank is not in the process group it was given")
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def together(self, function: Callable[[], T]) -> T:
        """Run ``function`` on every rank; returns its value if it succeeded everywhere.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, when it raised on any.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = function()
        except Exception as error:
            failure = error
        self._raise_any(failure)
        return value  # type: ignore[return-value]

    def from_first(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the first rank and hand its value (picklable) to all.

        Collective: yes.
        """
        if self.size == 1:
            return self.together(function)
        value: T | None = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                value = function()
            except Exception as error:
                failure = error
        box: list[Any] = [(value, None if failure is None else _Failure.of(failure))]
        dist.broadcast_object_list(box, src=self._global_rank(0), group=self.group)
        shared, outcome = box[0]
        if outcome is not None:
            raise outcome.to_error() from failure
        return cast(T, shared)

    def gather(self, value: T) -> list[T]:
        """Every rank's value (picklable), by rank. Collective: yes."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def require_equal(self, value: object, what: str) -> None:
        """Raise on every rank when a value differs between ranks. Collective: yes.

        Raises:
            DisagreementError: naming what differs and the ranks that do not have the first rank's value.
        """
        values = self.gather(value)
        others = [rank for rank, found in enumerate(values) if found != values[0]]
        if others:
            raise DisagreementError(f"{what} on rank {', '.join(map(str, others))} is not that of rank 0")

    def is_first_on_host(self) -> bool:
        """Whether this rank is the lowest one of its machine. Collective: yes."""
        hosts = self.gather(socket.gethostname())
        return hosts.index(hosts[self.rank]) == self.rank

    def _raise_any(self, failure: Exception | None) -> None:
        if self.size == 1:
            if isinstance(failure, errors.ShardwiseError):
                raise failure
            if failure is not None:
                raise _Failure.of(failure).to_error() from failure
            return
        failures = self.gather(None if failure is None else _Failure.of(failure))
        found = [(rank, item) for rank, item in enumerate(failures) if item is not None]
        if not found:
            return
        rank, first = found[0]
        if len(found) == self.size and all(item == first for _, item in found):
            raise first.to_error() from failure
        raise first.at_rank(rank).to_error() from failure

    def _global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@dataclass(frozen=True)
class _Failure:
    """An error as it travels between ranks."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        if isinstance(error, errors.ShardwiseError):
            return cls(type(error).__name__, str(error))
        return cls(CheckpointError.__name__, f"{type(error).__name__}: {error}")

    def at_rank(self, rank: int) -> _Failure:
        return _Failure(self.kind, f"rank {rank}: {self.message}")

    def to_error(self) -> Exception:
        kind: type[errors.ShardwiseError] = getattr(errors, self.kind, CheckpointError)
        return kind(self.message)
