"""Weights of a sharded model into vLLM, by its protocols restated; and its rules of adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.integrations import serving
from tests.verbs.conftest import small_qwen3

import shardwise
from shardwise.integrations.vllm import adapter_faults, config_faults, weight_source

EXPERTS = "qwen3_moe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    dense, experts = tmp_path_factory.mktemp("dense"), tmp_path_factory.mktemp("experts")
    zoo.save_original(small_qwen3(), dense)
    specimen = next(item for item in zoo.causal_lm_specimens() if item.name == EXPERTS)
    zoo.save_original(zoo.build(specimen), experts)
    return {"dense": str(dense), "experts": str(experts)}


@pytest.mark.parametrize(("model", "lora_rank"), [("dense", 0), ("dense", 4), ("experts", 0)])
def test_an_engine_gets_what_is_in_the_files(folders, model, lora_rank):
    assert serving.compare(folders[model], lora_rank) == []


@pytest.mark.distributed
def test_on_ranks(worlds, folders):
    for model, lora_rank in (("dense", 4), ("experts", 0)):
        assert worlds(3).run(serving.compare, folders[model], lora_rank) == [[]] * 3


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["everywhere", "on one", "raises"])
def test_an_engine_that_does_not_take_all(worlds, folders, where):
    first, second = worlds(2).run(serving.refuse, folders["dense"], where)
    assert first == second
    if where == "raises":
        assert first == "CheckpointError: rank 1: KeyError: 'no such parameter'"
    else:
        told = "ConfigError: rank 1: " if where == "on one" else "ConfigError: "
        assert first.startswith(f"{told}the engine took 3 tensors and left the rest")


def test_without_vllm_or_with_another(folders):
    model = shardwise.from_pretrained(folders["dense"])
    with pytest.raises(shardwise.ConfigError, match="install vllm, or load in its process with load_into"):
        weight_source(model)


@pytest.fixture
def saved(tmp_path) -> Path:
    """An adapter as it is saved here."""
    model = get_peft_model(small_qwen3(), LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
    shardwise.save_adapter(model, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_that_is_served(saved):
    assert adapter_faults(saved) == ()
    assert adapter_faults(saved, max_lora_rank=2) == (
        "rank 4 is more than max_lora_rank=2; start the engine with more",
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"use_dora": True}, "it uses DoRA"),
        ({"lora_bias": True}, "it uses a bias of LoRA's (lora_bias)"),
        (
            {"modules_to_save": ["lm_head"]},
            "lm_head: trained whole (modules_to_save), which only a classifier may be",
        ),
        ({"modules_to_save": ["score"]}, ""),
        ({"bias": "all"}, "bias is 'all': biases of the base are trained"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base"),
        ({"init_lora_weights": "gaussian"}, ""),
        ({"rank_pattern": {"q_proj": 64}}, "rank 64 is more than max_lora_rank=16; start the engine with more"),
        ({"r": 0}, "a rank is not positive"),
        ({"target_modules": None, "target_parameters": ["experts.down_proj"]}, ""),
        ({"layer_replication": [[0, 1]]}, "it uses layer_replication"),
    ],
)
def test_a_config_that_is_not(changed, told):
    config = LoraConfig(r=4, target_modules=["q_proj"]).to_dict() | changed
    assert config_faults(config) == ((told,) if told else ())
    assert config_faults({"r": 4, "lora_alpha": 4}) == ("it says no target_modules",)


def test_tensors_that_are_not(saved):
    file = saved / "adapter_model.safetensors"
    tensors = load_file(file)
    half = next(key for key in tensors if key.endswith("q_proj.lora_B.weight"))
    tensors.pop(half)
    save_file({**tensors, "base_model.model.model.layers.0.q_proj.lora_magnitude_vector": torch.ones(4)}, file)
    strange, lone = adapter_faults(saved)
    assert strange.endswith("q_proj.lora_magnitude_vector is no matrix of a LoRA")
    module = half.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
    assert lone == f"{module} has only one of its two matrices"


def test_a_folder_that_is_none(tmp_path, saved):
    with pytest.raises(shardwise.FormatError, match="there is no adapter_config.json"):
        adapter_faults(tmp_path)
    (saved / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(shardwise.FormatError):
        adapter_faults(saved)
    (saved / "adapter_config.json").write_text("{}")
    (saved / "adapter_model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(shardwise.FormatError):
        adapter_faults(saved)
