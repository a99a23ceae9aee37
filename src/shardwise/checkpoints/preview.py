"""What a checkpoint says of itself, for whoever asks before there is a model to restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoints.modes import Latest
from shardwise.checkpoints.opened import open_checkpoint, resolve, value_of
from shardwise.execution.ranks.world import World
from shardwise.storage.reading.local import LocalReader


@dataclass(frozen=True, slots=True)
class CheckpointPreview:
    """Plain facts of a checkpoint.

    Attributes:
        folder: of this one checkpoint.
        step: optimizer steps done.
        holds: "everything", or "adapter NAME".
        adapter: the settings of the adapter's config that change what it computes; None without adapter.
        optimizers: their classes; None where it is not known.
        data: the position in the data, where it is one for all ranks.
        user: the user's own.
    """

    folder: str
    step: int
    holds: str
    adapter: Mapping[str, Any] | None
    optimizers: tuple[str, ...] | None
    data: Mapping[str, Any] | None
    user: Mapping[str, Any]


def preview(root: Path) -> CheckpointPreview:
    """The facts of the newest checkpoint in a folder that is whole.

    Collective: yes, over the default process group; one rank reads, no tensors.

    Raises:
        FormatError: it is damaged, or another's.
        StorageError: there is none, or it cannot be read.
    """
    return World.current().from_first(lambda: _look(root))


def _look(root: Path) -> CheckpointPreview:
    step, _ = resolve(root, Latest())
    opened = open_checkpoint(root, step)
    facts = opened.facts
    position = None
    if facts.data == "one":
        with LocalReader(opened.folder) as reader:
            position = value_of(reader, opened, ("data", "rank_0"))
    return CheckpointPreview(
        folder=str(opened.folder),
        step=step,
        holds=facts.holds,
        adapter=facts.adapter,
        optimizers=None if facts.optimizers is None else tuple(name for name, _ in facts.optimizers),
        data=position if isinstance(position, dict) else None,
        user=facts.user,
    )
