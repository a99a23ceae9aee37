"""What a configuration of accelerate's, or of the Trainer's, says of sharding, in the words of FSDP2.

Keys of FSDP1 are taken for what they come to under FSDP2, with a note, or are refused with the reason. Nothing here
needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, assert_never

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.errors import ConfigError
from shardwise.models.torch_words import accelerator, has_collectives
from shardwise.models.wrapping.accelerate_keys import (
    MEANINGLESS,
    POLICIES,
    PRECISIONS,
    STATE_DICTS,
    STRATEGIES,
    AccelerateKeys,
    near,
    values_in,
)
from shardwise.models.wrapping.blocks import Off, PerBlock
from shardwise.models.wrapping.policies import Classes, MinSize, NoSplitModules, WholeModel, WrapPolicy


@dataclass(frozen=True, slots=True)
class BlocksOf:
    """Groups are the blocks of these classes; with none named, of those that the model declares."""

    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LargerThan:
    """Groups are modules of at least so many elements."""

    numel: int


@dataclass(frozen=True, slots=True)
class OneGroup:
    """Nothing is wrapped but the root."""


Wrapped: TypeAlias = BlocksOf | LargerThan | OneGroup


@dataclass(frozen=True, slots=True)
class AccelerateConfig:
    """What a configuration says, in the words of FSDP2.

    Attributes:
        wrap: which modules are groups.
        reshards: whether a block is resharded after its forward pass.
        offloads: whether shards, gradients and the optimizer are kept on the host.
        precision: "float32", "bfloat16" or "float16", that is computed in, and that gradients are reduced in.
        recomputes: whether activations are computed again in the backward pass.
        replicas: copies of the sharded model (HSDP).
        notes: what has no meaning here, or another one; a sentence each.
    """

    wrap: Wrapped = field(default_factory=OneGroup)
    reshards: bool = True
    offloads: bool = False
    precision: str = "float32"
    recomputes: bool = False
    replicas: int = 1
    notes: tuple[str, ...] = ()


def read_accelerate_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> AccelerateConfig:
    """Read a file (YAML, or JSON) or the values of one.

    Raises:
        ConfigError: it cannot be read; or naming every key that is unknown, contradicts another, or cannot be
            honoured.
    """
    told = "the configuration" if isinstance(source, Mapping) else os.fspath(source)
    keys = AccelerateKeys(source if isinstance(source, Mapping) else values_in(Path(source)))
    found = _Meaning(keys).config()
    if keys.faults:
        raise ConfigError("\n".join([f"{told}: the model cannot be sharded so", *map("  {}".format, keys.faults)]))
    return found


class _Meaning:
    """One configuration on its way to be understood."""

    def __init__(self, keys: AccelerateKeys) -> None:
        self.keys = keys
        self.values = keys.values
        self.fsdp = keys.fsdp
        self.faults = keys.faults
        self.notes: list[str] = []

    def config(self) -> AccelerateConfig:
        strategy = self.keys.choice("sharding_strategy", STRATEGIES)
        self._version()
        self._tell_meaningless()
        found = AccelerateConfig(
            wrap=self._wrap(),
            reshards=self._reshards(strategy),
            offloads=self.keys.either("offload_params", "cpu_offload"),
            precision=self._precision(),
            recomputes=self._recomputes(),
            replicas=self._replicas(strategy),
        )
        return replace(found, notes=tuple(self.notes))

    def _version(self) -> None:
        version = self.fsdp.get("version", 1 if "sharding_strategy" in self.fsdp else 2)
        if str(version) not in ("1", "2"):
            self.faults.append(f"fsdp_version={version!r}: there are 1 and 2")
        elif str(version) == "1":
            self.notes.append("it was written for FSDP1; the model is sharded by FSDP2")

    def _tell_meaningless(self) -> None:
        told = [name for name in MEANINGLESS if name in self.fsdp and name != "cpu_ram_efficient_loading"]
        for name in told:
            self.notes.append(f"{name}: {MEANINGLESS[name]}, so it means nothing")
        kind = self.keys.choice("state_dict_type", STATE_DICTS)
        if kind == "LOCAL_STATE_DICT":
            self.faults.append("state_dict_type=LOCAL_STATE_DICT: FSDP2 has none; take SHARDED_STATE_DICT")
        elif kind is not None:
            form = "OneFile()" if kind == "FULL_STATE_DICT" else "DistributedFolder()"
            self.notes.append(
                f"state_dict_type={kind}: saves are told it one by one: save_accelerate_model(..., {form})"
            )
        if self.fsdp.get("ignored_modules") not in (None, "", [], "None"):
            self.faults.append("ignored_modules: modules cannot be left out of sharding; take it away")
        if self.values.get("dynamo_config"):
            self.notes.append(
                "dynamo_config: pass Sharding(compiling=CompileBlocks()), which compiles block by block"
            )
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            if name in self.values:
                self.notes.append(f"{name}: it is the training's, and no matter of sharding")

    def _wrap(self) -> Wrapped:
        names = self._names()
        numel = self.fsdp.get("min_num_params")
        default = "TRANSFORMER_BASED_WRAP" if names else "SIZE_BASED_WRAP" if numel else "NO_WRAP"
        policy = self.keys.choice("auto_wrap_policy", POLICIES) or default
        if names and policy != "TRANSFORMER_BASED_WRAP":
            self.faults.append(
                f"transformer_layer_cls_to_wrap={','.join(names)} contradicts auto_wrap_policy={policy}"
            )
        if numel not in (None, 0, "0") and policy != "SIZE_BASED_WRAP":
            self.faults.append(f"min_num_params={numel} contradicts auto_wrap_policy={policy}")
        if policy == "TRANSFORMER_BASED_WRAP":
            return BlocksOf(names)
        if policy == "NO_WRAP":
            return OneGroup()
        try:
            count = int(float(numel)) if numel is not None else 0
        except (TypeError, ValueError):
            self.faults.append(f"min_num_params={numel!r}: it must be a number of parameters")
            return OneGroup()
        return LargerThan(count) if count > 0 else OneGroup()

    def _names(self) -> tuple[str, ...]:
        found: list[str] = []
        for key in ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"):
            value = self.fsdp.get(key)
            if value is None or value == "":
                continue
            parts: Any = value.split(",") if isinstance(value, str) else value
            if not isinstance(parts, (list, tuple, set)) or not all(isinstance(part, str) for part in parts):
                self.faults.append(f"{key}={value!r}: it must be names of classes, with commas or in a list")
                continue
            found += [part.strip() for part in (sorted(parts) if isinstance(parts, set) else parts) if part.strip()]
        return tuple(dict.fromkeys(found))

    def _reshards(self, strategy: str | None) -> bool:
        value = self.fsdp.get("reshard_after_forward")
        by_strategy = None if strategy is None else strategy in ("FULL_SHARD", "HYBRID_SHARD")
        if strategy == "NO_SHARD" or str(value).upper() == "NO_SHARD":
            self.faults.append("sharding_strategy=NO_SHARD: nothing would be sharded; use DistributedDataParallel")
        if value is None:
            return True if by_strategy is None else by_strategy
        named = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
        said = (
            named[value.upper()]
            if isinstance(value, str) and value.upper() in named
            else self.keys.flag("reshard_after_forward")
        )
        if by_strategy is not None and said is not by_strategy:
            self.faults.append(f"reshard_after_forward={value} contradicts sharding_strategy={strategy}")
        return said

    def _precision(self) -> str:
        found: dict[str, str] = {}
        for name, value in (
            ("mixed_precision", self.values.get("mixed_precision")),
            ("mixed_precision_policy", self.fsdp.get("mixed_precision_policy")),
            *((flag, flag) for flag in ("bf16", "fp16") if self.values.get(flag) is True),
        ):
            if value is None:
                continue
            plain = "no" if value is False else str(value).lower()
            if plain not in PRECISIONS:
                self.faults.append(f"{name}={value!r}: it must be one of {', '.join(PRECISIONS)}")
            else:
                found[f"{name}={plain}"] = PRECISIONS[plain]
        if len(set(found.values())) > 1:
            self.faults.append(f"{' and '.join(found)} contradict each other")
        return next(iter(found.values()), "float32")

    def _recomputes(self) -> bool:
        recomputes = self.keys.flag("activation_checkpointing")
        if self.keys.flag("activation_checkpointing_offload"):
            if not recomputes:
                self.faults.append("activation_checkpointing_offload=true wants activation_checkpointing=true")
            self.notes.append("activation_checkpointing_offload: inputs of blocks stay on the device")
        return recomputes

    def _replicas(self, strategy: str | None) -> int:
        section = self.values.get("parallelism_config") or {}
        if not isinstance(section, Mapping):
            self.faults.append(f"parallelism_config={section!r}: it must be keys with values")
            section = {}
        sizes: dict[str, int] = {}
        for key, value in section.items():
            plain = key.removeprefix("parallelism_config_")
            if plain in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
                if value is not None and (not str(value).isdecimal() or int(value) < 1):
                    self.faults.append(f"parallelism_config.{key}={value!r}: it must be 1 or more")
                else:
                    sizes[plain] = int(value or 1)
            elif not plain.startswith(("cp_", "sp_", "tp_")):
                self.faults.append(
                    f"parallelism_config.{key}: no such key{near(plain, ('dp_replicate_size', 'dp_shard_size'))}"
                )
        for name in ("tp_size", "cp_size", "sp_size"):
            if sizes.get(name, 1) > 1:
                self.faults.append(
                    f"{name}={sizes[name]}: only shards and replicas are made here; apply it to the model, "
                    "then fully_shard, and call shardwise.load"
                )
        replicas, shards, ranks = (
            sizes.get("dp_replicate_size", 1),
            sizes.get("dp_shard_size"),
            self.values.get("num_processes"),
        )
        if shards and shards * replicas > 1 and isinstance(ranks, int) and ranks not in (-1, shards * replicas):
            self.faults.append(
                f"num_processes={ranks} contradicts dp_replicate_size={replicas} times dp_shard_size={shards}"
            )
        if strategy is not None and strategy.startswith("HYBRID"):
            machines = self.values.get("num_machines") or 1
            if replicas == 1 and machines == 1:
                self.faults.append(
                    f"sharding_strategy={strategy}: it does not say how many replicas there are; give num_machines "
                    "(one for each), or parallelism_config.dp_replicate_size"
                )
            return max(replicas, int(machines))
        return replicas


def fields_of(said: AccelerateConfig) -> dict[str, Any]:
    """The fields of a :class:`~shardwise.models.wrapping.wrap.Sharding`.

    Collective: yes, over the default process group, where there are replicas.

    Raises:
        ConfigError: there are replicas, and no ranks that could be dealt to them.
    """
    return {
        "mesh": _mesh_of(said.replicas),
        "wrap": _wrap_of(said.wrap),
        "mp_policy": _precision_of(said.precision),
        "offload_policy": CPUOffloadPolicy() if said.offloads else OffloadPolicy(),
        "reshard_after_forward": said.reshards,
        "activation_checkpointing": PerBlock() if said.recomputes else Off(),
    }


def _wrap_of(wrapped: Wrapped) -> WrapPolicy:
    match wrapped:
        case BlocksOf(()):
            return NoSplitModules()
        case BlocksOf(classes):
            return Classes(classes)
        case LargerThan(numel):
            return MinSize(numel)
        case OneGroup():
            return WholeModel()
        case _:
            assert_never(wrapped)


def _precision_of(name: str) -> MixedPrecisionPolicy:
    """accelerate computes, reduces and gives out in one dtype."""
    if name == "float32":
        return MixedPrecisionPolicy()
    dtype: torch.dtype = getattr(torch, name)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)


def _mesh_of(replicas: int) -> DeviceMesh | None:
    if replicas == 1:
        return None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks % replicas or ranks == replicas:
        raise ConfigError(
            f"{replicas} replicas: {ranks} ranks cannot be dealt to as many of two or more each; "
            "call torch.distributed.init_process_group first, on a multiple of them"
        )
    found = accelerator()
    kind = found.type if found is not None and has_collectives(found, None) else "cpu"
    return init_device_mesh(kind, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
