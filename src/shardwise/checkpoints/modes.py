"""How a checkpointer keeps, writes and chooses checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch.distributed as dist

from shardwise.execution import Patience
from shardwise.execution.memory import require_budget

Mode: TypeAlias = Literal["sync", "async"]


@dataclass(frozen=True, slots=True)
class CheckpointerOptions:
    """How checkpoints are carried out; none of it changes what they hold.

    Attributes:
        budget_bytes: host memory that one rank may use for staging (strided tensors, copies to and from an
            accelerator); what ``mode="async"`` copies comes on top.
        process_group: the ranks that train together; None is the default group, or this process alone.
        patience: how long ranks wait for each other.
    """

    budget_bytes: int = 64 << 20
    process_group: dist.ProcessGroup | None = None
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        require_budget(self.budget_bytes)
