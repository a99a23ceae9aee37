"""All that is drawn of one run, or of several over each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.observing.lines_read import words_of
from shardwise.observing.run_record import RunReader, RunRecord
from shardwise.pictures.chart import Chart, Table
from shardwise.pictures.rank_charts import RankCharts
from shardwise.pictures.training_charts import training_charts

_MOST_PATH = 300


@dataclass(frozen=True, slots=True)
class Sheet:
    """Charts and tables under a title, with what is to be said of them."""

    title: str
    charts: Sequence[Chart]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def read_runs(paths: Sequence[Path]) -> list[tuple[str, RunRecord]]:
    """The runs in these folders, each with a label of its own.

    Raises:
        ShardwiseError: a folder is not there, or is not of a run.
    """
    runs = [RunReader(path).read() for path in paths]
    labels = [run.label for run in runs]
    return [
        (label if labels.count(label) == 1 else f"{words_of(str(run.path), _MOST_PATH)}: {label}", run)
        for label, run in zip(labels, runs, strict=True)
    ]


def sections_of(runs: Sequence[tuple[str, RunRecord]]) -> list[Sheet]:
    """What is to be seen of them: trainings over each other, then the ranks of each."""
    curves, notes = training_charts(runs)
    observed = [(label, RankCharts(run)) for label, run in runs if run.ranks]
    if len(observed) > 1:
        series = [charts.fullest(label) for label, charts in observed]
        title = "Host memory of the fullest rank, anonymous and shared"
        curves.append(Chart("fullest", title, "seconds since the beginning", "GiB", series))
    sections = [Sheet("Training" if len(runs) == 1 else "Together", curves, (), notes)] if curves else []
    for number, (label, run) in enumerate(runs, 1):
        charts = dict(observed).get(label)
        notes = [*run.notes]
        if charts is None:
            notes.append("no rank was observed; shardwise train --observe shows memory and phases")
            sections.append(Sheet(label, (), (), notes))
            continue
        notes += charts.notes()
        notes += [
            f"rank {rank.rank} has left no end; it was last heard of {run.shift_of(rank) + rank.last:.1f} s after "
            "the beginning"
            for rank in run.ranks
            if not rank.is_ended
        ][:8]
        drawn = [replace(chart, key=f"{chart.key}-{number}") if number > 1 else chart for chart in charts.charts()]
        sections.append(Sheet(label, drawn, charts.tables(), notes))
    return sections
