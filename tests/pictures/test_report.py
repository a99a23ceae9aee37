"""``shardwise report``: a page and PNGs of runs."""

import base64
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from tests.cli.running import RUNNER
from tests.observing.synthetic_runs import GIB, make_metrics, make_rank, make_run

from shardwise import pictures
from shardwise.cli import main

drawing = [
    pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"),
    # matplotlib's oldest supported version calls pyparsing by names of which that warns.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
pytestmark = drawing


def report(*arguments: object) -> Result:
    return RUNNER.invoke(main, ["report", *map(str, arguments)])


def page_in(folder: Path) -> str:
    return (folder / "report.html").read_text("utf-8")


def rows_in(page: str, title: str) -> list[list[str]]:
    [table] = re.findall(f"<h3>{title}</h3>(.*?)</table>", page, re.DOTALL)
    return [re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", table)]


BY_PHASE = "Peak memory by phase and rank, and seconds of the slowest rank"


def test_a_run_is_a_page_with_memory_by_rank_and_phase(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out", device_gib=2.0)
    make_metrics(run)
    result = report(run)
    assert (result.exit_code, result.stderr) == (0, "")
    names = sorted(path.name for path in (run / "report").iterdir())
    drawn = ["accelerator-1.png", "grad_norm.png", "learning_rate.png", "loss.png", "memory-1.png"]
    assert names == [*drawn, "report.html"]
    page = page_in(run / "report")
    shown = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,(.*?)"', page)]
    assert sorted(shown) == sorted((run / "report" / name).read_bytes() for name in drawn)
    assert all(data.startswith(b"\x89PNG") for data in shown)
    head, *rows = rows_in(page, BY_PHASE)
    assert head == ["phase", "times", "seconds", "rank 0", "rank 1"]
    found = {row[0]: row[1:] for row in rows}
    assert found["load"][:2] == ["1", "1.00"]
    assert found["step"][:2] == ["4", "3.40"]
    assert found["step: forward"][2] == "7.00 GiB, accelerator 2.00 GiB"
    assert rows_in(page, "Peaks by rank")[1][:5] == ["0", "host", "5.0", "7.00 GiB", "7.00 GiB"]


def test_the_page_sends_no_requests_and_runs_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out")
    report(run)
    page = page_in(run / "report")
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert set(re.findall(r'(?:src|href)\s*=\s*"([^,]*)', page)) == {"data:image/png;base64"}


def test_words_of_others_are_words(tmp_path: Path) -> None:
    evil = "</style><script>alert(1)</script><img src=x onerror=y>$x$_{\"'&"
    run = tmp_path / f"{evil.replace('/', '|')}\udce9 模"
    make_rank(run, 0, 1, [(0.0, evil), (0.5, {"anonymous": GIB}), (1.0, None)], host=evil)
    make_metrics(run / "_tenant <b>")
    result = report(run, run, tmp_path / run.name / "_tenant <b>")
    assert result.exit_code == 0, result.exception
    page = page_in(run / "report")
    for text in ("<script", "<b>", "<img src=x", "onerror=y>"):
        assert text not in page
    assert "&lt;script&gt;alert(1)" in page


def test_numbers_of_others_are_any(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, [(0.0, {}), (1.0, "x")])
    made = path.read_text()
    for number in ("NaN", "1" + "0" * 400, "-5", "1e308", '"1"', "null"):
        path.write_text(f'{made}{{"t":{number},"thread":0,"begin":"y"}}\n[0.5{f",{number}" * 9}]\n')
        entry = f'{{"step":1,"loss":{number},"grad_norm":1}}'
        history = f'[{entry}, {entry}, {{"step":{number},"loss":2}}]'
        (tmp_path / "trainer_state.json").write_text(f'{{"log_history": {history}}}')
        result = report(tmp_path)
        assert result.exit_code == 0, (number, result.exception)


def test_runs_are_compared_under_labels_of_their_own(tmp_path: Path) -> None:
    first, second, third = (make_run(tmp_path / name, seconds=2) for name in ("a/out", "b/out", "c/other"))
    make_metrics(first)
    for tenant in ("ada", "bob"):
        make_metrics(second / tenant)
    (third / "observed" / "rank-00001.jsonl").unlink()
    result = report(first, second, third, "--output", tmp_path / "seen")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "other: no file of rank 1 of 2\n"
    page = page_in(tmp_path / "seen")
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == ["Summary", "Runs compared", str(first), str(second), "other"]
    wanted = {"loss.png", "memory.png", "memory-1.png", "memory-3.png"}
    assert wanted <= {path.name for path in (tmp_path / "seen").iterdir()}


def test_the_page_begins_with_figures_and_what_differs(tmp_path: Path) -> None:
    small, large = make_run(tmp_path / "small"), make_run(tmp_path / "large", device_gib=2.0)
    make_metrics(small)
    make_metrics(large, steps=40)
    assert report(small, large).exit_code == 0
    page = page_in(small / "report")
    different = {row[0]: row[1:] for row in rows_in(page, "Different")}
    assert different[""] == ["small", "large"]
    assert different["peak accelerator memory of a rank"] == ["", "2.00 GiB"]
    assert different["steps"] == ["20", "40 (+100.0%)"]
    same = {row[0]: row[1:] for row in rows_in(page, "The same in all runs")}
    assert same["peak host memory of a rank"] == ["7.00 GiB", "7.00 GiB"]
    assert same["seconds in load"] == ["1.00", "1.00"]
    assert page.index("Different") < page.index("The same in all runs") < page.index("<img")
    assert page.count("<td>load: read weights</td>") == 2


def test_noisy_curves_are_smoothed_and_end_where_they_end() -> None:
    steps = np.arange(200)
    noisy = 5 + np.random.default_rng(0).normal(scale=0.2, size=200)
    smooth = pictures._smoothed(noisy)
    assert smooth is not None
    assert np.abs(smooth - 5).max() < 0.25, "the ends are averages of fewer points, not of zeros"
    assert pictures._smoothed(5 * 0.99**steps) is None
    assert pictures._smoothed(noisy[:10]) is None


def test_a_run_that_was_not_observed_has_its_curves_and_one_without_samples_a_page(tmp_path: Path) -> None:
    make_metrics(tmp_path / "trained")
    result = report(tmp_path / "trained")
    assert result.exit_code == 0
    assert "no rank was observed" in result.stderr
    make_rank(tmp_path / "begun", 0, 1, [(0.0, "x")], is_closed=False)
    result = report(tmp_path / "begun")
    assert result.exit_code == 0, result.exception
    assert "rank 0 did not end in order" in result.stderr


def test_of_many_ranks_the_fullest_are_drawn(tmp_path: Path) -> None:
    for rank in range(40):
        own = GIB * (90 if rank == 31 else 1)
        make_rank(tmp_path, rank, 40, [(0.0, "load"), (0.5, {"anonymous": own}), (1.0, None)])
    result = report(tmp_path)
    assert result.exit_code == 0, result.exception
    assert result.stderr.endswith("16 of 40 ranks are drawn, those with most memory\n")
    head, row = rows_in(page_in(tmp_path / "report"), BY_PHASE)
    assert len(head) == 3 + 8
    assert row[head.index("rank 31")] == "90.00 GiB"


def test_figures_that_cannot_be_drawn_or_written_are_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "out", seconds=2)
    (tmp_path / "file").touch()
    for arguments, message in (
        ((tmp_path / "not here",), "no such folder"),
        ((tmp_path,), "there is neither observed/"),
        ((run, "--output", tmp_path / "file"), "cannot be written (File exists)"),
    ):
        result = report(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda _: None)
    result = report(run)
    assert result.exit_code == 2
    assert "matplotlib, which draws, is not installed; pip install 'shardwise[report]'" in result.stderr
    assert not (run / "report").exists()
