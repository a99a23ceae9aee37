"""``shardwise top``: a run from its files, live: ranks, phases, memory, steps."""

from __future__ import annotations

import io
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.errors import ShardwiseError
from shardwise.observing.lines_read import number_in

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from shardwise.observing.rank_record import RankRecord
    from shardwise.observing.run_record import RunReader, RunRecord

_SILENT_S = 3.0
"""After which a rank that writes nothing is told of."""

_NARROW = 70
_WIDTH = 80
_MOST_TRAININGS = 12
_LEAST_RANKS = 4
"""Lines of ranks, however low the screen."""

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

    It reads files alone, so that the run may be on its way, on other machines, ended, or killed. Where there is
    nothing yet, it waits for the run. Ends with the run, or with Ctrl-C.
    """
    from shardwise.cli.launch import fail
    from shardwise.observing.run_record import RunReader

    console = _console()
    try:
        if once or not sys.stdout.isatty() or console.is_dumb_terminal:
            found = RunReader(run).read()
            console.print(board(found, Hearing().silence(found), console.width))
        else:
            _watch(run, every)
    except ShardwiseError as error:
        fail(error)
    except KeyboardInterrupt:
        return


def _watch(run: Path, every: float) -> None:
    """Show it until it ends, on a screen of its own, which leaves what was there; the end of it stays."""
    from rich.live import Live
    from rich.text import Text

    console = _console()
    hearing = Hearing()
    reader: RunReader | None = None
    found: RunRecord | None = None
    waiting = Text(f"{run}: waiting for a run into this folder (Ctrl-C ends)", overflow="fold")
    try:
        with Live(waiting, console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
            while True:
                reader, found = _look(run, reader)
                if found is not None:
                    live.update(board(found, hearing.silence(found), console.width, console.height), refresh=True)
                    if is_over(found):
                        break
                else:
                    live.update(waiting, refresh=True)
                time.sleep(every)
    finally:
        if found is not None:
            console.print(board(found, hearing.silence(found), console.width))


def _console() -> Console:
    """Where it is shown; as wide as usual where the environment says that there are no columns.

    Names of folders may be in any script, and a terminal that has no letters for them shows something else.
    """
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    return console if console.width > 0 else Console(highlight=False, width=_WIDTH)


def _look(run: Path, reader: RunReader | None) -> tuple[RunReader | None, RunRecord | None]:
    """What there is of a run now; None where there is nothing yet.

    Raises:
        StorageError: it is there, and cannot be read.
    """
    from shardwise.errors import FormatError
    from shardwise.observing.run_record import RunReader

    if reader is None and not run.exists():
        return None, None
    reader = reader or RunReader(run)
    try:
        return reader, reader.read()
    except FormatError:
        return reader, None


class Hearing:
    """When each rank was last heard of, by the clock here, where that can be: hosts' clocks may be others."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, int], tuple[float, float]] = {}

    def silence(self, run: RunRecord) -> Mapping[int, float]:
        """Seconds for which each rank has written nothing; at the first look, as its host's clock says."""
        now, steady = time.time(), time.monotonic()
        for rank in run.ranks:
            last, _ = self._heard.get((rank.run, rank.rank), (-1.0, 0.0))
            if last < 0:
                self._heard[rank.run, rank.rank] = rank.last, steady - max(now - rank.until, 0.0)
            elif rank.last != last:
                self._heard[rank.run, rank.rank] = rank.last, steady
        return {rank.rank: steady - self._heard[rank.run, rank.rank][1] for rank in run.ranks}


def is_over(run: RunRecord) -> bool:
    """Whether all ranks have come to their ends."""
    return bool(run.ranks) and all(rank.is_ended for rank in run.ranks)


def board(run: RunRecord, silence: Mapping[int, float], width: int, height: int | None = None) -> Group:
    """What there is to be seen, for a screen of this many columns, and lines, if there is an end of them.

    ``silence`` has the seconds for which each rank has written nothing.
    """
    from rich.console import Group
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
    room = len(run.ranks)
    if height is not None:
        taken = sum(-(-max(line.cell_len, 1) // width) for line in lines) + 1  # the heads of the columns
        room = room if taken + room <= height else max(height - taken - 1, _LEAST_RANKS)
    phases = {rank.rank: _phase(rank, silence[rank.rank], is_narrow=width < _NARROW) for rank in run.ranks}
    # The silent ones are what somebody looks for.
    first = sorted(run.ranks, key=lambda rank: (not phases[rank.rank].startswith("silent"), rank.rank))[:room]
    shown = sorted(first, key=lambda rank: rank.rank)
    table = _table(shown, phases, is_narrow=width < _NARROW)
    if room < len(run.ranks):
        others = Counter(phases[number] for number in sorted({*phases} - {rank.rank for rank in first}))
        words = ", ".join(f"{count} {phase}" for phase, count in others.most_common(3))
        more = Text(f"and {sum(others.values())} more: {words}", overflow="ellipsis", no_wrap=True)
        return Group(*lines, table, more)
    return Group(*lines, table)


def _table(ranks: Sequence[RankRecord], phases: Mapping[int, str], *, is_narrow: bool) -> Table:
    """A line for each rank. Its cells are texts: words of a run are no markup."""
    from rich.table import Table
    from rich.text import Text

    has_device = any(rank.newest().get("used") for rank in ranks)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in ("rank", "time", "phase"):
        table.add_column(head, justify="right" if head == "rank" else "left", overflow="ellipsis", no_wrap=True)
    for head in ("memory", "peak", *(["device"] if has_device else []), *([] if is_narrow else ["read", "MB/s"])):
        table.add_column(head, justify="right", no_wrap=True)
    for rank in ranks:
        cells = [str(rank.rank), _duration(rank.last), phases[rank.rank]]
        cells += _numbers(rank, has_device=has_device, is_narrow=is_narrow)
        table.add_row(*map(Text, cells))
    return table


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
        number = number_in(line, key)
        if number is None and isinstance(line.get(key), float):
            number = math.nan  # of a training that has gone wrong
        if number is not None:
            parts.append(words.format(number))
    return "  ".join(parts)


def _phase(rank: RankRecord, quiet_s: float, *, is_narrow: bool) -> str:
    path = rank.now_in()
    if rank.is_ended:
        return "ended"
    if quiet_s > max(_SILENT_S, 3 / rank.samples_per_second):
        return f"silent for {_duration(quiet_s)}" + (f", in {path[-1]}" if path else "")
    return (path[-1] if is_narrow else ": ".join(path)) if path else "between phases"


def _numbers(rank: RankRecord, *, has_device: bool, is_narrow: bool) -> list[str]:
    last = rank.newest()
    if not last:
        return []
    cells = [_gib(last["anonymous"] + last["shared"]), _gib(last["peak"])]
    if has_device:
        cells.append(_gib(last["used"]))
    if not is_narrow:
        cells += [_gib(last["read"]), _rate(rank)]
    return cells


def _rate(rank: RankRecord) -> str:
    """What was read of late."""
    last = rank.newest()
    near = [rank.newest(back) for back in range(1, min(rank.count, 200))]
    before = next((sample for sample in near if last["t"] - sample["t"] >= 1), (near or [last])[-1])
    passed = last["t"] - before["t"]
    return f"{(last['read'] - before['read']) * 1024 / 1e6 / passed:,.0f}" if passed > 0 else "0"


def _gib(kib: float) -> str:
    return f"{kib / _GIB:.2f}G"


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"
