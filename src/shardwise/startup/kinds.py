"""The ways of bringing a model up that are put beside each other, by name. Needs no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from shardwise.errors import ConfigError

OURS = "shardwise"
PHASES = ("load", "wrap", "optimizer")
"""Of every arm, in order. What an arm does in one go is of the first."""


class Holder(Enum):
    """Who has the whole model in memory at some moment; all ranks together have its shards besides."""

    NOBODY = "nobody"
    FIRST_RANK = "the first rank"
    EVERY_RANK = "every rank"

    def at_once_bytes(self, model_bytes: int, ranks: int) -> int:
        """About what all ranks need at once: whole models, the shards, tensors that are sent whole."""
        return {Holder.NOBODY: 1, Holder.FIRST_RANK: 3, Holder.EVERY_RANK: ranks + 1}[self] * model_bytes


@dataclass(frozen=True, slots=True)
class ArmKind:
    """One way. ``does`` is a phrase; ``needs`` are packages beside torch and transformers, by their extras."""

    does: str
    holder: Holder
    needs: Mapping[str, str]


_ACCELERATE = {"accelerate": "pip install 'shardwise[accelerate]'"}

KINDS: Mapping[str, ArmKind] = {
    OURS: ArmKind("each rank reads its own bytes", Holder.NOBODY, {}),
    "native": ArmKind("every rank loads all, then fully_shard", Holder.EVERY_RANK, {}),
    "native-efficient": ArmKind("rank 0 loads, set_model_state_dict broadcasts", Holder.FIRST_RANK, {}),
    "accelerate": ArmKind("every rank loads all, then FSDP2 by accelerate", Holder.EVERY_RANK, _ACCELERATE),
    "accelerate-efficient": ArmKind(
        "rank 0 loads, accelerate broadcasts (cpu_ram_efficient_loading)", Holder.FIRST_RANK, _ACCELERATE
    ),
    "transformers": ArmKind("from_pretrained(distributed_config=...)", Holder.NOBODY, {}),
}


def arms_named(text: str | None) -> list[str]:
    """The arms of a list with commas, in their usual order; all of them for None.

    Raises:
        ConfigError: one is not known, or lacks a package.
    """
    if text is None:
        return list(KINDS)
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in KINDS]:
        raise ConfigError(f"--arms={text!r}: {unknown[0]!r} is none; there are {', '.join(KINDS)}")
    for name in names:
        if reason := lacking(name):
            raise ConfigError(f"--arms={text!r}: {name} cannot run here: {reason}")
    return [name for name in KINDS if name in names]


def lacking(arm: str) -> str:
    """Why an arm cannot run here; "" where nothing lacks."""
    for package, remedy in KINDS[arm].needs.items():
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; {remedy}"
    return ""
