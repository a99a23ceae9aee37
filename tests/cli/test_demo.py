"""`demo`: what it makes, what it proves, and that it says so when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardwise import verify
from shardwise.cli.demo import CORPUS, DemoOutcome, demo_command, find_faults, prepare_folder
from shardwise.errors import ConfigError
from shardwise.report.forecast_parts import RankForecast
from shardwise.report.load_report import LoadReport
from shardwise.report.save_report import SaveReport
from shardwise.training.example import Comparison
from shardwise.training.report import StepFacts, TrainReport
from shardwise.training.texts.rows import Chat, read_rows

# click before 8.2 mixes stderr into stdout unless told not to.
MIXES = "mix_stderr" in signature(CliRunner).parameters
RUNNER = CliRunner(**({"mix_stderr": False} if MIXES else {}))


def run(*arguments: object) -> Result:
    return RUNNER.invoke(demo_command, [str(argument) for argument in arguments])


@pytest.mark.slow
@pytest.mark.distributed
def test_a_demo_cut_short_proves_the_weights_and_says_what_it_did_not_learn(tmp_path: Path) -> None:
    program = "from shardwise.cli.demo import demo_command; demo_command()"
    start = [sys.executable, "-c", program, "--out", str(tmp_path / "out"), "--steps=2"]
    result = subprocess.run(start, check=False, timeout=120, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr
    parts = [line[:5] for line in result.stdout.splitlines() if line.startswith("[")]
    assert parts == [f"[{number}/9]" for number in range(1, 10)]
    same = "49 tensors (47 parameters, 2 buffers), 7.51 MiB: not one bit differs"
    assert result.stdout.count(same) == 2
    assert f"loaded by transformers: {same}" in result.stdout
    assert "rank 0 of 2: read 3.38 MiB of 6.76 MiB" in result.stdout
    assert "it went on with step 16, and ended" in result.stdout
    assert "cy alone differs by " in result.stdout
    assert verify(tmp_path / "out" / "trained").compared == 46
    assert (tmp_path / "out" / "trained" / "tokenizer.json").is_file()
    assert "it should have fallen below 2.0" in result.stdout
    assert len(list((tmp_path / "out" / "checkpoint").glob("*.safetensors"))) == 3
    assert (tmp_path / "out" / "checkpoint" / "model.safetensors.index.json").is_file()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo(tmp_path: Path) -> None:
    result = run("--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "all 49 tensors bitwise those of transformers, on each of the 2 ranks" in result.stdout
    assert "many at once: 3 LoRAs of their own ranks and data on one base; cy, trained alone" in result.stdout


def test_the_corpus() -> None:
    rows = read_rows(CORPUS)
    assert 150 <= len(rows) <= 250
    assert all(isinstance(row, Chat) for row in rows)
    assert 20_000 < CORPUS.stat().st_size < 40_000


def test_a_folder_of_an_earlier_demo_is_used_again(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "out")
    (tmp_path / "out" / "checkpoint" / "old.safetensors").touch()
    (tmp_path / "out" / "trained").mkdir()
    (tmp_path / "out" / "trained" / "model.safetensors").touch()
    (tmp_path / "out" / "truth.pt").touch()
    (tmp_path / "out" / "notes.txt").touch()
    prepare_folder(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == [
        ".made-by-shardwise-demo",
        "checkpoint",
        "notes.txt",
    ]


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine.safetensors").touch()
    result = run("--out", tmp_path)
    assert result.exit_code == 2
    assert "is not empty, and not made by an earlier demo" in result.stderr
    assert (tmp_path / "checkpoint" / "mine.safetensors").exists()


def test_a_link_in_the_place_of_the_checkpoint_is_not_followed(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "out" / "checkpoint").rmdir()
    (tmp_path / "out" / "checkpoint").symlink_to(tmp_path / "mine")
    prepare_folder(tmp_path / "out")
    assert (tmp_path / "mine" / "file").exists()


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match="the demo cannot write there"):
        prepare_folder(tmp_path / "out")


def test_under_torchrun_there_would_be_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    result = run("--out", tmp_path / "out", "--nproc-per-node", 1)
    assert result.exit_code == 2
    assert "without torchrun" in result.stderr
    assert not (tmp_path / "out").exists()


def made_outcome(*losses: float, differing: tuple[str, ...] = (), lost: tuple[str, ...] = ()) -> DemoOutcome:
    load = LoadReport(
        checkpoint="out",
        rank=0,
        world_size=1,
        parameters=1,
        checkpoint_bytes=4,
        read_bytes=4,
        placed_bytes=4,
        files_opened=1,
        reads=1,
        seconds={},
        loaded=1,
        forecast=RankForecast(0, 4, 4, 0, 4, 4, 4, 1, 1),
        files=("model.safetensors",),
    )
    steps = tuple(StepFacts(number, loss, 1e-3, 1.0, 1, 1, 1.0, 1) for number, loss in enumerate(losses, start=1))
    saved = SaveReport(0, 1, "trained", ("model.safetensors",), 1, 1, 4, 4, {"F32": 1})
    return DemoOutcome(
        loaded=load,
        comparison=Comparison(1, 1, 0, 4, differing),
        trained=TrainReport(0, 1, 1, steps),
        answers=(),
        saved=saved,
        reloaded=Comparison(1, 1, 0, 4, lost),
    )


def test_what_is_wrong_with_a_demo() -> None:
    good, bad = made_outcome(7.0, 0.5), made_outcome(7.0, 0.5, differing=("lm_head.weight",))
    good = replace(good, trained=TrainReport(0, 1, 1, good.trained.steps[1:]))
    assert find_faults([good]) == []
    assert find_faults([good, bad]) == [
        "rank 0: 1 tensors are not bitwise those that transformers loads: lm_head.weight"
    ]
    fault, *_ = find_faults([made_outcome(7.0, 0.5, lost=("lm_head.weight",))])
    assert fault.endswith("of the saved model are not those that were trained: lm_head.weight")
    assert find_faults([made_outcome(float("nan"))]) == ["the loss ended at nan; it should have fallen below 2.0"]
