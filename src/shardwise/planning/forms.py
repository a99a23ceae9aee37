"""In which form the state of a model or of an optimizer is handed out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from shardwise.planning.sources import EveryRank, FirstRank

Receivers: TypeAlias = FirstRank | EveryRank
"""Who gets what is gathered."""


@dataclass(frozen=True, slots=True)
class Full:
    """Whole tensors on the CPU, on the ranks ``on``: ``FirstRank()`` or ``EveryRank()``. Others get nothing."""

    on: Receivers = field(default_factory=FirstRank)

    def receivers(self, size: int) -> range:
        """The ranks that get the tensors, of so many."""
        return range(1 if isinstance(self.on, FirstRank) else size)


@dataclass(frozen=True, slots=True)
class Sharded:
    """What each rank has: DTensors where tensors are sharded, in the model's own memory. Nothing is moved."""


Form: TypeAlias = Full | Sharded
