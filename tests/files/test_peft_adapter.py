"""Ranks and scales in an adapter's config."""

import json
import math
from pathlib import Path

import pytest

from shardwise.core.errors import ConfigError, FormatError
from shardwise.files.peft_adapter import LoraConfig, find_adapter_weights, parse_adapter_config


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


def test_rank_stabilized():
    assert parsed(r=9, lora_alpha=6, use_rslora=True).scaling("x") == 6 / math.sqrt(9)


def test_fields_that_peft_leaves_empty_are_no_features():
    parsed(target_parameters=None, modules_to_save=None, layer_replication=None, corda_config={})
    parsed(use_qalora=False, lora_bias=False)


def test_an_initialization_that_leaves_the_base_alone_is_no_feature():
    for init in ("mica", "orthogonal", "eva", "gaussian", False):
        assert parsed(init_lora_weights=init) == LoraConfig(8, 8)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"peft_type": "LORA", "r": 1, "r": 2}', b"\xff"])
def test_files_that_are_no_config(text):
    with pytest.raises(FormatError, match="here"):
        parse_adapter_config(text, what="here")


def test_unspecified_fields_have_the_defaults_of_peft():
    assert parsed() == LoraConfig(8, 8)
    assert parsed(r=8, lora_alpha=8, bias="none", init_lora_weights=True, rank_pattern=None) == LoraConfig(8, 8)
    told = {"use_rslora": True, "use_dora": True, "ensure_weight_tying": True}
    lists = {"modules_to_save": ("lm_head", "score"), "target_parameters": ("experts.gate_up_proj",)}
    config = parsed(r=3, lora_alpha=0.5, bias="lora_only", **told, **lists)
    assert config == LoraConfig(3, 0.5, bias="lora_only", **told, **lists)
    assert [config.saves_module(name) for name in ("model.lm_head", "model.head", "score")] == [True, False, True]


@pytest.mark.parametrize("name", ["use_rslora", "use_dora", "ensure_weight_tying"])
def test_a_flag_is_its_own(name):
    assert parsed(**{name: True}) == LoraConfig(8, 8, **{name: True})


SENSELESS = {
    "r is .*not a rank from 1 to 1048576": [{"r": value} for value in (0, -1, True, 2.0, "8", None, (1 << 20) + 1)],
    "lora_alpha is .*not a number": [{"lora_alpha": value} for value in (True, "8", None, [], 10**400, -(10**400))],
    "rank_pattern is .*, not ranks by regular": [
        {"rank_pattern": value} for value in ({"q": 0}, {"q": False}, {"q": "1"}, [1], "q", 3)
    ],
    "alpha_pattern is .*, not numbers by regular expression": [
        {"alpha_pattern": value} for value in ({"q": True}, {"q": None}, {"(": 1})
    ],
    "modules_to_save is .*not a list of names": [{"modules_to_save": it} for it in ("lm_head", ["a", 1], {"a": 1})],
    "target_parameters is .*not a list of names": [{"target_parameters": [None]}],
    "use_dora is .*not true or false": [{"use_dora": value} for value in (None, 0, "yes")],
    "bias is .*not one of none, all and lora_only": [{"bias": value} for value in ("some", None, True)],
}


@pytest.mark.parametrize("words", SENSELESS)
def test_values_that_make_no_sense(words):
    for content in SENSELESS[words]:
        with pytest.raises(FormatError, match=f"here: {words}"):
            parsed(**content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', and only LORA"),
        ({"peft_type": None}, "peft_type is None"),
        *(
            ({"init_lora_weights": it}, "init_lora_weights is")
            for it in ("pissa", "PiSSA_niter_4", "olora", "loftq")
        ),
        ({"lora_bias": True}, "uses lora_bias, with which it cannot be merged. Merge it with the version of PEFT"),
        ({"alora_invocation_tokens": [1], "use_qalora": True}, "alora_invocation_tokens, use_qalora, with which"),
    ],
)
def test_adapters_that_cannot_be_merged(content, words):
    with pytest.raises(ConfigError, match=f"here: .*{words}"):
        parsed(**content)


def test_initializations_that_leave_the_base_alone():
    for value in (True, False, "gaussian", "orthogonal", "eva"):
        assert parsed(init_lora_weights=value) == LoraConfig(8, 8)
    assert parsed(r=1 << 20).r == 1 << 20
    with pytest.raises(FormatError, match="lora_alpha is inf, not a number"):
        parse_adapter_config(b'{"peft_type": "LORA", "lora_alpha": 1e999}', what="here")
    found = parsed(lora_dropout=0.1, fan_in_fan_out=True, target_modules=["q"])
    assert found == LoraConfig(8, 8, adapted_names=("q",))
    assert parsed(layers_to_transform=0, target_modules=["q"]) == LoraConfig(8, 8)


def test_adapters_in_folders_of_their_own_are_named(tmp_path: Path) -> None:
    for name in ("reference", "policy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").touch()
    with pytest.raises(FormatError, match=r"has no adapter_config.json. Pass .* in it: policy, reference"):
        find_adapter_weights(tmp_path)
