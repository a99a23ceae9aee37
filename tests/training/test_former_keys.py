"""Keys of older versions of TRL and of published scripts: translated, left out or refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.core.errors import ConfigError
from shardwise.training.arguments import METHODS
from shardwise.training.former_keys import INERT, NESTED, OFF, RENAMED, SWITCHES, VALUES
from shardwise.training.keys import get_keys, get_types
from shardwise.training.run_config import RunConfig, read_run_config


def read(folder: Path, values: dict[str, Any], method: str = "sft", *, strict: bool = False) -> RunConfig:
    file = folder / "config.yaml"
    if method == "grpo":
        values = {"reward_funcs": ["accuracy_reward"], **values}
    file.write_text(yaml.safe_dump(values), "utf-8")
    return read_run_config([method, str(file)], strict=strict)


@pytest.mark.parametrize(
    ("method", "former", "today", "note"),
    [
        ("sft", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, "torch_dtype: read as dtype"),
        ("sft", {"warmup_ratio": 0.1}, {"warmup_steps": 0.1}, "warmup_ratio: read as warmup_steps: 0.1"),
        ("sft", {"warmup_ratio": 0.1, "warmup_steps": 5}, {"warmup_steps": 5}, "warmup_ratio: left out"),
        ("sft", {"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0.1}, "read as warmup_steps: 0.1"),
        ("sft", {"max_seq_length": 64}, {"max_length": 64}, "max_seq_length: read as max_length"),
        ("grpo", {"max_prompt_length": 64}, {}, "max_prompt_length: left out. TRL limits whole rows only"),
        ("sft", {"evaluation_strategy": "steps"}, {"eval_strategy": "steps"}, "read as eval_strategy"),
        ("sft", {"use_flash_attention_2": True}, {"attn_implementation": "flash_attention_2"}, "use_flash"),
        ("sft", {"use_flash_attention_2": False}, {}, "use_flash_attention_2: left out"),
        ("sft", {"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}, "group_by_length: read"),
        ("sft", {"preprocessing_num_workers": 4}, {"dataset_num_proc": 4}, "read as dataset_num_proc"),
        ("grpo", {"preprocessing_num_workers": 4}, {}, "preprocessing_num_workers: left out"),
        ("sft", {"overwrite_output_dir": True}, {}, "overwrite_output_dir: left out"),
        ("sft", {"hub_model_revision": "v1"}, {"hub_revision": "v1"}, "hub_model_revision: read as hub_revision"),
        ("sft", {"optim": "paged_adamw_32bit"}, {"optim": "adamw_torch"}, "optim: paged_adamw_32bit is read as"),
        ("sft", {"packing_strategy": "ffd"}, {"packing_strategy": "bfd"}, "packing_strategy: ffd is read as bfd"),
        ("sft", {"eval_strategy": False}, {"eval_strategy": "no"}, "eval_strategy: False is read as no"),
        ("sft", {"report_to": False}, {"report_to": "none"}, "report_to: False is read as none"),
        ("sft", {"dataset_configs": ["c"]}, {"dataset_config": "c"}, "dataset_configs: read as dataset_config: c"),
        ("sft", {"dataset_splits": ["a"]}, {"dataset_train_split": "a"}, "read as dataset_train_split: a"),
        ("grpo", {"scale_rewards": True}, {"scale_rewards": "group"}, None),
        ("grpo", {"scale_rewards": False}, {"scale_rewards": "none"}, None),
        ("sft", {"resume_from_checkpoint": False}, {"resume_from_checkpoint": False}, None),
        ("sft", {"model_revision": None, "dataloader_num_workers": None}, {}, None),
        ("grpo", {"packing": False, "beta": 0.04}, {"beta": 0.04}, None),
        (
            "cpo",
            {"gamma_beta_ratio": 0.5, "beta": 2.0, "loss_type": "sigmoid"},
            {"loss_type": "simpo", "simpo_gamma": 1.0},
            "gamma_beta_ratio: read as loss_type: simpo",
        ),
        (
            "cpo",
            {"gamma_beta_ratio": 0.5},
            {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
            "gamma_beta_ratio: read as beta: 2.0",
        ),
        (
            "sft",
            {"model_init_kwargs": {"torch_dtype": "bfloat16", "revision": "r", "attn_implementation": "sdpa"}},
            {"dtype": "bfloat16", "model_revision": "r", "attn_implementation": "sdpa"},
            "model_init_kwargs: read as dtype: bfloat16",
        ),
        (
            "sft",
            {
                "gradient_checkpointing_use_reentrant": False,
                "gradient_checkpointing_kwargs": {"use_reentrant": False},
            },
            {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
            "read as gradient_checkpointing_kwargs",
        ),
        (
            "sft",
            {"unsloth_load_in_4bit": True, "unsloth_lora_r": 16, "use_unsloth": True},
            {"load_in_4bit": True, "lora_r": 16, "use_peft": True},
            "use_unsloth: left out",
        ),
    ],
)
def test_a_key_that_is_translated(
    tmp_path: Path, method: str, former: dict[str, Any], today: dict[str, Any], note: str | None
) -> None:
    config = read(tmp_path, {"model_name_or_path": "m", **former}, method)
    expected = {"model_name_or_path": "m", **today}
    assert {key: config.values[key] for key in expected} == expected
    assert config.values.keys() - expected.keys() <= {"cpo_alpha", "beta", "reward_funcs"}
    assert (note is None) == (config.notes == ())
    assert note is None or any(note in one for one in config.notes)
    if note is not None:
        with pytest.raises(ConfigError, match="invalid keys"):
            read(tmp_path, {"model_name_or_path": "m", **former}, method, strict=True)


def test_keys_of_trackers_are_in_the_environment(tmp_path: Path) -> None:
    values = {"wandb_project": "p", "wandb_tags": ["a", "b"], "env": {"WANDB_PROJECT": "own", "X": 1}}
    assert read(tmp_path, {"max_pixels": 256}).own.processor_kwargs == {"max_pixels": 256}
    assert read(tmp_path, values).own.env == {"WANDB_PROJECT": "own", "WANDB_TAGS": "a,b", "X": 1}


def test_kernels_of_the_hub_are_asked_for_as_in_trl(tmp_path: Path) -> None:
    config = read(tmp_path, {"model_init_kwargs": {"use_kernels": True}})
    assert config.own.use_kernels
    assert config.notes == ("model_init_kwargs: read as use_kernels: True",)
    assert not read(tmp_path, {"model_init_kwargs": {"dtype": "float32"}}).own.use_kernels


def test_a_secret_is_not_printed(tmp_path: Path) -> None:
    config = read(tmp_path, {"token": "hf_secret"})
    assert config.values["hub_token"] == "hf_secret"
    assert config.notes == ("token: read as hub_token",)


def test_translations_are_to_keys_of_today() -> None:
    known = set().union(*map(get_keys, METHODS))
    assert set(RENAMED.values()) <= known
    assert set(VALUES) <= known
    assert {key for key, _ in (*SWITCHES.values(), *NESTED.values())} <= known
    assert not {*RENAMED, *NESTED, *OFF} & known
    for key, values in VALUES.items():
        assert "str" in get_types(key)
        choices = {choice for method in METHODS for choice in get_keys(method).get(key, {}).get("choices", ())}
        assert not choices or set(values.values()) <= choices
    assert len(INERT) <= 40


def test_a_key_is_never_guessed(tmp_path: Path) -> None:
    """A suggestion is for a misspelling. A similar name may mean something else."""
    for key in ("model_revision_hub", "project_name", "max_image_length", "lora_ranks_list", "dataset", "sp_alpha"):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, {key: 1})
        assert "Did you mean" not in str(caught.value)


def test_all_unknown_keys_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"invalid keys \(3\)"):
        read(tmp_path, {"my_flag": 1, "other_flag": 2, "adapter": "qlora", "torch_dtype": "auto"})
