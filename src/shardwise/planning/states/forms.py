"""In which form the state of a model or of an optimizer is handed out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from shardwise.errors import ConfigError
from shardwise.planning.states.sources import EveryRank, FirstRank

Receivers: TypeAlias = FirstRank | EveryRank
"""Who gets what is gathered."""


@dataclass(frozen=True, slots=True)
class FullState:
    """Whole tensors on the CPU, on the ranks ``on``: ``FirstRank()`` or ``EveryRank()``. Others get nothing."""

    on: Receivers = field(default_factory=FirstRank)

    def __post_init__(self) -> None:
        on: object = self.on
        if not isinstance(on, (FirstRank, EveryRank)):
            raise ConfigError(f"FullState(on={on!r}): on is FirstRank() or EveryRank()")

    def receivers(self, size: int) -> range:
        """The ranks that get the tensors, of so many."""
        return range(1 if isinstance(self.on, FirstRank) else size)


@dataclass(frozen=True, slots=True)
class ShardedState:
    """What each rank has: DTensors where tensors are sharded, in the model's own memory. Nothing is moved."""


StateForm: TypeAlias = FullState | ShardedState


@dataclass(frozen=True, slots=True)
class OneFile:
    """Whole tensors in one file of ``torch.save``, which the first rank writes."""


@dataclass(frozen=True, slots=True)
class DistributedFolder:
    """A folder of ``torch.distributed.checkpoint``, in which every rank writes its own."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """A file for every rank with what it holds. They are read by as many ranks, sharded alike, and no others."""


FileForm: TypeAlias = OneFile | DistributedFolder | RankFiles
"""In which form a state lies in files."""


def require_file_form(form: object) -> None:
    """Raise for what is no form of files.

    Raises:
        ConfigError: naming it.
    """
    if not isinstance(form, (OneFile, DistributedFolder, RankFiles)):
        raise ConfigError(f"the form {form!r} is none of files; pass OneFile(), DistributedFolder() or RankFiles()")


def require_form(form: object) -> None:
    """Raise for what is no form.

    Raises:
        ConfigError: naming it.
    """
    if not isinstance(form, (FullState, ShardedState)):
        raise ConfigError(
            f"the form {form!r} is none; pass FullState(on=FirstRank()), FullState(on=EveryRank()) or "
            "ShardedState()"
        )
