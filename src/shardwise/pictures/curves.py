"""Two small pictures of a training in its own folder: ``loss.png`` and ``memory.png``."""

from __future__ import annotations

from pathlib import Path

from shardwise.observing.run_record import METRICS, MetricsLines
from shardwise.pictures.chart import Chart
from shardwise.pictures.images import write_png
from shardwise.pictures.installed import lacking
from shardwise.pictures.training_charts import loss_of, peaks_by_step


class Curves:
    """Draws what ``metrics.jsonl`` of a folder has, each time anew. For one rank.

    A picture that cannot be drawn ends nothing: ``fault`` says why, and no more is tried.
    """

    def __init__(self, folder: Path) -> None:
        self.fault = ""
        self._folder = folder
        self._drawn = 0
        self._metrics = MetricsLines(folder / METRICS)

    def draw(self) -> None:
        """Draw both, where there is a step, and matplotlib."""
        if self.fault or lacking("matplotlib"):
            return
        try:
            self._metrics.read_on()
            lines = self._metrics.lines
            if len(lines) == self._drawn:
                return
            self._drawn = len(lines)
            memory = [
                peaks_by_step(lines, "first rank", "memory_bytes"),
                peaks_by_step(lines, "fullest rank", "fullest_bytes"),
            ]
            shown = [item for item in memory if item.y.any()]
            for chart in (
                loss_of([("", lines)]),
                Chart("memory", "The most memory so far", "step", "GiB", shown),
            ):
                if not chart.is_empty:
                    write_png(chart, self._folder / f"{chart.key}.png")
        except Exception as error:  # whatever matplotlib raises: the training matters more
            self.fault = f"loss.png and memory.png are drawn no more: {error}"
