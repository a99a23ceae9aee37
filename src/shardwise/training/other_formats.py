"""Configurations of axolotl and LLaMA-Factory, recognized and explained in TRL's keys.

They are not read as such: whoever has one gets the configuration for TRL that corresponds, to check and to keep.
Keys that correspond to each other are in ``other_formats.yaml``.
"""

import json
import re
from collections.abc import Mapping, Set
from functools import cache
from importlib import resources
from typing import Any, Final

import yaml

from shardwise.training.arguments import METHODS
from shardwise.training.former_keys import VALUES
from shardwise.training.keys import MISTAKEN, REJECTED, find_faults, get_types

_MARKS: Final[Mapping[str, tuple[str, Set[str]]]] = {
    "axolotl": ("base_model", {"sequence_len", "micro_batch_size", "num_epochs", "adapter", "val_set_size"}),
    "LLaMA-Factory": ("model_name_or_path", {"stage", "finetuning_type", "template", "cutoff_len", "lora_rank"}),
}
"""Programs, the key of the model in their files, and keys that TRL does not have. A file has two of these."""

_DATASET_KEYS: Final = ("path", "name", "data_dir", "data_files", "split")
_SECRET: Final = re.compile(r"hub_token|hf_token|api_key|secret|webhook", re.IGNORECASE)
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


@cache
def _read_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return ``keys``, ``lines``, ``implied`` and ``advice``, as ``other_formats.yaml`` describes them."""
    text = resources.files("shardwise.training").joinpath("other_formats.yaml").read_text("utf-8")
    tables: Mapping[str, Any] = yaml.safe_load(text)
    return tables


def _explain(program: str, given: Mapping[str, Any]) -> str:
    # What the program does without a key, and TRL does not.
    keys = dict(given)
    if keys.get("stage") == "dpo" and keys.get("pref_loss") in ("orpo", "simpo"):  # methods of their own in TRL
        keys["stage"] = keys["pref_loss"]
    for condition, implied in _read_tables()["implied"].items():
        conditions = {program, *keys, *(f"{program} {key}" for key in keys)}
        conditions |= {_line(key, value) for key, value in keys.items()}
        if condition in conditions:
            keys = {**keys, **{key: value for key, value in implied.items() if key not in keys}}
    # The method first, because it decides which keys of TRL exist.
    replacements = {key: _convert(key, value, keys) for key, value in keys.items()}
    chosen = [replacement.get("method") for replacement in replacements.values()]
    method = next((one for one in METHODS if one in chosen), METHODS[0])
    # Each key of the file is in the new one, with its origin as a comment, or among the comments at its end.
    config: dict[str, Any] = {}
    origins: dict[str, str] = {}
    comments: list[str] = []
    for key, value in keys.items():
        advice = _read_tables()["advice"].get(key.rpartition("].")[2])
        for name, new in replacements[key].items():
            faults = [fault.removeprefix(f"{name}: ") for fault in find_faults(name, new, method)]
            if name in config and config[name] != new:
                faults = [f"{name} is {_format(config[name])}"]
            # A method or an adapter that is not supported is an error of that configuration, too.
            if not faults or name in ("method", "adapter", "finetuning_type"):
                config[name] = new
                origin = (f"{key}: {advice}" if advice else key) if key in given else f"implied by {program}"
                origins.setdefault(name, "" if name == key and key in given else f"  # {origin}")
            elif key in given:
                reason = advice or {**REJECTED, **MISTAKEN}.get(name) or (faults[0] if get_types(name) else "")
                comments.append(f"# {_line(key, value)}" + (f"  # {reason}" if reason else ""))
    if isinstance(config.get("lora_r"), int):
        config.setdefault("lora_alpha", 2 * config["lora_r"])
    if program == "axolotl" and "per_device_train_batch_size" in config:
        config.setdefault("per_device_eval_batch_size", config["per_device_train_batch_size"])
    if config.get("bf16") and ("use_peft" in config or program == "axolotl"):  # else float32 is trained
        config.setdefault("dtype", "bfloat16")
    lines = [_line(name, value) + origins.get(name, "") for name, value in config.items()]
    title = f"is a configuration of {program}, not of TRL. Save this as another file, and check it:"
    return "\n".join([title, "", *lines, *(["", "# Not carried over:", *comments] if comments else [])])


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that have values, those in mappings and in datasets with a dot."""
    # LLaMA-Factory names its datasets in one string. axolotl lists entries, which may have keys that TRL has not.
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key == "dataset" and isinstance(value, str):
            flat[key] = [{"path": name.strip()} for name in value.split(",")]
        elif key == "datasets" and isinstance(value, list):
            entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in value]
            flat[key] = [{name: entry[name] for name in _DATASET_KEYS if entry.get(name)} for entry in entries]
            for number, entry in enumerate(entries):
                flat |= {f"datasets[{number}].{name}": entry[name] for name in entry if name not in _DATASET_KEYS}
        elif key.startswith("wandb_") and key != "wandb_name" and not _SECRET.search(key):
            env = flat.get("env", values.get("env"))
            flat["env"] = (env if isinstance(env, dict) else {}) | ({key.upper(): value} if value else {})
        elif key in ("special_tokens", "fsdp_config", "trl") and isinstance(value, dict):
            flat |= {f"{key}.{str(name).removeprefix('fsdp_')}": one for name, one in value.items()}
        else:
            flat.setdefault(key, value)
    with_values = {key: value for key, value in flat.items() if value not in (None, "", {})}
    return {f"{key} (secret)" if _SECRET.search(key) else key: value for key, value in with_values.items()}


def _convert(key: str, value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return TRL's keys that mean the same, or the key itself."""
    names, lines = _read_tables()["keys"], _read_tables()["lines"]
    if key in ("chat_template", "template"):  # by its name in that program
        return {"": value}
    if (line := _line(key, value)) in lines:
        settings: Mapping[str, Any] = lines[line]
        return settings
    if not value and (f"{key}: true" in lines or names.get(key) == "test_split_size"):
        return {}
    if key in ("lora_target", "additional_target") and isinstance(value, str):
        return {names[key]: [name.strip() for name in value.split(",")]}
    if key == "lora_target_modules" and keys.get("lora_target_linear"):  # which adds them to all others
        return {"": value}
    if key == "eval_steps" and keys.get("val_set_size"):
        return {"eval_strategy": "steps", key: value}
    # 4 in each of 2 epochs are 8 in all, one after each 0.125 of the steps.
    epochs = keys.get("num_epochs")
    is_per_epoch = key == "saves_per_epoch" or (key == "evals_per_epoch" and keys.get("val_set_size"))
    if is_per_epoch and isinstance(value, int) and isinstance(epochs, int | float) and value > 0:
        kind, count = key[:4], value * epochs
        if count <= 1:
            return {f"{kind}_strategy": "epoch"}
        return {f"{kind}_strategy": "steps", f"{kind}_steps": 1 / count}  # of all steps
    is_nested = key.startswith(("special_tokens.", "fsdp_config.", "trl."))
    name = names.get(key, key.partition(".")[2] if is_nested else key)
    if isinstance(value, str | bool):
        value = VALUES.get(name, {}).get(value, value)
    return {name: value}


def _line(key: str, value: Any) -> str:
    return f"{key}: {'...' if _SECRET.search(key) else _format(value)}".replace("\n", " ")


def _format(value: Any) -> str:
    """Write a value as YAML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(_line(_format(key), one) for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    text = json.dumps(value, ensure_ascii=False, default=str)
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)  # YAML 1.1 reads numbers with an exponent by their point
