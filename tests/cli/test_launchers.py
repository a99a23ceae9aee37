"""`train` under the launchers of others: torchrun, which starts ranks again, and accelerate."""

from __future__ import annotations

import json
import os
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
    """A training by a launcher. Ports are whichever are free."""
    arguments = [f"model={place / 'model'}", f"data={place / 'chats.jsonl'}", f"output={place / out}", *more]
    return subprocess.run(
        [sys.executable, "-m", *launcher, "-m", module, "train", *arguments],
        check=False,
        timeout=110,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
    )


def metrics(place: Path, out: str, kind: str) -> list[int]:
    lines = [json.loads(line) for line in (place / out / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == kind]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_is_killed_is_started_again_by_torchrun_and_all_go_on(place: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    more = ("training.max_steps=6", "training.batch_size=1", "checkpoints.every=1")
    result = launched(place, "restarted", torchrun, "tests.training.killed_once", *more)
    assert result.returncode == 0, result.stderr
    assert "training goes on after step 3" in result.stdout
    assert metrics(place, "restarted", "step") == [1, 2, 3, 4, 5, 6]
    assert metrics(place, "restarted", "checkpoint_restored") == [3]
    assert (place / "restarted" / "last" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_launches_the_module(place: Path) -> None:
    pytest.importorskip("accelerate")
    accelerate = ["accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2", "--num_processes=2"]
    result = launched(
        place, "accelerated", [*accelerate, "--main_process_port=0"], "shardwise", "training.max_steps=2"
    )
    assert result.returncode == 0, result.stderr
    assert "training: 2 steps on 2 ranks, in float32" in result.stdout
    assert metrics(place, "accelerated", "step") == [1, 2]
