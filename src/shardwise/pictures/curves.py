"""Two small pictures of a training in its own folder, ``loss.png`` and ``memory.png``, drawn beside the training.

[Note: Drawing holds nobody up] To draw takes a second or two, most of it matplotlib's import, which all ranks would
wait for if the first one did it. So a process of its own draws, one at a time; what is asked for meanwhile is drawn
by the next.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from shardwise.observing.lines_read import MetricsLines
from shardwise.observing.run_record import METRICS
from shardwise.pictures.installed import note_on_curves

_PATIENCE_S = 60.0
"""For the last pictures."""

_BEGIN = (
    "import sys; sys.path[:] = {path!r}; from shardwise.pictures.curves import draw_all; draw_all(sys.argv[1:])"
)


class Curves:
    """Has curves drawn from what ``metrics.jsonl`` of folders has. For one rank.

    A picture that cannot be drawn ends nothing: ``fault`` says why, and no more is tried. Where curves are not
    wanted none are drawn, and nothing is said.
    """

    def __init__(self, *, are_wanted: bool = True) -> None:
        self.fault = note_on_curves() if are_wanted else ""
        self._asked: dict[Path, None] = {}
        self._process: subprocess.Popen[str] | None = None
        self._are_wanted = are_wanted

    def draw(self, folder: Path) -> None:
        """Have both drawn into a folder, where there is a step; returns at once."""
        if self.fault or not self._are_wanted:
            return
        self._asked[folder] = None
        if self._process is None or self._process.poll() is not None:
            self._next()

    def finish(self) -> None:
        """Wait for what was asked for."""
        while self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
            self._next()

    def _next(self) -> None:
        """End the process there is, and begin one for what was asked for since."""
        self._end()
        if self.fault or not self._asked:
            return
        folders, self._asked = [str(folder) for folder in self._asked], {}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN.format(path=sys.path), *folders],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C asks the training to stop, which draws once more
            )
        except OSError as error:
            self.fault = f"loss.png and memory.png are drawn no more: {error}"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        told = process.communicate()[1].strip().splitlines()
        if process.returncode:
            cause = told[-1] if told else f"exit code {process.returncode}"
            self.fault = f"loss.png and memory.png are drawn no more: {cause}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def draw_all(folders: Sequence[str]) -> None:
    """Draw the curves of these folders.

    Raises:
        ShardwiseError: as of :func:`~shardwise.pictures.images.write_png`.
        OSError: the metrics cannot be read.
    """
    for folder in folders:
        draw_curves(Path(folder))


def draw_curves(folder: Path) -> None:
    """Draw the curves of one folder; raises as :func:`draw_all`."""
    from shardwise.pictures.chart import Chart
    from shardwise.pictures.images import write_png
    from shardwise.pictures.training_charts import loss_of, peaks_by_step

    (folder / METRICS).stat()  # one that is not there yet is no error to whoever reads on
    metrics = MetricsLines(folder / METRICS)
    metrics.read_on()
    keys = ("first rank", "memory_bytes"), ("fullest rank", "fullest_bytes")
    memory = [peaks_by_step(metrics.lines, name, key) for name, key in keys]
    shown = [item for item in memory if item.y.any()]
    for chart in (loss_of([("", metrics.lines)]), Chart("memory", "The most memory so far", "step", "GiB", shown)):
        if not chart.is_empty:
            write_png(chart, folder / f"{chart.key}.png")
