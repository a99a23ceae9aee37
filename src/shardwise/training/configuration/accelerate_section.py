"""``shardwise train --accelerate-config``: what a configuration of accelerate's says, as keys of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from shardwise.errors import ConfigError
from shardwise.models.wrapping.accelerate_config import (
    BlocksOf,
    LargerThan,
    OneGroup,
    Wrapped,
    read_accelerate_config,
)


def with_accelerate(values: Mapping[str, Any], file: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of a configuration with ``sharding`` as accelerate's file has it; and what is to be told of it.

    Raises:
        ConfigError: the file cannot be read or honoured; naming every key that is given twice, differently.
    """
    said = read_accelerate_config(file)
    notes = list(said.notes)
    if said.precision == "float16":
        notes.append("mixed_precision=fp16: gradients are reduced in float32")
    section: dict[str, Any] = {
        "wrap": _wrap_of(said.wrap),
        "precision": said.precision,
        "reduce_dtype": "bfloat16" if said.precision == "bfloat16" else "float32",
        "reshard_after_forward": said.reshards,
        "offload": "cpu" if said.offloads else "none",
        "activation_checkpointing": said.recomputes,
        "replicas": said.replicas,
    }
    own = values.get("sharding") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"sharding={own!r}: it must be keys with values")
    twice = [
        f"  sharding.{key}={own[key]!r}, and {value!r} by {file}"
        for key, value in section.items()
        if key in own and own[key] != value
    ]
    if twice:
        raise ConfigError("\n".join(["these are given twice, differently; leave one of each out", *twice]))
    return {**values, "sharding": {**section, **own}}, tuple(notes)


def _wrap_of(wrapped: Wrapped) -> object:
    match wrapped:
        case BlocksOf(()):
            return "no_split_modules"
        case BlocksOf(classes):
            return {"classes": list(classes)}
        case LargerThan(numel):
            return {"min_parameters": numel}
        case OneGroup():
            return "whole_model"
        case _:
            assert_never(wrapped)
