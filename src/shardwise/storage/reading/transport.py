"""What a kind of remote storage has to do, how long a request may take, and how often it is tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shardwise.errors import ConfigError

PASSING_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""


class TransientFault(OSError):
    """A request failed in a way in which the next one may not."""

    def __init__(self, cause: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(cause)
        self.retry_after_s = retry_after_s


class PermanentFault(OSError):
    """A request failed and would fail again; ``remedy`` says what to do."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.remedy = remedy


def changed(what: str) -> PermanentFault:
    """A file's content was replaced since it was first looked at."""
    return PermanentFault(
        f"the file changed while it was being read ({what})",
        "load again, from files that nobody writes to",
    )


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's size in bytes, and what its storage calls this version of it (None: nothing)."""

    nbytes: int
    version: str | None

    @property
    def identity(self) -> str:
        return f"{self.version or 'no version'}, {self.nbytes} bytes"

    def require_version(self, version: str | None) -> None:
        """Nothing contradicts that the file is still in this state.

        A version is a kind and a value ("ETag abc"). Not every server of a cluster tells the same kind, and what is
        told in another way cannot be compared.

        Raises:
            PermanentFault: for another version.
        """
        if self.version is None or version is None or version == self.version:
            return
        if version.split(" ")[0] == self.version.split(" ")[0]:
            raise changed(f"{self.version} before, {version} now")


class Transport(Protocol):
    """Makes single requests. Every method may be called from several threads at once.

    Raises FileNotFoundError, PermissionError, :class:`TransientFault` and :class:`PermanentFault`, which hold the
    cause as text.
    """

    def list(self) -> list[str]:
        """All files below the root, in any order.

        Raises:
            CannotListError: where the storage does not tell.
        """
        ...

    def state(self, file: str) -> FileState:
        """The file's state as it is now."""
        ...

    def fetch(
        self,
        file: str,
        start: int,
        buffers: Sequence[memoryview],
        expected: FileState,
        is_abandoned: Callable[[], bool],
    ) -> None:
        """Fill the buffers, of bytes and none of them empty, with one range, which lies in the file.

        The file must be in the ``expected`` state. When ``is_abandoned`` says so, nobody waits for the bytes any
        more, and any fault may be raised.
        """
        ...

    def close(self) -> None: ...


_SLOWEST_BYTES_PER_S = 64 * 1024


@dataclass(frozen=True, slots=True)
class Retries:
    """How a remote storage's passing failures are met: with exponential backoff and full jitter.

    Before the n-th repetition a random time between 0 and ``first_wait_s * 2**(n-1)`` passes, ``longest_wait_s`` at
    most: ranks that failed together do not come back together. A server that says when to come back
    (``Retry-After``) is believed up to ``longest_wait_s``.

    Attributes:
        attempts: how often a request is made before its failure is final.
        timeout_s: how long nothing may arrive; a request as a whole may take longer, by as much as its bytes
            need at 64 KiB/s.

    Raises:
        ConfigError: for a number that is out of bounds.
    """

    attempts: int = 6
    first_wait_s: float = 0.5
    longest_wait_s: float = 20.0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts={self.attempts}: a request has to be made once at least")
        for name in ("first_wait_s", "longest_wait_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"{name}={seconds} is not a time to wait, in seconds")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"timeout_s={self.timeout_s} is not a positive number of seconds")

    def wait_s(self, failures: int, chance: float, retry_after_s: float | None = None) -> float:
        """Seconds to wait after so many failures; ``chance`` is a random number between 0 and 1."""
        # Bounded before it is raised: 2**1100 is no float.
        bound = min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(failures - 1, 64))
        return max(chance * bound, min(retry_after_s or 0.0, self.longest_wait_s))

    def longest_request_s(self, nbytes: int) -> float:
        """Seconds after which a request for so many bytes is given up, even if they trickle in."""
        return self.timeout_s + nbytes / _SLOWEST_BYTES_PER_S


DEFAULT_RETRIES: Final = Retries()
