"""How a model is to be sharded, from words of a command."""

from __future__ import annotations

import difflib

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.errors import ConfigError
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


def sharding_named(wrap: str, *, param_dtype: str | None, offload: bool) -> Sharding:
    """How a model is sharded, from words; see :func:`wrap_named`.

    Raises:
        ConfigError: when a word is unknown.
    """
    dtype = None if param_dtype is None else getattr(torch, param_dtype, None)
    if param_dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"param_dtype={param_dtype!r} is not a floating dtype of torch, such as bfloat16")
    return Sharding(
        wrap=wrap_named(wrap),
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
    )


def wrap_named(text: str) -> WrapPolicy:
    """The wrap policy of this name.

    These are auto, model-plan, no-split, module-lists, whole, classes=NAME,NAME, and min-size=ELEMENTS.

    Raises:
        ConfigError: when there is none, with the nearest there is.
    """
    policies: dict[str, WrapPolicy] = {
        "auto": Automatic(),
        "model-plan": ModelPlan(),
        "no-split": NoSplitModules(),
        "module-lists": ModuleListBlocks(),
        "whole": WholeModel(),
    }
    word, _, names = text.partition("=")
    if word == "classes" and all(names.split(",")):
        return Classes(tuple(names.split(",")))
    if word == "min-size" and names.isdecimal():
        return MinSize(int(names))
    if text in policies:
        return policies[text]
    known = [*policies, "classes=NAME,NAME", "min-size=ELEMENTS"]
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.0)[0]
    raise ConfigError(f"there is no wrap policy {text!r}; did you mean {near}? There are {', '.join(known)}")
