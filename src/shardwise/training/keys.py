"""The keys of a configuration: those of shardwise and TRL, their checks, and rejected keys.

TRL's keys are the fields of its dataclasses (``SFTConfig``, ``ModelConfig``, ``ScriptArguments``,
``DatasetMixtureConfig``). Importing them takes seconds, so names, types and choices are checked against the table
``trl_keys.json``, which has those of shardwise, too. ``python -m tests.training.key_table`` writes it, and a test
compares it with the dataclasses.
"""

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any, Final, TypeAlias, get_args

from shardwise.training.arguments import METHODS, REWARDED, AdapterMethod, ShardwiseArguments, TrainMethod

Spec: TypeAlias = Mapping[str, Any]
"""Types and choices of a key, or of the elements of its list."""

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
    **dict.fromkeys(
        ("use_transformers_continuous_batching", "use_transformers_paged"),
        "ranks would take other numbers of passes, and wait for each other. Remove it, or set use_vllm",
    ),
    "precompute_ref_log_probs": "TRL would hash the model's weights, which are sharded. Remove it",
    "enable_jit_checkpoint": "it replaces the handler of stop signals, which save without it. Remove it",
    "auto_find_batch_size": "a rank that runs out of memory would retry alone. Set per_device_train_batch_size",
}
"""TRL's keys that are rejected if they are set, with the reason and the remedy."""

MISTAKEN: Final[Mapping[str, str]] = {
    "nproc_per_node": "it is an option of the command. Write --nproc-per-node, or set num_processes",
    "adapter": "it is axolotl's. Set use_peft and the keys lora_*, or load_in_4bit, too",
    "dataset": "it is LLaMA-Factory's. Set dataset_name",
    "lora_rank": "it is LLaMA-Factory's. Set lora_r",
    "lora_target": "it is LLaMA-Factory's. Set lora_target_modules",
    "finetuning_type": "it is LLaMA-Factory's. Set use_peft and the keys lora_*, or trainable_layers",
    "unsloth_configs": "another library would load the model. Set max_length, use_peft, load_in_4bit and lora_*",
    "dataset_mixer_list": "its names and shares alternate. Write dataset_mixer: {NAME: SHARE, ...}",
    "datasets_and_ratios": "its shares are of total_sample_size. Write dataset_mixer: {NAME: SHARE, ...}",
    "min_num_params": "it belongs to FSDP. Set accelerate_config",
    "interleave": "datasets are concatenated and shuffled. Write datasets: [{path: ..., fraction: ...}, ...]",
    **dict.fromkeys(
        ("freeze_llm", "freeze_vision", "freeze_vision_tower", "freeze_vit", "freeze_projector"),
        "which modules are trained is chosen by name. Set trainable_layers and extra_modules",
    ),
}
"""Keys that TRL does not have, whose removal could train something else, with what to set."""

_LOADS = "its trainer loads or copies another model, whole on every rank"
_ASKS = "its trainer asks a server or processes of its own"
OTHER_METHODS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gkd", "gold", "iw_opd"), f"{_LOADS}. Use distillation"),
    **dict.fromkeys(("a2po", "online_dpo", "sdft", "sdpo"), f"{_LOADS}. Use grpo or dpo"),
    **dict.fromkeys(
        ("async_grpo", "async_distillation", "server_distillation"), f"{_ASKS}. Use grpo, distillation"
    ),
}
"""Trainers of ``trl.experimental`` that do not run with a sharded model, with the reason and the remedy."""

_AT_LEAST_1: Final = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "lora_r"),
)

_MAPPINGS_OR_FILES: Final = ("accelerator_config", "fsdp_config", "deepspeed", "data_files")
"""Keys that take a mapping, or a string of any form."""

_JOINED: Final = re.compile(r"[\w. ]+,[\w., ]*")
"""Names of modules with commas between them, which no name has."""

_BY_VALUE: Final[Mapping[str, Mapping[Any, str]]] = {"scale_rewards": {True: "group", False: "none"}}
"""Values that TRL reads as others."""


def own_keys() -> Mapping[str, Spec]:
    """Return the keys of shardwise."""
    return _table()["shardwise"]


@cache
def get_keys(method: TrainMethod) -> Mapping[str, Spec]:
    """Return all keys of a method, with those of shardwise."""
    return {**_table()["all"], **_table()[method], **own_keys()}


def get_types(key: str) -> set[str]:
    """Return the types that a key has in any method, nothing if it is unknown."""
    return {kind for method in METHODS if key in get_keys(method) for kind in get_keys(method)[key]["types"]}


@cache
def _table() -> Mapping[str, Mapping[str, Spec]]:
    text = resources.files("shardwise.training").joinpath("trl_keys.json").read_text("utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


def normalize_values(values: Mapping[str, Any], method: TrainMethod) -> dict[str, Any]:
    """Return a configuration in which nulls stand only for keys that take them, and values have today's names.

    A key of another method that is off asks for nothing, and is left out, too, unless adapters may have the method.
    """
    specs = get_keys(method)
    # Keys that only other methods have.
    elsewhere = {key for one in METHODS for key in get_keys(one)} - specs.keys()
    # Keys that adapters with another loss than the file's may have, where they may be on by default.
    of_adapters = set[str]()
    if "adapters" in values or "sweep" in values:
        of_adapters = {key for loss in get_args(AdapterMethod) for key in get_keys(loss)}
    normalized = {}
    for key, value in values.items():
        if value is None and "null" not in specs.get(key, {}).get("types", ("null",)):
            continue
        if key in elsewhere and not value and (value is None or key not in of_adapters):
            continue
        if isinstance(value, str | bool):
            value = _BY_VALUE.get(key, {}).get(value, value)
        normalized[key] = value
    return normalized


def find_faults(key: str, value: Any, method: TrainMethod) -> Iterator[str]:
    """Yield the faults of a key and its value."""
    specs = get_keys(method)
    # The first that applies. The later ones are for values of the right type.
    if key == "method" and isinstance(value, str) and value in OTHER_METHODS:
        yield f"method: {value} is not supported: {OTHER_METHODS[value]}"
    elif others := [name for name in METHODS if key not in specs and key in get_keys(name)]:
        yield f"{key}: is a key of {', '.join(others)}, not of {method}. Remove it, or change method"
    elif faults := [f"{key}: {fault}" for fault in _find_key_faults(key, value, specs, method)]:
        yield from faults
    elif key in REJECTED and value:
        yield f"{key}: {REJECTED[key]}"
    elif key == "optim" and value not in OPTIMIZERS:
        yield f"optim: {value} is not known to step sharded parameters. Use one of {', '.join(sorted(OPTIMIZERS))}."
    elif key == "lora_target_modules" and (joined := _find_joined(value)):
        yield f"lora_target_modules: {joined[0]!r} is read as one name. Write [q_proj,v_proj] for several"
    elif key in own_keys() and (odd := _find_not_text(key, value)):
        yield f"{key}: {_format_value(odd[0])} is a {type(odd[0]).__name__}. Expected str"
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
    # Each key of shardwise says which ones it excludes.
    for field in dataclasses.fields(own):
        value = getattr(own, field.name)
        for other in field.metadata["excludes"]:
            if value and value != field.default and all_values.get(other):
                yield f"{field.name}: contradicts {other}. Remove one of them"
    yield from _find_mixture_faults(values, own)
    if own.loss != "sft" and not own.has_adapters:
        yield f"loss: {own.loss} is for many LoRAs. Set adapters or sweep, or method instead"
    if own.early_stopping_patience and not values.get("load_best_model_at_end"):
        yield "early_stopping_patience: needs load_best_model_at_end and eval_strategy. Set them"
    # As the Trainer's arguments check it, which are parsed once libraries have been imported.
    evaluates, saves = values.get("eval_strategy", "no"), values.get("save_strategy", "steps")
    if values.get("load_best_model_at_end") and saves not in ("best", evaluates):
        yield f"load_best_model_at_end: eval_strategy is {evaluates}, save_strategy {saves}. Set both to one value"
    for name, value in (own.env or {}).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in f"{name}{value}":
            yield f"env: {name!r} cannot be set to {value!r}. Write NAME: VALUE"
    if values.get("load_in_4bit") and not use_peft:
        yield "load_in_4bit: packed weights are not trained. Set use_peft"
    if (values.get("liger_kernel_config") or {}).get("fused_linear_cross_entropy"):
        yield "liger_kernel_config: fused_linear_cross_entropy replaces the head, as TRL does itself. Remove it"
    if own.method == "distillation" and not values.get("teacher_model_name_or_path"):
        yield "teacher_model_name_or_path: is missing. Set it to the model to learn from"
    if own.method in REWARDED and not (values.get("reward_funcs") or values.get("reward_model_name_or_path")):
        yield "reward_funcs: is missing. Name functions of trl.rewards, import paths, or reward models"
    is_full = not (use_peft or own.trainable_layers or own.trainable_modules or own.extra_modules)
    # FSDP2 takes one dtype for the trained parameters of a group.
    if values.get("cast_lm_head_to_fp32") and is_full and values.get("dtype", "float32") != "float32":
        yield "cast_lm_head_to_fp32: TRL converts the head after it is sharded. Set dtype: float32, or remove it"
    has_engine = values.get("use_vllm") and values.get("vllm_mode", "colocate") == "colocate"
    if has_engine and {*(own.config_overrides or {})} - {"use_cache"}:  # engines have no such setting
        yield (
            "config_overrides: the engine of use_vllm takes the config of the checkpoint. Save the model with "
            "these settings, or use a server that has them (--hf-overrides)"
        )
    for key in ("use_dora", "lora_modules_to_save"):
        if values.get("use_vllm") and use_peft and values.get(key):
            yield f"{key}: cannot be merged for the engine of use_vllm. Remove one of them"
    task = values.get("lora_task_type", "CAUSAL_LM")
    if own.method == "reward" and use_peft and task != "SEQ_CLS":
        yield f"lora_task_type: {task} does not fit reward. Set it to SEQ_CLS"


def _find_joined(value: Any) -> list[str]:
    """Return the elements of a list, or a string, that are several names with commas between them."""
    names = value if isinstance(value, list) else [value]
    return [name for name in names if isinstance(name, str) and _JOINED.fullmatch(name)]


def _find_not_text(key: str, value: Any) -> list[Any]:
    """Return the elements of a list of shardwise, or the keys of a mapping, that should be strings and are not."""
    if key in ("adapters", "sweep", "env", "dataset_configs"):  # checked elsewhere, or of any type
        return []
    return [one for one in value if not isinstance(one, str)] if isinstance(value, list | dict) else []


_MIXED: Final[Mapping[str, Spec]] = {
    "id": {"types": ["str"]},
    "config": {"types": ["null", "str"]},
    "split": {"types": ["null", "str"]},
    "columns": {"types": ["list", "null"]},
}
"""Keys of an entry of ``dataset_mixture``, beside its weight."""


def _find_mixture_faults(values: Mapping[str, Any], own: ShardwiseArguments) -> Iterator[str]:
    """Yield the faults of ``dataset_mixer`` and ``dataset_mixture``."""
    for name, share in (own.dataset_mixer or {}).items():
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            yield f"dataset_mixer.{name}: {_format_value(share)} is not a share of its rows. Write 0.0 to 1.0"
    for split in own.dataset_splits or ():
        if "train" not in split and "test" not in split:
            yield f"dataset_splits: {split} is neither for training nor for tests. Name it so, or use datasets"
    if own.dataset_configs and len(own.dataset_configs) != len(own.dataset_mixer or own.dataset_configs):
        yield "dataset_configs: has another number of entries than dataset_mixer. Write one for each"
    needs_tests = values.get("eval_strategy", "no") != "no" and not own.eval_dataset_name
    if needs_tests and own.dataset_mixer and all("train" in split for split in own.dataset_splits or ("test",)):
        yield "eval_strategy: dataset_splits has no split for tests. Add one, or set eval_dataset_name"
    if own.dataset_mixture is None:
        return
    entries = own.dataset_mixture.get("datasets")
    if not isinstance(entries, list) or not all(isinstance(one, dict) and "id" in one for one in entries):
        yield "dataset_mixture: has no datasets. Write datasets: [{id: NAME, weight: SHARE}, ...]"
        return
    if needs_tests and own.dataset_mixture.get("test_split_size") is None:
        yield "eval_strategy: dataset_mixture has no test_split_size. Set it in there, or set eval_dataset_name"
    # Unknown keys of the mixture and of all of its datasets are one fault.
    unknown = own.dataset_mixture.keys() - {"datasets", "seed", "test_split_size"}
    seed = own.dataset_mixture.get("seed")
    if seed is not None and (type(seed) is not int or seed < 0):
        yield f"dataset_mixture.seed: {_format_value(seed)} is not a seed. Write 0 or more"
    for number, entry in enumerate(entries):
        unknown |= entry.keys() - {"id", "config", "split", "columns", "weight"}
        for name in _MIXED:
            faults = _find_key_faults(name, entry.get(name), _MIXED, "dataset_mixture")
            yield from (f"dataset_mixture.datasets[{number}].{name}: {fault}" for fault in faults)
        weight = entry.get("weight")
        if weight is not None and (not isinstance(weight, int | float) or not 0 <= weight <= 1):
            shown = f"dataset_mixture.datasets[{number}].weight: {_format_value(weight)}"
            yield f"{shown} is not a share. Write 0.0 to 1.0"
    if unknown:
        yield f"dataset_mixture: does not know {', '.join(sorted(map(str, unknown)))}. Remove it"


def _find_key_faults(key: str, value: Any, specs: Mapping[str, Spec], whose: str) -> Iterator[str]:
    """Yield a fault if a key is unknown, or a value has none of its types and choices."""
    if key not in specs:
        if key in MISTAKEN:
            yield f"is not a key of {whose}, {MISTAKEN[key]}"
            return
        misspelled = _find_misspelled(str(key), specs)
        remedy = f"Did you mean {misspelled}?" if misspelled else "Remove it if it only steers your own script"
        yield f"is not a key of {whose}. {remedy}"
        return
    spec = specs[key]
    names: Sequence[str] = spec["types"]
    kind = "null" if value is None else type(value).__name__
    # Besides values of its types, a key takes those that TRL's parser converts to them.
    fits = (
        "any" in names
        or (key == "resume_from_checkpoint" and value is False)  # as the Trainer's own argument
        or kind in names
        or (kind == "int" and "float" in names)
        or (kind == "str" and "list" in names)
        or (kind == "str" and _is_number(value, names))  # YAML 1.1 reads 1e-4 as a string
    )
    if not fits:
        expected = " or ".join(sorted(names, key=lambda name: name == "null"))  # null last
        yield f"{_format_value(value)} is a {kind}. Expected {expected}"
    elif {"int", "float"} & {*names} and kind in ("int", "float", "str"):
        yield from _find_number_faults(key, value)
    elif kind == "str" and "dict" in names and key not in _MAPPINGS_OR_FILES and not value.startswith("{"):
        yield f"{_format_value(value)} is not a mapping. Write {{KEY: VALUE, ...}}"
    choices = spec.get("choices")
    for one in value if kind == "list" else (value,):
        if fits and choices and isinstance(one, str) and one not in choices:
            near = difflib.get_close_matches(one, choices, n=1)
            shown = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(choices)}."
            yield f"{_format_value(one)} is not a choice. {shown}"


def _find_misspelled(key: str, known: Iterable[str]) -> str | None:
    """Return a known key with one or two other letters. One that is merely similar may mean something else."""
    for near in difflib.get_close_matches(key, known, n=3, cutoff=0.8):
        # Letters that are added, left out or exchanged. Letters in another order are one mistake.
        edits = difflib.SequenceMatcher(None, key, near, autojunk=False).get_opcodes()
        letters = sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in edits if kind != "equal")
        if letters <= (2 if len(key) > 8 else 1) or sorted(key) == sorted(near):
            return near
    return None


def _find_number_faults(key: str, value: Any) -> Iterator[str]:
    with suppress(ValueError, OverflowError):  # a word, or a number beyond floats
        number = float(value)
        if math.isnan(number) or (key == "num_train_epochs" and math.isinf(number)):
            yield f"{_format_value(value)} is not finite. Write a number"
        elif number < (least := _least(key)):
            yield f"{_format_value(value)} is less than {least}. Write {least} or more"


def _least(key: str) -> float:
    """Return the smallest number of a key."""
    if key in _AT_LEAST_1:
        return 1
    least = {field.name: field.metadata["at_least"] for field in dataclasses.fields(ShardwiseArguments)}.get(key)
    return -math.inf if least is None else least


def _is_number(text: str, names: Sequence[str]) -> bool:
    with suppress(ValueError):
        if {"int", "float"} & {*names}:
            (float if "float" in names else int)(text)
            return True
    return False


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
