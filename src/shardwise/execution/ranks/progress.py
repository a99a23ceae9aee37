"""How far a call is: one progress bar, on the first rank, for what all ranks do, and the times of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from tqdm import tqdm

from shardwise.execution.ranks.world import World
from shardwise.models import pretrained
from shardwise.observing import phases


class Progress(Protocol):
    """Told of bytes as they arrive."""

    def advance(self, nbytes: int) -> None: ...


class ProgressBar:
    """A bar of bytes with rate and time left; silent where there is no terminal or transformers' bars are off.

    Every rank has one and tells it what it has done itself; the first rank's shows what all have done, as far as it
    has heard.
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
        with phases.phase(name):
            yield
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inner
        self._inner = before + elapsed
