"""Curves of trainings, by step, and the memory that a training's plan foresaw beside what its ranks have had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.observing.bounded import NO_SAMPLE, PhaseTimes, extremes
from shardwise.observing.lines_read import number_in
from shardwise.observing.rank_record import RankRecord
from shardwise.observing.run_record import RunRecord
from shardwise.pictures.chart import Chart, Floats, Look, Series, Table
from shardwise.report.names import in_bytes

_MOST_SERIES = 60
_POINTS = 60_000
"""Of all series of a chart."""

_CURVES = (
    ("learning_rate", "Learning rate", ""),
    ("grad_norm", "Gradient norm, before clipping", ""),
    ("tokens_per_second", "Tokens a second, all ranks", ""),
)


def training_charts(runs: Sequence[tuple[str, RunRecord]]) -> tuple[list[Chart], list[str]]:
    """The charts of all these runs, each by its label, and what is not in them."""
    told = [
        (_name(label, tenant, is_one=len(runs) == 1), lines)
        for label, run in runs
        for tenant, lines in run.metrics.items()
    ]
    notes = []
    if len(told) > _MOST_SERIES:
        notes.append(f"of {len(told)} trainings the first {_MOST_SERIES} are drawn")
        told = told[:_MOST_SERIES]
    charts = [loss_of(told)]
    for key, title, unit in _CURVES:
        series = [Series(name, *_values(lines, "step", key, _parts(len(told)))) for name, lines in told]
        charts.append(Chart(key, title, "step", unit, [item for item in series if len(item.x)]))
    return [chart for chart in charts if not chart.is_empty], notes


def loss_of(told: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Chart:
    """The losses of trainings, by name, with those of evaluations."""
    parts = _parts(len(told))
    steps = [Series(name or "loss", *_values(lines, "step", "loss", parts)) for name, lines in told]
    evaluated = [
        Series(f"{name} evaluation".strip(), *_values(lines, "evaluation", "loss", parts), Look.POINTS)
        for name, lines in told
    ]
    return Chart("loss", "Loss", "step", "nats", [item for item in (*steps, *evaluated) if len(item.x)])


def peaks_by_step(lines: Sequence[Mapping[str, Any]], name: str, key: str) -> Series:
    """The most memory so far, in GiB, as steps tell it under this key."""
    x, y = _values(lines, "step", key, _parts(1))
    return Series(name, x, y / 2**30)


def _parts(series: int) -> int:
    return max(50, _POINTS // (2 * max(series, 1)))


def _name(label: str, tenant: str, *, is_one: bool) -> str:
    if is_one:
        return tenant or "training"
    return f"{label}, {tenant}" if tenant else label


def _values(lines: Sequence[Mapping[str, Any]], kind: str, key: str, parts: int) -> tuple[Floats, Floats]:
    """Steps, and what was told of each; what is no number is left out."""
    told = [(line["step"], number_in(line, key)) for line in lines if line["kind"] == kind]
    pairs = [(step, value) for step, value in told if value is not None]
    table = np.array(pairs, np.float64).reshape(-1, 2)
    places = extremes(table[:, 1], parts)
    return table[places, 0], table[places, 1]


_GIB = 2**30
_LOAD, _PASSES, _OPTIMIZER, _CHECKPOINT = "load", "forward and backward", "optimizer", "checkpoint"
_ROW_OF = {
    "load": _LOAD,
    "forward": _PASSES,
    "loss": _PASSES,
    "backward": _PASSES,
    "optimizer": _OPTIMIZER,
    "checkpoint": _CHECKPOINT,
}
"""By the plan's phases. The loss is taken in the forward pass, and its gradient in the backward pass."""

_SPANS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    _LOAD: (("from_pretrained",),),
    _PASSES: (("step", "forward"), ("step", "backward")),
    _OPTIMIZER: (("step", "optimizer"),),
    _CHECKPOINT: (("checkpoint",),),
}


@dataclass(frozen=True, slots=True)
class _Fact:
    """The most that a rank has had in a phase, over what it had before the load."""

    rank: int
    nbytes: float
    before: float
    start: float
    stop: float


class TrainingForeseen:
    """The forecast that a training has told, and the samples within its phases.

    ``ranks`` are those that are looked at; ``shifts`` are how much later than the run each has begun, in seconds.
    Nothing is shown of a run that has told no forecast.
    """

    def __init__(self, ranks: Sequence[RankRecord], shifts: Sequence[float]) -> None:
        self.ranks = ranks
        self.shifts = shifts
        told = [facts for rank in ranks for facts in rank.facts if facts.get("tell") == "training"]
        self.is_on_host = not told or told[-1].get("device") == "cpu"
        self.foreseen = _by_row(told[-1], "host_bytes" if self.is_on_host else "device_bytes") if told else {}

    def lines(self) -> list[Series]:
        """Of each phase how high it was to come, from its first beginning to its last end; in GiB.

        On top of what that rank had before which came highest.
        """
        found = []
        for row, nbytes in self.foreseen.items():
            fact = self._facts.get(row)
            if fact is not None:
                height = np.full(2, (fact.before + nbytes) / _GIB)
                found.append(Series(f"foreseen: {row}", np.array([fact.start, fact.stop]), height, Look.DASHED))
        return found

    def table(self) -> Table:
        """Forecast, fact and their ratio, phase by phase."""
        where = "host memory" if self.is_on_host else "accelerator memory, in tensors"
        head = ("phase", "foreseen", "fact", "fact / foreseen", "on rank")
        rows = []
        for row, nbytes in self.foreseen.items():
            fact = self._facts.get(row)
            if fact is None:
                rows.append((row, in_bytes(int(nbytes)), "no sample", "", ""))
                continue
            ratio = f"{fact.nbytes / nbytes:.2f}" if nbytes else ""
            rows.append((row, in_bytes(int(nbytes)), in_bytes(int(fact.nbytes)), ratio, str(fact.rank)))
        return Table(f"Training: {where}, foreseen and done", head, rows)

    @cached_property
    def _facts(self) -> dict[str, _Fact]:
        """Of each phase that of the rank that had most."""
        found: dict[str, _Fact] = {}
        for rank, shift in zip(self.ranks, self.shifts, strict=True):
            phases = [times for times in rank.phases() if times.lane == 0]
            before = _before(phases) if self.is_on_host and phases else 0.0
            for row, paths in _SPANS.items():
                inside = [times for times in phases if times.path in paths]
                most_kib = max((self._most_of(times) for times in inside), default=NO_SAMPLE)
                if most_kib < 0:
                    continue
                grown = max(most_kib * 1024 - before, 0.0)
                if row not in found or grown > found[row].nbytes:
                    start, stop = min(times.starts[0] for times in inside), max(times.stops[-1] for times in inside)
                    found[row] = _Fact(rank.rank, grown, before, start + shift, stop + shift)
        return found

    def _most_of(self, times: PhaseTimes) -> float:
        return times.most_kib if self.is_on_host else times.most_allocated_kib


def _by_row(told: Mapping[str, Any], name: str) -> dict[str, float]:
    """The greatest of the plan's phases that are one row here; what is no number is left out."""
    found: dict[str, float] = {}
    phases = told.get("phases")
    for phase, row in _ROW_OF.items():
        values = phases.get(phase) if isinstance(phases, dict) else None
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(value, int | float) and 0 <= value < 2**63:
            found[row] = max(found.get(row, 0.0), float(value))
    return found


def _before(phases: Sequence[PhaseTimes]) -> float:
    """What the host had when the model began to be brought up; else when the first phase began; in bytes."""
    loads = [times for times in phases if times.path in _SPANS[_LOAD]]
    return max((loads or phases)[0].before_kib, 0.0) * 1024
