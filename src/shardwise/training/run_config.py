"""Configuration of ``shardwise train``: keys of TRL and of shardwise, checked before torch is imported.

A configuration is a YAML file as for ``trl sft --config``, with overrides ``--key value``. Its keys are the fields
of TRL's dataclasses (``SFTConfig``, ``ModelConfig``, ``ScriptArguments``, ``DatasetMixtureConfig``). Importing
them takes seconds, so names, types and choices are checked against the table ``keys.json``, which a test compares
with the dataclasses.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import yaml

from shardwise.errors import ConfigError
from shardwise.untrusted import parse_yaml

TrainMethod: TypeAlias = Literal["sft", "dpo", "kto", "grpo", "reward"]
METHODS: Final[tuple[TrainMethod, ...]] = get_args(TrainMethod)

Spec: TypeAlias = Mapping[str, Any]
"""Types, choices and the default of a key."""

OWN_KEYS: Final[Mapping[str, Spec]] = {
    "method": {"types": ["str"], "choices": list(METHODS), "default": "sft"},
    "num_processes": {"types": ["int", "null"]},
    "accelerate_config": {"types": ["null", "str"]},
    "transformer_layer_cls_to_wrap": {"types": ["list", "null"]},
    "min_num_params": {"types": ["int", "null"]},
    "dp_replicate_size": {"types": ["int"], "default": 1},
    "cpu_offload": {"types": ["bool"], "default": False},
    "shard_adapters": {"types": ["bool"], "default": True},
    "trainable_layers": {"types": ["int"], "default": 0},
    "trainable_modules": {"types": ["list", "null"]},
    "extra_modules": {"types": ["list", "null"]},
    "interleave": {"types": ["list", "null"]},
    "tenants": {"types": ["dict", "null"]},
    "sweep": {"types": ["dict", "null"]},
    "tokens_per_pass": {"types": ["int"], "default": 4096},
    "tokenizer_name_or_path": {"types": ["null", "str"]},
    "early_stopping_patience": {"types": ["int", "null"]},
    "env": {"types": ["dict", "null"]},
}
"""Keys that TRL does not have."""

_SHARDED_HERE = (
    "the model is sharded by shardwise. Remove it, or use accelerate_config, transformer_layer_cls_to_wrap, "
    "dp_replicate_size or cpu_offload"
)
_REJECTED: Final[Mapping[str, str]] = {
    "fsdp": _SHARDED_HERE,
    "fsdp_config": _SHARDED_HERE,
    "deepspeed": _SHARDED_HERE,
    "parallelism_config": _SHARDED_HERE,
    "load_in_8bit": "8-bit bases are not supported. Use load_in_4bit",
    "use_liger_kernel": "Liger kernels replace modules of a model that is sharded already. Remove it",
    "torch_compile": "the whole model would be compiled after it is sharded. Remove it",
    "auto_find_batch_size": "a rank that runs out of memory would retry alone. Set per_device_train_batch_size",
    "use_vllm": "TRL would gather the whole model for vLLM. Remove it",
}
"""Keys that are rejected if they are set, with the reason and the remedy."""

_AT_LEAST_1: Final = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("num_processes", "dp_replicate_size", "tokens_per_pass"),
)

OPTIMIZERS: Final = frozenset(
    {
        *("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit"),
        *("sgd", "adagrad", "rmsprop", "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
    }
)
"""Values of ``optim`` whose optimizers step DTensors."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A configuration whose names, types and choices are valid.

    Attributes:
        source: its file, for messages.
        method: name of the TRL trainer.
        values: keys of TRL that are set.
        own: all keys of ``OWN_KEYS``.
    """

    source: str
    method: TrainMethod
    values: Mapping[str, Any]
    own: Mapping[str, Any]


def read_run_config(arguments: Sequence[str]) -> RunConfig:
    """Read ``[METHOD] [CONFIG.yaml] [--key value ...]``.

    Raises:
        ConfigError: the file cannot be read, or keys are unknown or have invalid values. The message has all of
            them.
    """
    words = list(arguments)
    method = words.pop(0) if words and words[0] in METHODS else None
    file = words.pop(0) if words and not words[0].startswith("--") else None
    if file is not None and not Path(file).suffix and not Path(file).exists():
        raise ConfigError(f"{file}: is not supported. Use one of {', '.join(METHODS)}, or a YAML file")
    overrides = dict(_overrides(words))
    file = file or overrides.pop("config", None)  # as for TRL's own command
    values = {**({} if file is None else read_yaml(Path(file))), **overrides}
    values = {key: [value] if _is_single(key, value) else value for key, value in values.items()}
    if method is not None:
        values["method"] = method
    if values.get("resume_from_checkpoint") is True:  # as is the default here
        del values["resume_from_checkpoint"]
    source = file or "the command line"
    faults = [fault for key, value in values.items() for fault in find_faults(key, value, _method_in(values))]
    if faults:
        raise ConfigError("\n  ".join([f"{source}: invalid keys ({len(faults)}).", *faults]))
    own = {key: _parsed_own(values.get(key, spec.get("default")), spec["types"]) for key, spec in OWN_KEYS.items()}
    return RunConfig(source, _method_in(values), {k: v for k, v in values.items() if k not in OWN_KEYS}, own)


def _is_single(key: str, value: Any) -> bool:
    """Return whether a value is the only element of a list, as which TRL's command reads it."""
    is_list = key not in OWN_KEYS and "list" in _types_of(key) and "str" not in _types_of(key)
    return is_list and not isinstance(value, list | dict | None)


def _types_of(key: str) -> Sequence[str]:
    return next((specs[key]["types"] for specs in (OWN_KEYS, *_table().values()) if key in specs), ())


def _parsed_own(value: Any, types: Sequence[str]) -> Any:
    """Return the value of a key of ``OWN_KEYS``, in which a list or a number may be written as a string."""
    if not isinstance(value, str) or "str" in types:
        return value
    return [word.strip() for word in value.split(",")] if "list" in types else int(value)


def _method_in(values: Mapping[str, Any]) -> TrainMethod:
    found: Any = values.get("method", "sft")
    return found if found in METHODS else "sft"


@cache
def _table() -> Mapping[str, Mapping[str, Spec]]:
    found: Mapping[str, Any] = json.loads(
        resources.files("shardwise.training").joinpath("keys.json").read_text("utf-8")
    )
    return found


@cache
def _renamed() -> Mapping[str, str | None]:
    """Return new keys by former ones: of sections (None if there is none), of transformers 4 and older TRL."""
    text = resources.files("shardwise.training").joinpath("sections.json").read_text("utf-8")
    return dict(json.loads(text))


def get_keys(method: TrainMethod) -> Mapping[str, Spec]:
    """Return all keys of a method, with those of shardwise."""
    return {**_table()["all"], **_table()[method], **OWN_KEYS}


def find_faults(key: str, value: Any, method: TrainMethod) -> Iterator[str]:
    """Yield the faults of a key and its value."""
    specs = get_keys(method)
    if others := [name for name in METHODS if key not in specs and key in get_keys(name)]:
        yield f"{key}: is a key of {', '.join(others)}, not of {method}. Remove it, or change method"
    elif isinstance(value, dict) and key not in specs and any(name.startswith(f"{key}.") for name in _renamed()):
        for name in value:
            new = _renamed().get(f"{key}.{name}")
            remedy = f"Use {new}" if new else "Remove it, there is no such key"
            yield f"{key}.{name}: sections were removed. {remedy}"
    elif faults := [f"{key}: {fault}" for fault in _key_faults(key, value, specs, method)]:
        yield from faults
    elif key in _REJECTED and value:
        yield f"{key}: {_REJECTED[key]}"
    elif key == "optim" and value not in OPTIMIZERS:
        yield f"optim: {value} is not known to step sharded parameters. Use one of {', '.join(sorted(OPTIMIZERS))}."
    elif key == "env":
        for name, one in (value or {}).items():
            if not isinstance(name, str) or not name or "=" in name or "\0" in f"{name}{one}":
                yield f"env: {_format_value(name)} cannot be set to {_format_value(one)}. Write NAME: VALUE"
    elif key == "datasets":
        for number, entry in enumerate(value or ()):
            if not isinstance(entry, dict) or "path" not in entry:
                yield f"datasets[{number}]: {_format_value(entry)} has no path. Write - path: NAME"
                continue
            for name, one in entry.items():
                found = _key_faults(str(name), one, _table()["datasets"], "datasets")
                yield from (f"datasets[{number}].{name}: {fault}" for fault in found)


def _key_faults(key: str, value: Any, specs: Mapping[str, Spec], whose: str) -> Iterator[str]:
    """Yield a fault if a key is unknown, or a value has none of its types and choices."""
    if key not in specs:
        near = [_renamed()[key]] if key in _renamed() else difflib.get_close_matches(str(key), specs, n=1)
        yield f"is not a key of {whose}. " + (f"Did you mean {near[0]}?" if near and near[0] else "Remove it")
        return
    types: Sequence[str] = specs[key]["types"]
    kind = "null" if value is None else type(value).__name__
    fits = (
        "any" in types
        or kind in types
        or (kind == "int" and "float" in types)
        or (kind == "str" and "list" in types)
        or (kind == "str" and _is_number(value, types))  # YAML 1.1 reads 1e-4 as a string
    )
    if not fits:
        expected = " or ".join(name for name in types if name != "null") + (" or null" if "null" in types else "")
        # YAML 1.1 reads no as False.
        remedy = ". Write 'no' in quotes" if value is False and "no" in specs[key].get("choices", ()) else ""
        yield f"{_format_value(value)} is a {kind}. Expected {expected}{remedy}"
    elif {"int", "float"} & {*types} and kind in ("int", "float", "str"):
        yield from _number_faults(key, value)
    choices = specs[key].get("choices")
    if fits and choices and kind == "str" and value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        shown = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(choices)}."
        yield f"{_format_value(value)} is not a choice. {shown}"


def _number_faults(key: str, value: Any) -> Iterator[str]:
    with suppress(ValueError, OverflowError):  # a word, or a number beyond floats
        number = float(value)
        if math.isnan(number) or (key == "num_train_epochs" and math.isinf(number)):
            yield f"{_format_value(value)} is not finite. Write a number"
        elif key in _AT_LEAST_1 and number < 1:
            yield f"{_format_value(value)} is less than 1. Write 1 or more"


def _is_number(text: str, types: Sequence[str]) -> bool:
    with suppress(ValueError):
        if {"int", "float"} & {*types}:
            (float if "float" in types else int)(text)
            return True
    return False


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def trl_accelerate_config(name: str) -> Path:
    """Return the path of an accelerate config: a path, or the name of one that TRL ships (``fsdp2``)."""
    trl = find_spec("trl")  # does not import it
    if Path(name).is_file() or trl is None or trl.origin is None:
        return Path(name)
    shipped = Path(trl.origin).parent / "accelerate_configs" / f"{name}.yaml"
    return shipped if shipped.is_file() else Path(name)


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML file of keys and values.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping.
    """
    try:
        found = parse_yaml(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read, {error.strerror}. Check the path") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, a date or a number
        raise ConfigError(f"{file}: is not valid YAML. {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{file}: is not a mapping of keys to values. Write lines KEY: VALUE")
    return found


def _parse_value(key: str, text: str) -> Any:
    """Parse a value of the command line. YAML reads ``no`` as False, which is a string for ``save_strategy``."""
    value = parse_yaml(text)
    types = _types_of(key)
    return text if isinstance(value, bool) and types and "bool" not in types else value


def _overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Parse ``--key value``, ``--key=value``, ``--key v1 v2`` and ``--flag``, as TRL's parser does."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            groups.append(word.removeprefix("--").split("=", 1))
        elif not groups:
            raise ConfigError(f"{word}: is not a key. Write --key value after the configuration file")
        else:
            groups[-1].append(word)
    for key, *texts in groups:
        name = key.replace("-", "_")
        if not texts:
            is_negated = name.startswith("no_")
            yield name.removeprefix("no_"), not is_negated
            continue
        try:
            parsed = [_parse_value(name, text) for text in texts]
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"--{key}: is not a valid value. {error}") from error
        yield name, parsed[0] if len(parsed) == 1 else parsed
