"""``shardwise bench startup``: how a model comes up here, by this library and by others, beside each other."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.launch import fail, run_fresh
from shardwise.errors import ConfigError, ShardwiseError, StorageError
from shardwise.report.sizes import in_bytes
from shardwise.startup.figures import (
    ArmRun,
    GrowthLimit,
    arm_run,
    chart_of,
    figures_of,
    limit_of,
)
from shardwise.startup.kinds import KINDS, OURS, arms_named, lacking
from shardwise.startup.room import no_room
from shardwise.startup.values import compared

if TYPE_CHECKING:
    from rich.table import Table

    from shardwise.pictures.chart import Chart

PICTURE = "startup.png"
FIGURES = "startup.json"
_PRELOADED = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "accelerate.utils.fsdp_utils",
    "shardwise.startup.rank",
)
_BLOCK = 8 << 20
_WIDTH = 110


@dataclass(frozen=True)
class StartupResult:
    """All runs of all arms, and why those that are not among them did not run."""

    model: str
    ranks: int
    dtype: str
    runs: Sequence[ArmRun]
    not_run: Mapping[str, str]
    limit: GrowthLimit | None
    """Of our run that grew most; None where ours is not among the arms."""
    files: Sequence[str] = field(default=())

    def of(self, arm: str) -> list[ArmRun]:
        return [run for run in self.runs if run.arm == arm]

    def verdict(self, arm: str) -> str:
        """Whether it made the model that ours made, or the first arm that ran."""
        first = self.runs[0].values
        found = [compared(run.values, first) for run in self.of(arm)]
        return next((words for words in found if words != "same"), "same")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        arms = {
            arm: {"does": KINDS[arm].does, "values": self.verdict(arm), "runs": [run.to_dict() for run in runs]}
            for arm in KINDS
            if (runs := self.of(arm))
        }
        limit = None if self.limit is None else {**asdict(self.limit), "holds": self.limit.holds}
        place = {"model": self.model, "ranks": self.ranks, "dtype": self.dtype}
        return {**place, "arms": arms, "not_run": dict(self.not_run), "limit": limit, "files": [*self.files]}


@click.group("bench")
def bench_command() -> None:
    """Measurements that you can take of your own model, on your own machine."""


@bench_command.command("startup")
@click.argument("model")
@click.option("--ranks", required=True, type=click.IntRange(1), help="Processes for each arm, on this machine.")
@click.option(
    "--out",
    default="startup-out",
    show_default=True,
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="A new or empty folder, for the runs, the report and the picture.",
)
@click.option("--arms", metavar="NAME,NAME", help=f"Some of {', '.join(KINDS)}.  [default: all]")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1), help="Of all arms, in turns.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16", "float16", "auto"]),
    help="That the model is trained in; auto: as it is stored.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def startup_command(
    model: str, *, ranks: int, out: Path, arms: str | None, repeats: int, dtype: str, as_json: bool
) -> None:
    """Bring MODEL up for training on N ranks of this machine, in each of several ways, and compare.

    MODEL is a folder, or the name of a repository of the Hugging Face hub. Each arm has fresh processes, which are
    observed while they load, wrap and make an optimizer. What takes more memory than there is, or lacks a package,
    is left out and told. Exits with 1 where our own arm needs more than its shards, and for each rank its budget
    and 32 MiB; with 2 where nothing could be measured.
    """
    try:
        result = measure_startup(model, ranks, out, arms, repeats, dtype)
    except ShardwiseError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _show(result)
    sys.exit(0 if result.limit is None or result.limit.holds else 1)


def measure_startup(model: str, ranks: int, out: Path, arms: str | None, repeats: int, dtype: str) -> StartupResult:
    """Run the arms in turns, and write runs, figures, report and picture into ``out``.

    Raises:
        ShardwiseError: there is no such model or arm, the folder is in use, ours or all have failed.
    """
    from shardwise.cli.inspect import read_config_facts
    from shardwise.cli.report import write_text
    from shardwise.formats.checkpoint_index import open_checkpoint
    from shardwise.observing.run_record import RunReader
    from shardwise.storage.hub import resolve

    names = arms_named(arms)
    place = resolve(model)
    index = open_checkpoint(place)
    if "model_type" not in read_config_facts(place):
        raise ConfigError(f"{model}: there is no config.json in it that names a model_type; give a model's folder")
    _take(out)
    _warm(place)
    not_run = {name: reason for name in names if (reason := lacking(name) or no_room(name, index, ranks, dtype))}
    runs: list[ArmRun] = []
    charts: dict[str, list[tuple[float, Chart]]] = {name: [] for name in names}
    budgets: list[int] = []
    for repeat in range(repeats):
        for name in names:
            if name in not_run:
                continue
            folder = out / (name if repeats == 1 else f"{name}-{repeat + 1}")
            click.echo(f"{folder.name}: {KINDS[name].does}", err=True)
            try:
                held = run_fresh(ranks, _bring_up, name, str(place), dtype, str(folder), preloaded=_PRELOADED)
                record = RunReader(folder).read()
                figures = figures_of(record)
            except ShardwiseError as error:
                if name == OURS:
                    raise
                not_run[name] = str(error).strip().rpartition("\n")[2]
                click.echo(f"{folder.name}: {not_run[name]}", err=True)
                continue
            runs.append(arm_run(name, str(folder), figures, held))
            charts[name].append((figures.seconds, chart_of(name, record, figures)))
            budgets += [rank.budget_bytes for rank in held]
    if not runs:
        told = "; ".join(f"{name}: {reason}" for name, reason in not_run.items())
        raise ConfigError(f"no arm could run, so that nothing is measured ({told})")
    ours = [run for run in runs if run.arm == OURS]
    worst = max(ours, key=lambda run: run.figures.growth_bytes, default=None)
    limit = None if worst is None else limit_of(worst, ranks, max(budgets))
    by_seconds = [sorted(found, key=lambda pair: pair[0]) for found in charts.values() if found]
    result = StartupResult(model, ranks, dtype, runs, not_run, limit)
    write_text(out / FIGURES, json.dumps(result.to_dict(), indent=1) + "\n")
    return replace(result, files=_pictures(out, runs, [found[(len(found) - 1) // 2][1] for found in by_seconds]))


def _bring_up(arm: str, model: str, dtype: str, run: str) -> object:  # runs on a rank
    from shardwise.startup.arms import StartupJob
    from shardwise.startup.rank import bring_up_observed

    return bring_up_observed(arm, StartupJob(model, dtype, run))


def _take(out: Path) -> None:
    """Make the folder of the runs, which holds nothing yet.

    Raises:
        StorageError: it has something in it, or cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        used = next(out.iterdir(), None)
    except OSError as error:
        raise StorageError(f"--out={out}: it cannot be made ({error.strerror or error})") from error
    if used is not None:
        raise StorageError(f"--out={out}: there is {used.name} in it already; name a new or an empty folder")


def _warm(place: Path) -> None:
    """Read the files once, so that the first arm finds them where the others do."""
    block = bytearray(_BLOCK)
    for path in [place] if place.is_file() else sorted(place.iterdir()):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────


def _pictures(out: Path, runs: Sequence[ArmRun], charts: Sequence[Chart]) -> list[str]:
    """Draw all arms beside each other, and the report; nothing where what draws is not installed."""
    from shardwise.cli.report import draw_report
    from shardwise.pictures.installed import require
    from shardwise.pictures.side_by_side import write_side_by_side

    try:
        require("plotly", "matplotlib")
    except ConfigError as error:
        click.echo(f"there is no picture, and no report: {error}", err=True)
        return []
    write_side_by_side(charts, out / PICTURE)
    draw_report([Path(run.folder) for run in runs], out / "report")
    return [str(out / PICTURE), str(out / "report" / "report.html")]


def _show(result: StartupResult) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_table(result))
    for line in _lines(result):
        click.echo(line)


def _table(result: StartupResult) -> Table:
    from rich import box
    from rich.table import Table

    has_device = any(run.figures.device_bytes for run in result.runs)
    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, padding=(0, 2, 0, 0))
    table.add_column("arm", no_wrap=True)
    for head in ("seconds", "growth", "fullest rank", "mapped files", *(["device"] if has_device else [])):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("values", overflow="fold")
    for arm in KINDS:
        if found := [run.figures for run in result.of(arm)]:
            most = [
                max(getattr(figures, name) for figures in found)
                for name in ("growth_bytes", "fullest_bytes", "mapped_bytes", "device_bytes")
            ]
            cells = [in_bytes(value) for value in (most if has_device else most[:3])]
            table.add_row(
                arm,
                f"{statistics.median(figures.seconds for figures in found):.2f}",
                *cells,
                result.verdict(arm),
            )
    return table


def _lines(result: StartupResult) -> Iterator[str]:
    yield (
        "seconds: to the end of wrapping, median; growth: of the anonymous and shared memory of all ranks together "
        "over the level after imports, the most"
    )
    for arm, reason in result.not_run.items():
        yield f"{arm} did not run: {reason}"
    if result.limit is not None:
        verdict = "holds" if result.limit.holds else "DOES NOT HOLD"
        grown, most = in_bytes(result.limit.growth_bytes), in_bytes(result.limit.at_most_bytes)
        yield f"limit of {OURS}: {grown} of at most {most} (shards, and a budget and 32 MiB a rank): {verdict}"
    for path in result.files:
        yield os.fspath(path)
