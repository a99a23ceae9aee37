"""Hugging Face models under PyTorch FSDP2, each rank touching only its own bytes.

The names below are loaded when they are first used, so that ``import shardwise`` is quick and
``shardwise inspect`` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from shardwise.models.trained import AsItIs, Upcast
    from shardwise.models.wrap import (
        Automatic,
        Classes,
        ModelPlan,
        ModuleListBlocks,
        NoSplitModules,
        Sharding,
        WholeModel,
    )
    from shardwise.planning.consent import Ignore, Initialize, Refuse
    from shardwise.planning.forecast import RequireMemory, TryAnyway
    from shardwise.planning.sharing import Alone, OncePerGroup, Weighed
    from shardwise.planning.sources import Anyone, EveryRank, FirstRank, OneRankPerNode
    from shardwise.report import Forecast, LoadReport, ReopenReport, SaveReport, ShardReport
    from shardwise.storage import HubOptions
    from shardwise.verbs.load import LoadOptions, load
    from shardwise.verbs.merge_adapter import merge_adapter
    from shardwise.verbs.merge_weights import KeepSource, RemoveSource, Safetensors, TorchFile, merge_weights
    from shardwise.verbs.plan import plan
    from shardwise.verbs.pretrained import from_pretrained
    from shardwise.verbs.reopen import verify
    from shardwise.verbs.save import CompareWithMemory, HubNames, InternalNames, SaveOptions, Trust, save
    from shardwise.verbs.shard import ShardOptions, shard

__version__ = "0.1.0"

_HOMES = {
    "Alone": "shardwise.planning.sharing",
    "Anyone": "shardwise.planning.sources",
    "AsItIs": "shardwise.models.trained",
    "Automatic": "shardwise.models.wrap",
    "CheckpointError": "shardwise.errors",
    "Classes": "shardwise.models.wrap",
    "CompareWithMemory": "shardwise.verbs.save",
    "ConfigError": "shardwise.errors",
    "CoverageError": "shardwise.errors",
    "DisagreementError": "shardwise.errors",
    "EveryRank": "shardwise.planning.sources",
    "FirstRank": "shardwise.planning.sources",
    "Forecast": "shardwise.report",
    "FormatError": "shardwise.errors",
    "HubNames": "shardwise.verbs.save",
    "HubOptions": "shardwise.storage",
    "Ignore": "shardwise.planning.consent",
    "Initialize": "shardwise.planning.consent",
    "InternalNames": "shardwise.verbs.save",
    "KeepSource": "shardwise.verbs.merge_weights",
    "LoadOptions": "shardwise.verbs.load",
    "LoadReport": "shardwise.report",
    "ModelPlan": "shardwise.models.wrap",
    "ModuleListBlocks": "shardwise.models.wrap",
    "NoSplitModules": "shardwise.models.wrap",
    "OncePerGroup": "shardwise.planning.sharing",
    "OneRankPerNode": "shardwise.planning.sources",
    "Patience": "shardwise.execution.line",
    "PlacementError": "shardwise.errors",
    "RankLostError": "shardwise.errors",
    "Refuse": "shardwise.planning.consent",
    "RemoveSource": "shardwise.verbs.merge_weights",
    "ReopenReport": "shardwise.report",
    "RequireMemory": "shardwise.planning.forecast",
    "Safetensors": "shardwise.verbs.merge_weights",
    "SaveOptions": "shardwise.verbs.save",
    "SaveReport": "shardwise.report",
    "ShardOptions": "shardwise.verbs.shard",
    "ShardReport": "shardwise.report",
    "Sharding": "shardwise.models.wrap",
    "ShardwiseError": "shardwise.errors",
    "StorageError": "shardwise.errors",
    "TorchFile": "shardwise.verbs.merge_weights",
    "Trust": "shardwise.verbs.save",
    "TryAnyway": "shardwise.planning.forecast",
    "Upcast": "shardwise.models.trained",
    "Weighed": "shardwise.planning.sharing",
    "WholeModel": "shardwise.models.wrap",
    "from_pretrained": "shardwise.verbs.pretrained",
    "load": "shardwise.verbs.load",
    "merge_adapter": "shardwise.verbs.merge_adapter",
    "merge_weights": "shardwise.verbs.merge_weights",
    "plan": "shardwise.verbs.plan",
    "save": "shardwise.verbs.save",
    "shard": "shardwise.verbs.shard",
    "verify": "shardwise.verbs.reopen",
}

__all__ = [
    "Alone",
    "Anyone",
    "AsItIs",
    "Automatic",
    "CheckpointError",
    "Classes",
    "CompareWithMemory",
    "ConfigError",
    "CoverageError",
    "DisagreementError",
    "EveryRank",
    "FirstRank",
    "Forecast",
    "FormatError",
    "HubNames",
    "HubOptions",
    "Ignore",
    "Initialize",
    "InternalNames",
    "KeepSource",
    "LoadOptions",
    "LoadReport",
    "ModelPlan",
    "ModuleListBlocks",
    "NoSplitModules",
    "OncePerGroup",
    "OneRankPerNode",
    "Patience",
    "PlacementError",
    "RankLostError",
    "Refuse",
    "RemoveSource",
    "ReopenReport",
    "RequireMemory",
    "Safetensors",
    "SaveOptions",
    "SaveReport",
    "ShardOptions",
    "ShardReport",
    "Sharding",
    "ShardwiseError",
    "StorageError",
    "TorchFile",
    "Trust",
    "TryAnyway",
    "Upcast",
    "Weighed",
    "WholeModel",
    "__version__",
    "from_pretrained",
    "load",
    "merge_adapter",
    "merge_weights",
    "plan",
    "save",
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
