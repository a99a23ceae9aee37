"""Chooses huge or small pages for fresh memory, by what each of them has cost just now.

[Note: Looking at pages] A huge page is one fault instead of 512, and where its memory exists it costs a quarter. A
virtual machine's free memory may be with its host, though, which takes back whole huge pages and leaves what is in
pieces: then the host has to bring each huge page, at twenty times the cost, while small pages come from the pieces.
Which of the two it is cannot be asked, and changes within one load: what somebody has freed a moment ago is there,
what lies behind it is not. So no probe before a load would do. Memory is touched in portions of a huge page each,
right before bytes are read into it; each is timed, and the next portion is taken in the way whose last ones were
cheaper. The dearer way is tried again now and then, so rarely that all that was lost by it, and by ends that nobody
could foresee, is a twentieth of the time. What is timed is processor time, which counts what the host does for a
touch, and not the turns of other processes.

The way that was left may have been left for two dear portions among many cheap ones. So when it is asked whether to
try it again, its last eight count too, if these were cheaper.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, assert_never

from shardwise.report.load_report import TouchedPages


@dataclass(frozen=True, slots=True)
class MeasuredPages:
    """Portion by portion in those pages that have cost less of late."""


@dataclass(frozen=True, slots=True)
class HugePages:
    """In huge pages, whatever they cost; in small ones where the system has no others."""


@dataclass(frozen=True, slots=True)
class SmallPages:
    """In small pages, whatever they cost."""


Pages: TypeAlias = MeasuredPages | HugePages | SmallPages


class Way(Enum):
    """How one portion is touched."""

    HUGE = "huge"
    SMALL = "small"

    @property
    def other(self) -> Way:
        return Way.SMALL if self is Way.HUGE else Way.HUGE


_FIRST = 2
"""Portions that are touched in each way before anything is chosen."""

_RECENT = 2
"""Portions by which a way is judged: few, since memory that is there ends from one portion to the next."""

_TYPICAL = 8
"""Portions by which the way that is not taken is judged, if these were cheaper."""

_LOOKS_SHARE = 1 / 20
"""Of the time of all touches, what may be lost to the dearer way before it is tried again."""


class Weighing:
    """Chooses the way of each portion, from what earlier ones took. All portions have one size."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._last = {way: deque[float](maxlen=_TYPICAL) for way in Way}
        self._seconds = dict.fromkeys(Way, 0.0)
        self._nbytes = dict.fromkeys(Way, 0)
        self._begun = dict.fromkeys(Way, 0)
        self._lost = 0.0

    def next(self) -> Way:
        """The way in which to touch the next portion."""
        way = self._choose()
        self._begun[way] += 1
        return way

    def _choose(self) -> Way:
        match self._pages:
            case HugePages():
                return Way.HUGE
            case SmallPages():
                return Way.SMALL
            case MeasuredPages():
                pass
            case _:
                assert_never(self._pages)
        if min(self._begun.values()) < _FIRST:
            return min(Way, key=lambda way: self._begun[way])
        cheaper = self._cheaper()
        more = self._hoped(cheaper.other) - self._cost(cheaper)
        if more <= 0 or self._lost + more <= _LOOKS_SHARE * sum(self._seconds.values()):
            return cheaper.other
        return cheaper

    def took(self, way: Way, nbytes: int, seconds: float) -> None:
        """A portion has been touched."""
        if self._last[way.other]:
            self._lost += max(0.0, seconds - self._hoped(way.other))
        self._seconds[way] += seconds
        self._nbytes[way] += nbytes
        self._last[way].append(seconds)

    def _cheaper(self) -> Way:
        return min(Way, key=self._cost)

    def _cost(self, way: Way) -> float:
        return _mean(tuple(self._last[way])[-_RECENT:])

    def _hoped(self, way: Way) -> float:
        return min(self._cost(way), _mean(self._last[way]))

    def report(self) -> TouchedPages:
        """What was touched how, and why."""
        match self._pages:
            case HugePages() | SmallPages():
                reason = "as asked"
            case MeasuredPages():
                reason = "each time in those that had cost less of late"
            case _:
                assert_never(self._pages)
        return TouchedPages(
            huge_bytes=self._nbytes[Way.HUGE],
            small_bytes=self._nbytes[Way.SMALL],
            huge_seconds=self._seconds[Way.HUGE],
            small_seconds=self._seconds[Way.SMALL],
            reason=reason,
        )


def _mean(seconds: Collection[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0
