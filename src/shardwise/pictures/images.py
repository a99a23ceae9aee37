"""Charts as PNG files, by matplotlib, without a display."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import StorageError
from shardwise.pictures.chart import Chart, Look
from shardwise.pictures.colours import band_colours_of, colours_of
from shardwise.pictures.installed import require

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
    colour_of, band_colour_of = colours_of(chart), band_colours_of(chart)
    told: set[str] = set()
    for band in chart.bands:
        if band.name in band_colour_of:
            label = None if band.name in told else f"phase: {band.name}"
            told.add(band.name)
            axes.axvspan(band.start, band.stop, color=band_colour_of[band.name], alpha=0.2, lw=0, label=label)
    areas = [item for item in chart.series if item.look is Look.AREA]
    if areas:
        colours = [colour_of[item.name] for item in areas]
        names = [item.name for item in areas]
        axes.stackplot(areas[0].x, [item.y for item in areas], labels=names, colors=colours, alpha=0.75, lw=0)
    for item in chart.series:
        colour = colour_of[item.name]
        match item.look:
            case Look.POINTS:
                axes.plot(
                    item.x,
                    item.y,
                    "o",
                    ms=4,
                    color=colour,
                    label=None if item.name.endswith(", PSS") else item.name,
                )
            case Look.DASHED:
                axes.plot(item.x, item.y, "--", lw=1.2, color=colour, label=item.name)
            case Look.LINE:
                axes.plot(item.x, item.y, lw=1.2, color=colour, label=item.name)
            case Look.AREA:
                pass
    if chart.bars:
        place_of = {row: number for number, row in enumerate(chart.rows)}
        thick = 0.8 / len(chart.bars)
        for number, bars in enumerate(chart.bars):
            places = np.array([place_of[row] for row in bars.rows], np.float64) + (number + 0.5) * thick - 0.4
            axes.barh(
                places, bars.length, left=bars.start, height=thick, label=bars.name, color=colour_of[bars.name]
            )
        axes.set_yticks(range(len(chart.rows)), escaped(*chart.rows))
        axes.set_ylim(len(chart.rows) - 0.5, -0.5)
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


def save_figure(figure: Any, path: Path) -> None:
    """Write one of matplotlib's figures as a PNG, which is replaced in one go; what is behind it as it says.

    Raises:
        StorageError: the file cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # shown as a box
            figure.savefig(fresh, format="png", facecolor="auto")
        os.replace(fresh, path)
    except OSError as error:
        raise StorageError(f"{path}: it cannot be written ({error.strerror or error})") from error


def escaped(*texts: str) -> list[str]:
    """Without what matplotlib would take for mathematics; a label that begins with _ it would leave out."""
    return [text.replace("$", r"\$").lstrip("_") or " " for text in texts]
