"""A training that ``shardwise train`` starts, each rank on a simulated device."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file
from tests.accelerator.simulated import environment
from tests.integrations.requirements import require_patched_names
from tests.support.local_ranks import LocalRanks
from tests.training import tiny
from tests.training.on_ranks import by_command
from tests.truth import unlike
from transformers import Trainer

import shardwise
from shardwise.cli.launch import run_ranks

ROOT = Path(__file__).parents[2]


def run_beside_two_devices(*command: str) -> str:
    """Run a module with its arguments. Return what it prints."""
    result = subprocess.run(
        [sys.executable, "-m", *command],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(devices=2, delay_us=200),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_results_equal_those_of_the_cpu(tmp_path, library):
    require_patched_names()
    tiny.write_model(tmp_path / "model")
    tiny.write_chats(tmp_path / "chats.jsonl", 8)
    settings = {"optim": "sgd", "attn_implementation": "eager", "max_steps": 2}
    there, here = (
        str(tiny.write_config(tmp_path, name, **settings, output_dir=str(tmp_path / name)))
        for name in ("npu", "cpu")
    )
    run_beside_two_devices("shardwise", "train", there, "--nproc-per-node=2")
    with LocalRanks(2, is_forked=True) as ranks:
        ranks.run(by_command, [here], tmp_path / "at")
    states = [load_file(tmp_path / name / "model.safetensors") for name in ("npu", "cpu")]
    assert unlike(*states) == []


def devices(folder: str, words: list[str]) -> dict[str, list[str]]:
    """Of the parameters of a bank's base and, after them, of a model in training, and what the Trainer takes."""
    base = shardwise.from_pretrained(f"{folder}/model")
    found = {"bank": [str(shardwise.AdapterBank(base)._base.device)], "training": [], "trainer": []}
    own = Trainer.training_step

    def training_step(trainer: Any, model: Any, *given: Any) -> Any:
        found["training"] += sorted({str(parameter.device) for parameter in model.parameters()})
        found["trainer"] += [str(trainer.args.device), str(trainer.args.n_gpu)]
        return own(trainer, model, *given)

    with mock.patch.object(Trainer, "training_step", training_step):
        by_command(words, Path(folder, "at"))
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_one_rank_is_on_the_device(tmp_path, library):
    """Of a machine with two."""
    require_patched_names()
    tiny.write_model(tmp_path / "model")
    tiny.write_chats(tmp_path / "chats.jsonl", 8)
    config = str(tiny.write_config(tmp_path, optim="sgd", max_steps=1, save_strategy="no"))
    output = run_beside_two_devices("tests.accelerator.test_launch", str(tmp_path), config)
    assert json.loads(output.splitlines()[-1]) == {
        "bank": ["npu:0"],
        "training": ["npu:0"],
        "trainer": ["npu:0", "1"],
    }


if __name__ == "__main__":
    from tests.accelerator.test_launch import devices as on_rank

    [told] = run_ranks(1, on_rank, sys.argv[1], sys.argv[2:], libraries=None)
    print(json.dumps(told))
