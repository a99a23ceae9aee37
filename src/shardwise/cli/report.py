"""``shardwise report``."""

from collections.abc import Sequence
from pathlib import Path

import click


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
    click.echo(
        f"{click.format_filename(folder / 'report.html')}, with its pictures as PNG files in the same folder"
    )
