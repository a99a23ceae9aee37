"""Configurations of many LoRAs on one base.

The keys of a file are the defaults of each adapter, which its entry of ``adapters:`` and its point of ``sweep:``
override.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, get_args

from shardwise.core.formatting import folder_name
from shardwise.training.arguments import AdapterMethod, ShardwiseArguments
from shardwise.training.keys import find_conflicts, find_faults, get_keys
from shardwise.training.run_config import RunConfig, raise_faults

_STEP_KEYS: Final = frozenset(
    {
        *("beta", "disable_dropout"),
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "use_rslora"),
        *("learning_rate", "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("max_grad_norm", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        *("max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size"),
        *("gradient_accumulation_steps", "eval_steps", "logging_steps"),
        *("save_strategy", "save_steps", "save_total_limit"),
    }
)
"""Keys that change how an adapter is trained on its rows, and not the rows."""

ADAPTER_KEYS: Final = _STEP_KEYS | {
    *("loss", "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_text_field"),
    *("datasets", "test_split_size", "assistant_only_loss", "completion_only_loss", "eval_strategy"),
    *("max_length", "truncation_mode", "shuffle_dataset", "seed", "data_seed"),
}
"""Keys that an adapter may override."""

_SHARED_KEYS: Final = frozenset(
    {
        *("model_name_or_path", "model_revision", "dtype", "attn_implementation", "trust_remote_code"),
        *("load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage", "use_peft"),
        *("output_dir", "chat_template_path", "dataset_num_proc", "bf16", "use_cpu", "disable_tqdm", "report_to"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "eos_token", "tokenizer_name_or_path"),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("method", "num_processes", "accelerate_config", "transformer_layer_cls_to_wrap", "cpu_offload"),
        *("ddp_timeout", "tokens_per_pass", "adapters", "sweep", "env"),
        *("chat_template", "system_prompt", "config_overrides"),
    }
)
"""Keys that are common to all adapters."""

_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "method": ("sft",),
    "use_peft": (True,),
    "report_to": ("none", None),
    "optim": ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"),
    "lr_scheduler_type": (
        *("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "cosine_with_restarts"),
        *("cosine_warmup_with_min_lr", "inverse_sqrt", "polynomial", "warmup_stable_decay"),
    ),
    "save_strategy": ("no", "steps", "epoch"),
}
"""Supported values. Optimizers are elementwise, because a bank keeps an adapter's matrices in one flat tensor."""

_REPLACED: Final = {"num_train_epochs": "max_steps", "dataset_name": "datasets"}
"""Keys of the file that do not apply to an adapter which sets another key."""

_LOSSES: Final[tuple[AdapterMethod, ...]] = get_args(AdapterMethod)

_MAX_ADAPTERS: Final = 1024

_LONGEST_NAME: Final = 100
"""Of names in a file, to which a sweep appends values."""

_LONGEST_EXPANDED: Final = 128
"""Of names with these values, as an AdapterBank takes them."""

_SHORT: Final[Mapping[str, str]] = {
    "learning_rate": "lr",
    "lora_r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "weight_decay": "wd",
}
"""Abbreviations of keys in the names of a sweep's adapters."""


def read_adapters(config: RunConfig) -> dict[str, RunConfig]:
    """Expand a configuration of many LoRAs to one configuration for each, by name.

    Raises:
        ConfigError: keys are invalid, or not supported with many LoRAs. The message has all of them.
    """
    overrides_by_name, faults = _expand(config)
    # All keys of the file: those of TRL, and those of shardwise that do not have their defaults.
    values, defaults = dict(config.values), asdict(ShardwiseArguments())
    values |= {key: value for key, value in asdict(config.own).items() if value != defaults[key]}
    faults += [fault for key, value in values.items() for fault in _find_unsupported(key, value)]
    raise_faults(config.source, faults)
    adapters = {name: _make_config(config, name, overrides) for name, overrides in overrides_by_name.items()}
    # A key of one loss may be in the file if an adapter has that loss. The others do without it.
    known = {key for adapter in adapters.values() for key in get_keys(adapter.method)}
    raise_faults(
        config.source, [f"{key}: no adapter has a loss with it. Remove it" for key in values.keys() - known]
    )
    for name, adapter in adapters.items():
        conflicts = find_conflicts(adapter.values, adapter.own)
        raise_faults(config.source, [f"adapters.{name}: {fault}" for fault in conflicts])
    return adapters


def describe_row_settings(config: RunConfig) -> str:
    """Return the settings of an adapter that its tokenized rows depend on, as text."""
    values = {key: value for key, value in config.values.items() if key not in _STEP_KEYS | {"output_dir"}}
    return json.dumps([values, asdict(config.own)], sort_keys=True, default=repr)


def _expand(config: RunConfig) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the overrides of each adapter by name, and faults."""
    adapters: Mapping[str, Any] = config.own.adapters or {}
    sweep: Mapping[str, Any] = config.own.sweep or {}
    # A sweep alone is one of a nameless adapter without overrides.
    entries: Mapping[str, Any] = adapters or {"": {}}
    losses = set[AdapterMethod]()
    faults: list[str] = []
    for name, overrides in entries.items():
        loss = overrides.get("loss") if isinstance(overrides, dict) else None
        if loss not in _LOSSES:  # it has none, or one that is a fault of its own
            loss = config.own.loss
        losses.add(loss)
        if adapters:
            faults += _find_adapter_faults(name, overrides, loss)
    faults += [fault for key, values in sweep.items() for fault in _find_sweep_faults(key, values, sorted(losses))]
    if not adapters and not sweep:
        faults.append("adapters: is empty. Write NAME: {KEY: VALUE, ...}, or sweep: {KEY: [VALUE, ...]}")
    if faults:
        return {}, faults
    # {lora_r: [4, 8], seed: [1]} has the points ((lora_r, 4), (seed, 1)) and ((lora_r, 8), (seed, 1)), with the
    # names r4-seed1 and r8-seed1. Without a sweep there is one point, without keys.
    count = len(entries) * math.prod(map(len, sweep.values()))
    if count > _MAX_ADAPTERS:
        return {}, [f"sweep: has {count} combinations. Use at most {_MAX_ADAPTERS}"]
    points = itertools.product(*([(key, value) for value in values] for key, values in sweep.items()))
    expanded: dict[str, dict[str, Any]] = {}
    for (name, overrides), point in itertools.product(entries.items(), points):
        words = [name, *(_format_word(key, value) for key, value in point)]
        expanded["-".join(filter(None, words))] = {**overrides, **dict(point)}
    if len(expanded) < count:
        faults.append("sweep: two combinations have the same name. List each value once")
    longest = max(expanded, key=len, default="")
    if len(longest) > _LONGEST_EXPANDED:
        faults.append(f"sweep: {longest} has more than {_LONGEST_EXPANDED} characters. Sweep fewer keys")
    return expanded, faults


def _find_adapter_faults(name: object, overrides: object, loss: AdapterMethod) -> Iterator[str]:
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        yield f"adapters: {name!r} is not a name. Use up to {_LONGEST_NAME} characters that can be printed"
    elif not isinstance(overrides, dict):
        yield f"adapters.{name}: is not a mapping. Write {name}: {{KEY: VALUE, ...}}, or {name}: {{}}"
    else:
        for key, value in overrides.items():
            yield from (f"adapters.{name}.{fault}" for fault in _find_override_faults(key, value, [loss]))


def _find_sweep_faults(key: str, values: object, losses: Sequence[AdapterMethod]) -> Iterator[str]:
    if not isinstance(values, list) or not values:
        yield f"sweep.{key}: is not a list of values. Write {key}: [VALUE, ...]"
        return
    faults = dict.fromkeys(fault for value in values for fault in _find_override_faults(key, value, losses))
    yield from (f"sweep.{fault}" for fault in faults)


def _find_override_faults(key: str, value: Any, losses: Sequence[AdapterMethod]) -> Iterator[str]:
    """Yield the faults of a key that is set for adapters with these losses."""
    # A key that no loss has is one of the faults that find_faults finds.
    having = [loss for loss in _LOSSES if key in get_keys(loss)]
    if having and (others := [loss for loss in losses if loss not in having]):
        yield f"{key}: is a key of loss: {having[0]}, not of {others[0]}. Remove it, or set loss"
        return
    faults = list(find_faults(key, value, losses[0]))
    if not faults and key not in ADAPTER_KEYS:
        remedy = "Set it once for all" if key in _SHARED_KEYS else "Remove it"
        faults.append(f"{key}: cannot differ between adapters. {remedy}")
    yield from faults or _find_unsupported(key, value)


def _find_unsupported(key: str, value: Any) -> Iterator[str]:
    """Yield a fault if a key or value is supported in a single training only."""
    if key not in ADAPTER_KEYS and key not in _SHARED_KEYS:
        yield f"{key}: is not supported with adapters. Remove it"
    elif key in _VALUES and value not in _VALUES[key]:
        yield f"{key}: {value} is not supported with adapters. Use {', '.join(map(str, _VALUES[key]))}."
    elif key.endswith("checkpointing_kwargs") and "offload" in (value or ()):
        yield f"{key}: offload is not supported with adapters. Remove it"


def _make_config(config: RunConfig, name: str, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of one adapter, as of a single training in a folder with its name."""
    overrides = dict(overrides)
    method: AdapterMethod = overrides.pop("loss", config.own.loss)
    # The file's max_steps would end a training run for which an adapter sets num_train_epochs.
    replaced = {_REPLACED[key] for key in overrides if key in _REPLACED} - overrides.keys()
    # Keys of the file that another loss has do not apply.
    applied = get_keys(method).keys() - replaced
    values = {key: value for key, value in config.values.items() if key in applied}
    output_dir = f"{config.values.get('output_dir', 'trainer_output')}/{folder_name(name)}"
    values |= {**overrides, "use_peft": True, "output_dir": output_dir}
    single = replace(config.own, adapters=None, sweep=None, method=method, loss="sft")
    return replace(config, source=f"{config.source}, adapter {name}", values=values, own=single)


def _format_word(key: str, value: Any) -> str:
    """Return a value as a component of a name: ``r8``, ``lr0.0001``, ``cosine``."""
    text = re.sub(r"[^A-Za-z0-9_.-]+", "-", str(value)).strip("-.")[-40:]
    return text if text[:1].isalpha() and isinstance(value, str) else _SHORT.get(key, key) + text
