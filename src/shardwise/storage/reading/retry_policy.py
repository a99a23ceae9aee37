"""How long a request may take, and how often it is tried."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from shardwise.errors import ConfigError

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
