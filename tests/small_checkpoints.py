"""Checkpoints shared by the tests of the public functions."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests import zoo
from tests.quiet import quieten
from tests.saving.adapters import tensors_of
from tests.support.files import change_json
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    quieten()


MIXTRAL = zoo.Specimen("mixtral", "mixtral", "MixtralForCausalLM", "causal-lm")
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


def small_qwen3(**changes):
    """A Qwen3 of two layers with grouped heads; every weight random."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL | changes))
    zoo.fill(model)
    return model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory) -> Path:
    """A checkpoint of several files, untied, in float32."""
    return zoo.save_original(small_qwen3(), tmp_path_factory.mktemp("qwen3"), max_shard_size="30KB")


@pytest.fixture(scope="session")
def tied_qwen3(tmp_path_factory) -> Path:
    """The same with embedding and head tied."""
    return zoo.save_original(small_qwen3(tie_word_embeddings=True), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory) -> Path:
    """A checkpoint whose stored names and layout are not the model's own: experts apart."""
    return zoo.save_original(zoo.build(MIXTRAL), tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def changed(tmp_path):
    """``changed(directory, function, **config)``: a copy whose tensors were passed through a function."""

    def make(directory, function, **config):
        copy = tmp_path / "changed"
        copy.mkdir()
        save_file(function(tensors_of(Path(directory))), copy / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(Path(directory) / "config.json", copy)
        change_json(copy / "config.json", **config)
        return copy

    return make
