"""Configurations of axolotl and LLaMA-Factory, explained in TRL's keys. The files are invented."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.core.errors import ConfigError
from shardwise.training import other_formats
from shardwise.training.keys import get_types
from shardwise.training.other_formats import explain_other_format
from shardwise.training.run_config import read_run_config

PAGE = Path(__file__).parents[2] / "docs" / "moving_over.md"
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.yaml"))

AXOLOTL_LORA = """
base_model: example/llama-8b
model_type: LlamaForCausalLM
load_in_8bit: true
datasets:
  - path: example/stories
    type: alpaca
    split: train[:20%]
  - {path: more.jsonl, ds_type: json, type: chat_template, field_messages: conversations}
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/lora
sequence_len: 4096
sample_packing: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj]
lora_target_linear: true
wandb_project: stories
wandb_entity:
wandb_name: first
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
lr_scheduler_kwargs: {min_lr: 1.0e-6}
learning_rate: 0.00002
bf16: auto
gradient_checkpointing: true
flash_attention: true
group_by_length: false
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
special_tokens: {pad_token: <|end_of_text|>}
early_stopping_patience: 3
"""

AXOLOTL_QLORA = """
base_model: example/llama-70b
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets: [{path: example/chats, type: chat_template}]
chat_template: llama3
sequence_len: 512
val_set_size: 0
micro_batch_size: 1
gradient_accumulation_steps: 4
optimizer: adamw_torch
learning_rate: 2e-5
train_on_inputs: true
sdp_attention: true
flash_attention: false
evals_per_epoch: 4
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true, fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer}
hub_token: hf_secret
"""

AXOLOTL_FULL = """
base_model: example/qwen-1b
datasets: [{path: rows.jsonl, type: chat_template}]
sequence_len: 2048
micro_batch_size: 4
num_epochs: 1
optimizer: adamw_torch_fused
learning_rate: 2.0e-5
fp16: true
saves_per_epoch: 1
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
liger_rms_norm: true
"""

AXOLOTL_DPO = """
base_model: example/llama-8b
rl: dpo
rl_beta: 0.2
datasets: [{path: example/pairs, type: chat_template.default}]
sequence_len: 1024
sample_packing: false
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
micro_batch_size: 1
num_epochs: 2
learning_rate: 5.0e-6
bf16: true
val_set_size: 0.1
eval_steps: 50
save_steps: 100
warmup_steps: 10
"""

FACTORY_LORA = """
model_name_or_path: example/qwen-4b
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
dataset: identity, poems
template: qwen3_nothink
cutoff_len: 4096
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/lora
plot_loss: true
save_strategy: epoch
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
flash_attn: fa2
val_size: 0.1
freeze_vision_tower: true
"""

FACTORY_QLORA = """
model_name_or_path: example/qwen-4b
quantization_bit: 4
stage: sft
finetuning_type: lora
lora_target: all
dataset: identity
template: qwen3
bf16: true
neat_packing: true
train_on_prompt: true
"""

FACTORY_FULL = """
model_name_or_path: example/qwen-4b
stage: sft
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity
template: qwen3
cutoff_len: 2048
learning_rate: 1.0e-5
bf16: true
flash_attn: auto
disable_gradient_checkpointing: true
"""

FACTORY_DPO = """
model_name_or_path: example/qwen-4b
stage: dpo
finetuning_type: lora
lora_target: all
pref_beta: 0.2
pref_loss: hinge
dataset: pairs
template: qwen3
cutoff_len: 2048
learning_rate: 5.0e-6
"""

FACTORY_REWARD = """
model_name_or_path: example/qwen-4b
stage: rm
finetuning_type: lora
dataset: pairs
template: qwen3
"""

FACTORY_FREEZE = """
model_name_or_path: example/qwen-4b
stage: pt
finetuning_type: freeze
freeze_trainable_modules: self_attn,mlp
dataset: texts
template: default
quantization_bit: 8
"""

QLORA = {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True, "lora_dropout": 0.0}


def explain(text: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the title, the configuration to save, and the comments by key."""
    explanation = explain_other_format(yaml.safe_load(text))
    assert explanation is not None
    title, _, rest = explanation.partition("\n\n")
    pasted, _, left = rest.partition("# Not carried over:")
    comments = [line.removeprefix("# ").partition(": ") for line in left.split("\n") if line]
    return title, yaml.safe_load(pasted), {key: value for key, _, value in comments}


@pytest.mark.parametrize(
    ("text", "expected", "left"),
    [
        (
            AXOLOTL_LORA,
            {
                "model_name_or_path": "example/llama-8b",
                "datasets": [{"path": "example/stories", "split": "train[:20%]"}, {"path": "more.jsonl"}],
                "test_split_size": 0.05,
                "output_dir": "./outputs/lora",
                "max_length": 4096,
                "packing": True,
                "assistant_only_loss": True,
                "use_peft": True,
                "lora_r": 32,
                "lora_alpha": 16,
                "lora_dropout": 0.05,
                "lora_target_modules": "all-linear",
                "env": {"WANDB_PROJECT": "stories"},
                "report_to": "wandb",
                "run_name": "first",
                "gradient_accumulation_steps": 4,
                "per_device_train_batch_size": 2,
                "per_device_eval_batch_size": 2,
                "router_aux_loss_coef": 0.0,
                "num_train_epochs": 4,
                "optim": "adamw_torch_8bit",
                "lr_scheduler_type": "cosine",
                "lr_scheduler_kwargs": {"min_lr": 1e-6},
                "learning_rate": 2e-5,
                "bf16": True,
                "dtype": "bfloat16",
                "gradient_checkpointing": True,
                "attn_implementation": "flash_attention_2",
                "warmup_steps": 0.1,
                "eval_strategy": "steps",
                "eval_steps": 1 / 16,
                "save_strategy": "steps",  # as for evaluations, which load_best_model_at_end requires
                "save_steps": 1 / 4,
                "save_total_limit": 4,
                "pad_token": "<|end_of_text|>",
                "early_stopping_patience": 3,
                "load_best_model_at_end": True,
            },
            {
                "model_type": "LlamaForCausalLM",
                "load_in_8bit": "true  # 8-bit bases are not supported. Use load_in_4bit",
                "datasets[0].type": "alpaca  # rows are recognized by their columns, and rendered by the chat "
                "template of the tokenizer",
                "datasets[1].type": "chat_template  # rows are recognized by their columns, and rendered by the "
                "chat template of the tokenizer",
                "datasets[1].ds_type": "json",
                "datasets[1].field_messages": "conversations",
                "lora_target_modules": "[q_proj]",
            },
        ),
        (
            AXOLOTL_FULL,
            {
                "model_name_or_path": "example/qwen-1b",
                "datasets": [{"path": "rows.jsonl"}],
                "max_length": 2048,
                "per_device_train_batch_size": 4,
                "per_device_eval_batch_size": 4,
                "gradient_checkpointing": False,
                "router_aux_loss_coef": 0.0,
                "num_train_epochs": 1,
                "optim": "adamw_torch_fused",
                "lr_scheduler_type": "cosine",  # axolotl's default
                "learning_rate": 2e-5,
                "fp16": True,
                "bf16": False,
                "save_strategy": "epoch",
                "save_total_limit": 4,
                "warmup_steps": 0.03,
                "assistant_only_loss": True,
                "use_liger_kernel": True,
            },
            {
                "datasets[0].type": "chat_template  # rows are recognized by their columns, and rendered by the "
                "chat template of the tokenizer",
                "plugins": "[axolotl.integrations.liger.LigerPlugin]",
                "liger_rope": "true  # applied where use_liger_kernel is set",
            },
        ),
        (
            FACTORY_LORA,
            {
                "model_name_or_path": "example/qwen-4b",
                "trust_remote_code": True,
                "method": "sft",
                "do_train": True,
                "use_peft": True,
                "lora_r": 16,
                "lora_alpha": 32,  # twice the rank
                "lora_dropout": 0.0,
                "lora_target_modules": ["q_proj", "v_proj"],
                "datasets": [{"path": "identity"}, {"path": "poems"}],
                "max_length": 4096,
                "dataset_num_proc": 16,
                "output_dir": "saves/lora",
                "save_strategy": "epoch",
                "per_device_train_batch_size": 1,
                "learning_rate": 1e-4,
                "num_train_epochs": 3.0,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 0.1,
                "bf16": True,
                "dtype": "bfloat16",
                "attn_implementation": "flash_attention_2",
                "test_split_size": 0.1,
                "assistant_only_loss": True,
                "router_aux_loss_coef": 0.0,
            },
            {
                "template": "qwen3_nothink  # that of the tokenizer is used. Or set chat_template_path",
                "max_samples": "1000  # write split: train[:N] into datasets",
                "plot_loss": "true",
                "freeze_vision_tower": "true  # which modules are trained is chosen by name. Set trainable_layers "
                "and extra_modules",
            },
        ),
    ],
    ids=["axolotl-lora", "axolotl-full", "factory-lora"],
)
def test_every_key_is_converted_or_named(text: str, expected: dict[str, Any], left: dict[str, str]) -> None:
    _, config, comments = explain(text)
    assert config == expected
    assert comments == left


@pytest.mark.parametrize(
    ("text", "expected", "absent"),
    [
        (
            AXOLOTL_QLORA,
            {
                **QLORA,
                "attn_implementation": "sdpa",
                "num_train_epochs": 1,
                "cpu_offload": True,
                "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "save_strategy": "epoch",
                "warmup_steps": 0.03,
            },
            {"assistant_only_loss", "test_split_size", "eval_strategy", "fsdp", "chat_template", "hub_token"},
        ),
        (
            AXOLOTL_DPO,
            {
                "method": "dpo",
                "beta": 0.2,
                "lora_alpha": 32,
                "warmup_steps": 10,
                "test_split_size": 0.1,
                "eval_strategy": "steps",
                "eval_steps": 50,
                "save_strategy": "steps",
                "save_steps": 100,
                "router_aux_loss_coef": None,  # TRL's default
            },
            {"packing", "assistant_only_loss"},
        ),
        (
            FACTORY_QLORA,
            {**QLORA, "lora_r": 8, "lora_alpha": 16, "packing": True, "max_length": 2048, "learning_rate": 5e-5},
            {"assistant_only_loss"},
        ),
        (
            FACTORY_FULL,
            {"gradient_checkpointing": False, "max_length": 2048},  # LLaMA-Factory trains float32, as does TRL
            {"use_peft", "dtype", "attn_implementation", "deepspeed", *(f"lora_{key}" for key in ("r", "alpha"))},
        ),
        (
            FACTORY_DPO,
            {"method": "dpo", "beta": 0.2, "loss_type": "hinge", "lora_target_modules": "all-linear"},
            {"assistant_only_loss"},
        ),
        (FACTORY_REWARD, {"method": "reward", "lora_task_type": "SEQ_CLS", "use_peft": True}, {"beta"}),
        (
            FACTORY_FREEZE,
            {
                "method": "sft",
                "trainable_layers": 2,
                "trainable_modules": "self_attn,mlp",
                "packing": True,
                "packing_strategy": "wrapped",
            },
            {"use_peft", "load_in_8bit", "assistant_only_loss"},
        ),
        (
            AXOLOTL_LORA.replace("num_epochs: 4", "num_epochs: 3"),
            {"eval_steps": 1 / 12, "save_steps": 1 / 3},  # not rounded, so that one divides the other
            set(),
        ),
        (
            AXOLOTL_DPO.replace("rl: dpo", "rl: simpo")
            + "simpo_gamma: 0.4\nhub_model_id: m\noptimizer: paged_adamw_8bit",
            {
                "method": "cpo",
                "loss_type": "simpo",
                "beta": 0.2,
                "simpo_gamma": 0.4,
                "push_to_hub": True,
                "hub_private_repo": True,
                "optim": "adamw_torch_8bit",
            },
            {"cpo_alpha", "router_aux_loss_coef"},
        ),
        (
            AXOLOTL_DPO.replace("rl: dpo", "rl: ipo") + "dpo_use_weighting: true\nrevision_of_model: v1\n"
            "peft_use_dora: true\npeft_use_rslora: true",
            {
                "method": "dpo",
                "loss_type": "ipo",
                "use_weighting": True,
                "model_revision": "v1",
                "use_dora": True,
                "use_rslora": True,
            },
            {"push_to_hub"},
        ),
        (
            AXOLOTL_DPO.replace("rl: dpo\nrl_beta", "rl: orpo\norpo_alpha"),
            {"method": "orpo", "beta": 0.2},
            {"router_aux_loss_coef"},
        ),
        (
            AXOLOTL_DPO.replace("rl: dpo", "rl: grpo") + "trl: {sync_ref_model: true}",
            {"sync_ref_model": True, "ref_model_mixup_alpha": 0.9, "ref_model_sync_steps": 64},
            set(),
        ),
        (
            AXOLOTL_FULL + "model_config: {output_router_logits: true}",
            {"router_aux_loss_coef": None},
            {"model_config"},
        ),
        (
            FACTORY_FULL.replace("bf16: true", "pref_loss: orpo") + "use_dft_loss: true\nmoe_aux_loss_coef: 0.01\n"
            "default_system: s\neval_dataset: rows\nhub_model_id: m",
            {
                "method": "sft",
                "bf16": False,
                "loss_type": "dft",
                "router_aux_loss_coef": 0.01,
                "system_prompt": "s",
                "eval_dataset_name": "rows",
            },
            {"dtype", "push_to_hub"},
        ),
        (
            FACTORY_DPO.replace("hinge", "simpo"),
            {"method": "cpo", "beta": 0.2, "loss_type": "simpo", "cpo_alpha": 0.0},
            set(),
        ),
        (FACTORY_DPO.replace("hinge", "orpo"), {"method": "orpo", "beta": 0.2}, {"loss_type"}),
    ],
    ids=[
        *("axolotl-qlora", "axolotl-dpo", "qlora", "full", "dpo", "reward", "freeze"),
        *("axolotl-three-epochs", "axolotl-simpo", "axolotl-ipo", "axolotl-orpo", "axolotl-grpo", "axolotl-router"),
        *("full-float32", "simpo", "orpo"),
    ],
)
def test_what_lines_ask_for(text: str, expected: dict[str, Any], absent: set[str]) -> None:
    _, config, _ = explain(text)
    assert {key: config.get(key) for key in expected} == expected
    assert not absent & config.keys()


def test_every_counterpart_is_a_key() -> None:
    tables = yaml.safe_load(Path(other_formats.__file__).with_suffix(".yaml").read_text("utf-8"))
    names = {*tables["keys"].values(), *(name for line in tables["lines"].values() for name in line)}
    assert [name for name in sorted(names) if not get_types(name)] == []


AXOLOTL = (AXOLOTL_LORA, AXOLOTL_QLORA, AXOLOTL_FULL, AXOLOTL_DPO)
FACTORY = (FACTORY_LORA, FACTORY_QLORA, FACTORY_FULL, FACTORY_DPO, FACTORY_REWARD, FACTORY_FREEZE)


@pytest.mark.parametrize("text", [*AXOLOTL, *FACTORY])
def test_the_configuration_is_valid_and_no_key_is_lost(text: str, tmp_path: Path) -> None:
    title, pasted, _ = explain(text)
    program = "axolotl" if text in AXOLOTL else "LLaMA-Factory"
    assert title == f"is a configuration of {program}, not of TRL. Save this as another file, and check it:"
    assert title.replace(program, "axolotl") in PAGE.read_text("utf-8")
    explanation = str(explain_other_format(yaml.safe_load(text)))
    assert f"  # implied by {program}\n" in explanation
    (tmp_path / "trl.yaml").write_text(explanation.partition("\n\n")[2])
    config = read_run_config([str(tmp_path / "trl.yaml")])
    assert config.method == pasted.get("method", "sft")
    assert explain_other_format(pasted) is None
    # Beside TRL's keys with their own name, each key stands in a comment: as an origin, or as not carried over.
    said_without_key = {
        *("finetuning_type: full", "finetuning_type: freeze", "train_on_inputs: true", "train_on_prompt: true"),
        *("flash_attn: auto", "flash_attention: false", "group_by_length: false", "val_set_size: 0"),
    }
    for line in text.strip().split("\n"):
        key, _, value = line.partition(":")
        if value and not line.startswith(" ") and line not in said_without_key and key not in ("dataset", "bf16"):
            assert key.removeprefix("wandb_").lower() in explanation.lower(), line


@pytest.mark.parametrize("text", [AXOLOTL_LORA, FACTORY_DPO])
def test_train_refuses_the_file_with_the_explanation(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.yml").write_text(text)
    with pytest.raises(ConfigError, match=r"other\.yml: is a configuration of \S+, not of TRL\.") as raised:
        read_run_config([str(tmp_path / "other.yml"), "--learning_rate", "1e-6"])
    assert "\nlearning_rate: 1e-6\n" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("hub_token", {}),
        ("wandb_api_key", {"wandb_api_key": "hf_secret"}),
        ("env: {WANDB_API_KEY: ...}", {"env": {"WANDB_API_KEY": "hf_secret"}}),
        ("api_key", {"datasets": [{"path": "x", "api_key": "hf_secret"}]}),
        ("api_key", {"trl": {"api_key": "hf_secret"}}),
    ],
)
def test_a_secret_is_not_repeated(name: str, further: dict[str, Any]) -> None:
    told = str(explain_other_format({**yaml.safe_load(AXOLOTL_QLORA), **further}))
    assert "hf_secret" not in told
    assert name in told


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        (AXOLOTL_DPO, "rl: ebft", "method"),
        (AXOLOTL_LORA, "adapter: llama-adapter", "adapter"),
        (FACTORY_LORA, "finetuning_type: oft", "finetuning_type"),
    ],
)
def test_what_is_not_supported_stays_an_error(text: str, line: str, key: str, tmp_path: Path) -> None:
    """Without it the configuration would train something else."""
    name = line.partition(":")[0]
    _, config, _ = explain(re.sub(f"^{name}: .*$", line, text, flags=re.MULTILINE))
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=f"  {key}: "):
        read_run_config([str(tmp_path / "trl.yaml")])


def test_values_are_written_as_yaml_reads_them() -> None:
    values = {
        "base_model": "m",
        "sequence_len": 8,
        "adapter": "lora",
        "lr_scheduler_kwargs": {"a": 1e-9, "b": [2e22]},
    }
    for text in (
        "no",
        "Null",
        "1e-5",
        "12",
        "a: b",
        "- a",
        "#",
        '"',
        "é\n",
        "12:30",
        ".5",
        "{a}",
        "it's",
        "~",
        "a #b",
    ):
        explanation = explain_other_format({**values, "wandb_name": text, "output_dir": text, "odd": text})
        config = yaml.safe_load(str(explanation).partition("\n\n")[2])
        assert config["run_name"] == config["output_dir"] == text
        assert config["lr_scheduler_kwargs"] == values["lr_scheduler_kwargs"]


TRL = """
model_name_or_path: example/qwen-7b
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_mixer: {example/rows: 1.0}
dataset_splits: [train]
preprocessing_num_workers: 8
chat_template: "{% for message in messages %}{% endfor %}"
load_in_4bit: true
use_peft: true
lora_r: 16
lora_target_modules: all-linear
max_seq_length: 2048
warmup_ratio: 0.1
evaluation_strategy: epoch
wandb_project: a
unsloth_configs: {load_in_4bit: true}
"""


@pytest.mark.parametrize(
    "values",
    [
        *(
            pytest.param(yaml.safe_load(path.read_text("utf-8")), id=f"{path.parent.name}-{path.stem}")
            for path in RECIPES
        ),
        *(
            {**yaml.safe_load(TRL), **more}
            for more in ({}, {"stage": "sft"}, {"optimizer": "adamw"}, {"dataset": "d"})
        ),
        *(
            {"model_name_or_path": "m", "dataset_name": "d", key: "x"}
            for key in ("base_model", "adapter", "template")
        ),
        {
            "model": {"_component_": "torchtune.models.llama3.lora_llama3_8b"},
            "dataset": {},
            "optimizer": {},
            "epochs": 1,
        },
        {},
    ],
)
def test_a_configuration_of_trl_is_none_of_these(values: dict[str, Any]) -> None:
    assert explain_other_format(values) is None
