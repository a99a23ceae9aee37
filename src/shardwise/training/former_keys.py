"""Keys of older versions of TRL and transformers and of published training scripts, as keys of today.

Public configurations were written for other versions of TRL, and for scripts that extend it (those of the
alignment handbook and open-r1 above all). A key whose meaning is certain is translated, one that changes neither
the loss, the data nor the destination is left out, and both are told in one line each. Every other unknown key is
an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

RENAMED: Final[Mapping[str, str]] = {
    # transformers 4
    "torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
    "push_to_hub_model_id": "hub_model_id",
    # TRL before 1.0
    "max_seq_length": "max_length",
    "use_liger": "use_liger_kernel",
    "use_liger_loss": "use_liger_kernel",
    # scripts
    "preprocessing_num_workers": "dataset_num_proc",
    "hub_model_revision": "hub_revision",
    "private": "hub_private_repo",
    "token": "hub_token",
    "exp_name": "run_name",
    "tokenizer_path": "tokenizer_name_or_path",
    "dataset_id_or_path": "dataset_name",
    "dataset_path": "dataset_name",
    "eval_dataset_split": "dataset_test_split",
    "train_seed": "seed",
    "unsloth_load_in_4bit": "load_in_4bit",
    "unsloth_lora_alpha": "lora_alpha",
    "unsloth_lora_dropout": "lora_dropout",
    # shardwise before 1.0
    "tenants": "adapters",
}
"""Keys whose values mean the same under another name."""

SWITCHES: Final[Mapping[str, tuple[str, str]]] = {
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
    "use_flash_attention_2": ("attn_implementation", "flash_attention_2"),
    "adafactor": ("optim", "adafactor"),
}
"""Switches, and the key and the value that are set if they are on."""

NESTED: Final[Mapping[str, tuple[str, str]]] = {
    "gradient_checkpointing_use_reentrant": ("gradient_checkpointing_kwargs", "use_reentrant"),
    "use_reentrant": ("gradient_checkpointing_kwargs", "use_reentrant"),
    "skip_prepare_dataset": ("dataset_kwargs", "skip_prepare_dataset"),
    "typical_p": ("generation_kwargs", "typical_p"),
    "min_pixels": ("processor_kwargs", "min_pixels"),
    "max_pixels": ("processor_kwargs", "max_pixels"),
    # Trackers read these from the environment.
    "wandb_project": ("env", "WANDB_PROJECT"),
    "wandb_entity": ("env", "WANDB_ENTITY"),
    "wandb_run_group": ("env", "WANDB_RUN_GROUP"),
    "wandb_tags": ("env", "WANDB_TAGS"),
    "logging_dir": ("env", "TENSORBOARD_LOGGING_DIR"),
}
"""Keys whose values are in a mapping of today: its key, and the name inside of it."""

VALUES: Final[Mapping[str, Mapping[str | bool, str]]] = {
    # YAML 1.1 reads no as False.
    "eval_strategy": {False: "no"},
    "save_strategy": {False: "no"},
    "logging_strategy": {False: "no"},
    "report_to": {False: "none"},
    "packing_strategy": {"ffd": "bfd"},
    "optim": {
        "adamw_hf": "adamw_torch",
        "paged_adamw": "adamw_torch",
        "paged_adamw_32bit": "adamw_torch",
        # Moments in 8 bits, too, by torchao, whose optimizer steps shards as that of bitsandbytes does not.
        "adamw_8bit": "adamw_torch_8bit",
        "adamw_bnb_8bit": "adamw_torch_8bit",
        "paged_adamw_8bit": "adamw_torch_8bit",
    },
}
"""Values of today's keys that are read as others."""

INERT: Final[Mapping[str, str]] = {
    "overwrite_output_dir": "a training resumes from its own checkpoints, and overwrites no other training",
    "benchmarks": "the evaluations that the authors' script starts afterwards",
    "callbacks": "callbacks of the authors' script, which push checkpoints and start evaluations",
    "max_prompt_length": "TRL limits whole rows only, by max_length, and the prompts of GRPO not at all",
    "vllm_device": "vllm_mode decides where the engine runs",
    "cache_dir": "downloads are kept in the folder of HF_HOME",
    "model_cache_dir": "downloads are kept in the folder of HF_HOME",
    "save_safetensors": "weights are always saved in safetensors",
    "dataset_num_proc": "the processes that prepare rows, which this method prepares as it reads them",
    "padding_free": "this method pads its rows, with the same loss",
    "log_completions": "this method generates none",
    "dataset_format": "chats, ShareGPT and Alpaca are recognized by their columns",
    "allow_mixed_parquet_schemas": "datasets unites the columns of files",
    "use_unsloth": "the model is loaded and sharded here, without the kernels of Unsloth",
    "unsloth_local_files_only": "files are downloaded once, and then read from the cache",
    "truncation_side": "TRL cuts rows by truncation_mode",
    "padding_side": "TRL pads on the side that its loss needs",
}
"""Keys that are left out, each with the reason. None changes the loss, the data or where results go."""

OFF: Final = frozenset(
    {
        *(*SWITCHES, "freeze_llm", "freeze_vision", "freeze_vision_tower", "freeze_vit", "freeze_projector"),
        *("use_unsloth", "raw_rollout"),
    }
)
"""Switches of older versions and scripts that ask for nothing if they are false."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A configuration in today's keys.

    Attributes:
        values: its keys and values. Unknown keys are among them.
        notes: one line for each key that was translated or left out.
        faults: former keys that contradict others.
        former_keys: the former key of each key that was translated.
    """

    values: Mapping[str, Any]
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    former_keys: Mapping[str, str]


def translate(values: Mapping[str, Any], keys: Mapping[str, Any]) -> Translation:
    """Translate former keys and values of a configuration, and leave out the keys of ``INERT``.

    Args:
        values: keys and values.
        keys: the keys of today, for the method. They are not translated.
    """
    # Keys of today first, because what a former key becomes is compared with them.
    today = {key: value for key, value in values.items() if key in keys and not _is_converted(key, value, values)}
    notes: list[str] = []
    faults: list[str] = []
    former_keys: dict[str, str] = {}
    for key, value in values.items():
        if key in today:
            if isinstance(value, str | bool) and value in VALUES.get(key, {}):
                today[key] = VALUES[key][value]
                notes.append(f"{key}: {value} is read as {today[key]}")
            continue
        try:
            replacement = _translate_key(key, value, values)
        except (TypeError, ValueError) as error:
            faults.append(f"{key}: {error}")
            continue
        if replacement is None:
            if key in INERT:
                notes.append(f"{key}: left out. {INERT[key]}")
            else:
                today[key] = value  # unknown: an error when keys are checked
            continue
        if not replacement:
            notes.append(f"{key}: left out. {value} asks for nothing")
        # If the key of today is set, too: mappings are united, a value that counts less is left out, equal values
        # are one, and all others contradict each other.
        for name, new in replacement.items():
            old = today.get(name)
            is_unset = old is None or (key == "warmup_ratio" and old == 0)  # transformers 4 read 0 steps so
            if name not in keys and name in INERT:
                notes.append(f"{key}: left out. {INERT[name]}")
            elif key not in RENAMED and isinstance(new, dict) and isinstance(old, dict):  # env, kwargs
                today[name] = {**new, **old}
                notes.append(f"{key}: read as {name}: {new}")
            elif not is_unset and old != new and (not new or key in _YIELDING):
                notes.append(f"{key}: left out. {name}: {old} comes before it")
            elif not is_unset and old != new:
                faults.append(f"{key}: is a former name of {name}, which has another value. Remove {key}")
            else:
                today[name], former_keys[name] = new, key
                # Values of renamed keys may be secrets.
                notes.append(f"{key}: read as {name}" + ("" if key in RENAMED else f": {new}"))
    return Translation(today, tuple(notes), tuple(faults), former_keys)


def _is_converted(key: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Return whether a key of today has a former meaning here."""
    if key in ("dataset_configs", "dataset_splits"):
        return "dataset_mixer" not in values and not isinstance(values.get("dataset_name"), dict)
    if key == "loss_type":
        return "gamma_beta_ratio" in values
    return key == "model_init_kwargs" or (key == "dataset_name" and isinstance(value, dict))


_YIELDING: Final = frozenset({"warmup_ratio", "preprocessing_num_workers"})
"""Former keys that libraries ignored beside the key of today."""


def _translate_key(key: str, value: Any, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the keys of today that mean the same, none of them if they are the defaults. None for an unknown key.

    ``CONVERTED`` in ``tests/training/key_table.py`` describes those that are in no table, for the documentation.

    Raises:
        ValueError: the value has no counterpart. The message says what to do.
    """
    if key in OFF and not value:
        return {}
    if key in RENAMED:
        return {RENAMED[key]: value}
    if key in SWITCHES:
        return dict([SWITCHES[key]])
    if key in NESTED:
        mapping, name = NESTED[key]
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        return {} if value in (None, "") else {mapping: {name: text}}
    if key == "warmup_ratio":
        # transformers 5 reads warmup_steps below 1 as this fraction.
        ratio = float(value or 0)
        if not 0 <= ratio < 1:
            raise ValueError(f"{value} is not a fraction of the steps. Write 0.0 or more, and less than 1")
        return {"warmup_steps": ratio}
    # Lists for dataset_mixer, beside a single dataset.
    if key == "dataset_configs":
        if not isinstance(value, list) or len(value) != 1:
            raise ValueError("is for dataset_mixer. Set dataset_config")
        return {"dataset_config": value[0]}
    if key == "dataset_splits":
        if not isinstance(value, list) or not 1 <= len(value) <= 2:
            raise ValueError("is for dataset_mixer. Set dataset_train_split and dataset_test_split")
        return dict(zip(("dataset_train_split", "dataset_test_split"), value, strict=False))
    if key == "loss_type":
        if value != "sigmoid":
            raise ValueError(f"{value} beside gamma_beta_ratio has no counterpart. Remove it for that of SimPO")
        return {}
    if key == "dataset_name" and isinstance(value, dict):
        return {"dataset_mixer": value}
    if key == "eval_dataset_names" and isinstance(value, list) and len(value) == 1:
        return {"eval_dataset_name": value[0]}
    if key == "gamma_beta_ratio":
        # The margin of SimPO, which TRL's CPO has as a number of its own, beside SimPO's own default of beta.
        beta = values.get("beta", 2.0)
        gamma = float(value) * float(beta)
        return {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": beta, "simpo_gamma": gamma}
    if key == "save_safetensors" and value is False:
        raise ValueError("false would save pickles. Remove it")
    if key == "model_init_kwargs":
        return _translate_model_init(value)
    if key == "unsloth_configs" and not values.get("use_unsloth"):
        return {}
    if key == "unsloth_lora_r":
        return {"lora_r": value, "use_peft": True}
    return None


_MODEL_INIT: Final = {
    "torch_dtype": "dtype",
    "dtype": "dtype",
    "attn_implementation": "attn_implementation",
    "revision": "model_revision",
    "trust_remote_code": "trust_remote_code",
    "use_kernels": "use_kernels",
}
"""Keys of ``model_init_kwargs`` that are keys of a configuration."""

_MODEL_CONFIG: Final = frozenset(
    {"rope_scaling", "rope_parameters", "rope_theta", "use_cache", "max_position_embeddings", "sliding_window"}
)
"""Keys of ``model_init_kwargs`` that are settings of the model's config."""


def _translate_model_init(value: Any) -> Mapping[str, Any]:
    """Return keys for those of ``from_pretrained`` in ``model_init_kwargs``.

    Raises:
        ValueError: one of them has no counterpart.
    """
    if not isinstance(value, dict | None):
        raise ValueError(f"{value} is not a mapping. Write KEY: VALUE in it")
    settings: dict[str, Any] = {}
    replacement: dict[str, Any] = {}
    for name, setting in (value or {}).items():
        if name in _MODEL_INIT:
            replacement[_MODEL_INIT[name]] = setting
        elif name in _MODEL_CONFIG:
            settings[name] = setting
        elif name not in INERT:
            raise ValueError(f"{name} cannot be passed on. Remove it, or set it in config.json of the model")
    return {**replacement, "config_overrides": settings} if settings else replacement
