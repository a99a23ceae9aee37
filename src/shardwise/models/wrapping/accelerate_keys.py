"""The keys of a configuration of accelerate's, or of the Trainer's, that concern sharding: found, and known.

Three things are read: the YAML of ``accelerate config`` (``fsdp_config`` with the prefix ``fsdp_``, mixed
precision, ``parallelism_config``), the Trainer's ``fsdp`` and ``fsdp_config`` (without a prefix), and an
``fsdp_config`` alone. What keys mean is in ``accelerate_config``. Nothing here needs torch.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shardwise.errors import ConfigError

_MAX_BYTES = 1_000_000


def values_in(path: Path) -> Mapping[str, Any]:
    """The keys and values of a file, YAML or JSON.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
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


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICTS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
PRECISIONS = {"no": "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

MEANINGLESS = {
    "backward_prefetch": "FSDP2 orders its gathers itself",
    "backward_prefetch_policy": "FSDP2 orders its gathers itself",
    "forward_prefetch": "FSDP2 orders its gathers itself",
    "limit_all_gathers": "FSDP2 bounds its gathers itself",
    "sync_module_states": "every rank reads its own bytes",
    "use_orig_params": "FSDP2 always has the original parameters",
    "cpu_ram_efficient_loading": "no rank ever holds the whole model",
}
"""Keys that nothing is made of, and why."""

_OF_FSDP = frozenset(
    {
        *MEANINGLESS,
        *("version", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy", "min_num_params"),
        *("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "offload_params", "cpu_offload"),
        *("state_dict_type", "activation_checkpointing", "activation_checkpointing_offload", "ignored_modules"),
        *("mixed_precision_policy", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"),
    }
)

_OF_ACCELERATE = frozenset(
    {
        *(
            "compute_environment",
            "debug",
            "distributed_type",
            "downcast_bf16",
            "dynamo_config",
            "enable_cpu_affinity",
        ),
        *("fsdp_config", "fp8_config", "gpu_ids", "machine_rank", "main_process_ip", "main_process_port"),
        *("main_training_function", "mixed_precision", "num_machines", "num_processes", "rdzv_backend"),
        *(
            "same_network",
            "tpu_env",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "use_cpu",
            "parallelism_config",
            "mpirun_config",
        ),
        *("deepspeed_config", "megatron_lm_config", "commands", "command_file", "tpu_name", "tpu_zone"),
        *("use_xpu", "ipex_config", "gradient_accumulation_steps", "gradient_clipping"),
    }
)

_SHARDS_BY = {"FSDP", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "NO"}


class AccelerateKeys:
    """The keys of one configuration.

    Attributes:
        values: all of them.
        fsdp: those of FSDP, without a prefix.
        faults: what is wrong, a sentence each.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.fsdp: dict[str, Any] = {}
        self.faults: list[str] = []
        self._find()

    def _find(self) -> None:
        """The keys of FSDP, without a prefix; what else there is, is known or a fault."""
        values = dict(self.values)
        own = {key for key in values if key.removeprefix("fsdp_") in _OF_FSDP and key not in _OF_ACCELERATE}
        nested = values.pop("fsdp_config", None) or {}
        legacy = values.pop("fsdp", None)
        if isinstance(nested, (str, os.PathLike)):
            nested = values_in(Path(nested))
        if not isinstance(nested, Mapping):
            self.faults.append(f"fsdp_config={nested!r}: it must be keys with values, or the path of a JSON file")
            nested = {}
        if own and (nested or legacy):
            self.faults.append(f"{', '.join(sorted(own))}: beside fsdp_config; put them into it")
        is_trainers = legacy is not None
        for key, value in {**{key: values.pop(key) for key in sorted(own)}, **nested}.items():
            plain = key.removeprefix("fsdp_")
            if plain not in _OF_FSDP:
                self.faults.append(f"fsdp_config.{key}: no such key{near(plain, _OF_FSDP)}")
            elif plain in self.fsdp and self.fsdp[plain] != value:
                self.faults.append(
                    f"{key}={value!r} and {plain}={self.fsdp[plain]!r} are one key; give one of them"
                )
            else:
                self.fsdp[plain] = value
        self._add_legacy(legacy)
        if not is_trainers:
            for key in values:
                if key not in _OF_ACCELERATE:
                    self.faults.append(f"{key}: no such key{near(key, _OF_ACCELERATE | {'fsdp'})}")
        kind = str(values.get("distributed_type", "FSDP")).rpartition(".")[2].upper()
        if kind not in _SHARDS_BY:
            self.faults.append(f"distributed_type={kind}: this is not FSDP, and only FSDP2 is done here")
        elif kind != "FSDP" and not self.fsdp:
            self.faults.append(
                f"distributed_type={kind}: nothing in it says how the model is sharded; run accelerate config"
            )
        for other in ("deepspeed_config", "megatron_lm_config"):
            if values.get(other):
                self.faults.append(f"{other}: only FSDP2 is done here")
        if any(self.flag(key) for key in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")):
            self.faults.append("xla=True: FSDP on TPUs is another one; only FSDP2 is done here")

    def _add_legacy(self, legacy: Any) -> None:
        """The Trainer's ``fsdp``: true, or words."""
        if legacy is None or isinstance(legacy, bool):
            if legacy is False and self.fsdp:
                self.faults.append("fsdp=False, but there is an fsdp_config; leave one of them out")
            if legacy is True:
                self.fsdp.setdefault("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
                self.fsdp.setdefault("version", 2)
            return
        words = legacy.split() if isinstance(legacy, str) else list(legacy)
        known = {name.lower(): name for name in STRATEGIES}
        chosen = [word for word in words if word in known]
        strange = [word for word in words if word not in known and word not in ("offload", "auto_wrap")]
        if strange:
            self.faults.append(
                f"fsdp={legacy!r}: {', '.join(map(str, strange))} is none of "
                f"{', '.join([*known, 'offload', 'auto_wrap'])}"
            )
        if len(chosen) > 1:
            self.faults.append(f"fsdp={legacy!r}: {' and '.join(chosen)} contradict each other")
        if chosen:
            self.fsdp.setdefault("sharding_strategy", known[chosen[0]])
        if "offload" in words:
            self.fsdp.setdefault("offload_params", True)
        sized = int(self.fsdp.get("min_num_params") or 0) > 0
        if "auto_wrap" in words or "auto_wrap_policy" not in self.fsdp:
            self.fsdp.setdefault("auto_wrap_policy", "SIZE_BASED_WRAP" if sized else "TRANSFORMER_BASED_WRAP")

    def either(self, *names: str) -> bool:
        """Whether one of these, which mean the same, is set."""
        said = {name: self.flag(name) for name in names if name in self.fsdp}
        if len(set(said.values())) > 1:
            self.faults.append(
                f"{' and '.join(f'{name}={value}' for name, value in said.items())} contradict each other"
            )
        return any(said.values())

    def flag(self, name: str) -> bool:
        """A key that is true or false; false where it is left out."""
        value = self.fsdp.get(name)
        if isinstance(value, bool) or value is None:
            return bool(value)
        if str(value).lower() in ("true", "1", "yes", "on"):
            return True
        if str(value).lower() in ("false", "0", "no", "off"):
            return False
        self.faults.append(f"{name}={value!r}: it must be true or false")
        return False

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        """A key that is one of these words, or the number of one, from 1 on; None where it is left out."""
        value = self.fsdp.get(name)
        if value is None:
            return None
        if str(value).isdecimal() and 1 <= int(value) <= len(known):
            return known[int(value) - 1]
        plain = str(value).rpartition(".")[2].upper()
        if plain in known:
            return plain
        self.faults.append(f"{name}={value!r}: it must be one of {', '.join(known)}{near(plain, known)}")
        return None


def near(name: str, known: Collection[str]) -> str:
    """The name most likely meant, for an error."""
    found = difflib.get_close_matches(name, sorted(known), 1, 0.6)
    return f"; did you mean {found[0]}?" if found else ""
