"""What is to be drawn, as values: lines, areas, points, bars, over bands of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Look(Enum):
    """How values are shown."""

    LINE = "line"
    DASHED = "dashed"
    AREA = "area"
    """Stacked upon the areas before it, which have the same places."""
    POINTS = "points"


@dataclass(frozen=True, slots=True)
class Series:
    """Values at places, in order."""

    name: str
    x: Floats
    y: Floats
    look: Look = Look.LINE


@dataclass(frozen=True, slots=True)
class Band:
    """A part of the time, shaded behind everything."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Bars:
    """Spans of time of one rank, each in a row."""

    name: str
    rows: Sequence[str]
    start: Floats
    length: Floats


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture. ``key`` is short, and the name of its file.

    ``rows`` are those of the bars, from the top.
    """

    key: str
    title: str
    x_title: str
    y_title: str
    series: Sequence[Series] = ()
    bands: Sequence[Band] = ()
    bars: Sequence[Bars] = ()
    rows: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not any(len(item.x) for item in self.series) and not any(len(item.rows) for item in self.bars)


@dataclass(frozen=True, slots=True)
class Table:
    """Words and numbers in rows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
