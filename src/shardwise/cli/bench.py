"""``shardwise bench startup``: how a model comes up here, by this library and by others, beside each other."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.launch import fail, run_fresh
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.report.names import in_bytes
from shardwise.startup.figures import StartupResult
from shardwise.startup.kinds import KINDS, OURS
from shardwise.startup.measuring import StartupOptions, measure_startup

if TYPE_CHECKING:
    from rich.table import Table

_PRELOADED = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "accelerate.utils.fsdp_utils",
    "shardwise.startup.rank",
)
_WIDTH = 110


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
@click.option(
    "--limit",
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0, min_open=True),
    help="An arm that takes longer is ended, and the next one runs.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def startup_command(*, as_json: bool, **said: Any) -> None:
    """Bring MODEL up for training on N ranks of this machine, in each of several ways, and compare.

    MODEL is a folder, or the name of a repository of the Hugging Face hub. Each arm has fresh processes, which are
    observed while they load, wrap and make an optimizer. What takes more memory than there is, or lacks a package,
    is left out and told. Exits with 1 where our own arm needs more than its shards, and for each rank its budget
    and 32 MiB; with 2 where nothing could be measured.
    """
    try:
        _require_config(str(said["model"]))
        result = measure_startup(StartupOptions(**said), partial(run_fresh, preloaded=_PRELOADED), _tell)
    except ShardwiseError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _show(result)
    sys.exit(0 if result.limit is None or result.limit.holds else 1)


def _require_config(model: str) -> None:
    """Refuse a checkpoint of which transformers can make no model; raises ShardwiseError."""
    from shardwise.cli.inspect import read_config_facts
    from shardwise.storage.hub import resolve

    if "model_type" not in read_config_facts(resolve(model)):
        raise ConfigError(f"{model}: there is no config.json in it that names a model_type; give a model's folder")


def _tell(line: str) -> None:
    click.echo(line, err=True)


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────


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
