"""Metrics for Prometheus, and a status page without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from shardwise.core.formatting import in_bytes
from shardwise.core.machine import process_memory
from shardwise.serve.keys import UserKey
from shardwise.serve.service import Service

disable_created_metrics()  # type: ignore[no-untyped-call]  # a counter is new in each answer


def write_metrics(service: Service) -> bytes:
    """Return the metrics of a server in Prometheus' text format."""
    registry, counters = CollectorRegistry(), service.counters
    for name, help_text, values in (
        ("tokens", "Tokens of passes, and the most that samples may have, by user.", counters.tokens),
        ("failures", "Requests that failed, by user.", counters.failures),
        ("wait_seconds", "Seconds that requests took, by user.", counters.waits_s),
    ):
        counter = Counter(f"shardwise_{name}", help_text, ["user"], registry=registry)
        for user, value in values.items():
            counter.labels(user).inc(value)
    Counter("shardwise_turns", "Turns.", registry=registry).inc(counters.turns)
    for name, help_text, number in (
        ("models", "Models.", len(service.models)),
        ("queue", "Requests that wait.", service.num_waiting),
        (
            "adapters_per_turn",
            "Mean number of models trained in the last 1000 turns with any.",
            mean(counters.adapters),
        ),
        ("memory_bytes", "Memory of the process of the first rank.", process_memory()),
        (
            "result_bytes",
            "Bytes of results that are kept.",
            sum(each.num_bytes for each in service.futures.values()),
        ),
    ):
        Gauge(f"shardwise_{name}", help_text, registry=registry).set(number)
    return generate_latest(registry)


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


_STYLE = (
    "body{font:14px system-ui;margin:2em;max-width:70em}table{border-collapse:collapse}"
    "td,th{padding:.3em 1em;border-bottom:1px solid #ccc;text-align:left;white-space:nowrap}"
    "svg{vertical-align:middle}"
)


def write_page(service: Service, key: UserKey) -> str:
    """Return the status page: users, models with the loss of their last calls, the queue, memory.

    Users who are not operators see themselves alone.
    """
    counters = service.counters
    models = {name: model for name, model in service.models.items() if key.is_operator or model.key is key}
    facts = [
        ("Base", service.settings.name),
        ("Turns", str(counters.turns)),
        ("Models in a turn, mean", f"{mean(counters.adapters):.1f}"),
        ("Requests that wait", str(service.num_waiting)),
        ("Memory of the first rank", in_bytes(process_memory())),
    ]
    users = sorted({model.key.name for model in models.values()} | counters.tokens.keys())
    users = users if key.is_operator else [key.name]
    user_rows = [[user, counters.tokens.get(user, 0), counters.failures.get(user, 0)] for user in users]
    model_rows = [
        [model.key.name, name, model.rank, "+".join(sorted(model.parts)), model.num_steps]
        for name, model in models.items()
    ]
    curves = [_draw(list(model.losses)) for model in models.values()]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        f"<title>shardwise serve</title><style>{_STYLE}</style><h1>shardwise serve</h1>"
        + _table(["", ""], [list(fact) for fact in facts])
        + "<h2>Users</h2>"
        + _table(["User", "Tokens", "Failures"], user_rows)
        + "<h2>Models</h2>"
        + _table(
            ["User", "Model", "Rank", "Parts", "Steps", "Loss per trained token, last 200 calls"],
            model_rows,
            curves,
        )
        + "</html>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[object]], last: Sequence[str] = ()) -> str:
    """Return a table. ``last`` are cells of a last column, as HTML."""
    head = "".join(f"<th>{html.escape(each)}</th>" for each in header)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{html.escape(str(each))}</td>" for each in row)
        lines.append(f"<tr>{cells}{f'<td>{last[number]}</td>' if last else ''}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _draw(values: Sequence[float]) -> str:
    """Return a curve as SVG, 200 by 40, with the last value."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = 36 / (high - low) if high > low else 0.0
    points = " ".join(f"{place},{38 - (value - low) * scale:.1f}" for place, value in enumerate(values))
    curve = f'<polyline points="{points}" fill="none" stroke="#26c"/>'
    return f'<svg width="200" height="40">{curve}</svg> {values[-1]:.4f}'
