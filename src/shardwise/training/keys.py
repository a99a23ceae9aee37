"""The keys of a configuration: those of shardwise and TRL, rejected keys, and former names.

TRL's keys are the fields of its dataclasses (``SFTConfig``, ``ModelConfig``, ``ScriptArguments``,
``DatasetMixtureConfig``). Importing them takes seconds, so names, types and choices are checked against the table
``trl_keys.json``. ``python -m tests.training.key_table`` writes it, and a test compares it with the dataclasses.
"""

import dataclasses
import difflib
import enum
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any, Final, TypeAlias

from shardwise.training.arguments import METHODS, ShardwiseArguments, TrainMethod

Spec: TypeAlias = Mapping[str, Any]
"""Types and choices of a key."""

OPTIMIZERS: Final = frozenset(
    {
        *("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit"),
        *("sgd", "adagrad", "rmsprop", "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
    }
)
"""Values of ``optim`` whose optimizers step DTensors."""

_SHARDED_HERE: Final = (
    "the model is sharded by shardwise. Remove it, or use accelerate_config, transformer_layer_cls_to_wrap, "
    "dp_replicate_size or cpu_offload"
)
REJECTED: Final[Mapping[str, str]] = {
    "fsdp": _SHARDED_HERE,
    "fsdp_config": _SHARDED_HERE,
    "deepspeed": _SHARDED_HERE,
    "parallelism_config": _SHARDED_HERE,
    "load_in_8bit": "8-bit bases are not supported. Use load_in_4bit",
    "use_liger_kernel": "Liger kernels replace modules of a model that is sharded already. Remove it",
    "torch_compile": "the whole model would be compiled after it is sharded. Remove it",
    "auto_find_batch_size": "a rank that runs out of memory would retry alone. Set per_device_train_batch_size",
    "use_vllm": "TRL would gather the whole model for vLLM. Remove it",
    "reward_model_name_or_path": "would be loaded whole on every rank. Use reward_funcs",
    "model_init_kwargs": "cannot be passed on. Use dtype, attn_implementation and model_revision",
}
"""TRL's keys that are rejected if they are set, with the reason and the remedy."""

FORMER: Final[Mapping[str, str | None]] = {
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps (a fraction below 1)",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "dataset_mixer": "datasets",
    "dataset_mixture": "datasets",
    "preprocessing_num_workers": "dataset_num_proc",
    "use_flash_attention_2": "attn_implementation: flash_attention_2",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": None,
    "use_liger": "use_liger_kernel",
    "chat_template": "chat_template_path",
    "logging_dir": "env: {TENSORBOARD_LOGGING_DIR: FOLDER}",
    "max_prompt_length": "max_length",
    "min_num_params": "accelerate_config",
    "interleave": "datasets: [{path: ..., fraction: ...}, ...]",
}
"""Keys of transformers 4, older TRL and earlier versions of shardwise, and what to use instead."""

_AT_LEAST_1: Final = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("num_processes", "dp_replicate_size", "tokens_per_pass"),
)

_CONTRADICTIONS: Final = {
    **dict.fromkeys(("transformer_layer_cls_to_wrap", "cpu_offload"), "accelerate_config"),
    **dict.fromkeys(("trainable_layers", "trainable_modules", "extra_modules"), "use_peft"),
}
"""Keys that cannot be set together."""


@cache
def own_keys() -> Mapping[str, Spec]:
    """Return the keys of shardwise."""
    return make_specs(ShardwiseArguments)


@cache
def get_keys(method: TrainMethod) -> Mapping[str, Spec]:
    """Return all keys of a method, with those of shardwise."""
    return {**_table()["all"], **_table()[method], **own_keys()}


def get_types(key: str) -> Sequence[str]:
    """Return the types of a key of any method, nothing if it is unknown."""
    return next((get_keys(method)[key]["types"] for method in METHODS if key in get_keys(method)), ())


@cache
def _table() -> Mapping[str, Mapping[str, Spec]]:
    text = resources.files("shardwise.training").joinpath("trl_keys.json").read_text("utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


def make_specs(*kinds: type) -> dict[str, dict[str, Any]]:
    """Return, by name, the types and choices of the fields of dataclasses."""
    specs: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.init:
                specs[field.name] = _make_spec(hints[field.name], field)
    return specs


def _make_spec(hint: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    names: set[str] = set()
    # Fields that take a class of choices or another string (paths of generation configs) say so by both.
    choices = {str(choice) for choice in field.metadata.get("choices") or ()}
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for one in typing.get_args(hint) if is_union else (hint,):
        kind = typing.get_origin(one) or one
        if kind is typing.Literal:
            choices.update(typing.get_args(one))
            names.add("str")
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            choices.update(str(member.value) for member in kind)
            names.add("str")
        elif kind is types.NoneType:
            names.add("null")
        else:
            names.add(kind.__name__ if kind in (int, float, bool, str, list, dict) else "any")
    if field.default in (None, dataclasses.MISSING):
        names.add("null")  # TRL's own examples write null for what is left out
    spec: dict[str, Any] = {"types": sorted(names)}
    if choices:
        spec["choices"] = sorted(choices)
    return spec


def find_faults(key: str, value: Any, method: TrainMethod) -> Iterator[str]:
    """Yield the faults of a key and its value."""
    specs = get_keys(method)
    if others := [name for name in METHODS if key not in specs and key in get_keys(name)]:
        yield f"{key}: is a key of {', '.join(others)}, not of {method}. Remove it, or change method"
    elif faults := [f"{key}: {fault}" for fault in _find_key_faults(key, value, specs, method)]:
        yield from faults
    elif key in REJECTED and value:
        yield f"{key}: {REJECTED[key]}"
    elif key == "optim" and value not in OPTIMIZERS:
        yield f"optim: {value} is not known to step sharded parameters. Use one of {', '.join(sorted(OPTIMIZERS))}."
    elif key == "datasets":
        for number, entry in enumerate(value or ()):
            if not isinstance(entry, dict) or "path" not in entry:
                yield f"datasets[{number}]: {_format_value(entry)} has no path. Write - path: NAME"
                continue
            for name, one in entry.items():
                key_faults = _find_key_faults(str(name), one, _table()["datasets"], "datasets")
                yield from (f"datasets[{number}].{name}: {fault}" for fault in key_faults)


def find_conflicts(values: Mapping[str, Any], own: ShardwiseArguments) -> Iterator[str]:
    """Yield the faults of keys that are valid one by one.

    Args:
        values: TRL's keys that are set.
        own: keys of shardwise.
    """
    use_peft = values.get("use_peft")
    all_values = {**values, **dataclasses.asdict(own)}
    for key, other in _CONTRADICTIONS.items():
        if all_values.get(key) and all_values.get(other):
            yield f"{key}: contradicts {other}. Remove one of them"
    if own.early_stopping_patience and not values.get("load_best_model_at_end"):
        yield "early_stopping_patience: needs load_best_model_at_end and eval_strategy. Set them"
    for name, value in (own.env or {}).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in f"{name}{value}":
            yield f"env: {name!r} cannot be set to {value!r}. Write NAME: VALUE"
    if own.method == "grpo" and not use_peft and float(values.get("beta") or 0):
        yield (
            f"beta: {values['beta']} compares with a reference, which TRL would load whole on every rank. Set beta "
            "to 0.0, or use_peft to true"
        )
    if values.get("load_in_4bit") and not use_peft:
        yield "load_in_4bit: packed weights are not trained. Set use_peft"
    task = values.get("lora_task_type", "CAUSAL_LM")
    if own.method == "reward" and use_peft and task != "SEQ_CLS":
        yield f"lora_task_type: {task} does not fit reward. Set it to SEQ_CLS"


def _find_key_faults(key: str, value: Any, specs: Mapping[str, Spec], whose: str) -> Iterator[str]:
    """Yield a fault if a key is unknown, or a value has none of its types and choices."""
    if key not in specs:
        near = [FORMER[key]] if key in FORMER else difflib.get_close_matches(str(key), specs, n=1)
        yield f"is not a key of {whose}. " + (f"Did you mean {near[0]}?" if near and near[0] else "Remove it")
        return
    spec = specs[key]
    names: Sequence[str] = spec["types"]
    kind = "null" if value is None else type(value).__name__
    fits = (
        "any" in names
        or kind in names
        or (kind == "int" and "float" in names)
        or (kind == "str" and "list" in names)
        or (kind == "str" and _is_number(value, names))  # YAML 1.1 reads 1e-4 as a string
    )
    if not fits:
        expected = " or ".join(sorted(names, key=lambda name: name == "null"))  # null last
        # YAML 1.1 reads no as False.
        remedy = ". Write 'no' in quotes" if value is False and "no" in spec.get("choices", ()) else ""
        yield f"{_format_value(value)} is a {kind}. Expected {expected}{remedy}"
    elif {"int", "float"} & {*names} and kind in ("int", "float", "str"):
        yield from _find_number_faults(key, value)
    choices = spec.get("choices")
    if fits and choices and kind == "str" and value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        shown = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(choices)}."
        yield f"{_format_value(value)} is not a choice. {shown}"


def _find_number_faults(key: str, value: Any) -> Iterator[str]:
    with suppress(ValueError, OverflowError):  # a word, or a number beyond floats
        number = float(value)
        if math.isnan(number) or (key == "num_train_epochs" and math.isinf(number)):
            yield f"{_format_value(value)} is not finite. Write a number"
        elif key in _AT_LEAST_1 and number < 1:
            yield f"{_format_value(value)} is less than 1. Write 1 or more"


def _is_number(text: str, names: Sequence[str]) -> bool:
    with suppress(ValueError):
        if {"int", "float"} & {*names}:
            (float if "float" in names else int)(text)
            return True
    return False


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
