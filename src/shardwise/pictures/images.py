"""Charts as PNG files, by matplotlib, without a display: one by one, or side by side on one scale."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.pictures.chart import Chart, Look, Series, band_colours_of, colours_of
from shardwise.pictures.installed import require
from shardwise.pictures.replacing import in_place_of

_LEGEND_OF = 24


def write_png(chart: Chart, path: Path) -> None:
    """Draw a chart into a file, which is replaced in one go.

    Raises:
        ConfigError: matplotlib is not installed.
        StorageError: the file cannot be written.
    """
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 4.2 if not chart.bars else max(2.5, 1.2 + 0.28 * len(chart.rows))
    figure = Figure(figsize=(9, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colour_of = colours_of(chart)
    _shade(axes, chart)
    _stack(axes, [item for item in chart.series if item.look is Look.AREA], colour_of)
    for item in chart.series:
        _draw(axes, item, colour_of[item.name])
    if chart.bars:
        _draw_bars(axes, chart, colour_of)
    elif chart.key != "loss":
        axes.set_ylim(bottom=0)
    axes.set_title(escaped(chart.title)[0], loc="left", fontsize=11)
    axes.set_xlabel(chart.x_title)
    axes.set_ylabel(chart.y_title)
    axes.grid(visible=True, alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if 1 < len(handles) <= _LEGEND_OF:
        figure.legend(handles, escaped(*labels), loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)


def _shade(axes: Any, chart: Chart) -> None:
    """The bands, each name once in the legend."""
    colour_of = band_colours_of(chart)
    told: set[str] = set()
    for band in chart.bands:
        if band.name in colour_of:
            label = None if band.name in told else f"phase: {band.name}"
            told.add(band.name)
            axes.axvspan(band.start, band.stop, color=colour_of[band.name], alpha=0.2, lw=0, label=label)


def _stack(axes: Any, areas: Sequence[Series], colour_of: Mapping[str, str]) -> None:
    if areas:
        names = [item.name for item in areas]
        colours = [colour_of[name] for name in names]
        axes.stackplot(areas[0].x, [item.y for item in areas], labels=names, colors=colours, alpha=0.75, lw=0)


def _draw(axes: Any, item: Series, colour: str) -> None:
    """A series that is not stacked."""
    match item.look:
        case Look.POINTS:
            label = None if item.name.endswith(", PSS") else item.name
            axes.plot(item.x, item.y, "o", ms=4, color=colour, label=label)
        case Look.DASHED:
            axes.plot(item.x, item.y, "--", lw=1.2, color=colour, label=item.name)
        case Look.LINE:
            axes.plot(item.x, item.y, lw=1.2, color=colour, label=item.name)
        case Look.AREA:
            pass


def _draw_bars(axes: Any, chart: Chart, colour_of: Mapping[str, str]) -> None:
    """The bars of each rank, those of a row below each other; the first row is the uppermost."""
    place_of = {row: number for number, row in enumerate(chart.rows)}
    thick = 0.8 / len(chart.bars)
    for number, bars in enumerate(chart.bars):
        places = np.array([place_of[row] for row in bars.rows], np.float64) + (number + 0.5) * thick - 0.4
        colour = colour_of[bars.name]
        axes.barh(places, bars.length, left=bars.start, height=thick, label=bars.name, color=colour)
    axes.set_yticks(range(len(chart.rows)), escaped(*chart.rows))
    axes.set_ylim(len(chart.rows) - 0.5, -0.5)


def save_figure(figure: Any, path: Path) -> None:
    """Write one of matplotlib's figures as a PNG, which is replaced in one go; what is behind it as it says.

    Raises:
        StorageError: the file cannot be written.
    """
    with in_place_of(path) as fresh, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # shown as a box
        figure.savefig(fresh, format="png", facecolor="auto")


def escaped(*texts: str) -> list[str]:
    """Without what matplotlib would take for mathematics; a label that begins with _ it would leave out."""
    return [text.replace("$", r"\$").lstrip("_") or " " for text in texts]


INK = "#7d8590"
"""Of letters and lines: four times as dark as white, and as light as black. Behind them is nothing."""

_COLOURS = ("#3b82f6", "#60a5fa")
_BANDS = ("#f59e0b", "#10b981", "#a855f7")
_ACROSS = 3


def write_side_by_side(charts: Sequence[Chart], path: Path) -> None:
    """Draw areas of charts, with their bands, into a file, which is replaced in one go.

    Raises:
        ConfigError: matplotlib is not installed.
        StorageError: the file cannot be written.
    """
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    across = min(_ACROSS, len(charts))
    down = -(-len(charts) // across)
    figure = Figure(figsize=(3.2 * across + 0.4, 2.5 * down + 0.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.patch.set_alpha(0.0)
    all_axes = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
    names = [*dict.fromkeys(band.name for chart in charts for band in chart.bands)]
    colours = {name: _BANDS[number % len(_BANDS)] for number, name in enumerate(names)}
    for number, (axes, chart) in enumerate(zip(all_axes, charts, strict=False)):
        areas = [item for item in chart.series if item.look is Look.AREA]
        shades = [_COLOURS[place % 2] for place in range(len(areas))]
        if areas:
            axes.stackplot(areas[0].x, [item.y for item in areas], colors=shades, lw=0, zorder=2)
        for band in chart.bands:
            axes.axvspan(band.start, band.stop, color=colours[band.name], alpha=0.18, lw=0, zorder=1)
        axes.set_title(escaped(chart.title)[0], loc="left", fontsize=9, color=INK)
        axes.patch.set_alpha(0.0)
        axes.tick_params(colors=INK, labelsize=8)
        axes.grid(visible=True, alpha=0.35, color=INK, lw=0.5)
        for spine in axes.spines.values():
            spine.set_color(INK)
        if number + across >= len(charts):
            axes.set_xlabel(chart.x_title, color=INK, fontsize=8)
            axes.tick_params(labelbottom=True)
        if number % across == 0:
            axes.set_ylabel(chart.y_title, color=INK, fontsize=8)
    for axes in all_axes[len(charts) :]:
        axes.set_visible(False)
    all_axes[0].set_ylim(bottom=0)
    all_axes[0].set_xlim(left=0)
    patches = [Patch(color=colours[name], alpha=0.5, label=name) for name in names]
    figure.legend(handles=patches, loc="outside lower left", ncols=6, fontsize=8, frameon=False, labelcolor=INK)
    save_figure(figure, path)
