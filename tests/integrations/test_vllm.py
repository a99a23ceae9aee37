"""Weights of a sharded model into vLLM, by its protocol restated."""

import pytest
from tests import zoo
from tests.integrations import serving
from tests.small_checkpoints import small_qwen3
from tests.support.world import agreed

import shardwise
from shardwise.integrations.vllm import weight_source


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    models = {"dense": small_qwen3(), "experts": zoo.causal_lm("qwen3_moe")}
    return {name: str(zoo.save_original(model, tmp_path_factory.mktemp(name))) for name, model in models.items()}


@pytest.mark.parametrize(("model", "lora_rank"), [("dense", 0), ("dense", 4), ("experts", 0)])
def test_an_engine_gets_the_tensors_of_the_files(folders, model, lora_rank):
    assert serving.compare(folders[model], lora_rank) == []


def test_on_ranks(worlds, folders):
    for model, lora_rank in (("dense", 4), ("experts", 0)):
        assert worlds(3).run(serving.compare, folders[model], lora_rank) == [[]] * 3


@pytest.mark.parametrize("where", ["everywhere", "on one", "raises"])
def test_an_engine_that_does_not_take_all(worlds, folders, where):
    first = agreed(worlds(2), serving.refuse, folders["dense"], where)
    if where == "raises":
        assert first == "CheckpointError: rank 1: KeyError: 'no such parameter'"
    else:
        told = "ConfigError: rank 1: " if where == "on one" else "ConfigError: "
        assert first.startswith(f"{told}load_weights: took 3 tensors and left the rest")


def test_without_vllm_or_with_another(folders):
    model = shardwise.from_pretrained(folders["dense"])
    with pytest.raises(shardwise.ConfigError, match="Install vllm, or load in its process with load_into"):
        weight_source(model)
