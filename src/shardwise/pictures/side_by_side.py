"""Charts beside each other on one scale, as one PNG, for a page that is light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise.pictures.chart import Chart, Look
from shardwise.pictures.images import escaped, save_figure
from shardwise.pictures.installed import require

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
