"""``shardwise verify``, as a user calls it."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tests import zoo

from shardwise.cli import main
from shardwise.models.conversions import reference
from shardwise.verbs.verify_load import verify_load


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mixtral")
    (specimen,) = (item for item in zoo.causal_lm_specimens() if item.name == "mixtral")
    zoo.save_original(zoo.build(specimen), directory)
    return directory


def run(*arguments):
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


@pytest.mark.distributed
def test_an_equal_load_is_said_to_be_equal(mixtral):
    result = run(mixtral, "--ranks", 3, "--dtype", "bfloat16", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["is_equal"]
    assert report["world_size"] == 3
    assert report["tensors"] == 21
    assert report["buffers"] == 2
    assert report["elements"] > 187_200  # every parameter once, buffers on each rank


@pytest.mark.distributed
def test_a_model_that_cannot_be_loaded_is_one_error(tmp_path):
    result = run(tmp_path, "--ranks", 2)
    assert result.exit_code == 2
    assert "no usable config" in result.output
    assert "Traceback" not in result.output


def test_a_difference_is_found_and_named(mixtral, monkeypatch):
    """The verification can fail: one element of the independent path is changed."""
    original = reference.WholeTensors.__getitem__

    def other(self, key):
        value = original(self, key).clone()
        if key == "model.layers.1.block_sparse_moe.experts.2.w1.weight":
            value[3, 5] += 1
        return value

    monkeypatch.setattr(reference.WholeTensors, "__getitem__", other)
    report = verify_load(str(mixtral))
    assert report.unequal == ("model.layers.1.mlp.experts.gate_up_proj on rank 0",)
    assert "1 DIFFER" in str(report)


def test_a_buffer_that_differs_is_found(mixtral, monkeypatch):
    monkeypatch.setattr(
        "shardwise.engines.verifying.reference_buffers",
        lambda model: {name: torch.zeros_like(buffer) for name, buffer in model.named_buffers()},
    )
    assert verify_load(str(mixtral)).unequal == (
        "model.rotary_emb.inv_freq on rank 0",
        "model.rotary_emb.original_inv_freq on rank 0",
    )


def test_a_single_file_is_verified_too(mixtral, tmp_path):
    tensors = {}
    for file in mixtral.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(tensors, tmp_path / "odd-name.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((mixtral / "config.json").read_text())
    assert verify_load(str(tmp_path)).is_equal
