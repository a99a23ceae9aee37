"""``shardwise report``: a page, and PNGs, of what a run needed and did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from shardwise.errors import ShardwiseError


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [OTHER]...", type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Where report.html and its PNGs go.  [default: report/ of the first RUN]",
)
def report_command(runs: Sequence[Path], *, output: Path | None) -> None:
    """Show RUN, the output folder of a training or what shardwise.observe was given; others over it.

    Memory of each rank and machine, phases, traffic, what was foreseen beside what happened, and curves of the
    training, as one page that needs no network, and as PNGs. The run may be on its way, ended, or killed.
    """
    from shardwise.cli.launch import fail
    from shardwise.pictures.page import draw_report

    folder = output or runs[0] / "report"
    try:
        notes, pictures = draw_report(runs, folder)
    except ShardwiseError as error:
        fail(error)
    for note in notes:
        click.echo(note, err=True)
    click.echo(f"{click.format_filename(folder / 'report.html')}, and {pictures} PNG files beside it")
