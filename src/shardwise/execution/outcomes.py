"""Outcomes of a step on a rank, as they are sent to other ranks."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise import errors
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    pass


SILENT = b""
"""The message of a rank that has nothing to tell: None."""


_COMPRESSED_BYTES = 1 << 14


class Stopped(Exception):
    """This rank left its work because another one has failed."""


@dataclass(frozen=True)
class Failure:
    """An error as it travels between ranks."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, (errors.ShardwiseError, Stopped)):
            return cls(type(error).__name__, str(error))
        return cls(CheckpointError.__name__, f"{type(error).__name__}: {error}")

    @classmethod
    def among(cls, told: Sequence[object], asked: int, global_ranks: Sequence[int]) -> Failure | None:
        """Return the first failure of the ranks, with its rank unless all ``asked`` ranks failed alike.

        ``global_ranks`` are the ranks in the default group. A rank that only stopped because of another one is
        passed over.
        """
        failures = {rank: item for rank, item in enumerate(told) if isinstance(item, Failure)}
        own = {rank: item for rank, item in failures.items() if not item.is_stop} or failures
        for rank, first in own.items():
            is_common = len(own) == asked and set(own.values()) == {first}
            return first if is_common else first.at_rank(global_ranks[rank])
        return None

    @property
    def is_stop(self) -> bool:
        return self.kind == Stopped.__name__

    def at_rank(self, rank: int) -> Failure:
        return self if self.message.startswith("rank ") else replace(self, message=f"rank {rank}: {self.message}")

    def to_error(self) -> Exception:
        kind: type[errors.ShardwiseError] = getattr(errors, self.kind, CheckpointError)
        return kind(self.message)


_PLAIN, _COMPRESSED = b"p", b"z"


def encode(value: Any) -> bytes:
    """Pickle a value as a message. An object that is in it several times is in the message once."""
    if value is None:
        return SILENT
    plain = pickle.dumps(value)
    return _COMPRESSED + zlib.compress(plain, 1) if len(plain) > _COMPRESSED_BYTES else _PLAIN + plain


def decode(message: bytes) -> Any:
    """The value of a message."""
    if not message:
        return None
    return pickle.loads(zlib.decompress(message[1:]) if message[:1] == _COMPRESSED else message[1:])
