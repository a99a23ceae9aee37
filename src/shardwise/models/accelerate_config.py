"""Reads how a configuration of accelerate, or of the Trainer, shards a model, in the terms of FSDP2.

Three things are read: the YAML of ``accelerate config`` (``fsdp_config`` with the prefix ``fsdp_``, mixed
precision, ``parallelism_config``), the Trainer's ``fsdp`` and ``fsdp_config`` (without a prefix), and an
``fsdp_config`` alone. Keys of FSDP1 are taken for what they mean under FSDP2, with a note, or are refused.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.errors import ConfigError
from shardwise.models.policies import Classes, MinSize, WrapPolicy

_MAX_BYTES = 1_000_000

_RESHARDS: Final = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_PRECISIONS: Final = {"no": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_MEANINGLESS: Final = {
    **dict.fromkeys(
        ("backward_prefetch", "backward_prefetch_policy", "forward_prefetch"), "FSDP2 orders its gathers itself"
    ),
    "limit_all_gathers": "FSDP2 bounds its gathers itself",
    "sync_module_states": "every rank reads its own bytes",
    "use_orig_params": "FSDP2 always has the original parameters",
}
"""Keys that nothing is made of, and why."""

_FSDP_KEYS: Final[Mapping[str, Any]] = {
    **dict.fromkeys((*_MEANINGLESS, "cpu_ram_efficient_loading"), object),
    **dict.fromkeys(("offload_params", "cpu_offload", "activation_checkpointing"), bool),
    **dict.fromkeys(("activation_checkpointing_offload", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), bool),
    **dict.fromkeys(("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"), object),
    **dict.fromkeys(("min_num_params", "ignored_modules", "mixed_precision_policy", "xla_fsdp_settings"), object),
    "reshard_after_forward": bool,
    "version": ("1", "2"),
    "sharding_strategy": _STRATEGIES,
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
}
"""Keys of FSDP, without their prefix: ``bool``, one of these words (or its number, from 1), or any value."""

_OTHER_KEYS: Final = frozenset(
    {
        *("compute_environment", "debug", "distributed_type", "downcast_bf16", "dynamo_config"),
        *("enable_cpu_affinity", "fsdp", "fsdp_config", "fp8_config", "gpu_ids", "machine_rank"),
        *("main_process_ip", "main_process_port", "main_training_function", "mixed_precision", "num_machines"),
        *("num_processes", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
        *("use_cpu", "parallelism_config", "mpirun_config", "deepspeed_config", "megatron_lm_config"),
        *("commands", "command_file", "tpu_name", "tpu_zone", "use_xpu", "ipex_config"),
        *("gradient_accumulation_steps", "gradient_clipping"),
    }
)
"""Keys of accelerate that are not of FSDP."""


def read_accelerate_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[dict[str, Any], int, list[str]]:
    """Read a file (YAML or JSON), or the values of one.

    Returns:
        Fields of a :class:`~shardwise.models.wrap.Sharding` but for its mesh; the number of replicas; and
        notes on what has no meaning here, or another one.

    Raises:
        ConfigError: it cannot be read, or naming every key that is unknown, contradicts another, or cannot be
            honored.
    """
    name = "the configuration" if isinstance(source, Mapping) else os.fspath(source)
    reading = _Reading(source if isinstance(source, Mapping) else _read_file(Path(source)))
    fields, replicas = reading.fields(), reading.replicas()
    if reading.faults:
        raise ConfigError("\n  ".join([f"{name}: the model cannot be sharded so", *reading.faults]))
    return fields, replicas, reading.notes


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path}: has {path.stat().st_size:,} bytes, more than any configuration")
        text = path.read_text("utf-8")
        value: object = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: the configuration cannot be read ({error.strerror or error})") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: the configuration cannot be read ({error})") from error
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{path}: the configuration is keys with values, and this is a {type(value).__name__}")
    return value


class _Reading:
    """One configuration: ``fsdp`` has its keys of FSDP without prefix, ``faults`` and ``notes`` a sentence each."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.fsdp: dict[str, Any] = {}
        self.faults: list[str] = []
        self.notes: list[str] = []
        self._collect()
        self._refuse_other_kinds()

    def _collect(self) -> None:
        nested = self.values.get("fsdp_config") or {}
        if isinstance(nested, (str, os.PathLike)):
            nested = _read_file(Path(nested))
        if not isinstance(nested, Mapping):
            self.faults.append(f"fsdp_config={nested!r}: it must be keys with values, or the path of a JSON file")
            nested = {}
        own = {key: value for key, value in self.values.items() if key.removeprefix("fsdp_") in _FSDP_KEYS}
        for key, value in {**own, **nested}.items():
            plain = key.removeprefix("fsdp_")
            if plain not in _FSDP_KEYS:
                self.faults.append(f"fsdp_config.{key}: no such key{_near(plain, _FSDP_KEYS)}")
            elif self.fsdp.setdefault(plain, value) != value:
                self.faults.append(
                    f"{key}={value!r} and {plain}={self.fsdp[plain]!r} are one key; give one of them"
                )
        legacy = self.values.get("fsdp")
        if legacy is None:  # else they are the Trainer's arguments, of which most concern other things
            unknown = [key for key in self.values if key not in own and key not in _OTHER_KEYS]
            self.faults += [f"{key}: no such key{_near(key, _OTHER_KEYS)}" for key in unknown]
        self._add_words(legacy)
        self.fsdp = {key: self._typed(key, value) for key, value in self.fsdp.items() if value is not None}

    def _add_words(self, legacy: Any) -> None:
        """Add the keys that the Trainer's ``fsdp`` means, which is true, or words."""
        if not legacy:
            return
        words = (
            [] if legacy is True else legacy.split() if isinstance(legacy, str) else [str(word) for word in legacy]
        )
        strategies = [word for word in words if word.upper() in _STRATEGIES]
        if strange := set(words) - {*strategies, "offload", "auto_wrap"}:
            known = ", ".join(map(str.lower, _STRATEGIES))
            self.faults.append(f"fsdp={legacy!r}: {', '.join(strange)} is none of {known}, offload, auto_wrap")
        if len(strategies) > 1:
            self.faults.append(f"fsdp={legacy!r}: {' and '.join(strategies)} contradict each other")
        is_sized = str(self.fsdp.get("min_num_params") or 0) != "0" and legacy is not True
        wrap = "SIZE_BASED_WRAP" if is_sized else "TRANSFORMER_BASED_WRAP"
        meant = {"auto_wrap_policy": wrap, **({"version": 2} if legacy is True else {})}
        meant |= {"sharding_strategy": strategies[0]} if strategies else {}
        meant |= {"offload_params": True} if "offload" in words else {}
        self.fsdp = {**meant, **self.fsdp}

    def _typed(self, key: str, value: Any) -> Any:
        """Return a value as a bool or one of the words of its key."""
        kind = _FSDP_KEYS[key]
        text = str(value).rpartition(".")[2].upper()
        if key == "reshard_after_forward" and text in _STRATEGIES:
            return _RESHARDS.get(text, value)
        if kind is bool:
            if text in ("TRUE", "1", "YES", "ON", "FALSE", "0", "NO", "OFF"):
                return text in ("TRUE", "1", "YES", "ON")
            self.faults.append(f"{key}={value!r}: it must be true or false")
        elif kind is not object:
            if text.isdecimal() and 1 <= int(text) <= len(kind):
                return kind[int(text) - 1]
            if text in kind:
                return text
            self.faults.append(f"{key}={value!r}: it must be one of {', '.join(kind)}{_near(text, kind)}")
        return value if kind is object else None

    def _refuse_other_kinds(self) -> None:
        """Refuse what is not FSDP2, or has no equivalent in it."""
        kind = str(self.values.get("distributed_type", "FSDP")).rpartition(".")[2].upper()
        if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "NO"):
            self.faults.append(f"distributed_type={kind}: this is not FSDP, and only FSDP2 is done here")
        elif kind != "FSDP" and not self.fsdp:
            self.faults.append(
                f"distributed_type={kind}: nothing in it says how the model is sharded; run accelerate config"
            )
        for other in ("deepspeed_config", "megatron_lm_config"):
            if self.values.get(other):
                self.faults.append(f"{other}: only FSDP2 is done here")
        if any(self.fsdp.get(key) for key in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")):
            self.faults.append("xla=True: FSDP on TPUs is another one; only FSDP2 is done here")
        if "NO_SHARD" in (self.fsdp.get("sharding_strategy"), self.fsdp.get("reshard_after_forward")):
            self.faults.append("sharding_strategy=NO_SHARD: nothing would be sharded; use DistributedDataParallel")
        if self.fsdp.get("state_dict_type") == "LOCAL_STATE_DICT":
            self.faults.append("state_dict_type=LOCAL_STATE_DICT: FSDP2 has none; take SHARDED_STATE_DICT")
        if self.fsdp.get("ignored_modules") not in (None, "", [], "None"):
            self.faults.append("ignored_modules: modules cannot be left out of sharding; take it away")

    def fields(self) -> dict[str, Any]:
        """Return the fields of a Sharding but for its mesh."""
        self._note()
        dtype = self._dtype()
        offloads: dict[str, Any] = {
            key: self.fsdp[key] for key in ("offload_params", "cpu_offload") if key in self.fsdp
        }
        return {
            "wrap": self._wrap(),
            # accelerate computes, reduces and returns in one dtype
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype),
            "offload_policy": CPUOffloadPolicy() if self._one_of(offloads, default=False) else OffloadPolicy(),
            "reshard_after_forward": self._reshards(),
            "activation_checkpointing": bool(self.fsdp.get("activation_checkpointing")),
        }

    def _note(self) -> None:
        if self.fsdp.get("version", "1" if "sharding_strategy" in self.fsdp else "2") == "1":
            self.notes.append("it was written for FSDP1; the model is sharded by FSDP2")
        self.notes += [
            f"{key}: {why}, so it means nothing" for key, why in _MEANINGLESS.items() if key in self.fsdp
        ]
        if (kind := self.fsdp.get("state_dict_type")) is not None:
            form = "'full'" if kind == "FULL_STATE_DICT" else "'sharded'"
            self.notes.append(f"state_dict_type={kind}: pass it to each save: save_accelerate_model(..., {form})")
        if self.fsdp.get("activation_checkpointing_offload"):
            self.notes.append("activation_checkpointing_offload: inputs of blocks stay on the device")
        if self.values.get("dynamo_config"):
            self.notes.append("dynamo_config: call compile() on each block of the model")
        for name in {"gradient_accumulation_steps", "gradient_clipping"} & self.values.keys():
            self.notes.append(f"{name}: it is the training's, and no matter of sharding")

    def _one_of(self, given: Mapping[str, Any], default: Any) -> Any:
        """Return the value that all of these keys have."""
        if len(set(given.values())) > 1:
            named = " and ".join(f"{key}={value}" for key, value in given.items())
            self.faults.append(f"{named} contradict each other")
        return next(iter(given.values()), default)

    def _wrap(self) -> WrapPolicy:
        names, numel = self._class_names(), self.fsdp.get("min_num_params")
        default = "TRANSFORMER_BASED_WRAP" if names else "SIZE_BASED_WRAP" if numel else "NO_WRAP"
        policy = self.fsdp.get("auto_wrap_policy") or default
        if names and policy != "TRANSFORMER_BASED_WRAP":
            self.faults.append(
                f"transformer_layer_cls_to_wrap={','.join(names)} contradicts auto_wrap_policy={policy}"
            )
        if numel not in (None, 0, "0") and policy != "SIZE_BASED_WRAP":
            self.faults.append(f"min_num_params={numel} contradicts auto_wrap_policy={policy}")
        if policy == "TRANSFORMER_BASED_WRAP":
            return Classes(names) if names else "no_split_modules"
        try:
            count = int(float(numel or 0)) if policy == "SIZE_BASED_WRAP" else 0
        except (TypeError, ValueError, OverflowError):
            self.faults.append(f"min_num_params={numel!r}: it must be a number of parameters")
            count = 0
        return MinSize(count) if count > 0 else "whole_model"

    def _class_names(self) -> tuple[str, ...]:
        found: list[str] = []
        for key in ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"):
            value = self.fsdp.get(key) or ()
            parts = value.split(",") if isinstance(value, str) else value
            if not isinstance(parts, (list, tuple, set)) or not all(isinstance(part, str) for part in parts):
                self.faults.append(f"{key}={value!r}: it must be names of classes, with commas or in a list")
                continue
            found += [
                name for part in (sorted(parts) if isinstance(parts, set) else parts) if (name := part.strip())
            ]
        return tuple(dict.fromkeys(found))

    def _reshards(self) -> bool:
        strategy = self.fsdp.get("sharding_strategy")
        given = {"reshard_after_forward": self.fsdp.get("reshard_after_forward")}
        given |= {f"sharding_strategy={strategy}, which has it": _RESHARDS.get(str(strategy))}
        return bool(self._one_of({key: value for key, value in given.items() if value is not None}, default=True))

    def _dtype(self) -> torch.dtype | None:
        """Return the dtype that is computed, reduced and returned in; None for float32."""
        given = {
            "mixed_precision": self.values.get("mixed_precision"),
            "mixed_precision_policy": self.fsdp.get("mixed_precision_policy"),
            **{flag: flag for flag in ("bf16", "fp16") if self.values.get(flag) is True},
        }
        words = {
            key: "no" if value is False else str(value).lower() for key, value in given.items() if value is not None
        }
        for key, word in words.items():
            if word not in _PRECISIONS:
                self.faults.append(f"{key}={given[key]!r}: it must be one of {', '.join(_PRECISIONS)}")
        found: torch.dtype | None = self._one_of({key: _PRECISIONS.get(word) for key, word in words.items()}, None)
        return found

    def replicas(self) -> int:
        """Return the number of copies of the sharded model (HSDP)."""
        section = self.values.get("parallelism_config") or {}
        if not isinstance(section, Mapping):
            self.faults.append(f"parallelism_config={section!r}: it must be keys with values")
            section = {}
        given = {str(key).removeprefix("parallelism_config_"): value for key, value in section.items()}
        sizes = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
        for key, value in given.items():
            if key in sizes and value is not None and (not str(value).isdecimal() or int(value) < 1):
                self.faults.append(f"parallelism_config.{key}={value!r}: it must be 1 or more")
            elif key not in sizes and not key.startswith(("cp_", "sp_", "tp_")):
                self.faults.append(f"parallelism_config.{key}: no such key{_near(key, sizes)}")
        replicas, shards, *others = (int(given[key]) if str(given.get(key)).isdecimal() else 1 for key in sizes)
        for name, size in zip(sizes[2:], others, strict=True):
            if size > 1:
                self.faults.append(
                    f"{name}={size}: only shards and replicas are made here; apply it to the model, then "
                    "fully_shard, and call shardwise.load"
                )
        ranks = self.values.get("num_processes")
        if shards * replicas > 1 and given.get("dp_shard_size") and ranks not in (None, -1, shards * replicas):
            self.faults.append(
                f"num_processes={ranks} contradicts dp_replicate_size={replicas} times dp_shard_size={shards}"
            )
        strategy = str(self.fsdp.get("sharding_strategy"))
        machines = int(self.values.get("num_machines") or 1) if strategy.startswith("HYBRID") else 1
        if strategy.startswith("HYBRID") and replicas == machines == 1:
            self.faults.append(
                f"sharding_strategy={strategy}: it does not say how many replicas there are; give num_machines "
                "(one for each), or parallelism_config.dp_replicate_size"
            )
        return max(replicas, machines)


def _near(name: str, known: Collection[str]) -> str:
    """Return the name most likely meant, for an error."""
    found = difflib.get_close_matches(name, sorted(known), 1, 0.6)
    return f"; did you mean {found[0]}?" if found else ""
