"""Times the phases of a call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwise.observing import phases


@dataclass
class Clock:
    """Seconds by phase, in order. Those of a phase within another count for the inner one only."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, before, self._inner = time.perf_counter(), self._inner, 0.0
        with phases.phase(name):
            yield
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inner
        self._inner = before + elapsed
