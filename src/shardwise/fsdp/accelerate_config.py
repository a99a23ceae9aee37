"""Translates the FSDP settings of accelerate or of the Trainer to FSDP2.

It reads the YAML of ``accelerate config`` (``fsdp_config`` with the prefix ``fsdp_``, mixed precision,
``parallelism_config``), the Trainer's ``fsdp`` and ``fsdp_config`` (without a prefix), or an ``fsdp_config`` alone.
Keys of FSDP1 are translated to FSDP2 with a note, or rejected.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.core.errors import ConfigError, nearest
from shardwise.core.untrusted import parse_yaml
from shardwise.fsdp.policies import UNUSED_BY_FSDP2, Classes, MinSize, WrapPolicy

_MAX_BYTES = 1_000_000
_MAX_DIGITS = 9

_RESHARDS: Final = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_BOOLS: Final = {**dict.fromkeys(("true", "yes", "on"), True), **dict.fromkeys(("false", "no", "off"), False)}
_SIZES: Final = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_PRECISIONS: Final = {"no": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_REFUSED: Final = {
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), "FSDP on TPUs is not supported"),
    "ignored_modules": "modules cannot be left out of sharding",
    "deepspeed_config": "only FSDP2 is supported",
    "megatron_lm_config": "only FSDP2 is supported",
}
"""Keys that cannot be honored, and why."""

_FSDP_KEYS: Final[Mapping[str, Any]] = {
    **dict.fromkeys((*UNUSED_BY_FSDP2, *_REFUSED, "cpu_ram_efficient_loading", "xla_fsdp_settings"), object),
    **dict.fromkeys(("offload_params", "activation_checkpointing"), bool),
    **dict.fromkeys(("activation_checkpointing_offload", "reshard_after_forward"), bool),
    **dict.fromkeys(("transformer_layer_cls_to_wrap", "min_num_params", "mixed_precision_policy"), object),
    "version": ("1", "2"),
    "sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
}
"""Type of each key, without its prefix: ``bool``, allowed words (or their numbers, from 1), or any value."""

_ALIASES: Final = {
    "cpu_offload": "offload_params",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
}


def read_accelerate_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[dict[str, Any], int, list[str]]:
    """Read a file (YAML or JSON), or its values.

    Returns:
        The fields of a :class:`~shardwise.fsdp.wrap.Sharding` except for its mesh, the number of replicas, and
        notes on keys without effect.

    Raises:
        ConfigError: it cannot be read, or keys are unknown, contradictory, or not supported. The message has every
            such key.
    """
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise ConfigError(f"the configuration={source!r}: it must be the path of a file, or its values")
    name = "the configuration" if isinstance(source, Mapping) else os.fspath(source)
    reading = _Reading(source if isinstance(source, Mapping) else _read_file(Path(source)))
    fields, replicas = reading.fields(), reading.replicas()
    if reading.faults:
        raise ConfigError("\n  ".join([f"{name}: is not a supported FSDP config", *reading.faults]))
    return fields, replicas, reading.notes


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path}: has {path.stat().st_size:,} bytes, more than any configuration")
        text = path.read_text("utf-8")
        value: object = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise ConfigError(f"{path}: the configuration cannot be read ({error.strerror or error})") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: the configuration cannot be read ({error})") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: the configuration is keys with values, and this is a {type(value).__name__}")
    return value


class _Reading:
    """One configuration. ``fsdp`` has its FSDP keys without prefix, and ``written`` how each was given.

    ``faults`` and ``notes`` are sentences.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.fsdp: dict[str, Any] = {}
        self.written: dict[str, str] = {}
        # The keys of FSDP are at the top level, in fsdp_config, or in the file that this names. fsdp_config wins.
        nested = values.get("fsdp_config")
        if nested and isinstance(nested, (str, os.PathLike)):
            nested = _read_file(Path(nested))
        nested = self._mapping("fsdp_config", nested)
        top_level = {key: value for key, value in self._mapping("", values).items() if _is_fsdp_key(key)}
        for key, value in {**top_level, **nested}.items():
            plain = key.removeprefix("fsdp_")
            self._take(_ALIASES.get(plain, plain), key, value)
        # Last: keys win over what the words of fsdp imply.
        words = self._words(values.get("fsdp"))
        self.fsdp = {**words, **self.fsdp}
        self.written = {**dict.fromkeys(words, f"fsdp={values.get('fsdp')}"), **self.written}
        kind = str(values.get("distributed_type") or "FSDP").rpartition(".")[2].upper()
        if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "NO"):
            self.faults.append(
                f"distributed_type={values['distributed_type']}: is not FSDP. Only FSDP2 is supported"
            )
        elif kind != "FSDP" and not self.fsdp:
            self.faults.append(f"distributed_type={kind}: there are no keys of FSDP. Run accelerate config")

    def _mapping(self, name: str, value: Any) -> Mapping[str, Any]:
        """Return keys with values (none if there are none), or add a fault. ``name`` is "" for the whole."""
        if isinstance(value or {}, Mapping):
            strange = [key for key in value or {} if not isinstance(key, str)]
            self.faults += [f"{name}: the key {key!r} is no text. Put it in quotes".lstrip(": ") for key in strange]
            return {key: item for key, item in (value or {}).items() if isinstance(key, str)}
        file = ", or the path of a JSON file" if name == "fsdp_config" else ""
        self.faults.append(f"{name}={value!r}: it must be keys with values{file}")
        return {}

    def _take(self, plain: str, key: str, value: Any) -> None:
        """Convert the value of a key to its type."""
        if plain not in _FSDP_KEYS:
            self.faults.append(f"{key}: no such key. {nearest(plain, _FSDP_KEYS)}".rstrip())
            return
        kind, text, written = _FSDP_KEYS[plain], str(value).rpartition(".")[2].upper(), f"{key}={value}"
        # A strategy of FSDP1 in place of the truth value.
        if plain == "reshard_after_forward" and text in _RESHARDS:
            value = _RESHARDS[text]
        elif plain in _REFUSED and value not in (None, "", [], {}, "None", False):
            self.faults.append(f"{key}={value!r}: {_REFUSED[plain]}. Take it out")
        elif kind is bool and value is not None:
            parsed = _BOOLS.get(str(value).strip().lower())
            if parsed is None:
                self.faults.append(f"{key}={value!r}: it must be true or false")
            value = parsed
        elif isinstance(kind, tuple) and value is not None:
            # A word, or its number, as torch numbers the members of ShardingStrategy from 1.
            word = dict(zip("12345", kind, strict=False)).get(text, text)
            if word not in kind or word == "NO_SHARD":
                words = [known for known in kind if known != "NO_SHARD"]
                self.faults.append(f"{key}={value!r}: it must be one of {', '.join(words)}")
            value = word
        if plain in self.fsdp and value is not None and self.fsdp[plain] != value:
            self.faults.append(f"{written} and {self.written[plain]} are one key. Pass one of them")
        elif value is not None:
            self.fsdp[plain], self.written[plain] = value, written

    def _words(self, legacy: Any) -> dict[str, Any]:
        """Return the keys that the Trainer's ``fsdp`` (true, or words) stands for."""
        if not legacy:
            return {}
        words: list[str] = []
        if isinstance(legacy, str):
            words = legacy.split()
        elif legacy is not True:
            words = [str(word) for word in (legacy if isinstance(legacy, (list, tuple)) else [legacy])]
        strategies = [word.upper() for word in words if word.upper() in _RESHARDS]
        strange = set(words) - {"offload", "auto_wrap"} - {word.lower() for word in strategies}
        if strange or len(strategies) > 1:
            known = ", ".join(map(str.lower, _RESHARDS))
            self.faults.append(f"fsdp={legacy!r}: it must be one of {known}, and may have offload and auto_wrap")
        implied: dict[str, Any] = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        if legacy is True:
            implied["version"] = "2"
        elif str(self.fsdp.get("min_num_params") or 0) != "0":
            implied["auto_wrap_policy"] = "SIZE_BASED_WRAP"
        if strategies:
            implied["sharding_strategy"] = strategies[0]
        if "offload" in words:
            implied["offload_params"] = True
        return implied

    def fields(self) -> dict[str, Any]:
        """Return the fields of a Sharding except for its mesh."""
        self._add_notes()
        dtype = self._dtype()
        strategy = self.fsdp.get("sharding_strategy")
        reshards: dict[str, Any] = {}
        if "reshard_after_forward" in self.fsdp:
            reshards[self.written["reshard_after_forward"]] = self.fsdp["reshard_after_forward"]
        if strategy in _RESHARDS:
            reshards[self.written["sharding_strategy"]] = _RESHARDS[strategy]
        return {
            "wrap": self._wrap(),
            # accelerate computes, reduces and returns in one dtype
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype),
            "offload_policy": CPUOffloadPolicy() if self.fsdp.get("offload_params") else OffloadPolicy(),
            "reshard_after_forward": bool(self._single_value(reshards, default=True)),
            "activation_checkpointing": bool(self.fsdp.get("activation_checkpointing")),
        }

    def _add_notes(self) -> None:
        version = "1" if "sharding_strategy" in self.fsdp else "2"
        if self.fsdp.get("version", version) == "1":
            self.notes.append("it is a config of FSDP1. The model is sharded by FSDP2")
        self.notes += [
            f"{key}: {why}, so it means nothing" for key, why in UNUSED_BY_FSDP2.items() if key in self.fsdp
        ]
        if (kind := self.fsdp.get("state_dict_type")) is not None:
            form = "'full'" if kind == "FULL_STATE_DICT" else "'sharded'"
            self.notes.append(f"state_dict_type={kind}: pass it to each save: save_accelerate_model(..., {form})")
        if self.fsdp.get("activation_checkpointing_offload"):
            self.notes.append("activation_checkpointing_offload: inputs of blocks stay on the device")
        if self.values.get("dynamo_config"):
            self.notes.append("dynamo_config: pass Sharding(compile=True) to compile each block")
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            if name in self.values:
                self.notes.append(f"{name}: is a setting of the training, not of sharding")

    def _single_value(self, values: Mapping[str, Any], default: Any) -> Any:
        """Return the value that these keys, as they are written, share, or add a fault if they differ."""
        if len(set(values.values())) > 1:
            self.faults.append(f"{' and '.join(values)} contradict each other")
        return next(iter(values.values()), default)

    def _wrap(self) -> WrapPolicy:
        classes = self.fsdp.get("transformer_layer_cls_to_wrap") or ()
        listed = classes.split(",") if isinstance(classes, str) else classes
        if not isinstance(listed, (list, tuple, set)):
            self.faults.append(f"transformer_layer_cls_to_wrap={classes!r}: it must be names of classes")
            listed = ()
        names = tuple(dict.fromkeys(str(name).strip() for name in listed))
        numel = self.fsdp.get("min_num_params")
        # Without a policy, it is the one of the option that is given.
        default = "SIZE_BASED_WRAP" if numel else "NO_WRAP"
        if names:
            default = "TRANSFORMER_BASED_WRAP"
        policy = self.fsdp.get("auto_wrap_policy", default)
        for key, value, required in (
            ("transformer_layer_cls_to_wrap", ",".join(names), "TRANSFORMER_BASED_WRAP"),
            ("min_num_params", 0 if numel == "0" else numel, "SIZE_BASED_WRAP"),
        ):
            if value and policy != required:
                chosen = self.written.get("auto_wrap_policy", f"auto_wrap_policy={policy}")
                self.faults.append(f"{key}={value} contradicts {chosen}")
        if policy == "TRANSFORMER_BASED_WRAP":
            return Classes(names) if names else "no_split_modules"
        try:
            count = int(float(numel or 0)) if policy == "SIZE_BASED_WRAP" else 0
        except (TypeError, ValueError, OverflowError):
            count = -1
        if count < 0 or numel is True:
            self.faults.append(f"min_num_params={numel!r}: it must be a number of parameters")
        return MinSize(count) if count > 0 else "whole_model"

    def _dtype(self) -> torch.dtype | None:
        """Return the dtype of computation, reduction and outputs. None for float32."""
        values = {
            "mixed_precision": self.values.get("mixed_precision"),
            "mixed_precision_policy": self.fsdp.get("mixed_precision_policy"),
        }
        for flag in ("bf16", "fp16"):  # the Trainer's
            if _BOOLS.get(str(self.values.get(flag)).lower()):
                values[flag] = self.values[flag]
        # By how each was written. Several may be given, if they mean one dtype.
        dtypes: dict[str, torch.dtype | None] = {}
        for key, value in values.items():
            word = key if key in ("bf16", "fp16") else str(value or "no").lower()
            if word not in _PRECISIONS:
                self.faults.append(f"{key}={value!r}: it must be one of {', '.join(_PRECISIONS)}")
            elif value is not None:
                dtypes[f"{key}={value}"] = _PRECISIONS[word]
        dtype: torch.dtype | None = self._single_value(dtypes, None)
        return dtype

    def replicas(self) -> int:
        """Return the number of copies of the sharded model (HSDP)."""
        # Sizes of axes: only replicas and shards can be more than 1.
        mapping = self._mapping("parallelism_config", self.values.get("parallelism_config"))
        sizes: dict[str, int] = {}
        for key, value in mapping.items():
            plain = key.removeprefix("parallelism_config_")
            if plain.endswith("_size"):
                sizes[plain] = self._count(f"parallelism_config.{plain}", value)
        for key, size in sizes.items():
            if key not in _SIZES:
                self.faults.append(f"parallelism_config.{key}: no such key. {nearest(key, _SIZES)}".rstrip())
            elif not key.startswith("dp_") and size > 1:
                self.faults.append(
                    f"{key}={size}: a Sharding has shards and replicas only. docs/meshes.md has a loop for "
                    "each of the others"
                )
        replicas, shards = (sizes.get(key, 1) for key in ("dp_replicate_size", "dp_shard_size"))
        ranks = self.values.get("num_processes")
        if shards > 1 and str(ranks) not in ("None", "-1", str(shards * replicas)):
            self.faults.append(
                f"num_processes={ranks} contradicts dp_replicate_size={replicas} times dp_shard_size={shards}"
            )
        # The hybrid strategies of FSDP1 have one replica on each machine.
        strategy = str(self.fsdp.get("sharding_strategy"))
        machines = 1
        if strategy.startswith("HYBRID"):
            machines = self._count("num_machines", self.values.get("num_machines"))
        if strategy.startswith("HYBRID") and replicas == machines == 1:
            self.faults.append(
                f"{self.written['sharding_strategy']}: the number of replicas is missing. Pass num_machines (one "
                "replica for each) or parallelism_config.dp_replicate_size"
            )
        return max(replicas, machines)

    def _count(self, key: str, value: Any) -> int:
        """Return a number that is 1 or more, 1 if it is absent, or add a fault."""
        text = "1" if value is None else str(value)
        if text.isdecimal() and len(text) < _MAX_DIGITS and int(text) > 0:
            return int(text)
        self.faults.append(f"{key}={value!r}: it must be 1 or more")
        return 1


def _is_fsdp_key(key: str) -> bool:
    is_named = key.startswith("fsdp") and key not in ("fsdp", "fsdp_config")
    return is_named or key in _FSDP_KEYS or key in _ALIASES
