"""A sharding as accelerate would have it, from what its configuration says."""

from __future__ import annotations

from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.errors import ConfigError
from shardwise.models.accelerators import accelerator, has_collectives
from shardwise.models.wrapping.accelerate_config import AccelerateConfig, BlocksOf, LargerThan, OneGroup, Wrapped
from shardwise.models.wrapping.blocks import Off, PerBlock
from shardwise.models.wrapping.policies import Classes, MinSize, NoSplitModules, WholeModel, WrapPolicy


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
