"""Draws runs that were observed: pictures by matplotlib, and a page with tables by rank and phase.

The page needs nothing but a browser: pictures are in it, it has no script, and all text of a run is escaped.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.errors import ConfigError, StorageError
from shardwise.observing import get_label
from shardwise.report.names import in_bytes
from shardwise.run_records import Floats, PhaseSpan, RankRecord, RunRecord, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#7d8590"
"""Color of letters and lines: readable on white and on black, for backgrounds are transparent."""

_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "grid.color": INK,
    "axes.grid": True,
    "grid.alpha": 0.35,
    "font.size": 9,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "savefig.transparent": True,
    "text.parse_math": False,
    "lines.linewidth": 1.2,
    "axes.axisbelow": True,
}
_BANDS = ("#f59e0b", "#10b981", "#a855f7", "#72b7b2", "#e45756", "#9d755d", "#eab308", "#6366f1", "#ec4899")
_GIB = 2.0**20
"""In KiB."""

_MAX_LINES = 16
_MAX_SPANS = 60
_MAX_RANKS = 8
_MAX_PHASES = 60
_MAX_FIGURES = 8
_EVALUATION = ", evaluation"
_SETTINGS = {"train_batch_size": "batch size", "max_steps": "planned steps", "num_train_epochs": "epochs"}
_LEAST_SMOOTHED = 20
"""Points of the shortest curve that is smoothed."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of a page: pictures, as PNG by the names of their files, tables, and notes."""

    title: str
    pictures: Mapping[str, bytes]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib, which draws, is not installed; pip install 'shardwise[report]'")


def draw_report(runs: Sequence[Path], folder: Path) -> list[str]:
    """Write ``report.html`` and PNGs of runs. Return notes on missing data.

    Raises:
        ShardwiseError: a folder is not of a run, matplotlib is not installed, or a file cannot be written.
    """
    require_matplotlib()
    found = [read_run(run) for run in runs]
    names = [_plain(run.path.resolve().name) for run in found]
    labels = [name if names.count(name) == 1 else _plain(run.path) for name, run in zip(names, found, strict=True)]
    labeled = dict(zip(labels, found, strict=True))
    sections = [_summary(labeled), *_compared(labeled)]
    sections += [_run_section(label, run, number) for number, (label, run) in enumerate(labeled.items(), 1)]
    _write(folder, ", ".join(labels), sections)
    return [f"{section.title}: {note}" for section in sections for note in section.notes]


def _write(folder: Path, title: str, sections: Sequence[PageSection]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in sections:
            for name, data in section.pictures.items():
                (folder / name).write_bytes(data)
        (folder / "report.html").write_text(render_page(title, sections), "utf-8")
    except OSError as error:
        raise StorageError(f"{folder}: it cannot be written ({error.strerror or error}); make room") from error


# Runs


def _summary(runs: Mapping[str, RunRecord]) -> PageSection:
    """Return the figures of runs, those that differ between them first."""
    figures = [_figures(run) for run in runs.values()]
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    for name in dict.fromkeys(itertools.chain.from_iterable(figures)):
        cells = [each.get(name, (math.nan, "")) for each in figures]
        is_same = len({text for _, text in cells}) == 1
        rows[is_same].append([name, cells[0][1], *(_against(cells[0][0], *cell) for cell in cells[1:])])
    titles = ("Different", "The same in all runs") if len(runs) > 1 else ("", "Figures")
    tables = [Table(titles[is_same], ("", *runs), found) for is_same, found in rows.items() if found]
    return PageSection("Summary", {}, tables)


def _against(first: float, value: float, text: str) -> str:
    return (
        f"{text} ({value / first - 1:+.1%})" if first and value != first and math.isfinite(value / first) else text
    )


def _figures(run: RunRecord) -> dict[str, tuple[float, str]]:
    """Return figures by name: numbers, and the same as text."""
    found: dict[str, tuple[float, str]] = {}
    if run.ranks:
        kib = {"peak host memory of a rank": max(rank.peak_kib() for rank in run.ranks)}
        kib["peak accelerator memory of a rank"] = max(rank.peak_kib("allocated") for rank in run.ranks)
        seconds = {"seconds": max(rank.last_s for rank in run.ranks)}
        for name, spent in itertools.islice(_outer_phases(run.ranks).items(), _MAX_FIGURES):
            seconds[f"seconds in {get_label(name)}"] = spent
        found |= {name: (value, _size(value)) for name, value in kib.items() if value}
        found |= {name: (value, f"{value:.2f}") for name, value in seconds.items()}
        found["ranks"] = run.ranks[0].world_size, str(run.ranks[0].world_size)
    for training, curves in itertools.islice(run.curves.items(), _MAX_FIGURES):
        numbers = {"last loss": curves["loss"][1][-1]} if "loss" in curves else {}
        if "eval_loss" in curves:
            numbers["lowest evaluation loss"] = curves["eval_loss"][1].min()
        numbers["steps"] = max(steps[-1] for steps, _ in curves.values())
        numbers |= {_SETTINGS[name]: value for name, value in run.settings[training].items()}
        found |= {
            " ".join(filter(None, (training, name))): (float(value), f"{value:.6g}")
            for name, value in numbers.items()
        }
    return found


def _outer_phases(ranks: Sequence[RankRecord]) -> dict[str, float]:
    """Return the seconds of phases that are in no other, on the slowest rank, the longest first."""
    found: dict[str, float] = {}
    for rank in ranks:
        own: defaultdict[str, float] = defaultdict(float)
        for span in rank.phases:
            if len(span.path) == 1 and span.thread == 0:
                own[span.path[0]] += span.stop - span.start
        for name, seconds in own.items():
            found[name] = max(found.get(name, 0.0), seconds)
    return dict(sorted(found.items(), key=itemgetter(1), reverse=True))


def _compared(runs: Mapping[str, RunRecord]) -> list[PageSection]:
    """Return a section with the curves of trainings, and memory if several runs were observed."""
    trainings = {
        " ".join(filter(None, (label if len(runs) > 1 else "", name))) or "training": curves
        for label, run in runs.items()
        for name, curves in run.curves.items()
    }
    pictures = {}
    for key, title in (("loss", "Loss"), ("learning_rate", "Learning rate"), ("grad_norm", "Gradient norm")):
        lines = {name: curves[key] for name, curves in trainings.items() if key in curves}
        if key == "loss":
            lines |= {
                f"{name}{_EVALUATION}": curves["eval_loss"]
                for name, curves in trainings.items()
                if "eval_loss" in curves
            }
        if lines:
            pictures[f"{key}.png"] = _draw_lines(title, "step", "", lines)
    observed = {label: _fullest(run.ranks)[0] for label, run in runs.items() if run.ranks}
    if len(observed) > 1:
        lines = {label: (rank.samples["t"], rank.host_kib / _GIB) for label, rank in observed.items()}
        pictures["memory.png"] = _draw_lines("Host memory of the fullest rank", "seconds", "GiB", lines)
    return [PageSection("Runs compared" if len(runs) > 1 else "Training", pictures)] if pictures else []


def _run_section(label: str, run: RunRecord, number: int) -> PageSection:
    """Return memory over time, and tables, of the ranks of a run."""
    if not run.ranks:
        return PageSection(label, {}, (), ["no rank was observed (shardwise.observe records memory and phases)"])
    notes = [*run.notes]
    ranks = _fullest(run.ranks)[:_MAX_LINES]
    if len(ranks) < len(run.ranks):
        notes.append(f"{len(ranks)} of {len(run.ranks)} ranks are drawn, those with most memory")
    ranks.sort(key=attrgetter("rank"))
    spans = [span for span in run.ranks[0].phases if span.depth <= 2 and span.thread == 0]
    split = {span.path[:1] for span in spans if span.depth == 2}
    leaves = [span for span in spans if span.path not in split]
    longest = sorted(leaves, key=lambda span: span.start - span.stop)[:_MAX_SPANS]
    host = {f"rank {rank.rank}": (rank.samples["t"], rank.host_kib / _GIB) for rank in ranks}
    pictures = {f"memory-{number}.png": _draw_lines("Host memory, own and shared", "seconds", "GiB", host, longest)}
    if any(rank.peak_kib("used") for rank in ranks):
        device = {f"rank {rank.rank}": (rank.samples["t"], rank.samples["allocated"] / _GIB) for rank in ranks}
        pictures[f"accelerator-{number}.png"] = _draw_lines(
            "Accelerator memory, in tensors", "seconds", "GiB", device, longest
        )
    return PageSection(label, pictures, [_ranks_table(run.ranks), _phases_table(run.ranks)], notes)


def _fullest(ranks: Sequence[RankRecord]) -> list[RankRecord]:
    """Return the ranks, those with most memory first."""
    return sorted(ranks, key=lambda rank: -max(rank.peak_kib(), rank.peak_kib("allocated")))


def _ranks_table(ranks: Sequence[RankRecord]) -> Table:
    names = {
        "": "own and shared",
        "peak": "peak",
        "allocated": "accelerator, in tensors",
        **{name: name for name in ("reserved", "read", "written")},
    }
    rows = [
        (str(rank.rank), rank.host, f"{rank.last_s:.1f}", *(_size(rank.peak_kib(name)) for name in names))
        for rank in ranks
    ]
    return Table("Peaks by rank", ("rank", "host", "seconds", *names.values()), rows)


def _phases_table(ranks: Sequence[RankRecord]) -> Table:
    """Return seconds and the most memory of each phase, of the ranks with most memory."""
    shown = sorted(_fullest(ranks)[:_MAX_RANKS], key=attrgetter("rank"))
    by_path: defaultdict[tuple[str, ...], dict[int, list[PhaseSpan]]] = defaultdict(dict)
    for rank in shown:
        for span in rank.phases:
            by_path[span.path].setdefault(rank.rank, []).append(span)
    rows = []
    for path, by_rank in sorted(
        by_path.items(), key=lambda item: min(spans[0].start for spans in item[1].values())
    )[:_MAX_PHASES]:
        times = max(len(spans) for spans in by_rank.values())
        seconds = max(sum(span.stop - span.start for span in spans) for spans in by_rank.values())
        cells = [_peak_within(rank, by_rank.get(rank.rank, [])) for rank in shown]
        rows.append((": ".join(map(get_label, path)), str(times), f"{seconds:.2f}", *cells))
    head = ("phase", "times", "seconds", *(f"rank {rank.rank}" for rank in shown))
    return Table("Peak memory by phase and rank, and seconds of the slowest rank", head, rows)


def _peak_within(rank: RankRecord, spans: Sequence[PhaseSpan]) -> str:
    """Return the most memory that was sampled within spans, in words."""
    t = rank.samples["t"]
    edges = np.zeros(len(t) + 1)
    np.add.at(edges, np.searchsorted(t, [span.start for span in spans]), 1)
    np.add.at(edges, np.searchsorted(t, [span.stop for span in spans], side="right"), -1)
    is_inside = np.cumsum(edges[:-1]) > 0
    if not is_inside.any():
        return ""
    host, device = rank.host_kib[is_inside].max(), rank.samples["allocated"][is_inside].max()
    return _size(host) + (f", accelerator {_size(device)}" if device else "")


def _size(kib: float) -> str:
    return in_bytes(int(kib) << 10)


# Drawing


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Figure, io.BytesIO]]:
    """Yield a figure, which is drawn into the buffer at the end of the block."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # drawn as a box
        figure = Figure(figsize=(width, height))
        yield figure, buffer
        figure.savefig(buffer, format="png")


def _draw_lines(
    title: str,
    x_title: str,
    y_title: str,
    lines: Mapping[str, tuple[Floats, Floats]],
    spans: Sequence[PhaseSpan] = (),
) -> bytes:
    """Return a PNG with lines by name, and phases shaded. Noisy curves by step are smoothed, over faint points."""
    with _figure(9, 4.2) as (figure, buffer):
        axes = figure.subplots()
        axes.set(title=title, xlabel=x_title, ylabel=y_title)
        names = dict.fromkeys(span.path[-1] for span in sorted(spans, key=attrgetter("start")))
        colors = dict(zip(names, itertools.cycle(_BANDS), strict=False))
        for name, color in colors.items():
            mine = [(span.start, span.stop - span.start) for span in spans if span.path[-1] == name]
            axes.broken_barh(
                mine,
                (0, 1),
                transform=axes.get_xaxis_transform(),
                color=color,
                alpha=0.2,
                lw=0,
                label=f" {_plain(get_label(name))}",
            )
        for name, (x, y) in lines.items():
            smooth = _smoothed(y) if x_title == "step" else None
            if smooth is None:
                dashes = "--" if name.endswith(_EVALUATION) else "-"
                axes.plot(x, y, label=f" {name}", ls=dashes, marker="." if len(x) == 1 else "")
            else:
                [line] = axes.plot(x, smooth, label=f" {name}")
                axes.plot(x, y, color=line.get_color(), alpha=0.3, lw=0.7)
        axes.margins(x=0.01)
        if y_title == "GiB":
            axes.set_ylim(bottom=0)
        if 1 < len(lines) + len(colors) <= 3 * _MAX_LINES:
            figure.legend(loc="outside lower left", ncols=4)
    return buffer.getvalue()


def _smoothed(y: Floats) -> Floats | None:
    """Return a centered moving average, of fewer points at both ends, or None for a curve that has little noise."""
    if len(y) < _LEAST_SMOOTHED:
        return None
    window = np.ones(max(2 * (len(y) // 50) + 1, 5))
    smooth: Floats = np.convolve(y, window, "same") / np.convolve(np.ones(len(y)), window, "same")
    return smooth if np.abs(np.diff(y)).sum() > 3 * np.abs(np.diff(smooth)).sum() else None


# The page


def _plain(text: object) -> str:
    """Return text that can be encoded, on one line."""
    return " ".join(str(text).encode("utf-8", "replace").decode().split())


def render_page(title: str, sections: Sequence[PageSection]) -> str:
    """Return a page of HTML without external resources."""
    lines = [f"<h1>{_escaped(title)}</h1>"]
    for section in sections:
        lines.append(f"<h2>{_escaped(section.title)}</h2>")
        lines += [f"<p>{_escaped(note)}</p>" for note in section.notes]
        for name, data in section.pictures.items():
            encoded = base64.b64encode(data).decode()
            lines.append(f'<img alt="{_escaped(name)}" src="data:image/png;base64,{encoded}">')
        lines += [_table(table) for table in section.tables]
    return _PAGE.format(title=_escaped(title), body="\n".join(lines))


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_escaped(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(table.head, "th"), *(row(cells, "td") for cells in table.rows)]
    return f'<h3>{_escaped(table.title)}</h3><div class="table"><table>{"".join(lines)}</table></div>'


def _escaped(text: str) -> str:
    return html.escape(_plain(text))


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 12px; }}
h1, h2, p {{ overflow-wrap: anywhere; }}
h1 {{ font-size: 1.4em; }}
h2 {{ font-size: 1.15em; margin-top: 1.6em; }}
h3 {{ font-size: 1em; }}
p {{ color: #7d8590; }}
img {{ display: block; max-width: 100%; height: auto; margin: 10px 0; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.9em; }}
td, th {{ padding: 3px 10px 3px 0; text-align: left; border-bottom: 1px solid #7d859066; white-space: nowrap; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
