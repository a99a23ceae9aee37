"""What the sections of a configuration mean, as the values that everything below it takes."""

from __future__ import annotations

from typing import assert_never

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardwise.errors import ConfigError
from shardwise.execution.processes.launched import this_device
from shardwise.execution.ranks.world import World
from shardwise.models.accelerators import accelerator
from shardwise.models.blocks import CompileBlocks, Off, PerBlock
from shardwise.models.policies import (
    Automatic,
    Classes,
    MinSize,
    ModelPlan,
    ModuleListBlocks,
    NoSplitModules,
    WholeModel,
    WrapPolicy,
)
from shardwise.models.wrap import Sharding
from shardwise.training.accumulation import Accumulation, ShardedGradients, WholeGradients
from shardwise.training.batches import BatchLayout, Flattened, Packed, Padded
from shardwise.training.config_sections import (
    DataSection,
    FreezeTuning,
    FullTuning,
    LoraTuning,
    ShardingSection,
    TrainingSection,
    WrapSection,
)
from shardwise.training.losses import ChunkedLogits, WholeLogits
from shardwise.training.options import TrainOptions
from shardwise.training.prepare import mixed_precision
from shardwise.tuning import configs
from shardwise.tuning.modes import ExistingLora, Freeze, Full, InBlocks, Lora, Replicated, Tuning


def sharding_of(section: ShardingSection, options: TrainOptions) -> Sharding:
    """What a configuration says about sharding, on the ranks there are.

    Collective: yes, over the default process group, with replicas.

    Raises:
        ConfigError: the ranks cannot be dealt to the replicas, or there are none to offload for.
    """
    if section.offload == "cpu" and not dist.is_initialized():
        raise ConfigError(
            "sharding.offload='cpu': one process without a process group is not sharded, so there is no offload; "
            "start it by torchrun, or with --nproc-per-node 2 or more"
        )
    return Sharding(
        mesh=_mesh_of(section),
        wrap=_wrap_of(section),
        mp_policy=mixed_precision(options, getattr(torch, section.reduce_dtype)),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=accelerator() is not None) if section.offload == "cpu" else OffloadPolicy()
        ),
        reshard_after_forward=section.reshard_after_forward,
        activation_checkpointing=PerBlock(int(every)) if (every := section.activation_checkpointing) else Off(),
        compiling=CompileBlocks() if section.compile else Off(),
    )


def _mesh_of(section: ShardingSection) -> DeviceMesh | None:
    world = World.current()
    if section.replicas == 1:
        return None
    if world.size % section.replicas or section.replicas == world.size:
        raise ConfigError(
            f"sharding.replicas={section.replicas}: {world.size} ranks cannot be dealt to as many replicas of two "
            "or more ranks each"
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
        case WrapSection(classes=None, min_parameters=int(numel)):
            return MinSize(numel)
        case WrapSection():
            return Classes(tuple(section.wrap.classes or ()))
        case _:
            assert_never(section.wrap)


def row_layout(section: DataSection, implementation: str | None) -> BatchLayout:
    """How rows become batches, for an implementation of attention."""
    if not section.packing:
        return Padded()
    is_flash = implementation is not None and "flash" in implementation
    return Flattened(section.max_length) if is_flash else Packed(section.max_length)


def tuning_of(section: FullTuning | FreezeTuning | LoraTuning) -> Tuning:
    """What is trained.

    Raises:
        ConfigError: PEFT is not installed, or refuses the LoRA's configuration.
    """
    match section:
        case FullTuning():
            return Full()
        case FreezeTuning():
            return Freeze(section.trainable_layers, tuple(section.trainable_modules), tuple(section.extra_modules))
        case LoraTuning():
            adapters = Replicated() if section.placement == "replicated" else InBlocks()
            if section.adapter is not None:
                return ExistingLora(section.adapter, adapters=adapters)
            settings = {
                "task_type": "CAUSAL_LM",
                "r": section.r,
                "lora_alpha": section.lora_alpha,
                "lora_dropout": section.lora_dropout,
                "target_modules": section.target_modules,
                "target_parameters": section.target_parameters,
                "modules_to_save": section.modules_to_save,
                "use_rslora": section.use_rslora,
                "use_dora": section.use_dora,
            }
            try:
                return Lora(configs.lora_config(**settings, **section.options), adapters=adapters)
            except ConfigError as error:
                raise ConfigError(f"tuning: {error}") from error
        case _:
            assert_never(section)


def loss_of(section: TrainingSection) -> WholeLogits | ChunkedLogits:
    """How the loss is taken."""
    return WholeLogits() if section.loss_chunk_tokens is None else ChunkedLogits(section.loss_chunk_tokens)


def accumulation_of(section: TrainingSection) -> Accumulation:
    """What ranks keep of gradients between micro-batches."""
    return ShardedGradients() if section.accumulate == "sharded_gradients" else WholeGradients()
