"""``shardwise merge-adapter`` and ``shardwise merge-weights``."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests import zoo
from tests.cli.running import RUNNER
from tests.saving.adapters import save_adapter, tensors_of

from shardwise.cli import main


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return zoo.save_original(zoo.causal_lm("llama"), tmp_path_factory.mktemp("base"))


def run(*arguments: object):
    return RUNNER.invoke(main, [str(argument) for argument in arguments])


def test_merge_adapter(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter", r=2, target_modules=["q_proj"])
    result = run(
        "merge-adapter", base, adapter, tmp_path / "out", "--dtype", "bfloat16", "--max-shard-size", "50KB"
    )
    assert result.exit_code == 0, result.output
    assert "merged 2 of 2 modules" in result.stdout
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}
    as_json = json.loads(run("merge-adapter", base, adapter, tmp_path / "out", "--json").stdout)
    assert as_json["modules"] == 2
    refused = run("merge-adapter", base, adapter, base)
    assert refused.exit_code == 2
    assert "is the folder that is read" in refused.stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_merge_weights(base: Path, tmp_path: Path) -> None:
    dcp.save(tensors_of(base), checkpoint_id=tmp_path / "run", no_dist=True)
    result = run("merge-weights", tmp_path / "run", tmp_path / "out", "--base", base, "--remove-source")
    assert result.exit_code == 0, result.output
    assert "verified" in result.stdout
    assert not (tmp_path / "run").exists()
    assert tensors_of(tmp_path / "out").keys() == tensors_of(base).keys()
    result = run("merge-weights", tmp_path / "out", tmp_path / "bin", "--format", "bin", "--json")
    assert json.loads(result.stdout)["files"] == ["pytorch_model.bin"]
    assert run("merge-weights", tmp_path / "run", tmp_path / "out").exit_code == 2
