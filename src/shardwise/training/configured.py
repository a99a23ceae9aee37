"""What the sections of a configuration mean, as the values that everything below it takes."""

from __future__ import annotations

from typing import assert_never

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardwise.errors import ConfigError
from shardwise.execution.ranks import this_device
from shardwise.execution.world import World
from shardwise.models.wrap import (
    Automatic,
    Classes,
    ModelPlan,
    ModuleListBlocks,
    NoSplitModules,
    Sharding,
    WholeModel,
    WrapPolicy,
)
from shardwise.training.config import DataSection, ShardingSection, WrapClasses
from shardwise.training.data import Flattened, Layout, Packed, Padded
from shardwise.training.options import TrainOptions
from shardwise.training.prepare import mixed_precision


def sharding_of(section: ShardingSection, options: TrainOptions) -> Sharding:
    """What a configuration says about sharding, on the ranks there are.

    Collective: yes, over the default process group, with replicas.

    Raises:
        ConfigError: the ranks cannot be dealt to the replicas.
    """
    return Sharding(
        mesh=_mesh_of(section),
        wrap=_wrap_of(section),
        mp_policy=mixed_precision(options, getattr(torch, section.reduce_dtype)),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if section.offload == "cpu" else OffloadPolicy()
        ),
        reshard_after_forward=section.reshard_after_forward,
    )


def _mesh_of(section: ShardingSection) -> DeviceMesh | None:
    world = World.current()
    if section.replicas == 1:
        return None
    if world.size % section.replicas or section.replicas == world.size:
        raise ConfigError(
            f"sharding.replicas={section.replicas}: {world.size} ranks cannot be dealt to as many "
            "replicas of two or "
            "more ranks each"
        )
    return init_device_mesh(
        this_device().type,
        (section.replicas, world.size // section.replicas),
        mesh_dim_names=("replicate", "shard"),
    )


def _wrap_of(section: ShardingSection) -> WrapPolicy:
    match section.wrap:
        case "automatic":
            return Automatic()
        case "model_plan":
            return ModelPlan()
        case "no_split_modules":
            return NoSplitModules()
        case "module_list":
            return ModuleListBlocks()
        case "whole_model":
            return WholeModel()
        case WrapClasses(classes=classes):
            return Classes(tuple(classes))
        case _:
            assert_never(section.wrap)


def row_layout(section: DataSection, implementation: str | None) -> Layout:
    """How rows become batches, for an implementation of attention."""
    if not section.packing:
        return Padded()
    is_flash = implementation is not None and "flash" in implementation
    return Flattened(section.max_length) if is_flash else Packed(section.max_length)
