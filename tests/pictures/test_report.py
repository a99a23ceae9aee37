"""``shardwise report``: a page, and PNGs."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from tests.observing.made_runs import make_metrics, make_rank, make_run

from shardwise.cli.report import report_command
from shardwise.observing.bounded import extremes, merged
from shardwise.pictures import installed

MIXES = "mix_stderr" in signature(CliRunner).parameters
RUNNER = CliRunner(**({"mix_stderr": False} if MIXES else {}))

drawing = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("plotly", "matplotlib")),
    reason="plotly or matplotlib is not installed",
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


def report(*arguments: object) -> Result:
    return RUNNER.invoke(report_command, [str(argument) for argument in arguments])


def page_in(folder: Path) -> str:
    return (folder / "report.html").read_text("utf-8")


def figures_in(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert found is not None
    figures: list[dict[str, Any]] = json.loads(found[1])
    return figures


def charts_in(page: str) -> dict[str, dict[str, Any]]:
    """By title, the last of each."""
    titles = re.findall(r"<h3>(.*?)</h3>\n(?:<p class=\"shaded\">.*\n)?<div class=\"chart\"", page)
    return dict(zip(titles, figures_in(page), strict=True))


@drawing
def test_a_run_as_a_page_and_pictures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out", ranks=4, machines=2, device_gib=3.0)
    result = report(run)
    assert (result.exit_code, result.stderr) == (0, "")
    page = page_in(run / "report")
    charts = charts_in(page)
    memory = charts["Host memory by rank, anonymous and shared; points: PSS"]
    lines = [trace for trace in memory["data"] if trace["mode"] == "lines" and "dash" not in trace["line"]]
    assert [trace["name"] for trace in lines] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert max(lines[0]["y"]) == pytest.approx(1 + 3 + 0.5 + 2, abs=0.4)  # in one sample alone
    assert [shape["x0"] < shape["x1"] for shape in memory["layout"]["shapes"]] == [True, True]
    assert re.search("shaded: <span>.*</i>from_pretrained</span> <span>.*</i>step</span></p>", page)
    [foreseen] = [trace for trace in memory["data"] if trace["name"].startswith("foreseen")]
    assert foreseen["y"][0] == pytest.approx(lines[0]["y"][0] + 2, abs=0.4)
    stacked = charts["Host memory of host-m1, its ranks stacked"]["data"]
    assert [trace["name"] for trace in stacked] == ["shared", "rank 2", "rank 3"]
    for rank in (2, 3):  # each rank has its own colour, and has it everywhere
        bars = charts["Phases"]["data"][rank]
        assert {line["line"]["color"] for line in (lines[rank], stacked[rank - 1])} == {bars["marker"]["color"]}
    assert len({line["line"]["color"] for line in (*lines, stacked[0])}) == 5
    rows = charts["Phases"]["data"][0]["y"]
    assert {"from_pretrained: read", "step: backward"} <= set(rows)
    [read] = {max(trace["y"]) for trace in charts["Read, by system calls"]["data"]}
    assert read == pytest.approx(2**30 / 1e9, rel=0.05)
    assert charts["Loss"]["data"][0]["y"][0] == pytest.approx(3 * 0.95, abs=1e-3)
    assert {"Learning rate", "Gradient norm, before clipping", "Tokens a second, all ranks"} <= charts.keys()
    assert "Accelerator memory by rank" in charts
    assert "<td>8.00 GiB</td>" not in page
    assert "<td>2.00 GiB</td>" in page  # read by each of four
    pictures = sorted(path.name for path in (run / "report").glob("*.png"))
    assert {"loss.png", "memory.png", "phases.png", "machine0.png", "machine1.png", "read.png"} <= set(pictures)
    assert all((run / "report" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


FORESEEN = {"load": 4, "forward": 5, "loss": 7, "backward": 6.5, "optimizer": 3.5, "checkpoint": 2}


def rows_in(page: str, title: str) -> dict[str, list[str]]:
    """The rows of a table, by their first cells; none where there is no such table."""
    found = re.search(rf"<h3>{title}</h3><div class=\"table\"><table>(.*?)</table>", page, re.S)
    lines = re.findall(r"<tr>(<td>.*?)</tr>", found[1]) if found else []
    cells = [re.findall(r"<td>(.*?)</td>", line) for line in lines]
    return {first: others for first, *others in cells}


@drawing
def test_a_training_is_shown_beside_what_its_plan_foresaw(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out", ranks=2, foreseen=FORESEEN)
    assert report(run).exit_code == 0
    page = page_in(run / "report")
    rows = rows_in(page, "Training: host memory, foreseen and done")
    assert [*rows] == ["load", "forward and backward", "optimizer", "checkpoint"]
    assert [cells[0] for cells in rows.values()] == ["4.00 GiB", "7.00 GiB", "3.50 GiB", "2.00 GiB"]
    assert rows["checkpoint"][1:] == ["no sample", "", ""]
    # One sample has two GiB more, at the beginning of a forward pass; loading has taken three.
    assert float(rows["forward and backward"][2]) == pytest.approx(5 / 7, abs=0.05)
    assert float(rows["optimizer"][2]) == pytest.approx(3 / 3.5, abs=0.1)
    memory = charts_in(page)["Host memory by rank, anonymous and shared; points: PSS"]["data"]
    drawn = {trace["name"]: trace for trace in memory if trace["name"].startswith("foreseen: ")}
    assert [*drawn] == ["foreseen: load", "foreseen: forward and backward", "foreseen: optimizer"]
    passes = drawn["foreseen: forward and backward"]
    assert passes["y"] == [pytest.approx(1.5 + 7, abs=0.3)] * 2
    assert (passes["x"][0], passes["x"][1]) == (pytest.approx(2, abs=0.1), pytest.approx(9.2, abs=0.1))


@drawing
def test_of_accelerators_their_own_memory_is_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out", ranks=1, device_gib=3.0, foreseen=FORESEEN)
    assert report(run).exit_code == 0
    page = page_in(run / "report")
    rows = rows_in(page, "Training: accelerator memory, in tensors, foreseen and done")
    assert rows["optimizer"] == ["3.50 GiB", "3.00 GiB", "0.86", "0"]
    charts = charts_in(page)
    on_host = charts["Host memory by rank, anonymous and shared; points: PSS"]["data"]
    assert not any(trace["name"].startswith("foreseen: ") for trace in on_host)
    there = charts["Accelerator memory by rank"]["data"]
    heights = [trace["y"] for trace in there if trace["name"] == "foreseen: forward and backward"]
    assert heights == [[7, 7]]


@drawing
@pytest.mark.parametrize("phases", [None, [], {"load": 3}, {"load": {"host_bytes": "many"}}, {"load": {}, "x": {}}])
def test_a_run_that_has_told_no_forecast_shows_none(tmp_path: Path, phases: object) -> None:
    run = make_run(tmp_path / "out", ranks=1)
    with (run / "observed" / "rank-00000.jsonl").open("a") as file:
        file.write(json.dumps({"t": 10.0, "tell": "training", "device": "cpu", "phases": phases}) + "\n")
    assert report(run).exit_code == 0
    page = page_in(run / "report")
    assert "foreseen: " not in page
    assert "Training: host memory" not in page


@drawing
def test_the_page_asks_nobody(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out")
    report(run)
    page = page_in(run / "report")
    ours = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", page, flags=re.S)
    assert "http" not in ours.replace("http-equiv", "")
    assert "default-src 'none'" in ours
    assert not re.search(r"""(src|href)\s*=""", ours)


@drawing
def test_ten_minutes_of_eight_ranks_are_a_small_page_in_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out", ranks=8, machines=2, seconds=600, rate=20, steps=1200, device_gib=4.0)
    start = time.process_time()
    result = report(run)
    assert result.exit_code == 0
    assert time.process_time() - start < 5
    page = page_in(run / "report")
    assert len(page.encode()) < 5_000_000
    memory = charts_in(page)["Host memory by rank, anonymous and shared; points: PSS"]["data"][3]
    assert max(memory["y"]) > 6  # the one sample of 12,000


@drawing
def test_runs_over_each_other_have_labels_of_their_own(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a" / "out", model="models/One")
    second = make_run(tmp_path / "b" / "out", model="models/Two", steps=30)
    third = make_run(tmp_path / "c" / "out", model="models/Two")
    result = report(first, second, third, "--output", tmp_path / "seen")
    assert result.exit_code == 0, result.stderr
    charts = charts_in(page_in(tmp_path / "seen"))
    names = [trace["name"] for trace in charts["Loss"]["data"] if trace["mode"] == "lines"]
    assert names == ["out (One)", f"{second}: out (Two)", f"{third}: out (Two)"]
    fullest = charts["Host memory of the fullest rank, anonymous and shared"]["data"]
    assert [trace["name"] for trace in fullest] == names


@drawing
def test_tenants_have_a_curve_each(tmp_path: Path) -> None:
    make_rank(tmp_path, 0, 1)
    for name in ("ada", "bob"):
        make_metrics(tmp_path / name)
    assert report(tmp_path).exit_code == 0
    loss = charts_in(page_in(tmp_path / "report"))["Loss"]["data"]
    assert [trace["name"] for trace in loss] == ["ada", "bob", "ada evaluation", "bob evaluation"]


@drawing
def test_a_killed_rank_and_one_that_lacks_are_told(tmp_path: Path) -> None:
    make_rank(tmp_path, 0, 3)
    make_rank(tmp_path, 1, 3, is_ended=False, seconds=4)
    result = report(tmp_path)
    assert result.exit_code == 0
    assert "of 3 ranks nothing is there of rank 2" in result.stderr
    assert re.search(r"rank 1 has left no end; it was last heard of \d\.\d s after the beginning", result.stderr)
    assert "nothing is there of rank 2" in page_in(tmp_path / "report")


@drawing
def test_a_run_that_was_not_observed_has_its_curves(tmp_path: Path) -> None:
    make_metrics(tmp_path)
    result = report(tmp_path)
    assert result.exit_code == 0
    assert "no rank was observed" in result.stderr
    assert list(charts_in(page_in(tmp_path / "report"))) == [
        "Loss",
        "Learning rate",
        "Gradient norm, before clipping",
        "Tokens a second, all ranks",
    ]


@drawing
def test_words_of_others_are_words(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>$x$_"
    path = make_rank(tmp_path, 0, 1, model=f"m/{evil}")
    path.write_text(
        path.read_text().replace('"audit"', json.dumps(evil)).replace("host-one", json.dumps(evil)[1:-1])
    )
    assert report(tmp_path).exit_code == 0
    page = page_in(tmp_path / "report")
    assert "<script>alert" not in page
    assert page.count("<script") == 3


@drawing
def test_numbers_of_others_are_any(tmp_path: Path) -> None:
    huge = "1" + "0" * 400
    path = make_rank(tmp_path, 0, 1, seconds=2)
    made = path.read_text()
    metrics = tmp_path / "metrics.jsonl"
    for number in ("NaN", "Infinity", huge, "-5", "1e308", "true", '"1"', "[1]", "null"):
        told = re.sub('"(host_bytes|read_bytes|placed_bytes)":[^,}]*', rf'"\1":{number}', made)
        path.write_text(f'{told}[2,{number},0,"x"]\n[0,1,2,3,4,{number},6,7,8,9,10,11,12]\n')
        metrics.write_text(f'{{"kind":"step","step":1,"loss":{number},"grad_norm":1}}\n' * 2)
        with metrics.open("a") as more:
            more.write(f'{{"kind":"step","step":{number},"loss":2}}\n')
        result = report(tmp_path)
        assert result.exit_code == 0, (number, result.exception)


@drawing
def test_many_looks_at_how_pages_are_shared_are_thinned_and_stay(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, seconds=10)
    with path.open("a") as more:
        for number in range(3000):
            more.write(f"[1,{number / 300},9,{(9 if number == 1500 else 3) << 20},0,0]\n")
    assert report(tmp_path).exit_code == 0
    memory = charts_in(page_in(tmp_path / "report"))["Host memory by rank, anonymous and shared; points: PSS"]
    [points] = [trace for trace in memory["data"] if trace["name"] == "rank 0, PSS"]
    assert len(points["y"]) < 2500
    assert max(points["y"]) == 9


@drawing
def test_a_thousand_ranks_are_a_page_that_says_what_is_not_on_it(tmp_path: Path) -> None:
    for rank in range(200):
        make_rank(tmp_path, rank, 1000, seconds=1, rate=10, machine=f"m{rank // 8}")
    path = tmp_path / "observed" / "rank-00101.jsonl"
    path.write_text(path.read_text().replace("6581412", "99000000").replace("7315415", "99700000"))
    result = report(tmp_path)
    assert result.exit_code == 0, result.exception
    assert "of 1000 ranks nothing is there of rank 200-999" in result.stderr
    assert re.search("of 200 ranks 6[45] have lines and rows, among them the fullest, rank 101;", result.stderr)
    assert "of 25 machines 16 are drawn" in result.stderr
    page = page_in(tmp_path / "report")
    assert len(page.encode()) < 5_000_000
    charts = charts_in(page)
    assert (
        max(
            map(
                max,
                (trace["y"] for trace in charts["Host memory by rank, anonymous and shared; points: PSS"]["data"]),
            )
        )
        > 90
    )
    stacked = charts["Host memory of host-m12, its ranks stacked"]["data"]
    assert [trace["name"] for trace in stacked] == ["shared", *(f"rank {rank}" for rank in range(96, 104))]
    assert "Phases of 8 of 200 ranks" in charts


@drawing
def test_names_in_any_script_are_drawn_without_a_word(tmp_path: Path) -> None:
    run = make_run(tmp_path / "\u6a21\u578b\udce9", ranks=1, seconds=1, model="m/\u6a21\ud800")
    result = report(run, run)
    assert (result.exit_code, result.stderr) == (0, "")
    names = {path.name for path in (run / "report").glob("*.png")}
    assert {"memory.png", "memory-2.png", "phases-2.png"} <= names


@drawing
def test_a_rank_of_one_sample(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1)
    lines = path.read_text().splitlines()
    sample = next(line for line in lines if line.startswith("[0,"))
    for kept in ([lines[0]], [lines[0], sample]):
        path.write_text("\n".join(kept) + "\n")
        assert report(tmp_path).exit_code == 0


@drawing
def test_there_is_no_need_of_a_display(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out", seconds=2)
    words = "from shardwise.cli.report import report_command; report_command()"
    done = subprocess.run(
        [sys.executable, "-c", words, str(run)],
        env={"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path), "MPLBACKEND": "TkAgg", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


FULL = """
import resource, sys
from shardwise.cli.report import report_command
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop()), -1))
report_command()
"""


@drawing
@pytest.mark.parametrize("most", [1000, 5_000_000])  # of the page, of which there is most; of a picture
def test_a_disk_that_is_full_is_one_error_and_nothing_half(tmp_path: Path, most: int) -> None:
    run = make_run(tmp_path / "out", ranks=1, seconds=1)
    if most > 1000:
        (run / "report" / ".loss.png.new").mkdir(parents=True)  # as a file that cannot be written
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(run), str(most)], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert re.search(r"error: .*: it cannot be written \(.*\); make room, or name another folder", done.stderr)
    assert [path.name for path in (run / "report").glob(".*.new") if path.is_file()] == []


@pytest.mark.parametrize("name", ["plotly", "matplotlib"])
def test_a_library_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        installed.importlib.util, "find_spec", lambda asked: None if asked == name else find("json")
    )
    result = report(make_run(tmp_path / "out", seconds=2))
    assert result.exit_code == 2
    assert f"{name}, which draws, is not installed; pip install 'shardwise[report]'" in result.stderr
    assert not (tmp_path / "out" / "report").exists()


CTRL_C = """
import os, signal, sys, time
from pathlib import Path
from shardwise.pictures.curves import Curves
signal.signal(signal.SIGINT, lambda *_: None)  # as a training, which stops in order
with Curves() as curves:
    curves.draw(Path(sys.argv[1]))
    time.sleep(0.3)
    os.killpg(0, signal.SIGINT)
    curves.finish()
    print(curves.fault)
"""


@drawing
def test_ctrl_c_of_a_training_ends_no_drawing(tmp_path: Path) -> None:
    make_metrics(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C, str(tmp_path)],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    assert (tmp_path / "loss.png").is_file()


@drawing
def test_a_folder_that_is_none_of_a_run(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "not here", "no such folder"), (tmp_path, "there is neither observed/")):
        result = report(path)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    (tmp_path / "file").touch()
    result = report(make_run(tmp_path / "out", seconds=2), "--output", tmp_path / "file")
    assert result.exit_code == 2
    assert "cannot be written (File exists); make room, or name another folder" in result.stderr


@pytest.mark.slow
@drawing
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize(("width", "is_dark"), [(1100, False), (360, True)])
def test_a_browser_draws_it_without_a_word(tmp_path: Path, width: int, *, is_dark: bool) -> None:
    run = make_run(tmp_path / "out", ranks=8, device_gib=1.0)
    report(run)
    page = page_in(run / "report")
    place = tmp_path / "asked.html"
    place.write_text(page.replace("</body>", f"{_ASK}</body>"), "utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--enable-logging=stderr",
        *(["--blink-settings=preferredColorScheme=0"] if is_dark else []),
    ]
    done = subprocess.run(
        [str(CHROMIUM), *options, f"--window-size={width},2000", "--dump-dom", place.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    found = re.search(r'id="answers">(.*?)</p>', done.stdout)
    assert found is not None, done.stderr
    answers = json.loads(found[1])
    assert int(answers["drawn"]) == len(figures_in(page)) == done.stdout.count('class="main-svg"') / 3
    assert answers["width"] <= answers["room"]  # nobody scrolls to the right
    assert answers["requests"] == 0
    assert min(answers["plots"]) >= 150  # a long legend takes nothing from what is drawn
    assert answers["paper"] == ("rgb(21, 23, 26)" if is_dark else "rgb(255, 255, 255)")
    assert answers["ink"] == ("rgb(230, 232, 234)" if is_dark else "rgb(28, 30, 33)")
    assert "CONSOLE" not in done.stderr
    assert "Refused" not in done.stderr


_ASK = """<p id="answers"></p><script>
const asking = setInterval(() => {
  const drawn = document.getElementById("state").dataset.drawn;
  if (!drawn) return;
  clearInterval(asking);
  const all = name => [...document.querySelectorAll(name)];
  document.getElementById("answers").textContent = JSON.stringify({
    drawn, width: document.documentElement.scrollWidth, room: innerWidth,
    requests: performance.getEntriesByType("resource").length,
    plots: all(".plot-container .bglayer .bg").map(plot => plot.getBoundingClientRect().height),
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.querySelector(".xtick text")).fill,
  });
}, 50);
</script>"""


@given(st.lists(st.floats(-1e9, 1e9), min_size=0, max_size=300), st.integers(1, 20))
def test_thinning_keeps_what_stands_out(values: Sequence[float], parts: int) -> None:
    array = np.array(values, np.float64)
    places = extremes(array, parts)
    assert len(places) <= 2 * parts + 2
    assert (np.diff(places) > 0).all()
    if values:
        kept = array[places]
        assert (kept.max(), kept.min(), kept[0], kept[-1]) == (array.max(), array.min(), array[0], array[-1])


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=50), st.floats(0, 3))
def test_spans_that_are_near_are_one(pairs: Sequence[tuple[float, float]], gap: float) -> None:
    start = np.array([a for a, _ in pairs], np.float64)
    stop = np.array([a + b for a, b in pairs], np.float64)
    starts, stops = merged(start, stop, gap)
    assert (starts[1:] - stops[:-1] > gap).all()
    for a, b in zip(start, stop, strict=True):
        assert ((starts <= a) & (b <= stops)).any()
