"""``shardwise report``: a page, and PNGs, of what a run needed and did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from shardwise.errors import ShardwiseError, StorageError


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

    folder = output or runs[0] / "report"
    try:
        notes, pictures = draw_report(runs, folder)
    except ShardwiseError as error:
        fail(error)
    for note in notes:
        click.echo(note, err=True)
    click.echo(f"{click.format_filename(folder / 'report.html')}, and {pictures} PNG files beside it")


def draw_report(runs: Sequence[Path], folder: Path) -> tuple[list[str], int]:
    """Write the page and the PNGs of these runs; what is to be said of them, and how many PNGs there are.

    Raises:
        ShardwiseError: a folder is not of a run, what draws is not installed, or a file cannot be written.
    """
    from shardwise.pictures.collection import read_runs, sections_of
    from shardwise.pictures.images import write_png
    from shardwise.pictures.installed import require
    from shardwise.pictures.page import page_of

    require("plotly", "matplotlib")
    found = read_runs(runs)
    sections = sections_of(found)
    page = page_of(", ".join(label for label, _ in found), sections)
    write_text(folder / "report.html", page)
    names: set[str] = set()
    for section in sections:
        for chart in section.charts:
            name = chart.key if chart.key not in names else f"{chart.key}-{len(names)}"
            names.add(name)
            write_png(chart, folder / f"{name}.png")
    return [f"{section.title}: {note}" for section in sections for note in section.notes], len(names)


def write_text(path: Path, text: str) -> None:
    """Into a file, which is replaced in one go; raises StorageError."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text, "utf-8")
        fresh.replace(path)
    except OSError as error:
        cause = error.strerror or error
        raise StorageError(f"{path}: it cannot be written ({cause}); name another folder by --output") from error
