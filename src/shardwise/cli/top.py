"""``shardwise top``: a run from its files, live: ranks, phases, memory, steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from rich.console import Group

    from shardwise.observing.rank_record import RankRecord
    from shardwise.observing.run_record import RunRecord

_SILENT_S = 3.0
"""After which a rank that writes nothing is told of."""

_NARROW = 70
_MOST_TRAININGS = 12
_GIB = 1 << 20
"""In KiB."""


@click.command("top")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show it once, and end; so it is where the output is no terminal.")
@click.option(
    "--every", default=1.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between looks."
)
def top_command(run: Path, *, once: bool, every: float) -> None:
    """Show what the ranks of RUN do: an output folder of a training, or what shardwise.observe was given.

    It reads files alone, so that the run may be on its way, on other machines, ended, or killed. Ends with the run,
    or with Ctrl-C.
    """
    from rich.console import Console
    from rich.live import Live

    from shardwise.cli.launch import fail
    from shardwise.observing.run_record import RunReader

    console = Console(highlight=False)
    try:
        reader = RunReader(run)
        found = reader.read()
        if once or not sys.stdout.isatty():
            console.print(board(found, time.time(), console.width))
            return
        with Live(board(found, time.time(), console.width), console=console, auto_refresh=False) as live:
            while not is_over(found):
                time.sleep(every)
                found = reader.read()
                live.update(board(found, time.time(), console.width), refresh=True)
    except ShardwiseError as error:
        fail(error)
    except KeyboardInterrupt:
        return


def is_over(run: RunRecord) -> bool:
    """Whether all ranks have come to their ends."""
    return bool(run.ranks) and all(rank.is_ended for rank in run.ranks)


def board(run: RunRecord, now: float, width: int) -> Group:
    """What there is to be seen, for a screen of this many columns.

    ``now`` is in seconds since 1970.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [Text(run.label, style="bold", overflow="fold")]
    for name, told in list(run.metrics.items())[:_MOST_TRAININGS]:
        if steps := [line for line in told if line["kind"] == "step"]:
            lines.append(Text(f"{name}  {_step(steps[-1])}".strip(), overflow="fold"))
    if len(run.metrics) > _MOST_TRAININGS:
        lines.append(Text(f"and {len(run.metrics) - _MOST_TRAININGS} more trainings"))
    lines += [Text(note, style="yellow", overflow="fold") for note in run.notes]
    if not run.ranks:
        return Group(*lines)
    is_narrow = width < _NARROW
    has_device = any(rank.newest().get("used") for rank in run.ranks)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in ("rank", "for", "phase"):
        table.add_column(head, justify="right" if head == "rank" else "left", overflow="ellipsis", no_wrap=True)
    for head in ("host", "peak", *(["device"] if has_device else []), *([] if is_narrow else ["read", "MB/s"])):
        table.add_column(head, justify="right", no_wrap=True)
    for rank in run.ranks:
        table.add_row(*_cells(rank, now, has_device=has_device, is_narrow=is_narrow))
    return Group(*lines, table)


def _step(line: Mapping[str, Any]) -> str:
    """A step in words; what is not told is left out."""
    parts = [f"step {line['step']}"]
    for key, words in (
        ("loss", "loss {:.4f}"),
        ("learning_rate", "lr {:.2e}"),
        ("grad_norm", "grad norm {:.3f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("epoch", "epoch {:.2f}"),
    ):
        if isinstance(line.get(key), int | float):
            parts.append(words.format(line[key]))
    return "  ".join(parts)


def _cells(rank: RankRecord, now: float, *, has_device: bool, is_narrow: bool) -> list[str]:
    path = rank.now_in()
    quiet_s = now - rank.until
    if rank.is_ended:
        phase = "ended"
    elif quiet_s > max(_SILENT_S, 3 / rank.samples_per_second):
        phase = f"silent for {_duration(quiet_s)}" + (f", in {path[-1]}" if path else "")
    else:
        phase = (path[-1] if is_narrow else ": ".join(path)) if path else "between phases"
    cells = [str(rank.rank), _duration(rank.last), phase]
    if not rank.rows:
        return cells
    last = rank.newest()
    cells += [_gib(last["anonymous"] + last["shared"]), _gib(last["peak"])]
    if has_device:
        cells.append(_gib(last["used"]))
    if not is_narrow:
        cells += [_gib(last["read"]), _rate(rank)]
    return cells


def _rate(rank: RankRecord) -> str:
    """What was read of late."""
    last = rank.newest()
    near = [rank.newest(back) for back in range(1, min(len(rank.rows), 200))]
    before = next((sample for sample in near if last["t"] - sample["t"] >= 1), (near or [last])[-1])
    passed = last["t"] - before["t"]
    return f"{(last['read'] - before['read']) * 1024 / 1e6 / passed:,.0f}" if passed > 0 else "0"


def _gib(kib: float) -> str:
    return f"{kib / _GIB:.2f}G"


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"
