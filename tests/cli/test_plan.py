"""``shardwise plan``: text, JSON and exit codes."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from tests import zoo
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardwise.cli import main
from shardwise.cli.plan import parse_mesh
from shardwise.errors import ConfigError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plan")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    zoo.save_original(Qwen3ForCausalLM(config), directory, max_shard_size="8KB")
    return str(directory)


def invoke(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_text(checkpoint):
    result = invoke(checkpoint, "--ranks", "4", "--nodes", "2", "--mesh", "replicate=2,shard=2")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"plan for {checkpoint}\n")
    assert "mesh        replicate=2, shard=2, cuda, 2 nodes" in result.output
    assert "model.layers.{0..2} x3" in result.output
    assert " times the checkpoint, in " in result.output


def test_json(checkpoint):
    result = invoke(checkpoint, "--ranks", "4", "--device", "cpu", "--budget-bytes", "4096", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["ranks"]) == 4
    assert found["mesh"] == {"fsdp": 4}
    assert found["ranks"][0]["device_bytes"] == 0
    assert found["ranks"][0]["host_bytes"] >= found["ranks"][0]["padded_bytes"] + 4096
    assert found["summary"]["read_imbalance"] >= 1


def test_options_reach_the_plan(checkpoint):
    plain = json.loads(invoke(checkpoint, "--ranks", "2", "--dtype", "float32", "--json").stdout)
    changed = json.loads(
        invoke(
            checkpoint,
            "--ranks=2",
            "--dtype=float32",
            "--param-dtype=bfloat16",
            "--wrap=whole",
            "--offload",
            "--json",
        ).stdout
    )
    assert [group["modules"] for group in changed["groups"]] == [[""]]
    assert changed["groups"][0]["gathered_bytes"] * 2 == sum(group["gathered_bytes"] for group in plain["groups"])
    assert changed["ranks"][0]["device_bytes"] < plain["ranks"][0]["device_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks=4", "--nodes=3"], "4 ranks cannot be dealt evenly to 3 nodes"),
        (["--ranks=4", "--mesh=shard:4"], "is not AXIS=SIZE"),
        (["--ranks=4", "--mesh=shard=2"], "of 2 ranks, not of 4"),
        (["--ranks=4", "--mesh=shards=4"], "did you mean shard"),
        (["--ranks=4", "--wrap=layers"], "no wrap policy 'layers'"),
        (["--ranks=4", "--dtype=float17"], "float17"),
    ],
)
def test_what_cannot_be_planned_exits_with_2(checkpoint, arguments, message):
    result = invoke(checkpoint, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert not result.stdout


def test_a_folder_without_a_model_exits_with_2(tmp_path):
    result = invoke(str(tmp_path), "--ranks=2")
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr


def test_the_number_of_ranks_is_required(checkpoint):
    result = invoke(checkpoint)
    assert result.exit_code == 2
    assert "--ranks" in result.stderr


def test_meshes_in_words():
    assert parse_mesh("replicate=2,shard=4") == {"replicate": 2, "shard": 4}
    assert parse_mesh("shard=4, replicate=2") == {"shard": 4, "replicate": 2}


@pytest.mark.parametrize(
    "text", ["", "shard", "shard=", "=4", "shard=x", "shard=-4", "shard=²", "shard=4,", "shard=1e3"]
)
def test_other_words_make_no_mesh(text):
    with pytest.raises(ConfigError, match="is not AXIS=SIZE"):
        parse_mesh(text)


def test_an_axis_is_given_once():
    with pytest.raises(ConfigError, match="axis shard twice"):
        parse_mesh("shard=2,shard=2")
