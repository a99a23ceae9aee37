"""``merge_weights``: checkpoints of training, written as transformers saves the model."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests import zoo
from tests.merging.adapters import tensors_of
from tests.quiet import quieten
from transformers import AutoModelForCausalLM

from shardwise.verbs.merge_weights import merge_weights

_NAMES = ("qwen3", "qwen3_moe", "llama", "gpt_oss", "mixtral", "phi3", "gpt2")


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    quieten()


def specimen(name: str) -> zoo.Specimen:
    return next(item for item in zoo.causal_lm_specimens() if item.model_type == name)


def save_distributed(state: dict, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves alone
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)
    return folder


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", _NAMES)
def test_a_distributed_checkpoint_becomes_what_transformers_saves(name: str, tmp_path: Path) -> None:
    model = zoo.build(specimen(name))
    zoo.save_original(model, tmp_path / "wanted")
    model.config.save_pretrained(tmp_path / "run")
    save_distributed({"model": model.state_dict()}, tmp_path / "run" / "pytorch_model_fsdp_0")
    report = merge_weights(tmp_path / "run", tmp_path / "out", max_shard_size="200KB")
    same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "wanted"))
    assert "the hub's" in report.names
    with zoo.silenced():
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
