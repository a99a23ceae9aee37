"""``shardwise bench startup``: arms, figures, the table, the picture, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.checkpoints import SHAPES, write
from benchmarks.training import smaller
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli import bench, main
from shardwise.errors import FormatError, StorageError
from shardwise.execution.processes.local_ranks import RankError, RanksLateError
from shardwise.observing.run_record import RunReader
from shardwise.pictures import installed
from shardwise.startup import figures, kinds, measuring
from shardwise.startup.figures import ArmFigures, ArmRun, GrowthLimit, StartupResult
from shardwise.startup.values import BroughtUp, compared, run_starts, values_of
from shardwise.tensors.boxes import Box
from shardwise.tensors.fingerprint import MODULUS, fingerprint

MIXES = "mix_stderr" in signature(CliRunner).parameters
RUNNER = CliRunner(**({"mix_stderr": False} if MIXES else {}))
TINY = SHAPES["qwen3-0.6b"].tiny()
MIB = 1 << 10
"""In KiB."""

# matplotlib's oldest supported version calls pyparsing by names of which that warns.
old_names = pytest.mark.filterwarnings("ignore::DeprecationWarning")
drawing = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("plotly", "matplotlib")),
    reason="plotly or matplotlib is not installed",
)


def startup(*arguments: object) -> Result:
    return RUNNER.invoke(main, ["bench", "startup", *map(str, arguments)])


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────


def test_what_is_refused_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(bench, "run_fresh", nobody)
    model = write(TINY, tmp_path)
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine.txt").write_text("")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    found = {
        "no config": startup(bare, "--ranks", 2, "--out", tmp_path / "f"),
        "no model": startup(tmp_path / "none", "--ranks", 2, "--out", tmp_path / "a"),
        "no weights": startup(used, "--ranks", 2, "--out", tmp_path / "b"),
        "no ranks": startup(model, "--ranks", 0, "--out", tmp_path / "c"),
        "arm": startup(model, "--ranks", 2, "--arms", "shardwise,fast", "--out", tmp_path / "d"),
        "folder": startup(model, "--ranks", 2, "--out", used),
        "file": startup(model, "--ranks", 2, "--out", used / "mine.txt"),
    }
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: None)
    found["accelerate"] = startup(model, "--ranks", 2, "--arms", "accelerate", "--out", tmp_path / "e")
    assert {name: result.exit_code for name, result in found.items()} == dict.fromkeys(found, 2)
    errors = {name: result.stderr for name, result in found.items()}
    assert str(tmp_path / "none") in errors["no model"]
    assert str(used) in errors["no weights"]
    assert f"{bare}: there is no config.json in it that names a model_type" in errors["no config"]
    assert "--ranks" in errors["no ranks"]
    assert "'fast' is none; there are shardwise, native," in errors["arm"]
    assert "there is mine.txt in it already; name a new or an empty folder" in errors["folder"]
    assert "cannot be made" in errors["file"]
    assert "accelerate is not installed; pip install 'shardwise[accelerate]'" in errors["accelerate"]
    assert not (tmp_path / "a").exists(), "a folder was made for nothing"


def test_a_rank_of_a_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    result = startup(write(TINY, tmp_path), "--ranks", 1, "--arms", "shardwise", "--out", tmp_path / "out")
    assert (result.exit_code, "call it without torchrun" in result.stderr) == (2, True)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


def made_run(run: Path, own: list[list[tuple[float, int, int]]]) -> Path:
    """Ranks with samples of (seconds, own KiB, mapped KiB); load until 1, wrap until 2, optimizer until 3."""
    for rank, samples in enumerate(own):
        header = {"observed": 1, "run": "one", "began": 1000.0 + rank * 0.5, "samples_per_second": 10, "rank": rank}
        place = {"world_size": len(own), "machine": "m", "host": "h", "pid": 1, "device": ""}
        rows: list[list[Any]] = []
        for number, name in enumerate(kinds.PHASES):
            rows += [[2, number, 0, name], [3, number + 1, 0]]
        rows += [[0, t, kib // 2, kib - kib // 2, mapped, 0, 0, 0, 0, 0, 0, 0, 0] for t, kib, mapped in samples]
        end = {"t": 3.0, "end": True, "peak_kib": 0}
        lines = [header | place, *sorted(rows, key=lambda row: row[1]), end]
        path = run / "observed" / f"rank-{rank:05d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_growth_is_that_of_one_moment_over_the_level_of_each_rank(tmp_path: Path) -> None:
    first = [(0.0, 100 * MIB, 0), (1.0, 160 * MIB, 7 * MIB), (1.5, 130 * MIB, 0), (3.0, 130 * MIB, 0)]
    second = [(0.0, 200 * MIB, 0), (1.0, 240 * MIB, 0), (2.5, 200 * MIB, 0)]  # begins half a second later
    record = RunReader(made_run(tmp_path, [first, second])).read()
    found = figures.figures_of(record)
    # At 1.0 the second has grown by 20 and the first by 60; at 1.5 by 40 and 30.
    assert found.growth_bytes == (60 + 20) << 20
    assert found.fullest_bytes == 60 << 20
    assert found.mapped_bytes == 7 << 20
    assert found.seconds == pytest.approx(2.5)
    assert found.phases == pytest.approx({"load": 1.0, "wrap": 1.0, "optimizer": 1.0})
    chart = figures.chart_of("native", record, found)
    assert max(np.sum([series.y for series in chart.series], axis=0)) == pytest.approx(80 / 1024)
    assert [(band.name, band.start, band.stop) for band in chart.bands] == [
        ("load", 0.0, 1.5),
        ("wrap", 1.5, 2.5),
        ("optimizer", 2.5, 3.5),
    ]


@pytest.mark.parametrize("inner", ["from_pretrained", "wrap"])
def test_a_rank_whose_disk_was_full_before_its_end_is_an_error(tmp_path: Path, inner: str) -> None:
    """With phases of its own within what there is: the optimizer was never written down."""
    run = made_run(tmp_path, [[(0.0, 0, 0), (2.0, MIB, 0)]])
    file = run / "observed" / "rank-00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    cut = next(number for number, line in enumerate(lines) if '"wrap"' in line)
    file.write_text("".join([*lines[:2], f'[2, 0, 0, "{inner}"]\n[3, 0.5, 0]\n', *lines[2:cut]]))
    with pytest.raises(FormatError, match="rank 0 has not been observed to its end"):
        figures.figures_of(RunReader(run).read())


def test_the_limit_is_the_shards_and_a_budget_and_32_mib_for_each_rank() -> None:
    def limit(growth_mib: int) -> GrowthLimit:
        taken = ArmFigures(1.0, {}, growth_mib << 20, 0, 0, 0)
        return figures.limit_of(ArmRun("shardwise", "", taken, 100 << 20, 0, {}), 2, 256 << 20)

    assert limit(100 + 2 * (256 + 32)).holds
    assert not limit(100 + 2 * (256 + 32) + 1).holds


@pytest.mark.parametrize("as_json", [False, True])
def test_growth_over_the_limit_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    run = ArmRun("shardwise", "out/shardwise", ArmFigures(1.5, {}, 3 << 30, 2 << 30, 0, 0), 1 << 30, 0, {"a": "1"})
    other = ArmRun(
        "native", "out/native", ArmFigures(2.5, {}, 9 << 30, 4 << 30, 0, 5 << 30), 1 << 30, 0, {"a": "2"}
    )
    not_run = {"accelerate": "accelerate is not installed"}
    made = StartupResult("m", 2, "auto", [run, other], not_run, GrowthLimit(2 << 30, 3 << 30))
    monkeypatch.setattr(bench, "measure_startup", lambda *_: made)
    result = startup(write(TINY, tmp_path), "--ranks", 2, *(["--json"] if as_json else []))
    assert result.exit_code == 1
    if as_json:
        told = json.loads(result.stdout)
        assert told["limit"] == {"at_most_bytes": 2 << 30, "growth_bytes": 3 << 30, "holds": False}
        assert told["arms"]["native"]["values"] == "1 of 1 differ, as a"
        assert told["arms"]["native"]["runs"][0]["figures"]["device_bytes"] == 5 << 30
        assert told["not_run"] == not_run
        return
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "arm seconds growth fullest rank mapped files device values" in lines
    assert "shardwise 1.50 3.00 GiB 2.00 GiB 0 B 0 B same" in lines
    assert "native 2.50 9.00 GiB 4.00 GiB 0 B 5.00 GiB 1 of 1 differ, as a" in lines
    assert "accelerate did not run: accelerate is not installed" in lines
    assert any(line.endswith("DOES NOT HOLD") for line in lines)


@given(st.data())
def test_fingerprints_of_any_cut_add_up_to_that_of_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) + 1
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    total = 0
    for start, stop in ((0, cut), (cut, shape[dim])):
        if start == stop:
            continue
        box = Box(
            tuple(start if d == dim else 0 for d in range(len(shape))),
            tuple(stop - start if d == dim else size for d, size in enumerate(shape)),
        )
        part = np.ascontiguousarray(np.take(whole, range(start, stop), axis=dim)).reshape(-1).view(np.uint8)
        starts = run_starts(box, shape)
        nbytes = len(part) // len(starts)
        for number, first in enumerate(starts):
            total += fingerprint(memoryview(part[number * nbytes :][:nbytes]), first * 4)
    assert total % MODULUS == fingerprint(memoryview(whole.reshape(-1).view(np.uint8)))


def test_a_peer_that_fails_or_hangs_is_told_and_ours_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, late = {"native"}, {"accelerate"}
    started: list[tuple[str, object]] = []

    def in_place_of_ranks(size: int, _: object, arm: str, *others: str, **told: object) -> list[BroughtUp]:
        started.append((arm, told["timeout_s"]))
        if arm in failing:
            raise RankError({1: "Traceback ...\nRuntimeError: it is broken"}, {})
        if arm in late:
            raise RanksLateError({1: "late", 3: "late"}, {})
        made_run(Path(others[-1]), [[(0.0, 0, 0), (3.0, 50 * MIB, 0)]] * size)
        return [BroughtUp(20 << 20, 0, 256 << 20, {"a": 1}, {"b": 2})] * size

    def full(*_: object) -> None:
        raise StorageError("startup.png: it cannot be written (No space left on device)")

    monkeypatch.setattr(bench, "run_fresh", in_place_of_ranks)
    monkeypatch.setattr(kinds, "lacking", lambda _: "")
    monkeypatch.setattr(measuring, "lacking", lambda _: "")
    monkeypatch.setattr(installed, "lacking", lambda *names: ["plotly"])
    model, out = write(TINY, tmp_path), tmp_path / "out"
    (model / "odd.bin").symlink_to("/proc/self/mem")  # a file beside, that cannot be read
    arms = ("--arms", "transformers,native,shardwise,accelerate", "--repeats", 2, "--dtype", "auto", "--limit", 9.5)
    result = startup(model, "--ranks", 2, "--out", out, *arms)
    assert result.exit_code == 0, result.stderr
    names = ["shardwise", "native", "accelerate", "transformers", "shardwise", "transformers"]
    assert started == [(name, 9.5) for name in names]
    assert "native did not run: [rank 1] RuntimeError: it is broken" in result.stdout
    told = "accelerate was ended: after 9.5 s rank 1, 3 had not come to its end; --limit gives more"
    assert f"accelerate did not run: {told}" in result.stdout.splitlines()
    assert f"accelerate-1: {told}" in result.stderr.splitlines()
    assert "limit of shardwise: 100.00 MiB of at most 616.00 MiB" in result.stdout
    assert "there is no picture, and no report: plotly, which draws, is not installed" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == [
        "shardwise-1",
        "shardwise-2",
        "startup.json",
        "transformers-1",
        "transformers-2",
    ]
    result = startup(model, "--ranks", 2, "--out", tmp_path / "one", "--arms", "native")
    assert (result.exit_code, "no arm could run" in result.stderr) == (2, True)
    monkeypatch.setattr(installed, "lacking", lambda *names: [])
    monkeypatch.setattr(measuring, "write_side_by_side", full)
    result = startup(model, "--ranks", 2, "--out", tmp_path / "full", "--arms", "shardwise")
    assert "no report: startup.png: it cannot be written (No space" in result.stderr
    assert (result.exit_code, "limit of shardwise: 100.00 MiB" in result.stdout) == (0, True)
    late.add("shardwise")
    result = startup(model, "--ranks", 2, "--out", tmp_path / "late", *arms)
    assert (result.exit_code, "error: shardwise was ended: after 9.5 s" in result.stderr) == (2, True)
    failing.add("shardwise")
    result = startup(model, "--ranks", 2, "--out", tmp_path / "other", *arms)
    assert (result.exit_code, "RuntimeError: it is broken" in result.stderr) == (2, True)


def test_ranks_that_hold_other_values_are_told() -> None:
    held = [BroughtUp(0, 0, 0, {"a": 1, "b": 2}, {"c": 3}), BroughtUp(0, 0, 0, {"a": 5}, {"c": 3})]
    ours = values_of(held)
    assert compared(ours, ours) == "same"
    moved = [BroughtUp(0, 0, 0, {"a": 4}, {"c": 3}), BroughtUp(0, 0, 0, {"a": 2, "b": 2}, {"c": 3})]
    assert compared(values_of(moved), ours) == "same"  # cut at another place
    apart = [BroughtUp(0, 0, 0, {"a": 6, "b": 2}, {"c": 3}), BroughtUp(0, 0, 0, {}, {"c": 4})]
    assert compared(values_of(apart), ours) == "1 of 3 differ, as c"
    assert compared(values_of(apart), values_of(apart)) == "1 of 3 differ, as c"


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────


@drawing
@old_names
def test_the_picture_can_be_read_on_white_and_on_black(tmp_path: Path) -> None:
    from matplotlib.image import imread

    from shardwise.pictures.images import INK, write_side_by_side

    samples = [(t / 100, int(200 * MIB + t * MIB + 20 * MIB * (t % 30 == 0)), 0) for t in range(300)]
    record = RunReader(made_run(tmp_path / "run", [samples] * 4)).read()
    charts = [figures.chart_of(name, record, figures.figures_of(record)) for name in kinds.KINDS]
    write_side_by_side(charts, tmp_path / "all.png")
    image = imread(tmp_path / "all.png")
    assert image[0, 0, 3] == 0  # nothing behind it
    assert (tmp_path / "all.png").stat().st_size < 150_000
    channels = np.array([int(INK[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    assert min(1.05 / (luminance + 0.05), (luminance + 0.05) / 0.05) > 3  # of letters as large as these


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────


@drawing
@old_names
@pytest.mark.distributed
def test_two_arms_and_why_the_others_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accelerate, on a machine with memory for the model once."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        kinds.importlib.util, "find_spec", lambda name: None if name == "accelerate" else real(name)
    )
    monkeypatch.setattr(measuring, "host_pools", lambda: {"": TINY.nbytes * 2 * 3 // 2})
    out = tmp_path / "out"
    result = startup(write(TINY, tmp_path), "--ranks", 2, "--out", out)
    assert result.exit_code == 0, result.stderr
    told = json.loads((out / "startup.json").read_text())
    assert list(told["arms"]) == ["shardwise", "transformers"]
    assert {arm["values"] for arm in told["arms"].values()} == {"same"}
    assert [run["host_shards_bytes"] for arm in told["arms"].values() for run in arm["runs"]] == pytest.approx(
        [2 * TINY.nbytes] * 2, rel=0.01
    )
    assert told["limit"]["holds"]
    assert {name: reason.partition(":")[0].partition(";")[0] for name, reason in told["not_run"].items()} == {
        "native": "every rank holds the whole model",
        "native-efficient": "the first rank holds the whole model",
        "accelerate": "accelerate is not installed",
        "accelerate-efficient": "accelerate is not installed",
    }
    assert "limit of shardwise:" in result.stdout
    assert "\x1b" not in result.stdout
    for arm in told["arms"]:
        record = RunReader(out / arm).read()
        assert [rank.rank for rank in record.ranks] == [0, 1]
        assert [times.name for times in record.ranks[0].phases() if len(times.path) == 1] == [
            "load",
            "wrap",
            "optimizer",
        ]
        assert arm in (out / "report" / "report.html").read_text("utf-8")
    assert (out / "startup.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_who_holds_less_grows_less(tmp_path: Path) -> None:
    """All arms make one model; memory-efficient ones grow less than plain ones, ours as transformers' own."""
    shape = smaller("qwen3-100m", num_hidden_layers=6, max_window_layers=6, vocab_size=16384)
    result = startup(write(shape, tmp_path), "--ranks", 4, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["not_run"] == {}
    assert {name: arm["values"] for name, arm in told["arms"].items()} == dict.fromkeys(kinds.KINDS, "same")
    grown = {name: arm["runs"][0]["figures"]["growth_bytes"] for name, arm in told["arms"].items()}
    assert grown["native-efficient"] < grown["native"]
    assert grown["accelerate-efficient"] < grown["accelerate"]
    least, ours = grown.pop("transformers"), grown.pop("shardwise")
    assert ours < min(grown.values()) / 1.5
    assert ours < 1.1 * least
