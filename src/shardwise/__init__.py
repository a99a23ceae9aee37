"""Hugging Face models under PyTorch FSDP2, each rank touching only its own bytes.

The names below are loaded when they are first used, so that ``import shardwise`` is quick and
``shardwise inspect`` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoints.checkpointer import Checkpointer
    from shardwise.checkpoints.modes import (
        Asynchronous,
        AtStep,
        CheckpointerOptions,
        KeepAll,
        KeepLast,
        Latest,
        Synchronous,
    )
    from shardwise.checkpoints.reopened import verify
    from shardwise.checkpoints.state import TrainState
    from shardwise.errors import (
        CheckpointError,
        ConfigError,
        CoverageError,
        DisagreementError,
        FormatError,
        PlacementError,
        RankLostError,
        ShardwiseError,
        StorageError,
    )
    from shardwise.execution.line import Patience
    from shardwise.execution.states import StateOptions
    from shardwise.models.blocks import CompileBlocks, Off, PerBlock
    from shardwise.models.lora import MergedAdapter
    from shardwise.models.optimizer_state import ByName, ByPosition
    from shardwise.models.policies import (
        Automatic,
        Classes,
        MinSize,
        ModelPlan,
        ModuleListBlocks,
        NoSplitModules,
        WholeModel,
    )
    from shardwise.models.selection import AdapterOnly, Everything
    from shardwise.models.trained import AsItIs, Upcast
    from shardwise.models.vocabulary import Drawn, MeanOfRows, ResizeVocab
    from shardwise.models.wrap import Sharding
    from shardwise.planning.comparing import SampledBlocks, WholeFiles
    from shardwise.planning.consent import Ignore, Initialize, Refuse, TakeFirst
    from shardwise.planning.forecast import RequireMemory, TryAnyway
    from shardwise.planning.forms import DistributedFolder, FullState, OneFile, RankFiles, ShardedState
    from shardwise.planning.pages import HugePages, MeasuredPages, SmallPages
    from shardwise.planning.sharing import Alone, InIntervals, OncePerGroup, Weighed
    from shardwise.planning.sources import Anyone, EveryRank, FirstRank, OneRankPerNode
    from shardwise.report import (
        CheckpointReport,
        FilesReport,
        Forecast,
        LoadReport,
        ReopenReport,
        RestoreReport,
        SaveReport,
        ShardReport,
        StateReport,
        TrainerReport,
    )
    from shardwise.storage import HubOptions
    from shardwise.tuning.modes import ExistingLora, Freeze, Full, InBlocks, Lora, Replicated
    from shardwise.verbs.accelerate_files import (
        load_accelerate_model,
        load_accelerate_optimizer,
        save_accelerate_model,
        save_accelerate_optimizer,
    )
    from shardwise.verbs.load import LoadOptions, load
    from shardwise.verbs.merge_adapter import merge_adapter
    from shardwise.verbs.merge_weights import KeepSource, RemoveSource, Safetensors, TorchFile, merge_weights
    from shardwise.verbs.optimizer_state import optimizer_state, set_optimizer_state
    from shardwise.verbs.plan import plan
    from shardwise.verbs.pretrained import FromFiles, Later, from_pretrained
    from shardwise.verbs.save import (
        CompareWithMemory,
        HubNames,
        InternalNames,
        SaveOptions,
        Trust,
        save,
        save_adapter,
    )
    from shardwise.verbs.shard import ShardOptions, shard
    from shardwise.verbs.state import model_state, set_model_state
    from shardwise.verbs.stream import StreamOptions, iter_hf_tensors
    from shardwise.verbs.trainer_checkpoint import LeaveRandom, RestoreRandom, load_trainer_checkpoint

__version__ = "0.1.0"

_HOMES = {
    "AdapterOnly": "shardwise.models.selection",
    "Alone": "shardwise.planning.sharing",
    "Anyone": "shardwise.planning.sources",
    "AsItIs": "shardwise.models.trained",
    "Asynchronous": "shardwise.checkpoints.modes",
    "AtStep": "shardwise.checkpoints.modes",
    "Automatic": "shardwise.models.policies",
    "ByName": "shardwise.models.optimizer_state",
    "ByPosition": "shardwise.models.optimizer_state",
    "CheckpointError": "shardwise.errors",
    "CheckpointReport": "shardwise.report",
    "Checkpointer": "shardwise.checkpoints.checkpointer",
    "CheckpointerOptions": "shardwise.checkpoints.modes",
    "Classes": "shardwise.models.policies",
    "CompareWithMemory": "shardwise.verbs.save",
    "CompileBlocks": "shardwise.models.blocks",
    "ConfigError": "shardwise.errors",
    "CoverageError": "shardwise.errors",
    "DisagreementError": "shardwise.errors",
    "Drawn": "shardwise.models.vocabulary",
    "EveryRank": "shardwise.planning.sources",
    "Everything": "shardwise.models.selection",
    "ExistingLora": "shardwise.tuning.modes",
    "DistributedFolder": "shardwise.planning.forms",
    "FilesReport": "shardwise.report",
    "FirstRank": "shardwise.planning.sources",
    "Forecast": "shardwise.report",
    "FormatError": "shardwise.errors",
    "Freeze": "shardwise.tuning.modes",
    "Full": "shardwise.tuning.modes",
    "FromFiles": "shardwise.verbs.pretrained",
    "FullState": "shardwise.planning.forms",
    "HubNames": "shardwise.verbs.save",
    "HubOptions": "shardwise.storage",
    "HugePages": "shardwise.planning.pages",
    "Ignore": "shardwise.planning.consent",
    "InBlocks": "shardwise.tuning.modes",
    "InIntervals": "shardwise.planning.sharing",
    "Initialize": "shardwise.planning.consent",
    "InternalNames": "shardwise.verbs.save",
    "KeepAll": "shardwise.checkpoints.modes",
    "KeepLast": "shardwise.checkpoints.modes",
    "KeepSource": "shardwise.verbs.merge_weights",
    "Later": "shardwise.verbs.pretrained",
    "Latest": "shardwise.checkpoints.modes",
    "LeaveRandom": "shardwise.verbs.trainer_checkpoint",
    "LoadOptions": "shardwise.verbs.load",
    "LoadReport": "shardwise.report",
    "Lora": "shardwise.tuning.modes",
    "MeanOfRows": "shardwise.models.vocabulary",
    "MeasuredPages": "shardwise.planning.pages",
    "MergedAdapter": "shardwise.models.lora",
    "MinSize": "shardwise.models.policies",
    "ModelPlan": "shardwise.models.policies",
    "ModuleListBlocks": "shardwise.models.policies",
    "NoSplitModules": "shardwise.models.policies",
    "Off": "shardwise.models.blocks",
    "OncePerGroup": "shardwise.planning.sharing",
    "OneFile": "shardwise.planning.forms",
    "OneRankPerNode": "shardwise.planning.sources",
    "Patience": "shardwise.execution.line",
    "PerBlock": "shardwise.models.blocks",
    "PlacementError": "shardwise.errors",
    "RankFiles": "shardwise.planning.forms",
    "RankLostError": "shardwise.errors",
    "Refuse": "shardwise.planning.consent",
    "RemoveSource": "shardwise.verbs.merge_weights",
    "ReopenReport": "shardwise.report",
    "Replicated": "shardwise.tuning.modes",
    "RequireMemory": "shardwise.planning.forecast",
    "RestoreRandom": "shardwise.verbs.trainer_checkpoint",
    "RestoreReport": "shardwise.report",
    "ResizeVocab": "shardwise.models.vocabulary",
    "Safetensors": "shardwise.verbs.merge_weights",
    "SampledBlocks": "shardwise.planning.comparing",
    "SaveOptions": "shardwise.verbs.save",
    "SaveReport": "shardwise.report",
    "ShardOptions": "shardwise.verbs.shard",
    "ShardReport": "shardwise.report",
    "ShardedState": "shardwise.planning.forms",
    "Sharding": "shardwise.models.wrap",
    "ShardwiseError": "shardwise.errors",
    "SmallPages": "shardwise.planning.pages",
    "StateOptions": "shardwise.execution.states",
    "StateReport": "shardwise.report",
    "StorageError": "shardwise.errors",
    "StreamOptions": "shardwise.verbs.stream",
    "Synchronous": "shardwise.checkpoints.modes",
    "TakeFirst": "shardwise.planning.consent",
    "TorchFile": "shardwise.verbs.merge_weights",
    "TrainState": "shardwise.checkpoints.state",
    "TrainerReport": "shardwise.report",
    "Trust": "shardwise.verbs.save",
    "TryAnyway": "shardwise.planning.forecast",
    "Upcast": "shardwise.models.trained",
    "Weighed": "shardwise.planning.sharing",
    "WholeFiles": "shardwise.planning.comparing",
    "WholeModel": "shardwise.models.policies",
    "from_pretrained": "shardwise.verbs.pretrained",
    "iter_hf_tensors": "shardwise.verbs.stream",
    "load": "shardwise.verbs.load",
    "load_accelerate_model": "shardwise.verbs.accelerate_files",
    "load_accelerate_optimizer": "shardwise.verbs.accelerate_files",
    "load_trainer_checkpoint": "shardwise.verbs.trainer_checkpoint",
    "model_state": "shardwise.verbs.state",
    "optimizer_state": "shardwise.verbs.optimizer_state",
    "merge_adapter": "shardwise.verbs.merge_adapter",
    "merge_weights": "shardwise.verbs.merge_weights",
    "plan": "shardwise.verbs.plan",
    "save": "shardwise.verbs.save",
    "save_adapter": "shardwise.verbs.save",
    "save_accelerate_model": "shardwise.verbs.accelerate_files",
    "save_accelerate_optimizer": "shardwise.verbs.accelerate_files",
    "set_model_state": "shardwise.verbs.state",
    "set_optimizer_state": "shardwise.verbs.optimizer_state",
    "shard": "shardwise.verbs.shard",
    "verify": "shardwise.checkpoints.reopened",
}

__all__ = [
    "AdapterOnly",
    "Alone",
    "Anyone",
    "AsItIs",
    "Asynchronous",
    "AtStep",
    "Automatic",
    "ByName",
    "ByPosition",
    "CheckpointError",
    "CheckpointReport",
    "Checkpointer",
    "CheckpointerOptions",
    "Classes",
    "CompareWithMemory",
    "CompileBlocks",
    "ConfigError",
    "CoverageError",
    "DisagreementError",
    "DistributedFolder",
    "Drawn",
    "EveryRank",
    "Everything",
    "ExistingLora",
    "FilesReport",
    "FirstRank",
    "Forecast",
    "FormatError",
    "Freeze",
    "FromFiles",
    "Full",
    "FullState",
    "HubNames",
    "HubOptions",
    "HugePages",
    "Ignore",
    "InBlocks",
    "InIntervals",
    "Initialize",
    "InternalNames",
    "KeepAll",
    "KeepLast",
    "KeepSource",
    "Later",
    "Latest",
    "LeaveRandom",
    "LoadOptions",
    "LoadReport",
    "Lora",
    "MeanOfRows",
    "MeasuredPages",
    "MergedAdapter",
    "MinSize",
    "ModelPlan",
    "ModuleListBlocks",
    "NoSplitModules",
    "Off",
    "OncePerGroup",
    "OneFile",
    "OneRankPerNode",
    "Patience",
    "PerBlock",
    "PlacementError",
    "RankFiles",
    "RankLostError",
    "Refuse",
    "RemoveSource",
    "ReopenReport",
    "Replicated",
    "RequireMemory",
    "ResizeVocab",
    "RestoreRandom",
    "RestoreReport",
    "Safetensors",
    "SampledBlocks",
    "SaveOptions",
    "SaveReport",
    "ShardOptions",
    "ShardReport",
    "ShardedState",
    "Sharding",
    "ShardwiseError",
    "SmallPages",
    "StateOptions",
    "StateReport",
    "StorageError",
    "StreamOptions",
    "Synchronous",
    "TakeFirst",
    "TorchFile",
    "TrainState",
    "TrainerReport",
    "Trust",
    "TryAnyway",
    "Upcast",
    "Weighed",
    "WholeFiles",
    "WholeModel",
    "__version__",
    "from_pretrained",
    "iter_hf_tensors",
    "load",
    "load_accelerate_model",
    "load_accelerate_optimizer",
    "load_trainer_checkpoint",
    "merge_adapter",
    "merge_weights",
    "model_state",
    "optimizer_state",
    "plan",
    "save",
    "save_accelerate_model",
    "save_accelerate_optimizer",
    "save_adapter",
    "set_model_state",
    "set_optimizer_state",
    "shard",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
