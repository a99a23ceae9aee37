"""A training that ``shardwise train`` starts, each rank on a simulated device."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.accelerator.simulated import environment
from tests.integrations.requirements import require_patched_names
from tests.support.local_ranks import LocalRanks
from tests.training import tiny
from tests.training.on_ranks import by_command
from tests.truth import unlike

ROOT = Path(__file__).parents[2]


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
    result = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", there, "--nproc-per-node=2"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(devices=2, delay_us=200),
    )
    assert result.returncode == 0, result.stderr
    with LocalRanks(2, is_forked=True) as ranks:
        ranks.run(by_command, [here], tmp_path / "at")
    states = [load_file(tmp_path / name / "model.safetensors") for name in ("npu", "cpu")]
    assert unlike(*states) == []
