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


# ── whole trainings ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def training(checkpoint, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {checkpoint}\ndata: {{train: none.jsonl, max_length: 32}}\noutput: out\ntuning: {{method: lora}}\n"
    )
    return str(file)


def test_a_training_by_its_configuration(training):
    result = invoke(training, "training.batch_size=3", "--ranks=4", "--device=cpu", "--memory=1GiB", "--tflops=2")
    assert result.exit_code == 0, result.output
    assert "plan for" in result.output
    assert "step        3 x 32 tokens on each rank, in float32, activations kept, AdamW" in result.output
    assert "peak        " in result.output
    assert "the largest batch for 1.00 GiB is " in result.output
    assert "TFLOP on each rank: " in result.output
    found = json.loads(invoke(training, "--ranks=4", "--device=cpu", "--json").stdout)
    assert {phase["phase"] for phase in found["phases"]} == {
        "load",
        "forward",
        "loss",
        "backward",
        "optimizer",
        "checkpoint",
    }
    assert found["peak_bytes"] == max(phase["host_bytes"] for phase in found["phases"])
    assert found["load"]["trainable_parameters"] > 0
    assert len(found["peaks"]) == 4
    assert found["step_s"] is None


def test_a_training_by_options(checkpoint):
    arguments = [checkpoint, "--batch=2", "--seq=16", "--ranks=2", "--json"]
    plain = json.loads(invoke(*arguments).stdout)
    lora = json.loads(invoke(*arguments, "--tuning=lora=4").stdout)
    assert (plain["precision"], plain["recomputed"]) == ("bfloat16", "blocks computed again")
    assert lora["load"]["trainable_parameters"] < plain["load"]["trainable_parameters"]
    assert lora["peak_bytes"] < plain["peak_bytes"]


def test_what_does_not_fit_is_told_and_exits_with_2(training):
    result = invoke(training, "--ranks=1", "--device=cpu", "--memory=100KB")
    assert result.exit_code == 2
    assert "error: no batch fits into 97.66 KiB: one row lacks" in result.stderr
    assert "most of it are" in result.stderr
    assert "peak        " in result.stdout


def test_tenants_by_their_configuration(checkpoint, tmp_path):
    file = tmp_path / "tenants.yaml"
    file.write_text(
        f"model: {checkpoint}\ndata: none.jsonl\noutput: out\ntuning: {{r: 4, target_modules: all-linear}}\n"
        "bank: {tokens_per_pass: 128}\ntenants: [{name: ada}, {name: bob, tuning: {r: 8}}]\n"
    )
    result = invoke(str(file), "--ranks=2", "--device=cpu", "--json")
    assert result.exit_code == 0, result.output
    [first, _] = json.loads(result.stdout)["bank"]
    assert len(first["trained"]) == 2
    assert first["trained"][1] == 2 * first["trained"][0]
    assert first["tokens"] == 128
    refused = invoke(str(file), "--ranks=2", "--memory=1GiB")
    assert refused.exit_code == 2
    assert "of one training, not of tenants" in refused.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "it is a list, not keys with values"),
        ("a: [\n", "the configuration cannot be read"),
        ("modle: x\n", "modle: no such key; did you mean model?"),
        ("model: /none/at/all\ndata: x\noutput: y\n", "/none/at/all"),
    ],
)
def test_configurations_that_are_none(tmp_path, text, message):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    result = invoke(str(file), "--ranks=2")
    assert result.exit_code == 2
    assert message in result.stderr
    assert not result.stdout


def test_a_configuration_of_a_model_without_a_config(tmp_path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {tmp_path / 'model'}\ndata: x\noutput: y\n")
    result = invoke(str(file), "--ranks=2")
    assert result.exit_code == 2
    assert "there is no config.json" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory=1GiB"], "--memory, --tflops and --read-rate are of a training"),
        (["--batch=2"], "--batch is of a training; give --seq"),
        (["--seq=16", "--memory=much"], "--memory: 'much' is not a size"),
        (["--seq=16", "--read-rate=fast"], "--read-rate: 'fast' is not a size"),
        (["--seq=16", "--tflops=0"], "--tflops"),
        (["--seq=16", "--tenants=2", "--rank=4"], "--tenants is not for this plan"),
        (["training.batch_size=2"], "overrides are of a training's configuration"),
    ],
)
def test_what_is_said_of_a_training_is_said_of_one(checkpoint, arguments, message):
    result = invoke(checkpoint, "--ranks=2", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_configuration_says_itself_what_options_say(training):
    result = invoke(training, "--ranks=2", "--seq=16")
    assert result.exit_code == 2
    assert "--seq is not for this plan" in result.stderr
