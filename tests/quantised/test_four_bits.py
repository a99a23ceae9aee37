"""A base in four bits: each rank's rows alone, and bit for bit what bitsandbytes has in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import zoo
from tests.quantised import four_bits
from transformers import AutoModelForCausalLM, Qwen3Config

from shardwise.testing.world import run_world

CONFIG = Qwen3Config(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    model = AutoModelForCausalLM.from_config(CONFIG)
    zoo.fill(model)
    folder = tmp_path_factory.mktemp("plain")
    zoo.save_original(model, folder, max_shard_size="60KB")
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mesh", "size", "form", "scales"),
    [
        ("flat", 2, "nf4", "plain"),
        ("flat", 3, "nf4", "nested"),
        pytest.param("flat", 1, "nf4", "plain", marks=pytest.mark.slow),
        pytest.param("flat", 1, "fp4", "nested", marks=pytest.mark.slow),
        pytest.param("flat", 5, "nf4", "plain", marks=pytest.mark.slow),
        pytest.param("hsdp", 4, "nf4", "nested", marks=pytest.mark.slow),
    ],
)
def test_bytes_answers_gradients_and_files(plain, tmp_path, mesh, size, form, scales):
    found = run_world(size, four_bits.differing, str(plain), mesh, form, scales, str(tmp_path), timeout_s=240.0)
    assert found == [[]] * size


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mesh", "size", "placement"), [("flat", 2, "in blocks"), ("flat", 3, "replicated"), ("flat", 1, "in blocks")]
)
def test_a_lora_learns_as_on_bitsandbytes(plain, mesh, size, placement):
    for told in run_world(size, four_bits.trained_alike, str(plain), mesh, placement):
        assert told["same names"], told
        assert told["kinds"] == ["Linear4bit"], told
        assert told["falls"], told
        assert told["losses"] < 1e-6, told
        assert told["gradients"] < 1e-5, told
