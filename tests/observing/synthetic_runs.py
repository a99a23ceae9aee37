"""Folders of runs, as observers and trainings leave them, without running anything."""

import json
import math
from pathlib import Path
from typing import Any

from shardwise.observing import COLUMNS

MIB = 1 << 10
GIB = 1 << 20
"""In KiB."""


def make_rank(
    run: Path,
    rank: int,
    size: int,
    lines: list[tuple[float, Any]],
    *,
    run_id: str = "this",
    host: str = "host",
    is_closed: bool = True,
) -> Path:
    """Write the file of a rank: at each time a dict of a sample, the name of a phase that begins, or None."""
    path = run / "observed" / f"rank-{rank:05d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"run": run_id, "rank": rank, "world_size": size, "columns": COLUMNS, "host": host, "pid": 1}
    written: list[Any] = [header]
    for t, line in sorted(lines, key=lambda item: item[0]):
        if isinstance(line, dict):
            written.append([t, *(line.get(name, 0) for name in COLUMNS[1:])])
        else:
            written.append({"t": t, "thread": 0, **({"end": True} if line is None else {"begin": line})})
    if is_closed:
        written.append({"t": lines[-1][0], "closed": True})
    path.write_text("".join(json.dumps(line) + "\n" for line in written))
    return path


def make_run(run: Path, *, ranks: int = 2, seconds: float = 5.0, device_gib: float = 0.0, **others: Any) -> Path:
    """Write a run in which each rank loads for a second, and takes steps, with a peak of 7 GiB in one sample."""
    for rank in range(ranks):
        lines: list[tuple[float, Any]] = [(0.0, "load"), (0.2, "read"), (0.8, None), (1.0, None)]
        for step in range(1, int(seconds)):
            lines += [(step + 0.05, "step"), (step + 0.1, "forward"), (step + 0.5, None), (step + 0.9, None)]
        for number in range(int(seconds * 20)):
            t = number / 20
            own = GIB * (2 + min(t, 1.0) + 0.1 * math.sin(t + rank)) if number != 45 else 7 * GIB
            device = int(device_gib * GIB * min(t, 1.0))
            sample = {
                "anonymous": int(own),
                "peak": 7 * GIB,
                "allocated": device,
                "reserved": device,
                "used": device,
            }
            lines.append((t, sample))
        make_rank(run, rank, ranks, [*lines, (seconds, {"anonymous": GIB})], **others)
    return run


def make_metrics(folder: Path, steps: int = 20) -> None:
    """Write the Trainer's state of a training, with an evaluation at each tenth step."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        entries.append({"step": step, "loss": 3 * 0.95**step, "learning_rate": 1e-4, "grad_norm": 1.0})
        if step % 10 == 0:
            entries.append({"step": step, "eval_loss": 3 * 0.9**step})
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
