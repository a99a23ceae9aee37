"""Curves of trainings, by step: loss, rate, norm, tokens a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.observing.plain import number_in
from shardwise.observing.run_record import RunRecord
from shardwise.observing.thinning import extremes
from shardwise.pictures.chart import Chart, Floats, Look, Series

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
