"""How a checkpointer keeps, writes and chooses checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.execution.memory.free import require_budget
from shardwise.execution.ranks.line import Patience


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The newest ``count`` complete checkpoints stay; older ones are removed once a newer one counts."""

    count: int = 3

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"KeepLast({self.count}): at least one checkpoint must be kept")


@dataclass(frozen=True, slots=True)
class KeepAll:
    """No checkpoint is ever removed."""


Retention: TypeAlias = KeepLast | KeepAll


@dataclass(frozen=True, slots=True)
class Synchronous:
    """``save`` returns when the checkpoint counts. It is written from where the tensors lie."""


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """``save`` returns when the state has been copied to host memory; a thread writes it from there.

    At most one checkpoint is on its way: the next ``save`` waits for it first.
    """


Mode: TypeAlias = Synchronous | Asynchronous


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest complete checkpoint."""


@dataclass(frozen=True, slots=True)
class AtStep:
    """The checkpoint of this step."""

    step: int


Which: TypeAlias = Latest | AtStep


@dataclass(frozen=True, slots=True)
class CheckpointerOptions:
    """How checkpoints are carried out; none of it changes what they hold.

    Attributes:
        budget_bytes: host memory that one rank may use for staging (strided tensors, copies to and from an
            accelerator); what ``Asynchronous`` copies comes on top.
        process_group: the ranks that train together; None is the default group, or this process alone.
        patience: how long ranks wait for each other.
    """

    budget_bytes: int = 64 << 20
    process_group: dist.ProcessGroup | None = None
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        require_budget(self.budget_bytes)
