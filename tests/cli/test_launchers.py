"""`train` under the launchers of others: torchrun, which starts ranks again, and accelerate."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.training import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    tiny.write_model(folder / "model")
    tiny.write_chats(folder / "chats.jsonl", 8)
    return folder


def launched(
    place: Path, out: str, launcher: list[str], module: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """A training by a launcher. Ports are free ones."""
    arguments = ["--model_name_or_path", place / "model", "--dataset_name", place / "chats.jsonl", "--output_dir"]
    arguments += [place / out, "--report_to=none", "--bf16=false", "--max_length=64", "--logging_steps=1", *more]
    return subprocess.run(
        [sys.executable, "-m", *launcher, "-m", module, "train", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
    )


def steps(place: Path, out: str) -> list[int]:
    """Steps that the newest checkpoint knows of."""
    newest = max((place / out).glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    told = json.loads((newest / "trainer_state.json").read_text())
    return [entry["step"] for entry in told["log_history"] if "loss" in entry]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_is_killed_is_started_again_by_torchrun_and_all_continue(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDED", f"1 4 {signal.SIGKILL.value}")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    more = ("--max_steps=6", "--per_device_train_batch_size=1", "--save_steps=1")
    result = launched(place, "restarted", torchrun, "tests.training.interrupted", *more)
    assert result.returncode == 0, result.stderr
    assert steps(place, "restarted") == [1, 2, 3, 4, 5, 6]
    assert (place / "restarted" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_launches_the_module(place: Path) -> None:
    pytest.importorskip("accelerate")
    accelerate = ["accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2", "--num_processes=2"]
    more = ("--max_steps=2", "--save_steps=1")
    result = launched(place, "accelerated", [*accelerate, "--main_process_port=0"], "shardwise", *more)
    assert result.returncode == 0, result.stderr
    assert steps(place, "accelerated") == [1, 2]
    assert result.stdout.count("saved in") == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_of_a_launcher_exit_alike(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on several hosts, of which each sees its own. One rank is stopped."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    monkeypatch.setenv("ENDED", f"1 4 {signal.SIGTERM.value}")
    result = launched(place, "stopped", torchrun, "tests.training.interrupted", "--max_steps=1000")
    assert result.stderr.count("exitcode  : 75") == 2, result.stderr
