"""One colour for each rank, the same in all charts of a page; and for phases, behind them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.pictures.chart import Chart

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
