"""``merge_adapter`` against PEFT's own ``merge_and_unload``."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tests import zoo
from tests.saving.adapters import adapted_by_peft, change, merged_by_peft, save_adapter, tensors_of, ulps_apart
from tests.small_checkpoints import SMALL
from tests.support.files import change_json
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from shardwise import KeyMismatchError, StorageError
from shardwise.saving.merge_adapter import merge_adapter
from shardwise.saving.merge_steps import read_companions

_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_CONFIGS = {
    "qwen3": Qwen3Config(**SMALL),
    "tied": Qwen3Config(**SMALL | {"tie_word_embeddings": True}),
    "biased": LlamaConfig(**SMALL, attention_bias=True),
    "moe": Qwen3MoeConfig(**SMALL, **_EXPERTS),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=16),
    "mamba": MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, state_size=4),
    "bert": BertConfig(**SMALL | {"num_hidden_layers": 1, "tie_word_embeddings": True}, is_decoder=True),
}


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> dict[str, Path]:
    made: dict[str, Path] = {}
    for name, config in _CONFIGS.items():
        model = AutoModelForCausalLM.from_config(config)
        zoo.fill(model)
        made[name] = zoo.save_original(model, tmp_path_factory.mktemp(name), max_shard_size="30KB")
        (made[name] / "tokenizer_config.json").write_text('{"of": "the base"}')
        (made[name] / "chat_template.jinja").write_text("base")
    return made


_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

# Base, config of the adapter, modules that are merged.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "lora": ("qwen3", {"r": 4, "lora_alpha": 16, "target_modules": _ATTENTION}, 8),
    "rslora": ("qwen3", {"r": 4, "lora_alpha": 16, "use_rslora": True, "target_modules": ["up_proj"]}, 2),
    "dora": ("qwen3", {"r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}, 4),
    "dora of the embedding": ("qwen3", {"r": 4, "use_dora": True, "target_modules": ["embed_tokens"]}, 1),
    "embedding": ("qwen3", {"r": 4, "target_modules": ["embed_tokens", "lm_head"]}, 2),
    "patterns": (
        "qwen3",
        {
            "r": 4,
            "target_modules": [*_ATTENTION, "gate_proj"],
            "rank_pattern": {"q_proj": 2, "layers.1.self_attn.k_proj": 6, r"layers\.0\..*v_proj": 1},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 40, "gate_proj": 3},
        },
        10,
    ),
    "whole modules": ("qwen3", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}, 12),
    "biases of the base": ("biased", {"r": 4, "bias": "all", "target_modules": ["q_proj"]}, 8),
    "columns": ("gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}, 6),
    "dora, columns": ("gpt2", {"r": 4, "use_dora": True, "target_modules": ["c_attn"], "fan_in_fan_out": True}, 2),
    "experts": (
        "moe",
        {
            "r": 3,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
            "rank_pattern": {"experts.down_proj": 2},
        },
        6,
    ),
    "one parameter of experts": ("moe", {"r": 3, "target_parameters": ["experts.down_proj"]}, 2),
    "router": ("moe", {"r": 3, "target_parameters": ["mlp.gate.weight"]}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_merge_of_peft(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base, config, modules = CASES[case]
    adapter = save_adapter(bases[base], tmp_path / "adapter", **config)
    report = merge_adapter(bases[base], adapter, tmp_path / "out", max_shard_size="40KB", dtype="bfloat16")
    truth = merged_by_peft(bases[base], adapter)
    compare(truth, tmp_path / "out", torch.bfloat16)
    assert (report.modules, report.unchanged) == (modules, ())
    assert f"merged {modules} of {modules} modules" in str(report)


def test_options_of_the_hub_and_a_config_are_those_of_the_base(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = save_adapter(bases["qwen3"], tmp_path / "adapter", r=4, target_modules=["q_proj"])
    both = shutil.copytree(bases["tied"], tmp_path / "both")
    inner = shutil.copytree(bases["qwen3"], both / "inner")
    report = merge_adapter(both, adapter, tmp_path / "out", subfolder="inner")
    assert report.base == str(inner)
    with pytest.raises(StorageError, match="at revision v2"):
        merge_adapter("somebody/something", adapter, tmp_path / "out", revision="v2", cache_dir=tmp_path)
    # All fields of a config that is passed are written, with or without a file of the base's.
    config = Qwen3Config(**SMALL, rms_norm_eps=0.5)
    for _ in range(2):
        merge_adapter(inner, adapter, tmp_path / "out", config=config, model_class=AutoModelForCausalLM)
        merged = AutoConfig.from_pretrained(tmp_path / "out")
        assert (merged.rms_norm_eps, merged.hidden_size) == (0.5, config.hidden_size)
        assert merged.architectures == ["Qwen3ForCausalLM"]
        (inner / "config.json").unlink(missing_ok=True)
    # A former name of a field in the base's file does not overrule them.
    config.save_pretrained(inner)
    change_json(
        inner / "config.json",
        architectures=["Qwen3ForCausalLM"],
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    merge_adapter(inner, adapter, tmp_path / "out", config_overrides={"rope_parameters": rope})
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == rope


@pytest.mark.parametrize("vocab_size", [104, 90])
@pytest.mark.parametrize("copied", [None, ["embed_tokens"], ["lm_head"]], ids=str)
@pytest.mark.parametrize("base", ["qwen3", "tied"])
def test_an_adapter_with_another_vocabulary_resizes_the_base(
    base: str, copied: list[str] | None, vocab_size: int, bases: dict[str, Path], tmp_path: Path
) -> None:
    config = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": copied}
    adapter = save_adapter(bases[base], tmp_path / "adapter", vocab_size=vocab_size, **config)
    report = merge_adapter(bases[base], adapter, tmp_path / "out")
    assert f"the vocabulary has {vocab_size} tokens, as the adapter" in report.notes
    truth = merged_by_peft(bases[base], adapter, vocab_size=vocab_size).eval()
    with zoo.silenced():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert found.config.vocab_size == vocab_size
    inputs = zoo.sample_inputs(found)
    torch.testing.assert_close(found(**inputs).logits, truth(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_new_rows_that_the_adapter_lacks_are_named(bases: dict[str, Path], tmp_path: Path) -> None:
    # PEFT stores the embedding that it targets, and not the head.
    adapter = save_adapter(bases["qwen3"], tmp_path / "adapter", target_modules=["embed_tokens"], vocab_size=104)
    with pytest.raises(KeyMismatchError, match="trained with 104 tokens, the base has 97.*no lm_head.weight"):
        merge_adapter(bases["qwen3"], adapter, tmp_path / "out")


def test_tied_tensors_are_untied_if_the_adapter_has_both(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = save_adapter(bases["tied"], tmp_path / "adapter", r=4, target_modules=["q_proj"], vocab_size=104)
    key = "base_model.model.lm_head.weight"
    change(adapter, lambda tensors: tensors | {key: tensors[key] + 1})
    report = merge_adapter(bases["tied"], adapter, tmp_path / "out")
    found, stored = tensors_of(tmp_path / "out"), tensors_of(adapter)
    assert torch.equal(found["lm_head.weight"], stored[key])
    assert torch.equal(found["model.embed_tokens.weight"], stored["base_model.model.model.embed_tokens.weight"])
    assert report.notes[0] == "lm_head.weight is not tied any more: it has its own values"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = json.loads((bases["tied"] / "config.json").read_text())
    assert config == wanted | {"tie_word_embeddings": False, "vocab_size": 104}
    change(adapter, lambda tensors: tensors | {key.replace("weight", "modules_to_save.weight"): tensors[key] + 1})
    with pytest.raises(KeyMismatchError, match="are the same tensor, and differ"):
        merge_adapter(bases["tied"], adapter, tmp_path / "other")


TIED: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "both": ("tied", ["embed_tokens", "lm_head", "q_proj"], {}),
    "head": ("tied", ["lm_head"], {"use_dora": True}),
    "embedding, larger": ("tied", ["embed_tokens"], {"vocab_size": 104}),
    "head, larger": ("tied", ["lm_head"], {"vocab_size": 104}),
    "both by PEFT": ("tied", ["embed_tokens"], {"vocab_size": 104, "ensure_weight_tying": True}),
    "mamba": ("mamba", ["lm_head", "x_proj"], {}),
    "two ties": ("bert", ["word_embeddings"], {}),
}
_FAST = "both", "embedding, larger"


@pytest.mark.parametrize(
    "case", [name if name in _FAST else pytest.param(name, marks=pytest.mark.slow) for name in TIED]
)
def test_a_lora_on_a_tied_module_unties_it(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base, targets, config = TIED[case]
    adapter = save_adapter(bases[base], tmp_path / "adapter", r=4, target_modules=targets, **config)
    report = merge_adapter(bases[base], adapter, tmp_path / "out")
    truth = adapted_by_peft(bases[base], adapter, vocab_size=config.get("vocab_size")).eval()
    with zoo.silenced():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert found.config.tie_word_embeddings is False
    assert "is not tied any more: it has its own values" in report.notes[0]
    inputs = zoo.sample_inputs(found)
    torch.testing.assert_close(found(**inputs).logits, truth(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["T5", "SwitchTransformers"])
def test_an_encoder_decoder_that_is_untied_scales_its_output_as_before(name: str, tmp_path: Path) -> None:
    """These models scale what the decoder gives to a head if the config says that it is tied."""
    config_class, model_class = (
        getattr(transformers, name + suffix) for suffix in ("Config", "ForConditionalGeneration")
    )
    torch.manual_seed(0)
    config = config_class(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    with zoo.silenced():
        model_class(config).save_pretrained(tmp_path / "base")
    # As on the hub: both are given by the class.
    file = tmp_path / "base" / "config.json"
    fields = json.loads(file.read_text())
    for field in ("tie_word_embeddings", "scale_decoder_outputs"):
        fields.pop(field, None)
    file.write_text(json.dumps(fields))
    lora = LoraConfig(r=2, target_modules=["q", "lm_head"], task_type="SEQ_2_SEQ_LM", init_lora_weights=False)
    with zoo.silenced():
        truth = get_peft_model(model_class.from_pretrained(tmp_path / "base"), lora).eval()
        truth.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    with zoo.silenced():
        merged = model_class.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(1, 9)[None]
    logits, expected = (model(input_ids=ids, decoder_input_ids=ids).logits for model in (merged, truth))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("SequenceClassification", "SEQ_CLS"),
        pytest.param("SequenceClassification", None, marks=pytest.mark.slow),
        pytest.param("TokenClassification", "TOKEN_CLS", marks=pytest.mark.slow),
    ],
)
def test_the_head_of_a_classifier_comes_from_the_adapter(
    kind: str, task: str | None, bases: dict[str, Path], tmp_path: Path
) -> None:
    auto_class = getattr(transformers, f"AutoModelFor{kind}")
    with zoo.silenced():
        model = auto_class.from_pretrained(bases["qwen3"], num_labels=3, pad_token_id=0)
    config = {"target_modules": ["q_proj"], "modules_to_save": ["score"], "task_type": task}
    adapter = save_adapter(model, tmp_path / "adapter", r=4, **config)
    overrides = {"pad_token_id": 0}
    report = merge_adapter(bases["qwen3"], adapter, tmp_path / "out", config_overrides=overrides)
    assert (report.model_class, report.modules, report.unchanged) == (f"Qwen3For{kind}", 3, ())
    with zoo.silenced():
        truth = PeftModel.from_pretrained(auto_class.from_pretrained(bases["qwen3"], num_labels=3), adapter)
        found = auto_class.from_pretrained(tmp_path / "out").eval()
    truth.config.pad_token_id = 0
    assert (found.config.architectures, found.config.num_labels) == ([f"Qwen3For{kind}"], 3)
    inputs = zoo.sample_inputs(found)
    torch.testing.assert_close(found(**inputs).logits, truth.eval()(**inputs).logits, rtol=1e-4, atol=1e-5)


def compare(truth: torch.nn.Module, out: Path, dtype: torch.dtype) -> None:
    """The files are what transformers saves of this model, rounded once, or the next number."""
    wanted_folder = out.parent / "wanted"
    truth.save_pretrained(wanted_folder)
    wanted, found = tensors_of(wanted_folder), tensors_of(out)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == dtype
        assert ulps_apart(found[key], tensor.to(dtype)) <= 1, key


def test_it_loads_and_computes_as_the_adapted_model_does(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = save_adapter(bases["moe"], tmp_path / "adapter", target_parameters=["experts.down_proj"], r=2)
    merge_adapter(bases["moe"], adapter, tmp_path / "out")
    truth = merged_by_peft(bases["moe"], adapter).eval()
    with zoo.silenced():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    inputs = zoo.sample_inputs(found)
    torch.testing.assert_close(found(**inputs).logits, truth(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_code_that_a_config_refers_to_is_copied(file: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    assert "own.py" not in read_companions(tmp_path, [tmp_path])[0]
    parts = {"source.spm", "bpe.codes", "normalizer.json", "vocab-src.json", "qwen.tiktoken"}
    for part in parts:
        (tmp_path / part).touch()
    assert parts <= read_companions(tmp_path, [tmp_path])[0].keys()
    (tmp_path / file).write_text('{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}')
    assert "own.py" in read_companions(tmp_path, [tmp_path])[0]
    (adapter := tmp_path / "adapter").mkdir()
    found, _ = read_companions(adapter, [tmp_path, adapter])
    assert ("own.py" in found) == (file == "tokenizer_config.json")
