"""The page of runs, and its PNGs, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise.pictures.collection import read_runs, sections_of
from shardwise.pictures.images import write_png
from shardwise.pictures.installed import require
from shardwise.pictures.page import page_of
from shardwise.pictures.replacing import in_place_of


def draw_report(runs: Sequence[Path], folder: Path) -> tuple[list[str], int]:
    """Write the page and the PNGs of these runs; what is to be said of them, and how many PNGs there are.

    Raises:
        ShardwiseError: a folder is not of a run, what draws is not installed, or a file cannot be written.
    """
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
    with in_place_of(path) as fresh:
        fresh.write_text(text, "utf-8")
