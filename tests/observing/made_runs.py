"""Folders of runs, made up: as many ranks and samples as a test wants, without running anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GIB = 1 << 20
"""In KiB."""


def make_rank(
    run: Path,
    rank: int,
    size: int,
    *,
    seconds: float = 10.0,
    rate: float = 20.0,
    began: float = 1_700_000_000.0,
    machine: str = "one",
    model: str = "models/Tiny",
    step_s: float = 0.5,
    is_ended: bool = True,
    device_gib: float = 0.0,
    foreseen: Mapping[str, float] | None = None,
    run_name: str = "this",
) -> Path:
    """The file of a rank that loads for a fifth of the time and trains for the rest, with a peak in one sample.

    ``foreseen`` is what the plan of the training says of each phase, in GiB; None where it has told none.
    """
    path = run / "observed" / f"rank-{rank:05d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[Any] = [
        {
            "observed": 1,
            "run": run_name,
            "began": began + rank * 0.01,
            "samples_per_second": rate,
            "rank": rank,
            "world_size": size,
        }
        | {"machine": machine, "host": f"host-{machine}", "pid": 100 + rank, "device": "cuda" if device_gib else ""}
    ]
    loaded = seconds / 5
    marks: list[tuple[float, list[Any]]] = [(0.0, [2, 0.0, 0, "from_pretrained"])]
    for number, name in enumerate(("index", "plan", "read", "audit")):
        start, stop = loaded * number / 4, loaded * (number + 1) / 4
        marks += [(start, [2, start, 0, name]), (stop, [3, stop, 0])]
    marks.append((loaded, [3, loaded, 0]))
    start = loaded
    while start + step_s < seconds:
        marks.append((start, [2, start, 0, "step"]))
        for share, name in ((0.0, "forward"), (0.3, "backward"), (0.8, "optimizer")):
            stop = start + step_s * (share + 0.15)
            marks += [(start + step_s * share, [2, start + step_s * share, 0, name]), (stop, [3, stop, 0])]
        start += step_s
        marks.append((start, [3, start, 0]))
    facts = {
        "t": loaded,
        "tell": "load",
        "checkpoint": model,
        "parameters": 1000,
        "checkpoint_bytes": 8 << 30,
        "read_bytes": (8 << 30) // size,
        "placed_bytes": (8 << 30) // size,
        "seconds": {"index": 0.1, "plan": 0.2, "read": 1.5, "audit": 0.1},
        "forecast": {"shard_bytes": 1 << 30, "device_bytes": 0, "host_bytes": 2 << 30, "read_bytes": 1 << 30},
    }
    rows: list[tuple[float, Any]] = [(t, mark) for t, mark in marks]
    count = int(seconds * rate)
    most = 0.0
    for number in range(count):
        t = number / rate
        anonymous = GIB * (1 + min(t / loaded, 1.0) * 3 + 0.3 * math.sin(t * 3 + rank))
        if number == count // 2:
            anonymous += 2 * GIB  # one sample alone
        most = max(most, anonymous + 0.7 * GIB)
        device = int(device_gib * GIB * min(t / loaded, 1.0))
        read = int(min(t, loaded) * GIB)
        sample = [
            0,
            t,
            int(anonymous),
            GIB // 2,
            GIB // 5,
            int(most),
            device,
            device,
            device,
            read,
            read // 9,
            read,
            0,
        ]
        rows.append((t, sample))
    rows += [(loaded - 1e-6, facts), (loaded, [1, loaded, 3 * GIB, 2 * GIB, GIB // 2, GIB // 10])]
    if foreseen is not None and rank == 0:
        phases = {name: {"device_bytes": 0, "host_bytes": int(gib * 2**30)} for name, gib in foreseen.items()}
        if device_gib:
            phases = {name: {"device_bytes": at["host_bytes"], "host_bytes": 1} for name, at in phases.items()}
        told = {"device": "cuda" if device_gib else "cpu", "phases": phases}
        rows.append((seconds, {"t": seconds, "tell": "training", **told}))
    lines += [row for _, row in sorted(rows, key=lambda row: row[0])]
    if is_ended:
        lines.append({"t": seconds, "end": True, "peak_kib": int(most)})
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path


def make_metrics(folder: Path, steps: int = 20, *, start: float = 3.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        told = {"loss": start * 0.95**step, "learning_rate": 1e-4 * step, "grad_norm": 1.0 + 1 / step}
        told |= {"tokens": 1000, "tokens_per_second": 2000.0 + step, "seconds": 0.5, "memory_bytes": 5 << 30}
        lines.append({"kind": "step", "step": step, "epoch": step / steps, **told})
        if step % 10 == 0:
            lines += [{"kind": "evaluation", "step": step, "loss": start * 0.9**step, "perplexity": 3.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(run: Path, *, ranks: int = 2, machines: int = 1, steps: int = 20, **others: Any) -> Path:
    """A run of ``ranks``, dealt to machines in order, with metrics."""
    for rank in range(ranks):
        make_rank(run, rank, ranks, machine=f"m{rank * machines // ranks}", **others)
    make_metrics(run, steps)
    return run
