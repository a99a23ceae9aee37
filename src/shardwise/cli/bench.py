"""``shardwise bench startup`` and ``shardwise report``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.launch import spawn_ranks
from shardwise.errors import ConfigError
from shardwise.report.names import table_lines

if TYPE_CHECKING:
    from shardwise.startup_arms import ArmOnRank


@click.group("bench")
def bench_command() -> None:
    """Measure your own model on your own machine."""


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
@click.option("--arms", default="", metavar="NAME,NAME", help="Some of those of docs/startup.md.  [default: all]")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16", "float16", "auto"]),
    help="That the model is trained in; auto: as it is stored.",
)
@click.option(
    "--limit",
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0, min_open=True),
    help="An arm that takes longer is ended, and the next one runs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def startup_command(*, as_json: bool, **options: Any) -> None:
    """Bring MODEL up for training on N ranks of this machine, in each of several ways, and compare.

    MODEL is a folder, or the name of a repository of the Hugging Face hub. Each arm has new processes, which are
    observed while they load, wrap and create an optimizer. An arm that needs more memory than available, or a
    package that is not installed, is skipped. Exits with 1 if shardwise's arm needs more than its shards, its
    budget and 32 MiB for each rank, and with 2 if nothing could be measured.
    """
    from shardwise.startup import StartupOptions, compare_startup

    _require_config(str(options["model"]))
    result = compare_startup(StartupOptions(**options), _start, partial(click.echo, err=True))
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        table = result.table()
        legend = "seconds: to the end of wrapping; growth: own and shared memory of all ranks, the most"
        lines = table_lines(table.head, table.rows, table.head[1:-1])
        click.echo("\n".join([*lines, legend, *result.notes(), *result.files]))
    sys.exit(0 if result.holds else 1)


def _start(ranks: int, *arguments: str, timeout_s: float) -> list[ArmOnRank]:
    """Bring up a model by an arm on fresh ranks."""
    from shardwise.startup_arms import load_by_arm

    return spawn_ranks(ranks, load_by_arm, *arguments, timeout_s=timeout_s)


def _require_config(model: str) -> None:
    """Raise ShardwiseError unless a checkpoint names a model of transformers."""
    from shardwise.cli.checkpoints import read_config_summary
    from shardwise.storage.remote import resolve

    if "model_type" not in read_config_summary(resolve(model)):
        raise ConfigError(f"{model}: has no config.json with a model_type. Pass a model's folder")


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [OTHER]...", type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Folder for report.html and its PNGs.  [default: report/ of the first RUN]",
)
def report_command(runs: Sequence[Path], *, output: Path | None) -> None:
    """Draw RUN, the folder of a training or of shardwise.observe, and others compared with it.

    Memory of each rank, phases, and curves of the training, as one page that needs no network, and as PNGs. A run
    may still be running, or have been killed.
    """
    from shardwise.pictures import draw_report

    folder = output or runs[0] / "report"
    for note in draw_report(runs, folder):
        click.echo(note, err=True)
    click.echo(f"{click.format_filename(folder / 'report.html')}, with its pictures as PNG files beside it")
