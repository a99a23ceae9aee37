"""What is kept of a rank in bounded memory: of its phases, and of points that stand out.

[Note: Joined spans] A run of days has millions of steps. Of a phase all times are counted and added up, and the
most memory within it is kept; its spans are joined where they are nearest, so that no more are left than a picture
can show: what lies between joined spans is less than a thousandth of the time that the rank has run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


def extremes(values: Floats, parts: int) -> Places:
    """The places of the first value, the last one, and of the least and the most of each of as many equal parts.

    In order, at most ``2 * parts + 2``; all places where there are no more than that. NaN stands out nowhere.
    """
    count = len(values)
    if count <= 2 * parts + 2:
        return np.arange(count)
    each = -(-count // parts)
    padded = np.full(each * parts, np.nan)
    padded[:count] = values
    table = padded.reshape(parts, each)
    has_any = ~np.isnan(table).all(axis=1)
    starts, table = np.flatnonzero(has_any) * each, table[has_any]
    least = starts + np.nanargmin(table, axis=1)
    most = starts + np.nanargmax(table, axis=1)
    return np.unique(np.concatenate([[0], least, most, [count - 1]]))


def standing_out(columns: Sequence[Floats], most: int) -> Places:
    """The places of :func:`extremes` of any of these columns, in order, at most ``most`` of them."""
    parts = max(most // (2 * len(columns)) - 1, 1)
    return np.unique(np.concatenate([extremes(column, parts) for column in columns]))


def merged(start: Floats, stop: Floats, gap: float) -> tuple[Floats, Floats]:
    """Spans in order, of which those that are not further apart than ``gap`` are one."""
    if not len(start):
        return start, stop
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    is_first = np.concatenate([[True], start[1:] - reach[:-1] > gap])
    is_last = np.concatenate([is_first[1:], [True]])
    return start[is_first], reach[is_last]


_MOST_SPANS = 2048

NO_SAMPLE = -math.inf
"""The most memory where none was looked at."""


@dataclass(slots=True)
class PhaseSpan:
    """One time that a thread is in a phase. ``path`` has the phases around it first; seconds, and KiB.

    ``before_kib`` is the host's memory before it, or where nothing was sampled before, at its first sample.
    """

    path: tuple[str, ...]
    lane: int
    start: float
    stop: float | None = None
    """None while nobody has left it."""
    before_kib: float = NO_SAMPLE
    most_kib: float = NO_SAMPLE
    """Of the host, anonymous and shared."""
    most_allocated_kib: float = NO_SAMPLE
    """Of the accelerator, in tensors."""

    def take(self, host_kib: float, allocated_kib: float) -> None:
        """A sample within it."""
        if self.before_kib < 0:
            self.before_kib = host_kib
        self.most_kib = max(self.most_kib, host_kib)
        self.most_allocated_kib = max(self.most_allocated_kib, allocated_kib)


@dataclass(slots=True)
class PhaseTimes:
    """All times that one thread was in one phase. See [Note: Joined spans]."""

    path: tuple[str, ...]
    lane: int
    times: int = 0
    seconds: float = 0.0
    """In all."""
    before_kib: float = NO_SAMPLE
    """Of the first time, as the two below of all of them; as of :class:`PhaseSpan`."""
    most_kib: float = NO_SAMPLE
    most_allocated_kib: float = NO_SAMPLE
    starts: array[float] = field(default_factory=lambda: array("d"))
    stops: array[float] = field(default_factory=lambda: array("d"))

    @property
    def name(self) -> str:
        return self.path[-1]

    def add(self, span: PhaseSpan, stop: float) -> None:
        """One more time, which ended then."""
        if not self.times:
            self.before_kib = span.before_kib
        self.times += 1
        self.seconds += stop - span.start
        self.most_kib = max(self.most_kib, span.most_kib)
        self.most_allocated_kib = max(self.most_allocated_kib, span.most_allocated_kib)
        self.starts.append(span.start)
        self.stops.append(stop)
        if len(self.starts) >= _MOST_SPANS:
            self._join()

    def spans(self) -> tuple[Floats, Floats]:
        """(beginnings, ends), in order."""
        return np.array(self.starts, np.float64), np.array(self.stops, np.float64)

    def with_open(self, span: PhaseSpan, stop: float) -> PhaseTimes:
        """The same, with a time that has not ended as if it ended then."""
        more = replace(self, starts=self.starts[:], stops=self.stops[:])
        more.add(span, stop)
        return more

    def _join(self) -> None:
        """Join what is nearest: half of the gaps stay, the longest."""
        starts, stops = self.spans()
        gaps = starts[1:] - stops[:-1]
        kept = np.sort(np.argsort(gaps, kind="stable")[len(gaps) // 2 :])
        self.starts = array("d", starts[np.concatenate([[0], kept + 1])].tobytes())
        self.stops = array("d", stops[np.concatenate([kept, [len(stops) - 1]])].tobytes())
