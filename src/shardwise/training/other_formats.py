"""Configurations of axolotl and LLaMA-Factory, recognized and explained in TRL's keys.

They are not read as such: whoever has one gets the configuration for TRL that corresponds, to check and to keep.
"""

import json
import re
from collections.abc import Mapping, Set
from itertools import chain
from typing import Any, Final

from shardwise.training.arguments import METHODS
from shardwise.training.keys import REJECTED, find_faults, get_types

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "model_name_or_path": ("base_model",),
    "tokenizer_name_or_path": ("tokenizer_config",),
    "method": ("rl", "stage"),
    "beta": ("rl_beta", "pref_beta"),
    "loss_type": ("pref_loss",),
    "desirable_weight": ("kto_desirable_weight", "kto_chosen_weight"),
    "undesirable_weight": ("kto_undesirable_weight", "kto_rejected_weight"),
    "datasets": ("dataset",),
    "dataset_num_proc": ("dataset_processes", "preprocessing_num_workers"),
    "test_split_size": ("val_set_size", "val_size"),
    "max_length": ("sequence_len", "cutoff_len"),
    "packing": ("sample_packing",),
    "eval_packing": ("eval_sample_packing",),
    "per_device_train_batch_size": ("micro_batch_size",),
    "per_device_eval_batch_size": ("eval_batch_size",),
    "num_train_epochs": ("num_epochs",),
    "optim": ("optimizer",),
    "lr_scheduler_type": ("lr_scheduler",),
    "warmup_steps": ("warmup_ratio",),  # transformers 5 reads a number below 1 as this fraction of the steps
    "early_stopping_patience": ("early_stopping_steps",),
    "run_name": ("wandb_name",),
    "lora_r": ("lora_rank",),
    "lora_target_modules": ("lora_target",),
    "lora_modules_to_save": ("additional_target",),
    "trainable_layers": ("freeze_trainable_layers",),
    "trainable_modules": ("freeze_trainable_modules",),
    "extra_modules": ("freeze_extra_modules",),
    "use_bnb_nested_quant": ("double_quantization",),
    "cpu_offload": ("fsdp_config.offload_params",),
}
"""Keys of TRL or shardwise, and the names elsewhere of keys with the same values."""

_SETTINGS: Final[Mapping[tuple[str, Any], tuple[str, ...]]] = {
    ("method", "sft"): ("stage: pt",),
    ("method", "reward"): ("reward_model: true", "stage: rm"),
    ("use_peft", True): ("adapter: lora", "adapter: qlora", "finetuning_type: lora"),
    ("load_in_4bit", True): ("adapter: qlora", "quantization_bit: 4"),
    ("load_in_8bit", True): ("quantization_bit: 8",),
    ("lora_target_modules", "all-linear"): ("lora_target_linear: true", "lora_target: all"),
    ("bf16", True): ("bf16: auto", "pure_bf16: true"),
    ("dtype", "bfloat16"): ("pure_bf16: true",),
    ("attn_implementation", "flash_attention_2"): ("flash_attention: true", "flash_attn: fa2"),
    ("attn_implementation", "sdpa"): ("sdp_attention: true", "flash_attn: sdpa"),
    ("attn_implementation", "eager"): ("eager_attention: true", "flash_attn: disabled"),
    ("assistant_only_loss", True): ("train_on_inputs: false", "train_on_prompt: false"),
    ("packing", True): ("neat_packing: true",),
    ("train_sampling_strategy", "group_by_length"): ("group_by_length: true",),
    ("gradient_checkpointing", False): ("disable_gradient_checkpointing: true",),
    # Moments in 8 bits, too, by torchao, whose optimizer steps shards as that of bitsandbytes does not.
    ("optim", "adamw_torch_8bit"): ("optimizer: adamw_8bit", "optimizer: adamw_bnb_8bit", "optim: adamw_8bit"),
    # What TRL does without a key.
    ("", None): (
        *("train_on_inputs: true", "train_on_prompt: true", "finetuning_type: full", "finetuning_type: freeze"),
        *("freeze_trainable_modules: all", "flash_attn: auto"),
    ),
}
"""Keys of TRL with values, and lines elsewhere that ask for them."""

_TRL_NAMES: Final = {name: key for key, names in _NAMES.items() for name in names}
_TRL_SETTINGS: Final = {
    line: dict(pair for pair in _SETTINGS if line in _SETTINGS[pair]) for line in chain(*_SETTINGS.values())
}

_MARKS: Final[Mapping[str, tuple[str, Set[str]]]] = {
    "axolotl": ("base_model", {"sequence_len", "micro_batch_size", "num_epochs", "adapter", "val_set_size"}),
    "LLaMA-Factory": ("model_name_or_path", {"stage", "finetuning_type", "template", "cutoff_len", "lora_rank"}),
}
"""Programs, the key of the model in their files, and keys that TRL does not have. A file has two of these."""

_IMPLIED: Final[Mapping[str, Mapping[str, Any]]] = {
    "env": {"report_to": "wandb"},
    "fp16: true": {"bf16": False},
    "adapter": {"lora_dropout": 0.0},
    "load_in_4bit: true": {"use_bnb_nested_quant": True},
    "reward_model: true": {"lora_task_type": "SEQ_CLS"},
    "early_stopping_patience": {"load_best_model_at_end": True},
    "axolotl": {"sequence_len": 512, "micro_batch_size": 1, "num_epochs": 1, "lr_scheduler": "cosine"}
    | {"bf16": "auto", "train_on_inputs": False},
    "stage: pt": {"train_on_prompt": True, "packing": True},
    "stage: rm": {"lora_task_type": "SEQ_CLS"},
    "quantization_bit: 4": {"double_quantization": True},
    "early_stopping_steps": {"load_best_model_at_end": True},
    "LLaMA-Factory": {"stage": "sft", "finetuning_type": "lora", "cutoff_len": 2048, "learning_rate": 5e-5}
    | {"train_on_prompt": False},
    "finetuning_type: lora": {"lora_rank": 8, "lora_target": "all", "lora_dropout": 0.0},
    "finetuning_type: freeze": {"freeze_trainable_layers": 2},
}
"""What keys mean that are not set, where TRL has other defaults: by program, and by a key or line of the file."""

_ADVICE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("chat_template", "template"), "that of the tokenizer is used. Or set chat_template_path"),
    **dict.fromkeys(("lora_model_dir", "adapter_name_or_path"), "merge it before, by shardwise merge-adapter"),
    "dataset": "names in dataset_info.json. Write the file or the hub's name of each",
    "unfrozen_parameters": "all are trained. Or set trainable_layers, trainable_modules, extra_modules",
    "max_samples": "write split: train[:N] into datasets",
    "type": "rows are recognized by their columns, and rendered by the chat template of the tokenizer",
}
"""What to do about keys elsewhere, and those of a dataset."""

_DATASET_KEYS: Final = ("path", "name", "data_dir", "data_files", "split")
_SECRET: Final = re.compile(r"hub_token|api_key|secret|webhook")
_PLAIN: Final = re.compile(r"(?!(true|false|yes|no|on|off|null)$)(\.{0,2}/)?[a-z][\w./-]*|\d+e-?\d+", re.IGNORECASE)
"""Strings that YAML reads as strings without quotes."""


def explain_other_format(values: Mapping[str, Any]) -> str | None:
    """Explain a configuration of axolotl or LLaMA-Factory.

    Args:
        values: its keys and values.

    Returns:
        which one it is, with a configuration for TRL that corresponds, as YAML, and a comment for each key without
        a counterpart. None for any other configuration.
    """
    for program, (model_key, marks) in _MARKS.items():
        if model_key in values and len(marks & values.keys()) >= 2:
            return _explain(program, _flatten(values))
    return None


def _explain(program: str, given: Mapping[str, Any]) -> str:
    keys = dict(given)
    for condition, implied in _IMPLIED.items():
        if condition in {program, *keys, *(_line(key, value) for key, value in keys.items())}:
            keys = {**keys, **{key: value for key, value in implied.items() if key not in keys}}
    replacements = {key: _convert(key, value, keys) for key, value in keys.items()}
    chosen = [replacement.get("method") for replacement in replacements.values()]
    method = next((one for one in METHODS if one in chosen), METHODS[0])
    config: dict[str, Any] = {}
    origins: dict[str, str] = {}
    comments: list[str] = []
    for key, value in keys.items():
        advice = _ADVICE.get(key.rpartition("].")[2])
        for name, new in replacements[key].items():
            faults = [fault.removeprefix(f"{name}: ") for fault in find_faults(name, new, method)]
            if name in config and config[name] != new:
                faults = [f"{name} is {_format(config[name])}"]
            if not faults or name == "method":  # one that is not supported is an error of that configuration, too
                config[name] = new
                origin = (f"{key}: {advice}" if advice else key) if key in given else f"the default of {program}"
                origins[name] = "" if name == key else f"  # {origin}"
            elif key in given:
                reason = advice or REJECTED.get(name) or (faults[0] if get_types(name) else "")
                comments.append(f"# {_line(key, value)}" + (f"  # {reason}" if reason else ""))
    if isinstance(config.get("lora_r"), int):
        config.setdefault("lora_alpha", 2 * config["lora_r"])
    if config.get("bf16") and ("use_peft" in config or program == "axolotl"):  # else float32 is trained
        config.setdefault("dtype", "bfloat16")
    lines = [_line(name, value) + origins.get(name, "") for name, value in config.items()]
    title = f"is a configuration of {program}, not of TRL. Save this as another file, and check it:"
    return "\n".join([title, "", *lines, *(["", "# Not carried over:", *comments] if comments else [])])


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that have values, those in mappings and in datasets with a dot."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key == "dataset" and isinstance(value, str):
            flat[key] = [{"path": name.strip()} for name in value.split(",")]
        elif key == "datasets" and isinstance(value, list):
            entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in value]
            flat[key] = [{name: entry[name] for name in _DATASET_KEYS if entry.get(name)} for entry in entries]
            for number, entry in enumerate(entries):
                flat |= {f"datasets[{number}].{name}": entry[name] for name in entry if name not in _DATASET_KEYS}
        elif key.startswith("wandb_") and key != "wandb_name":
            flat["env"] = flat.get("env", {}) | ({key.upper(): value} if value else {})
        elif _SECRET.search(key):
            flat[f"{key} (secret)"] = "..."
        elif key in ("special_tokens", "fsdp_config", "trl") and isinstance(value, dict):
            flat |= {f"{key}.{str(name).removeprefix('fsdp_')}": one for name, one in value.items()}
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if value not in (None, "", {})}


def _convert(key: str, value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return TRL's keys that mean the same, or the key itself."""
    line = _line(key, value)
    if key in ("chat_template", "template"):  # by its name in that program
        return {"": value}
    if line in _TRL_SETTINGS:
        return {name: new for name, new in _TRL_SETTINGS[line].items() if name}
    if not value and (f"{key}: true" in _TRL_SETTINGS or key in _NAMES["test_split_size"]):
        return {}
    if key in ("lora_target", "additional_target") and isinstance(value, str):
        return {_TRL_NAMES[key]: [name.strip() for name in value.split(",")]}
    if key == "lora_target_modules" and keys.get("lora_target_linear"):  # which adds them to all others
        return {"": value}
    epochs = keys.get("num_epochs")
    is_per_epoch = key == "saves_per_epoch" or (key == "evals_per_epoch" and keys.get("val_set_size"))
    if is_per_epoch and isinstance(value, int) and isinstance(epochs, int | float) and value > 0:
        kind, count = key[:4], value * epochs
        if count <= 1:
            return {f"{kind}_strategy": "epoch"}
        return {f"{kind}_strategy": "steps", f"{kind}_steps": round(1 / count, 6)}  # of all steps
    is_nested = key.startswith(("special_tokens.", "fsdp_config.", "trl."))
    return {_TRL_NAMES.get(key, key.partition(".")[2] if is_nested else key): value}


def _line(key: str, value: Any) -> str:
    return f"{key}: {_format(value)}".replace("\n", " ")


def _format(value: Any) -> str:
    """Write a value as YAML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format(key)}: {_format(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    text = json.dumps(value, ensure_ascii=False, default=str)
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)  # YAML 1.1 reads numbers with an exponent by their point
