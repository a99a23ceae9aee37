"""LoRAs on bases in four bits in the trainers that people have."""

from pathlib import Path

import pytest
from tests import zoo
from tests.harness.world import run_world
from tests.integrations import four_bits
from transformers import AutoModelForCausalLM, Qwen3Config


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    sizes = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
    config = Qwen3Config(**sizes, **heads)
    folder = tmp_path_factory.mktemp("plain")
    model = AutoModelForCausalLM.from_config(config)
    zoo.fill(model)
    zoo.save_original(model, folder)
    return folder


@pytest.mark.slow
@pytest.mark.distributed
def test_they_train_in_float32(plain, tmp_path):
    first, second = run_world(2, four_bits.trained, str(plain), str(tmp_path), timeout_s=240.0)
    for kind in ("Trainer", "SFTTrainer"):
        assert first[f"{kind}'s dtypes"] == ["torch.float32"]
        assert first[kind] == second[kind]
        assert first[kind][-1] < first[kind][0]
