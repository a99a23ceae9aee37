"""``shardwise bench startup``: arms, figures, the table, the picture, and what is refused."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.checkpoints import SHAPES, write
from benchmarks.training import smaller
from click.testing import Result
from tests.cli.running import RUNNER
from tests.observing.made_runs import MIB, make_rank

from shardwise import pictures
from shardwise import startup as comparison
from shardwise.cli import bench, main
from shardwise.errors import FormatError, StorageError
from shardwise.execution.processes import RankError, RanksLateError
from shardwise.run_records import read_run
from shardwise.startup import ArmRun, StartupResult, arm_run
from shardwise.startup_arms import ARMS, PHASES, ArmOnRank

TINY = SHAPES["qwen3-0.6b"].tiny()
# matplotlib's oldest supported version calls pyparsing by names of which that warns.
old_names = pytest.mark.filterwarnings("ignore::DeprecationWarning")
drawing = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


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
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: None)
    found["accelerate"] = startup(model, "--ranks", 2, "--arms", "accelerate", "--out", tmp_path / "e")
    assert {name: result.exit_code for name, result in found.items()} == dict.fromkeys(found, 2)
    errors = {name: result.stderr for name, result in found.items()}
    assert str(tmp_path / "none") in errors["no model"]
    assert str(used) in errors["no weights"]
    assert f"{bare}: has no config.json with a model_type" in errors["no config"]
    assert "--ranks" in errors["no ranks"]
    assert "there is no 'fast', but shardwise, native," in errors["arm"]
    assert "it has mine.txt in it. Name a new or an empty folder." in errors["folder"]
    assert "cannot be created" in errors["file"]
    assert "accelerate is not installed. Run pip install 'shardwise[accelerate]'" in errors["accelerate"]
    assert not (tmp_path / "a").exists(), "a folder was made for nothing"


def test_a_rank_of_a_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    result = startup(write(TINY, tmp_path), "--ranks", 1, "--arms", "shardwise", "--out", tmp_path / "out")
    assert (result.exit_code, "Start it without torchrun" in result.stderr) == (2, True)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


def made_run(run: Path, own: list[list[tuple[float, int, int]]]) -> Path:
    """Ranks with samples of (seconds, own KiB, mapped KiB); load until 1, wrap until 2, optimizer until 3."""
    for rank, samples in enumerate(own):
        lines: list[tuple[float, Any]] = []
        for number, name in enumerate(PHASES):
            lines += [(number + rank / 2, name), (number + 1 + rank / 2, None)]
        for t, kib, mapped in samples:
            lines.append((t, {"anonymous": kib // 2, "shared": kib - kib // 2, "file": mapped}))
        make_rank(run, rank, len(own), lines)
    return run


def test_growth_is_that_of_one_moment_over_the_level_of_each_rank(tmp_path: Path) -> None:
    first = [(0.0, 100 * MIB, 0), (1.0, 160 * MIB, 7 * MIB), (1.5, 130 * MIB, 0), (3.0, 130 * MIB, 0)]
    second = [(0.5, 200 * MIB, 0), (1.5, 240 * MIB, 0), (3.0, 200 * MIB, 0)]  # begins half a second later
    found = arm_run("native", read_run(made_run(tmp_path, [first, second])))
    # At 1.0 the second has grown by 20 and the first by 60; at 1.5 by 40 and 30.
    assert found.growth_bytes == (60 + 20) << 20
    assert found.fullest_bytes == 60 << 20
    assert found.mapped_bytes == 7 << 20
    assert found.seconds == pytest.approx(2.5)
    assert found.phases == pytest.approx({"load": 1.0, "wrap": 1.0, "optimizer": 1.0})
    assert found.panel is not None
    assert max(np.sum(found.panel.layers, axis=0)) == pytest.approx(80 / 1024)
    assert found.panel.spans == {"load": (0.0, 1.5), "wrap": (1.5, 2.5), "optimizer": (2.5, 3.5)}


@pytest.mark.parametrize("inner", ["from_pretrained", "wrap"])
def test_a_rank_whose_disk_was_full_before_its_end_is_an_error(tmp_path: Path, inner: str) -> None:
    """With phases of its own within what there is: the optimizer was never written down."""
    run = made_run(tmp_path, [[(0.0, 0, 0), (2.0, MIB, 0)]])
    file = run / "observed" / "rank-00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    cut = next(number for number, line in enumerate(lines) if '"wrap"' in line)
    begun = f'{{"t":0,"thread":0,"begin":"{inner}"}}\n{{"t":0.5,"thread":0,"end":true}}\n'
    file.write_text("".join([*lines[:2], begun, *lines[2:cut]]))
    with pytest.raises(FormatError, match="rank 0 was not observed to its end"):
        arm_run("native", read_run(run))


def test_a_rank_without_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="rank 1 was not observed to its end"):
        arm_run("native", read_run(made_run(tmp_path, [[(0.0, 0, 0)], []])))


def test_growth_over_the_limit_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ArmRun("shardwise", "out/shardwise", 1.5, {}, 3 << 30, 2 << 30, 0, 0, (3 << 30) - 1, {"a": "1"})
    other = ArmRun("native", "out/native", 2.5, {}, 9 << 30, 4 << 30, 0, 5 << 30, 0, {"a": "2"})
    not_run = {"accelerate": "accelerate is not installed"}
    made = StartupResult("m", 2, "auto", {"shardwise": run, "native": other}, not_run)
    assert replace(made, runs={"shardwise": replace(run, limit_bytes=3 << 30)}).holds
    monkeypatch.setattr(comparison, "compare_startup", lambda *_: made)
    result = startup(write(TINY, tmp_path), "--ranks", 2, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["holds"], told["not_run"]) == (1, False, not_run)
    assert told["arms"]["shardwise"]["limit_bytes"] == (3 << 30) - 1
    assert told["arms"]["native"]["values"] == "1 of 1 differ, as a"
    result = startup(write(TINY, tmp_path), "--ranks", 2)
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "arm seconds growth fullest rank mapped files device values" in lines
    assert "shardwise 1.50 3.00 GiB 2.00 GiB 0 B 0 B same" in lines
    assert "native 2.50 9.00 GiB 4.00 GiB 0 B 5.00 GiB 1 of 1 differ, as a" in lines
    assert "accelerate did not run: accelerate is not installed" in lines
    assert any(line.endswith("DOES NOT HOLD") for line in lines)


def test_a_peer_that_fails_or_hangs_is_told_and_ours_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, late = {"native"}, {"accelerate"}
    started: list[tuple[str, object]] = []

    def in_place_of_ranks(size: int, _: object, arm: str, *others: str, **told: object) -> list[ArmOnRank]:
        started.append((arm, told["timeout_s"]))
        if arm in failing:
            raise RankError("[rank 1] Traceback ...\n[rank 1] RuntimeError: it is broken")
        if arm in late:
            raise RanksLateError("rank 1, 3 did not finish in 9.5 s; it was ended")
        made_run(Path(others[-1]), [[(0.0, 0, 0), (3.5, 50 * MIB, 0)]] * size)
        return [ArmOnRank(20 << 20, 256 << 20, {"a": "1", "b": "2"})] * size

    def full(*_: object) -> None:
        raise StorageError("report: it cannot be written (No space left on device)")

    def named(arms: str, out: str) -> Result:
        asked = ("--arms", arms, "--dtype", "auto", "--limit", 9.5)
        return startup(model, "--ranks", 2, "--out", tmp_path / out, *asked)

    monkeypatch.setattr(bench, "run_fresh", in_place_of_ranks)
    monkeypatch.setattr(comparison, "_missing", lambda _: "")
    monkeypatch.setattr(pictures, "draw_report", full)
    monkeypatch.setattr(pictures, "draw_panels", lambda _: b"")
    model, out = write(TINY, tmp_path), tmp_path / "out"
    (model / "odd.bin").symlink_to("/proc/self/mem")  # a file that cannot be read
    arms = ("--arms", "transformers,native,shardwise,accelerate", "--dtype", "auto", "--limit", 9.5)
    result = startup(model, "--ranks", 2, "--out", out, *arms)
    assert result.exit_code == 0, result.stderr
    assert started == [(name, 9.5) for name in ("shardwise", "native", "accelerate", "transformers")]
    assert "native did not run: [rank 1] RuntimeError: it is broken" in result.stdout
    told = "accelerate was ended: rank 1, 3 did not finish in 9.5 s; it was ended; --limit gives more"
    assert f"accelerate did not run: {told}" in result.stdout.splitlines()
    assert f"accelerate: {told}" in result.stderr.splitlines()
    assert "limit of shardwise: 100.00 MiB of 616.00 MiB" in result.stdout
    assert "no picture and no report: report: it cannot be written (No space" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["shardwise", "startup.json", "transformers"]
    result = named("native", "one")
    assert (result.exit_code, "no arm could run" in result.stderr) == (2, True)
    late.add("shardwise")
    result = named("shardwise", "late")
    assert (result.exit_code, "error: shardwise was ended: rank 1, 3" in result.stderr) == (2, True)
    failing.add("shardwise")
    result = named("shardwise,transformers", "other")
    assert (result.exit_code, "RuntimeError: it is broken" in result.stderr) == (2, True)


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────


@drawing
@old_names
@pytest.mark.distributed
def test_two_arms_and_why_the_others_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accelerate, on a machine with memory for the model once."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        comparison.importlib.util, "find_spec", lambda name: None if name == "accelerate" else real(name)
    )
    monkeypatch.setattr(comparison, "host_memory", lambda: TINY.nbytes * 2 * 3 // 2)
    out = tmp_path / "out"
    result = startup(write(TINY, tmp_path), "--ranks", 2, "--out", out)
    assert result.exit_code == 0, result.stderr
    told = json.loads((out / "startup.json").read_text())
    assert list(told["arms"]) == ["shardwise", "transformers"]
    assert {arm["values"] for arm in told["arms"].values()} == {"same"}
    limits = [arm["limit_bytes"] for arm in told["arms"].values()]
    assert limits == pytest.approx([2 * TINY.nbytes + 2 * (288 << 20)] * 2, rel=0.01)
    assert told["holds"]
    assert {name: reason.partition(":")[0].partition(";")[0] for name, reason in told["not_run"].items()} == {
        "native": "every rank holds the whole model",
        "native-efficient": "rank 0 holds the whole model",
        "accelerate": "accelerate is not installed. Run pip install 'shardwise[accelerate]'",
        "accelerate-efficient": "accelerate is not installed. Run pip install 'shardwise[accelerate]'",
    }
    assert "limit of shardwise:" in result.stdout
    assert "\x1b" not in result.stdout
    for arm in told["arms"]:
        record = read_run(out / arm)
        assert [rank.rank for rank in record.ranks] == [0, 1]
        assert [span.path[0] for span in record.ranks[0].phases if len(span.path) == 1] == [*PHASES]
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
    assert {name: arm["values"] for name, arm in told["arms"].items()} == dict.fromkeys(ARMS, "same")
    grown = {name: arm["growth_bytes"] for name, arm in told["arms"].items()}
    assert grown["native-efficient"] < grown["native"]
    assert grown["accelerate-efficient"] < grown["accelerate"]
    least, ours = grown.pop("transformers"), grown.pop("shardwise")
    assert ours < min(grown.values()) / 1.5
    assert ours < 1.1 * least
