"""How a save is carried out, and under which names, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.execution.memory.free import require_budget
from shardwise.execution.ranks.line import Patience

MAX_SHARD_SIZE = "50GB"
"""As in ``save_pretrained`` of transformers 5."""


@dataclass(frozen=True, slots=True)
class HubNames:
    """Tensors are saved under the names, and in the shapes, that the model's checkpoints have on the hub."""


@dataclass(frozen=True, slots=True)
class InternalNames:
    """Tensors are saved as the model's modules hold them."""


@dataclass(frozen=True, slots=True)
class PeftNames:
    """One adapter of a PEFT model is saved, and nothing else, under the names that PEFT's files have."""

    adapter: str = "default"


WrittenNames: TypeAlias = HubNames | InternalNames


@dataclass(frozen=True, slots=True)
class Trust:
    """What was written is not read again."""


@dataclass(frozen=True, slots=True)
class CompareWithMemory:
    """Before the save is committed, every rank reads back what it gave and compares it with its memory.

    The first one does so with the headers, too. Small files (config, tokenizer) are not read back.
    """


Verification: TypeAlias = Trust | CompareWithMemory


@dataclass(frozen=True, slots=True)
class WithTraining:
    """An adapter with the state of its training: optimizer, schedule, open window, counts; where there is such."""


@dataclass(frozen=True, slots=True)
class MatricesOnly:
    """An adapter's matrices and its config, as PEFT saves them, and nothing of its training."""


SavedState: TypeAlias = WithTraining | MatricesOnly


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a save is carried out; none of it changes what is saved.

    Attributes:
        budget_bytes: host memory that one rank may use for staging (casts, copies from an accelerator).
        progress: show a bar on the first rank (where there is a terminal, and transformers' bars are not off).
        process_group: the ranks that hold the model; None is the default group, or this process alone.
        patience: how long ranks wait for each other.
    """

    budget_bytes: int = 256 << 20
    progress: bool = True
    process_group: dist.ProcessGroup | None = None
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        require_budget(self.budget_bytes)


def resolved_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ConfigError(f"dtype={dtype!r} is not a floating dtype of 16 bits or more; pass torch.bfloat16, say")
    return found
