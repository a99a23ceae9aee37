"""One page of HTML that needs nothing but a browser, Plotly and the figures inside, and its PNGs: as files.

[Note: A page on its own] Plotly's library is five megabytes, and one and a half when packed, so that it is packed,
and the browser unpacks it (DecompressionStream, in browsers since 2023). The page's own policy forbids requests.
Words come from folders and files of others, so that they are escaped wherever they go.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.pictures.chart import Bars, Chart, Floats, Look, Series, Table, band_colours_of, colours_of
from shardwise.pictures.collection import Sheet, read_runs, sections_of
from shardwise.pictures.images import write_png
from shardwise.pictures.installed import require
from shardwise.pictures.replacing import in_place_of

_LEGEND_OF = 24
"""Series in a legend, at the most."""


def page_of(title: str, sections: Sequence[Sheet]) -> str:
    """The whole page.

    Raises:
        ConfigError: Plotly is not installed.
    """
    require("plotly")
    body = [f"<h1>{html.escape(title)}</h1>"]
    figures: list[dict[str, Any]] = []
    for section in sections:
        body.append(f"<h2>{html.escape(section.title)}</h2>")
        body += [f'<p class="note">{html.escape(note)}</p>' for note in section.notes]
        for chart in section.charts:
            body.append(f"<h3>{html.escape(chart.title)}</h3>")
            body += [_shaded(chart)] if chart.bands else []
            body.append(f'<div class="chart" id="chart{len(figures)}"></div>')
            figures.append(figure_of(chart))
        body += [_table(table) for table in section.tables]
    return _PAGE.format(
        title=html.escape(title), body="\n".join(body), figures=_as_json(figures), plotly=_packed_plotly()
    )


def figure_of(chart: Chart) -> dict[str, Any]:
    """A chart as Plotly has it: data, and layout."""
    colour_of, band_colour_of = colours_of(chart), band_colours_of(chart)
    data = [_trace(item, colour_of) for item in chart.series] + [_bars(item, colour_of) for item in chart.bars]
    shapes = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": band.start, "x1": band.stop, "y0": 0, "y1": 1}
        | {"layer": "below", "line": {"width": 0}, "opacity": 0.15, "fillcolor": band_colour_of[band.name]}
        for band in chart.bands
        if band.stop > band.start
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": _plain(chart.x_title)}},
        "yaxis": {"title": {"text": _plain(chart.y_title)}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        "showlegend": 1 < sum(trace.get("showlegend", True) for trace in data) <= _LEGEND_OF,
        "shapes": shapes,
        "height": 340,
    }
    if chart.bars:
        rows = [_plain(row) for row in chart.rows]
        order = {"categoryarray": rows, "categoryorder": "array", "autorange": "reversed"}
        layout["yaxis"] = {"type": "category", **order}
        layout["xaxis"]["rangemode"] = "nonnegative"
        layout |= {"barmode": "group", "height": 160 + 26 * len(rows)}
    elif chart.key == "loss":
        layout["yaxis"].pop("rangemode")
    return {"data": data, "layout": layout}


def _shaded(chart: Chart) -> str:
    """What the colours behind a chart mean, on lines that break where a screen is narrow."""
    words = (
        f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>'
        for name, colour in band_colours_of(chart).items()
    )
    return f'<p class="shaded">shaded: {" ".join(words)}</p>'


def _trace(item: Series, colour_of: Mapping[str, str]) -> dict[str, Any]:
    colour = colour_of[item.name]
    trace = {"type": "scatter", "name": _plain(item.name), "x": _rounded(item.x), "y": _rounded(item.y)}
    match item.look:
        case Look.POINTS:
            is_told = not item.name.endswith(", PSS")
            return trace | {"mode": "markers", "marker": {"color": colour, "size": 6}, "showlegend": is_told}
        case Look.AREA:
            return trace | {"mode": "lines", "stackgroup": "one", "line": {"width": 0.5, "color": colour}}
        case Look.DASHED:
            return trace | {"mode": "lines", "line": {"width": 1.2, "color": colour, "dash": "dash"}}
        case Look.LINE:
            return trace | {"mode": "lines", "line": {"width": 1.4, "color": colour}}


def _bars(item: Bars, colour_of: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": _plain(item.name),
        "offsetgroup": _plain(item.name),
        "y": [_plain(row) for row in item.rows],
        "base": _rounded(item.start),
        "x": _rounded(item.length),
        "marker": {"color": colour_of[item.name], "line": {"width": 0}},
    }


def _rounded(values: Floats) -> list[float]:
    """Five digits of the greatest are enough for a picture, and for times with what is between them."""
    most = float(np.abs(values).max(initial=0.0))
    digits = int(np.clip(5 - np.ceil(np.log10(most)), 0, 12)) if most > 0 else 0
    found: list[float] = np.round(values, digits).tolist()
    return [int(value) if value == int(value) else value for value in found]


def _plain(text: str) -> str:
    """Without what Plotly would take for markup."""
    return text.replace("&", "+").replace("<", "(").replace(">", ")")


def _as_json(values: object) -> str:
    """JSON that ends no script, whatever is in it."""
    text = json.dumps(values, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = "\n".join(line(row, "td") for row in table.rows)
    head = line(table.head, "th")
    return f'<h3>{html.escape(table.title)}</h3><div class="table"><table>{head}\n{rows}</table></div>'


@cache
def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>
:root {{ --paper: #ffffff; --ink: #1c1e21; --faint: #6b7178; --rule: #d9dce0; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #15171a; --ink: #e6e8ea; --faint: #9aa1a9; --rule: #363b41; }}
}}
body {{ background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 0 auto;
  max-width: 1100px; padding: 12px; }}
h1 {{ font-size: 1.4em; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15em; margin-top: 1.6em; border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }}
h3 {{ font-size: 1em; margin: 1em 0 0; }}
.note {{ color: var(--faint); margin: 0.3em 0; overflow-wrap: anywhere; }}
.shaded {{ color: var(--faint); margin: 0.3em 0 0; font-size: 0.85em; }}
.shaded span {{ white-space: nowrap; margin-right: 1em; }}
.shaded i {{ display: inline-block; width: 1em; height: 0.8em; margin-right: 0.4em; opacity: 0.45; }}
.chart {{ width: 100%; margin: 10px 0; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.9em; }}
td, th {{ padding: 3px 10px 3px 0; text-align: left; border-bottom: 1px solid var(--rule); white-space: nowrap; }}
</style>
</head>
<body>
{body}
<p class="note" id="state">Drawing ...</p>
<script type="application/json" id="figures">{figures}</script>
<script type="text/plain" id="plotly">{plotly}</script>
<script>
(async () => {{
  const state = document.getElementById("state");
  try {{
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    const figures = JSON.parse(document.getElementById("figures").textContent);
    const places = figures.map((_, number) => document.getElementById("chart" + number));
    const legendOf = figure => {{  // a plot keeps its height where a narrow screen has a long legend
      const told = figure.data.filter(trace => trace.showlegend !== false).map(trace => trace.name.length);
      const across = Math.max(1, Math.floor((places[0].clientWidth - 60) / (Math.max(...told) * 7 + 48)));
      return Math.max(0, Math.ceil(told.length / across) - 2) * 19;
    }};
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const paint = ({{layout, ...figure}}) => {{
      const style = getComputedStyle(document.documentElement);
      const [ink, faint, rule] = ["--ink", "--faint", "--rule"].map(name => style.getPropertyValue(name).trim());
      const axis = {{gridcolor: rule, zerolinecolor: rule, linecolor: rule, automargin: true}};
      return {{...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: {{color: ink, size: 12}}, margin: {{l: 48, r: 12, t: 24, b: 40}}, hovermode: "closest",
        modebar: {{bgcolor: "rgba(0,0,0,0)", color: faint, activecolor: ink}},
        height: layout.height + (layout.showlegend ? legendOf(figure) : 0),
        xaxis: {{...axis, ...layout.xaxis}}, yaxis: {{...axis, ...layout.yaxis}}}};
    }};
    const draw = () => Promise.all(figures.map((figure, number) => Plotly.react(
      places[number], figure.data, paint(figure),
      {{responsive: true, displaylogo: false,
       displayModeBar: matchMedia("(hover: hover) and (min-width: 700px)").matches ? "hover" : false}})));
    dark.addEventListener("change", draw);
    await draw();
    state.textContent = "";
    state.dataset.drawn = figures.length;
  }} catch (error) {{
    state.textContent = "The figures cannot be drawn by this browser (" + error + "); the PNG files " +
      "beside this page show the same.";
  }}
}})();
</script>
</body>
</html>
"""


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
