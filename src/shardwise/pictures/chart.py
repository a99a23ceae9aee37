"""What is to be drawn, as values: lines, areas, points, bars, over bands of time; and in which colours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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


COLOURS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#e45756",
    "#72b7b2",
    "#b279a2",
    "#eeca3b",
    "#9d755d",
    "#ff9da6",
    "#79706e",
)
_SHARED = "#a8adb4"
_RANK = re.compile(r"rank (\d+)")


def colours_of(chart: Chart) -> Mapping[str, str]:
    """The colour of each series and of each rank's bars, by name."""
    names = [item.name for item in chart.series] + [item.name for item in chart.bars]
    owners = [*dict.fromkeys(map(_owner, names))]
    return {name: _colour(_owner(name), owners) for name in names}


def band_colours_of(chart: Chart) -> Mapping[str, str]:
    """The colour of each phase that is shaded, by name, in the order of their beginnings."""
    names = dict.fromkeys(band.name for band in chart.bands if band.stop > band.start)
    return {name: COLOURS[(number + 4) % len(COLOURS)] for number, name in enumerate(names)}


def _owner(name: str) -> str:
    """What has a colour of its own: a rank's dashes and points have that of its line."""
    return name.partition(",")[0].removesuffix(" evaluation").removeprefix("foreseen for ")


def _colour(owner: str, owners: list[str]) -> str:
    if owner == "shared":
        return _SHARED
    rank = _RANK.fullmatch(owner)
    return COLOURS[(int(rank[1]) if rank else owners.index(owner)) % len(COLOURS)]
