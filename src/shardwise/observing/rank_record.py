"""What is known of one rank that was observed, kept in bounded memory however long it ran.

[Note: Thinned samples] Of more samples than a rank's share of what all ranks may keep, the least and the most of
each part stay, of each kind of memory, with the first one and the newest: a peak of one sample is never lost. What
must be exact, the most within each phase and how often it was entered, is counted while the file is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.observing.bounded import NO_SAMPLE, Floats, PhaseSpan, PhaseTimes, standing_out
from shardwise.observing.rank_file import SAMPLED, SHARED

_SAMPLES_OF_ALL = 1 << 21
_LEAST_SAMPLES = 1 << 12
_MOST_SAMPLES = 1 << 17
"""Of a rank; two hours at 20 a second."""

_NEWEST = 256
"""Samples that stay as they are: what was read of late is told by them."""

_MOST_SHARES = 1 << 12
_MOST_TOLD = 256
_MOST_DEEP = 16
_MOST_LANES = 32
"""Threads that are in a phase at a time."""

_MOST_PHASES = 1 << 12
_OTHERS = (-1, ("other phases",))
"""Of whichever threads, where there are too many by name."""

_ANONYMOUS, _SHARED_MEMORY, _FILE = (SAMPLED.index(name) for name in ("anonymous", "shared", "file"))
_WIDTH = len(SAMPLED)
_ALLOCATED, _RESERVED = (SAMPLED.index(name) for name in ("allocated", "reserved"))


@dataclass(frozen=True, slots=True)
class ToldFacts:
    """Facts, and the outermost phase of the first thread that they were told in; None where it was in none."""

    facts: Mapping[str, Any]
    around: PhaseSpan | None


@dataclass(slots=True)
class RankRecord:
    """One time that a rank was observed; times in seconds since ``began``, none before the one before it."""

    run: str
    """The same of all ranks that began together."""
    rank: int
    world_size: int
    machine: str
    host: str
    device: str
    pid: int
    began: float
    """In seconds since 1970, by the clock of its host."""
    samples_per_second: float
    rows: array[float] = field(default_factory=lambda: array("d"))
    """Samples one after the other, each as of ``SAMPLED``. See [Note: Thinned samples]."""
    taken: int = 0
    """Samples that there were, also those that are kept no more."""
    shares: array[float] = field(default_factory=lambda: array("d"))
    """One after the other, each as of ``SHARED``."""
    told: list[ToldFacts] = field(default_factory=list)
    is_ended: bool = False
    """Whether it came to its end; one that was killed did not."""
    last: float = 0.0
    """When it was last heard of."""
    stacks: dict[int, list[PhaseSpan]] = field(default_factory=dict)
    """The phases that each thread is in, if it is in any."""
    times: dict[tuple[int, tuple[str, ...]], PhaseTimes] = field(default_factory=dict)
    """By lane and path, in the order of their first beginnings; without those that have not ended."""
    most_samples: int = field(init=False)

    def __post_init__(self) -> None:
        self.most_samples = min(max(_SAMPLES_OF_ALL // self.world_size, _LEAST_SAMPLES), _MOST_SAMPLES)

    @property
    def until(self) -> float:
        """When it was last heard of, in seconds since 1970."""
        return self.began + self.last

    @property
    def peak_kib(self) -> float:
        """The most host memory of the process, by the kernel's count; 0 where nothing was sampled."""
        return self.newest().get("peak", 0.0)

    @property
    def count(self) -> int:
        """Samples that are kept."""
        return len(self.rows) // len(SAMPLED)

    @property
    def facts(self) -> list[Mapping[str, Any]]:
        return [told.facts for told in self.told]

    def samples(self) -> Mapping[str, Floats]:
        """By name, as of ``SAMPLED``: seconds, and KiB."""
        return _by_name(_table(self.rows, SAMPLED), SAMPLED)

    def divided(self) -> Mapping[str, Floats]:
        """Memory with each page divided by those who have it: by name, as of ``SHARED``; seconds, and KiB."""
        return _by_name(_table(self.shares, SHARED), SHARED)

    def newest(self, back: int = 0) -> Mapping[str, float]:
        """The last sample, or one so many before it, by name; empty where there is none."""
        if back >= self.count:
            return {}
        start = len(self.rows) - (back + 1) * len(SAMPLED)
        return dict(zip(SAMPLED, self.rows[start : start + len(SAMPLED)], strict=True))

    def now_in(self) -> tuple[str, ...]:
        """The phases that its first thread is in; of another one where the first is in none."""
        return min(self.stacks.items())[1][-1].path if self.stacks else ()

    def phases(self) -> Sequence[PhaseTimes]:
        """In the order of their first beginnings; what has not ended lasts until it was last heard of."""
        found = dict(self.times)
        for stack in self.stacks.values():
            for span in stack:
                key = span.lane, span.path
                found[key] = found[key].with_open(span, self.last)
        return [*found.values()]

    # ── what is read ──────────────────────────────────────────────────────────────────────────────

    def hear(self, t: float) -> float:
        """It was heard of then; the time, which is not before what came before it."""
        self.last = max(self.last, t)
        return self.last

    def take_sample(self, values: Sequence[float]) -> None:
        """As of ``SAMPLED``."""
        self.taken += 1
        self.rows.append(self.hear(values[0]))
        self.rows.extend(values[1:])
        host_kib, allocated_kib = values[_ANONYMOUS] + values[_SHARED_MEMORY], values[_ALLOCATED]
        for stack in self.stacks.values():
            for span in stack:
                span.take(host_kib, allocated_kib)
        if len(self.rows) >= self.most_samples * _WIDTH:
            table = _table(self.rows, SAMPLED)
            columns = [table[:, column] for column in (_SHARED_MEMORY, _FILE, _ALLOCATED, _RESERVED)]
            columns.append(table[:, _ANONYMOUS] + table[:, _SHARED_MEMORY])
            self.rows = _thinned(table, columns, self.most_samples // 2, _NEWEST)

    def take_shares(self, values: Sequence[float]) -> None:
        """As of ``SHARED``."""
        self.shares.append(self.hear(values[0]))
        self.shares.extend(values[1:])
        if len(self.shares) >= _MOST_SHARES * len(SHARED):
            table = _table(self.shares, SHARED)
            self.shares = _thinned(table, [table[:, 2] + table[:, 3]], _MOST_SHARES // 2, 0)

    def begin(self, t: float, lane: int, name: str) -> None:
        """A thread enters a phase.

        Raises:
            ValueError: it is in too many, or too many threads are.
        """
        stack = self.stacks.get(lane, ())
        if len(stack) >= _MOST_DEEP or (not stack and len(self.stacks) >= _MOST_LANES):
            raise ValueError("too many phases at a time")
        path = (*(stack[-1].path if stack else ()), name)
        times = self.times.get((lane, path)) or self._times_of((lane, path))
        rows = self.rows
        before = rows[_ANONYMOUS - _WIDTH] + rows[_SHARED_MEMORY - _WIDTH] if rows else NO_SAMPLE
        span = PhaseSpan(times.path, times.lane, self.hear(t), None, before)
        if stack:
            stack.append(span)
        else:
            self.stacks[lane] = [span]

    def _times_of(self, key: tuple[int, tuple[str, ...]]) -> PhaseTimes:
        """Where a phase is counted that is entered for the first time."""
        key = key if len(self.times) < _MOST_PHASES else _OTHERS
        return self.times.setdefault(key, PhaseTimes(key[1], key[0]))

    def end(self, t: float, lane: int) -> None:
        """A thread leaves the phase that it has entered last.

        Raises:
            KeyError: it is in none.
        """
        stack = self.stacks[lane]
        span = stack.pop()
        span.stop = self.hear(t)
        self.times[span.lane, span.path].add(span, span.stop)
        if not stack:
            del self.stacks[lane]

    def tell(self, t: float, facts: Mapping[str, Any]) -> None:
        """Facts; of very many the first and the newest are kept."""
        self.hear(t)
        if len(self.told) >= _MOST_TOLD:
            del self.told[_MOST_TOLD // 2]
        self.told.append(ToldFacts(facts, self.stacks[0][0] if 0 in self.stacks else None))


def _table(rows: array[float], names: Sequence[str]) -> Any:
    return np.array(rows, np.float64).reshape(-1, len(names))


def _by_name(table: Any, names: Sequence[str]) -> dict[str, Floats]:
    return {name: table[:, column] for column, name in enumerate(names)}


def _thinned(table: Any, columns: Sequence[Floats], most: int, newest: int) -> array[float]:
    """At most so many rows, of which any of the columns stands out, and so many of the newest."""
    older = len(table) - newest
    places = standing_out([column[:older] for column in columns], most - newest)
    return array("d", np.concatenate([table[places], table[older:]]).tobytes())
