"""What the sections of a configuration mean, as the values that everything below it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, assert_never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardwise.errors import ConfigError
from shardwise.execution.processes.launched import this_device
from shardwise.execution.ranks.world import World
from shardwise.models.four_bits.quantization import AsStored, FourBit, Fp4, NestedScales, Nf4, PlainScales
from shardwise.models.torch_words import accelerator
from shardwise.models.wrapping.blocks import CompileBlocks, Off, PerBlock
from shardwise.models.wrapping.policies import (
    Automatic,
    Classes,
    MinSize,
    ModelPlan,
    ModuleListBlocks,
    NoSplitModules,
    WholeModel,
    WrapPolicy,
)
from shardwise.models.wrapping.wrap import Sharding
from shardwise.planning.loads.load_plan import Ignore, Refuse
from shardwise.planning.states.matching import OnFault
from shardwise.tensors.byte_sizes import in_bytes_of
from shardwise.training.checkpoints import OptimizerSettings, SettingsAsked, SettingsOfCheckpoint
from shardwise.training.configuration.config_sections import (
    CheckpointSection,
    DataSection,
    DataSetSection,
    EvaluationSection,
    FreezeTuning,
    FullTuning,
    LoraTuning,
    QuantizationSection,
    ShardingSection,
    TrainConfig,
    TrainingSection,
    WrapSection,
)
from shardwise.training.data.batches import BatchLayout, Flattened, Packed, Padded
from shardwise.training.data.read_once import ReadOptions
from shardwise.training.data.row_files import ByContent, ByStat
from shardwise.training.data.sources import DataName
from shardwise.training.data.token_cache import CacheFolder, NoCache, TokenCaching
from shardwise.training.data.tokenising import Effort
from shardwise.training.evaluation_rows import EndEarly, ToItsEnd, TrainingEnd
from shardwise.training.options import EachEpoch, Every, Precision, TrainOptions
from shardwise.training.passes.forward import (
    Accumulation,
    ShardedGradients,
    WholeGradients,
    fitting_accumulation,
)
from shardwise.training.passes.losses import ChunkedLogits, WholeLogits
from shardwise.training.prepare import mixed_precision
from shardwise.training.texts.layouts import RowWords
from shardwise.tuning import configs
from shardwise.tuning.modes import ExistingLora, Freeze, Full, InBlocks, Lora, Replicated, Tuning


def resolved(config: TrainConfig, device: torch.device) -> TrainConfig:
    """A configuration in which what depends on where it runs has been decided.

    Collective: yes, over the default process group: accelerators of all ranks count.
    """
    is_accelerator = device.type != "cpu"
    can = False
    if config.sharding.precision == "auto":
        own = is_accelerator and (device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False))
        can = World.current().all_reduce(lambda: own, all)
    return decided(config, "bfloat16" if can else "float32", is_accelerator=is_accelerator)


def decided(config: TrainConfig, precision: Precision, *, is_accelerator: bool) -> TrainConfig:
    """A configuration with what is ``auto`` in ``sharding`` decided; the precision, where it is."""
    section, found = config.sharding, dict[str, object]()
    if section.precision == "auto":
        found["precision"] = precision
    if section.activation_checkpointing == "auto":
        found["activation_checkpointing"] = is_accelerator
    return config.model_copy(update={"sharding": section.model_copy(update=found)}) if found else config


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
    return sharding_on(section, options, _mesh_of(section))


def sharding_on(section: ShardingSection, options: TrainOptions, mesh: DeviceMesh | None) -> Sharding:
    """The same on a mesh, or, where there are no ranks yet, without. Collective: no."""
    return Sharding(
        mesh=mesh,
        wrap=_wrap_of(section),
        mp_policy=mixed_precision(options, getattr(torch, section.reduce_dtype)),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=accelerator() is not None) if section.offload == "cpu" else OffloadPolicy()
        ),
        reshard_after_forward=section.reshard_after_forward,
        activation_checkpointing=recomputing_of(section),
        compiling=CompileBlocks() if section.compile else Off(),
    )


def recomputing_of(section: ShardingSection) -> PerBlock | Off:
    """Which blocks are computed again in the backward pass; ``auto`` is none, as on CPUs."""
    every = section.activation_checkpointing
    return PerBlock(int(every)) if every and every != "auto" else Off()


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


def names_of_data(section: DataSection) -> list[DataName]:
    """The data sets that are learned.

    Raises:
        ConfigError: columns that are none of ours.
    """
    train = [section.train] if isinstance(section.train, str) else section.train
    return [
        _name(each if isinstance(each, DataSetSection) else DataSetSection(path=each), section) for each in train
    ]


def name_of_evaluation(section: EvaluationSection) -> DataName | None:
    """The data set that is only looked at.

    Raises:
        ConfigError: columns that are none of ours.
    """
    return None if section.data is None else _name(DataSetSection(path=section.data), section)


def _name(own: DataSetSection, common: DataSection | EvaluationSection) -> DataName:
    words = RowWords(own.layout or common.layout, common.columns if own.columns is None else own.columns)
    return DataName(own.path, own.split or common.split, own.subset or common.subset, words, own.weight)


def reading_of(section: DataSection, cache_root: Path | None) -> ReadOptions:
    """How rows become tokens; ``cache_root``: where they are kept if the section does not say; None: nowhere."""
    directory = cache_root if section.cache_dir is None else Path(section.cache_dir)
    caching: TokenCaching = NoCache()
    if section.cache != "never" and directory is not None:
        known_by = ByContent() if section.cache == "content" else ByStat()
        caching = CacheFolder(directory, known_by, in_bytes_of(section.cache_size))
    return ReadOptions(caching, Effort(section.processes), progress=True)


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


def every_of(every: int | Literal["epoch"] | None) -> Every:
    """How often something is done."""
    return EachEpoch() if every == "epoch" else every


def ending_of(section: EvaluationSection) -> TrainingEnd:
    """Whether evaluations end a training."""
    return ToItsEnd() if section.patience is None else EndEarly(section.patience, section.min_delta)


def settings_of_resumed(section: CheckpointSection) -> OptimizerSettings:
    """Whose settings an optimizer has that goes on."""
    return SettingsAsked() if section.optimizer_settings == "config" else SettingsOfCheckpoint()


def on_other_base_of(section: CheckpointSection) -> OnFault:
    """Whether an adapter may go on on another base than it was saved with."""
    return Ignore() if section.on_other_base == "ignore" else Refuse()


def accumulation_of(
    section: TrainingSection, model: nn.Module, options: TrainOptions, summed_in: str
) -> Accumulation:
    """What ranks keep of gradients between micro-batches; ``auto``: whole ones where there is memory for them.

    Collective: yes, over the default process group, where it is to be found out.
    """
    match section.accumulate:
        case "whole_gradients":
            return WholeGradients()
        case "sharded_gradients":
            return ShardedGradients()
        case "auto":
            return fitting_accumulation(model, options, getattr(torch, summed_in))
        case _:
            assert_never(section.accumulate)


def quantization_of(section: QuantizationSection | None) -> FourBit | AsStored | None:
    """How the base is kept, where that is said."""
    if section is None:
        return None
    if section.form == "stored":
        return AsStored()
    return (Nf4 if section.form == "nf4" else Fp4)(
        block_size=section.block_size,
        scales=NestedScales() if section.scales == "nested" else PlainScales(),
        compute_dtype=None if section.compute_dtype is None else getattr(torch, section.compute_dtype),
        stay=tuple(section.stay),
    )
