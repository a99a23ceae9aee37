"""A training that ``shardwise train`` and torchrun start, each rank on a simulated device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.accelerator.simulated import environment
from tests.integrations.requirements import require_patched_names
from tests.training import tiny
from tests.truth import unlike

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ALONE = ["shardwise", "train", "--nproc-per-node=2"]
LAUNCHERS = {
    "shardwise": ALONE,
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardwise", "train"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    require_patched_names()
    folder = tmp_path_factory.mktemp("launched")
    tiny.write_model(folder / "model")
    tiny.write_chats(folder / "chats.jsonl", 8)
    return folder


def launched(place: Path, out: str, launcher: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess:
    settings = {
        "model_name_or_path": place / "model",
        "dataset_name": place / "chats.jsonl",
        "output_dir": place / out,
        "report_to": "none",
        "bf16": "false",
        "optim": "sgd",
        "attn_implementation": "eager",
        "max_length": 64,
        "max_steps": 2,
    }
    arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return subprocess.run(
        [sys.executable, "-m", *launcher, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=variables,
    )


@pytest.fixture(scope="module")
def expected(place) -> dict[str, torch.Tensor]:
    """What comes of the same training on the CPU."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    result = launched(place, "cpu", ALONE, {**os.environ, "PYTHONPATH": path})
    assert result.returncode == 0, result.stderr
    return load_file(place / "cpu" / "model.safetensors")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_results_equal_those_of_the_cpu(place, library, expected, launcher):
    result = launched(place, launcher, LAUNCHERS[launcher], environment(devices=2, delay_us=200))
    assert result.returncode == 0, result.stderr
    assert unlike(load_file(place / launcher / "model.safetensors"), expected) == []


def test_more_ranks_than_devices_are_refused(place, library):
    result = launched(place, "refused", ALONE, environment(devices=1))
    assert result.returncode == 2
    assert "2 ranks on a machine: each needs a device, and this process sees 1" in result.stderr
