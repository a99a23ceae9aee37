"""Runs of days: what is kept of them is bounded, and a peak of one sample stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.observing.made_runs import GIB

from shardwise.observing.bounded import PhaseSpan, PhaseTimes, extremes, merged, standing_out
from shardwise.observing.lines_read import MetricsLines
from shardwise.observing.rank_record import RankRecord
from shardwise.observing.run_record import RunReader
from shardwise.pictures.rank_charts import RankCharts

PEAK = 9 * GIB


def lines_of(steps: int, peak_at: int, sample_every: int, ranks: int = 1) -> Iterator[str]:
    """A load of a second, and steps of a quarter of one with a forward pass; one sample stands out."""
    place = {"rank": 0, "world_size": ranks, "machine": "m", "host": "h", "pid": 1, "device": ""}
    yield json.dumps({"observed": 1, "run": "a", "began": 1.7e9, "samples_per_second": 20, **place})
    yield f"[0,0,{GIB},0,0,0,0,0,0,0,0,0,0]"
    yield '[2,0.1,0,"from_pretrained"]'
    yield f"[0,0.5,{3 * GIB},0,0,0,0,0,0,0,0,0,0]"
    yield '{"t":0.9,"tell":"load","checkpoint":"m/Tiny","forecast":{"host_bytes":1}}'
    yield "[3,1,0]"
    for step in range(steps):
        t = 1 + step / 4
        yield f'[2,{t},0,"step"]'
        yield f'[2,{t},0,"forward"]'
        if step % sample_every == 0:
            yield f"[0,{t},{PEAK if step == peak_at else GIB + step % 7},0,0,0,0,0,0,{step},0,0,0]"
        yield f"[3,{t + 0.125},0]"
        yield f"[3,{t + 0.1875},0]"


def write_run(run: Path, **shape: int) -> Path:
    file = run / "observed" / "rank-00000.jsonl"
    file.parent.mkdir(parents=True)
    with file.open("w") as text:
        text.writelines(f"{line}\n" for line in lines_of(**shape))
    return run


def held_bytes(rank: RankRecord) -> int:
    arrays = [
        rank.rows,
        rank.shares,
        *(kept for times in rank.times.values() for kept in (times.starts, times.stops)),
    ]
    return sum(len(kept) * kept.itemsize for kept in arrays)


def test_many_short_steps_are_counted_and_not_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=20_000, peak_at=12_002, sample_every=2, ranks=1024)
    [rank] = RunReader(run).read().ranks
    assert rank.taken == 10_002
    assert 1024 < rank.count <= 4096
    assert held_bytes(rank) < 1 << 20
    assert not rank.stacks
    samples = rank.samples()
    assert samples["anonymous"].max() == PEAK
    assert samples["anonymous"][0] == GIB
    assert samples["read"][-1] == 19_998
    assert (np.diff(samples["t"]) >= 0).all()
    assert [rank.newest(back)["read"] for back in range(200)] == [19_998 - 2 * back for back in range(200)]
    times = {found.path: found for found in rank.phases()}
    assert [*times] == [("from_pretrained",), ("step",), ("step", "forward")]
    step, forward = times["step",], times["step", "forward"]
    assert (step.times, step.seconds) == (20_000, pytest.approx(20_000 * 0.1875))
    assert forward.seconds == pytest.approx(20_000 * 0.125)
    assert forward.most_kib == step.most_kib == PEAK
    assert times["from_pretrained",].most_kib == 3 * GIB
    [told] = rank.told
    assert told.around is not None
    assert (told.around.before_kib, told.around.most_kib, told.around.stop) == (GIB, 3 * GIB, 1)
    charts = RankCharts(RunReader(run).read())
    assert charts.notes()[0].startswith(f"of 10002 samples of rank 0 {rank.count} are kept, the least and the most")
    assert max(charts.memory().series[0].y) == 9


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=2, max_size=60), st.integers(3000, 9000)
)
def test_joined_spans_are_drawn_as_all_of_them_are(pattern: list[tuple[int, int]], count: int) -> None:
    """Pictures join what is nearer than a six hundredth of the time."""
    gaps, lengths = np.resize(np.array(pattern, np.float64).T, (2, count))
    start = np.cumsum(gaps + np.concatenate([[0.0], lengths[:-1]]))
    stop = start + lengths
    times = PhaseTimes(("step",), 0)
    for a, b in zip(start.tolist(), stop.tolist(), strict=True):
        times.add(PhaseSpan(("step",), 0, a), b)
    assert len(times.starts) < 2048
    gap = float(stop[-1]) / 600
    drawn, right = merged(*times.spans(), gap), merged(start, stop, gap)
    assert [*map(list, drawn)] == [*map(list, right)]


def test_what_is_still_open_is_told_as_far_as_it_has_come(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3, peak_at=2, sample_every=1)
    file = tmp_path / "observed" / "rank-00000.jsonl"
    file.write_text(
        "".join(file.read_text().splitlines(keepends=True)[:-2])
    )  # killed in the last pass, at its sample
    [rank] = RunReader(tmp_path).read().ranks
    assert rank.now_in() == ("step", "forward")
    for _ in range(2):  # to look changes nothing
        times = {found.path: found for found in rank.phases()}
        assert (times["step",].times, times["step",].seconds) == (3, pytest.approx(2 * 0.1875))
        assert times["step", "forward"].most_kib == PEAK


def test_metrics_of_many_steps_keep_what_stands_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as text:
        for step in range(10_000):
            told = {"loss": 500.0 if step == 4321 else 2.0 + step % 5, "grad_norm": 0.001 if step == 77 else 1.0}
            text.write(json.dumps({"kind": "step", "step": step, **told}) + "\n")
            if step % 1000 == 999:
                text.write(json.dumps({"kind": "evaluation", "step": step, "loss": 1.0}) + "\n")
    metrics = MetricsLines(file, 2048)
    metrics.read_on()
    assert len(metrics.lines) < 2048
    steps = {line["step"]: line for line in metrics.lines if line["kind"] == "step"}
    assert [*steps] == sorted(steps)
    assert {0, 77, 4321, 9999} <= {*steps}
    assert len([line for line in metrics.lines if line["kind"] == "evaluation"]) >= 2


@given(
    st.lists(st.one_of(st.floats(-1e9, 1e9), st.just(float("nan"))), min_size=1, max_size=300), st.integers(1, 20)
)
def test_numbers_that_lack_move_no_others(values: list[float], parts: int) -> None:
    array = np.array(values, np.float64)
    places = extremes(array, parts)
    if np.isnan(array).all():
        return
    assert (np.nanmax(array[places]), np.nanmin(array[places])) == (np.nanmax(array), np.nanmin(array))
    assert len(standing_out([array, -array], 40)) <= 40


REPORT = """
from pathlib import Path
from shardwise.cli.report import report_command
try:
    report_command()
finally:  # not getrusage's, which begins with what the process that started this one has
    print("peak", int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_report_of_two_million_steps_takes_little_memory(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "long", steps=2_000_000, peak_at=1_234_560, sample_every=40)
    (run / "metrics.jsonl").write_text(
        "".join(f'{{"kind":"step","step":{step},"loss":{9 if step == 77_777 else 2}}}\n' for step in range(200_000))
    )
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(run)], capture_output=True, text=True, check=False, timeout=590
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("peak ")[1]) < 400  # of which the libraries that draw take 150
    page = (run / "report" / "report.html").read_text("utf-8")
    assert "<td>step: forward</td><td>2000000</td><td>250000.00 s</td>" in page
    assert len(page) < 5_000_000
