"""Outcomes of a call on a rank, as they are sent to other ranks."""

from __future__ import annotations

import pickle
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from shardwise.core import errors
from shardwise.core.errors import CheckpointError, ShardwiseError
from shardwise.core.phases import current_phases

T = TypeVar("T")
P = ParamSpec("P")

_MEMORY = re.compile(r"out of memory|DefaultCPUAllocator|can.t allocate memory|not enough memory", re.IGNORECASE)


class Stopped(Exception):
    """This rank stopped its work because another one has failed."""


@dataclass(frozen=True)
class Failure:
    """An error as it is sent between ranks.

    Attributes:
        kind: the name of its class in :mod:`shardwise.core.errors`, or of :class:`Stopped`.
        message: its text.
        phase: the call and the phase in which it was raised.
        cause: the exception, on the rank that raised it.
    """

    kind: str
    message: str
    phase: str = field(default="", compare=False)
    cause: Exception | None = field(default=None, compare=False)

    @classmethod
    def from_error(cls, error: Exception) -> Failure:
        # The nearest public class: subclasses that other modules define may not exist on the other ranks.
        public = [base for base in type(error).__mro__ if base is Stopped or base.__module__ == errors.__name__]
        message = str(error) if public else f"{type(error).__name__}: {error}"
        if not public and is_out_of_memory(error):
            message = describe_out_of_memory(error)
        phase = getattr(error, "phase", "") or current_phases()
        return cls((public or [CheckpointError])[0].__name__, message, phase, error)

    @classmethod
    def among(cls, values: Sequence[object], count: int, global_ranks: Sequence[int]) -> Failure | None:
        """Return the first failure of the ranks, with its rank unless the first ``count`` ranks failed alike.

        ``global_ranks`` are the ranks in the default group. A rank that only stopped because of another one is
        ignored.
        """
        failures = {rank: value for rank, value in enumerate(values) if isinstance(value, Failure)}
        # Ranks that only stopped are consequences. If there are no others, the first of them is all that is known.
        causes = {rank: failure for rank, failure in failures.items() if not failure.is_stop} or failures
        for rank, first in causes.items():
            # count is 1 in a broadcast. Then the error of the first rank has no "rank 0: ".
            is_common = [*causes] == [*range(count)] and set(causes.values()) == {first}
            return first if is_common else first.at_rank(global_ranks[rank])
        return None

    def __reduce__(self) -> tuple[type[Failure], tuple[str, str, str]]:
        return Failure, (self.kind, self.message, self.phase)

    @property
    def is_stop(self) -> bool:
        return self.kind == Stopped.__name__

    def at_rank(self, rank: int) -> Failure:
        return self if self.message.startswith("rank ") else replace(self, message=f"rank {rank}: {self.message}")

    def to_error(self) -> ShardwiseError:
        kind: type[ShardwiseError] = getattr(errors, self.kind, CheckpointError)
        return at_phase(kind(self.message), self.phase)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if this process, or its device, has no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    is_torch_error = isinstance(error, RuntimeError) and not isinstance(error, dist.DistError)
    return is_torch_error and _MEMORY.search(str(error)) is not None


def describe_out_of_memory(error: BaseException, advice: str = "See docs/out_of_memory.md") -> str:
    detail = str(error).partition("\n")[0] or type(error).__name__
    return f"out of memory ({detail}). {advice}"


def at_phase(error: ShardwiseError, phase: str) -> ShardwiseError:
    """Add the phase in which the ranks were to an error, with a note that tracebacks show."""
    if phase:
        error.phase = phase
        error.add_note(f"The ranks were in this phase: {phase}")
    return error


def attempt(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T | Failure:
    """Return the function's value, or its exception as a failure."""
    try:
        return function(*args, **keywords)
    except Exception as error:
        return Failure.from_error(error)


def encode(value: object) -> bytes:
    """Pickle a value as a message: None as the empty one, and one that cannot be pickled as a failure.

    An object that is in it several times is in the message once.
    """
    if value is None:
        return b""
    pickled = attempt(pickle.dumps, value)
    if isinstance(pickled, Failure):
        pickled = pickle.dumps(pickled)
    return zlib.compress(pickled, 1)


def decode(message: bytes) -> Any:
    """Return the value of a message."""
    return pickle.loads(zlib.decompress(message)) if message else None
