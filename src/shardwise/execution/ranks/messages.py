"""What ranks tell each other, as bytes in torch's key-value store: values, failures, and the answer to all of them.

[Note: Meetings cost what was said] Each rank tells the first one what it has to tell, which may be nothing. The
first rank makes one answer of it, and each rank reads that. So what a store carries is what was said, and as many
answers as there are ranks: ``n`` ranks cost ``O(n)`` bytes where the answer is small. It is small where it is a
conclusion (that nobody failed, that all are equal, a sum), and where many ranks say the same, which is told once.
Where every rank must know what each of them has, and they have different things, the answer has ``n`` parts; an
answer that is too large to be read ``n`` times from one store is sent by a collective, after all have met
(:mod:`~shardwise.execution.ranks.world`).
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from shardwise import errors
from shardwise.errors import CheckpointError
from shardwise.report.names import shown_ranks

SILENT = b""
"""The message of a rank that has nothing to tell, and the answer when there is nothing to answer."""

Said: TypeAlias = Mapping[int, bytes]
"""What ranks have told the first one, by rank; those that were silent are left out."""

_COMPRESSED_BYTES = 1 << 14
_PLAIN, _COMPRESSED, _FAILURE = b"p", b"z", b"f"


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

    @property
    def is_stop(self) -> bool:
        """Whether a rank only left its work, and has nothing to tell."""
        return self.kind == Stopped.__name__

    def at_rank(self, rank: int) -> Failure:
        if self.message.startswith("rank "):
            return self
        return Failure(self.kind, f"rank {rank}: {self.message}")

    def to_error(self) -> Exception:
        kind: type[errors.ShardwiseError] = getattr(errors, self.kind, CheckpointError)
        return kind(self.message)

    def encode(self) -> bytes:
        return _FAILURE + pickle.dumps(self)


@dataclass(frozen=True)
class Outcome:
    """What all ranks raise: a failure, and whose it is; None where it is everybody's."""

    failure: Failure
    rank: int | None

    @classmethod
    def among(cls, said: Said, asked: int) -> Outcome | None:
        """The first failure that was told of. ``asked`` is how many ranks could have failed.

        Of failures this is told on, and nothing else: there may be as many as ranks.
        """
        failures: dict[int, Failure] = {
            rank: pickle.loads(message[len(_FAILURE) :])
            for rank, message in sorted(said.items())
            if message.startswith(_FAILURE)
        }
        if not failures:
            return None
        told = {rank: failure for rank, failure in failures.items() if not failure.is_stop} or failures
        (rank, first), *others = told.items()
        is_common = len(told) == asked and all(failure == first for _, failure in others)
        return cls(first, None if is_common else rank)

    def to_error(self, number_of: Callable[[int], int]) -> Exception:
        """``number_of`` is what a rank is called in messages."""
        failure = self.failure if self.rank is None else self.failure.at_rank(number_of(self.rank))
        return failure.to_error()

    @classmethod
    def in_answer(cls, answer: bytes) -> Outcome | None:
        """The failure that an answer tells of."""
        return pickle.loads(answer[len(_FAILURE) :]) if answer.startswith(_FAILURE) else None

    def encode(self) -> bytes:
        return _FAILURE + pickle.dumps(self)


def encode(value: Any) -> bytes:
    """A value (picklable) as a message."""
    plain = pickle.dumps(value)
    return _COMPRESSED + zlib.compress(plain, 1) if len(plain) > _COMPRESSED_BYTES else _PLAIN + plain


def decode(message: bytes) -> Any:
    """The value of a message."""
    return pickle.loads(zlib.decompress(message[1:]) if message[:1] == _COMPRESSED else message[1:])


def packed(said: Said) -> bytes:
    """The messages of all ranks as one. What several ranks say is in it once."""
    messages = [said[rank] for rank in range(len(said))]
    number_of = {message: number for number, message in enumerate(dict.fromkeys(messages))}
    runs = array("I")
    for number, run in groupby(number_of[message] for message in messages):
        runs.extend((number, sum(1 for _ in run)))
    return encode((list(number_of), runs.tobytes()))


def unpacked(answer: bytes) -> list[Any]:
    """The values of packed messages, by rank; where messages are equal, one value."""
    messages, told = decode(answer)
    values = [decode(message) for message in messages]
    runs = array("I", told)
    return [values[number] for number, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def decoded(said: Said) -> list[Any]:
    """The values of the messages of all ranks, by rank; where messages are equal, one value."""
    values = {message: decode(message) for message in said.values()}
    return [values[said[rank]] for rank in range(len(said))]


@dataclass(frozen=True, slots=True)
class OddRanks:
    """Ranks that do not have the first rank's value.

    Attributes:
        first: the lowest of them.
        shown: all of them, in a few words.
    """

    first: int
    shown: str

    @classmethod
    def among(cls, values: Sequence[object]) -> OddRanks | None:
        """Those among the values of all ranks; None where all are equal."""
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        return cls(odd[0], shown_ranks(odd)) if odd else None


def digest_of(value: object) -> bytes:
    """What ranks compare in place of a value: equal where it is printed alike."""
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).digest()


class KeyStore:
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

    def below(self, name: str) -> KeyStore:
        return KeyStore(self._store, f"{self._prefix}/{name}")
