"""What an adapter's config says of ranks and scales."""

import json
import math

import pytest

from shardwise.errors import FormatError
from shardwise.formats.peft_adapter import LoraConfig, parse_adapter_config


def parsed(**content) -> LoraConfig:
    return parse_adapter_config(json.dumps({"peft_type": "LORA", **content}).encode(), what="here")


def test_the_first_pattern_that_matches_the_end_of_a_name_counts():
    config = parsed(r=8, lora_alpha=16, rank_pattern={"q_proj": 4, r"layers\.1\..*": 2}, alpha_pattern={"^m.k": 3})
    assert config.rank("model.layers.1.q_proj") == 4
    assert config.rank("model.layers.1.k_proj") == 2
    assert config.rank("model.layers.11.k_proj") == 8
    assert config.rank("my_q_proj") == 8
    assert config.scaling("model.layers.0.q_proj") == 4
    assert config.scaling("m.k") == 3 / 8


def test_rank_stabilised():
    assert parsed(r=9, lora_alpha=6, use_rslora=True).scaling("x") == 6 / math.sqrt(9)


def test_what_peft_leaves_empty_is_no_feature():
    parsed(target_parameters=None, modules_to_save=None, layer_replication=None, use_qalora=False, corda_config={})


@pytest.mark.parametrize("text", [b"", b"[]", b'{"peft_type": "LORA", "r": 1, "r": 2}', b"\xff"])
def test_files_that_are_no_config(text):
    with pytest.raises(FormatError, match="here"):
        parse_adapter_config(text, what="here")
