"""Agrees, before a checkpoint, on what ranks have, and on whether the last plan holds again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.checkpoints.state import Looked, key_of
from shardwise.errors import DisagreementError
from shardwise.execution.replicas import (
    DigestWords,
    OddCircles,
    Replicas,
    as_bytes,
    odd_circles,
)
from shardwise.execution.world import OddRanks
from shardwise.execution.write import TensorsPlan, Views
from shardwise.planning.moves import Common
from shardwise.tensors import Box

_SHOWN = 4


@dataclass(frozen=True)
class PlannedSave:
    """The plan of a checkpoint, the state that it is of, and this rank's chunks."""

    looked: Looked
    plan: TensorsPlan
    views: Views
    common: Mapping[str, Common]
    """What this rank holds together with others."""

    @cached_property
    def replicas(self) -> Replicas:
        """That, with its values; and numbers of optimizers, which every rank has."""
        tensors = {key_of(path): tensor for path, tensor in self.looked.tensors.items()}
        numbers = {name: as_bytes(value) for name, value in self.looked.numbers.items()}
        everybody = tuple(range(len(self.plan.by_rank)))
        common = {name: ((Box.whole(value.shape), everybody),) for name, value in numbers.items()}
        if len(everybody) == 1:
            common = {}
        return Replicas.among({**tensors, **numbers}, {**self.common, **common}, self.looked.buffers)


@dataclass(frozen=True, slots=True)
class SaveWords:
    """What a rank tells the others before a checkpoint; of replicas where the last plan holds on this rank."""

    call: str
    replicas: DigestWords | None
    data: str
    random: dict[str, str]
    base: bytes
    """Of samples of what the checkpoint takes for granted; empty where it holds everything."""
    settings: str
    rates: list[float]


@dataclass(frozen=True, slots=True)
class AgreedSave:
    """The same on every rank. ``odd`` are the replicas that differ, where the last plan holds on all ranks."""

    odd: OddCircles | None
    alike: list[str]
    data: str


def agreed_of(told: Sequence[SaveWords]) -> AgreedSave:
    if odd := OddRanks.among([item.call for item in told]):
        raise DisagreementError(
            f"the list of arguments (step, keep, mode, only) on rank {odd.shown} is not that of rank 0"
        )
    if odd := OddRanks.among([item.settings for item in told]):
        own, those = (", ".join(map(str, told[rank].rates[:_SHOWN])) or "none" for rank in (odd.first, 0))
        raise DisagreementError(
            f"the settings of the optimizers on rank {odd.shown} are not those of rank 0 (learning rates {own} "
            f"against {those}); ranks have stepped with different schedules or settings: give all ranks the same"
        )
    first = told[0].random
    alike = [name for name in first if all(item.random.get(name) == first[name] for item in told)]
    positions = {item.data for item in told}
    data = "none" if positions == {""} else "one" if len(positions) == 1 else "each"
    if "" in positions and data != "none":
        raise DisagreementError("some ranks have a position in the data and others none; give all ranks theirs")
    replicas = [item.replicas for item in told if item.replicas is not None]
    return AgreedSave(odd_circles(replicas) if len(replicas) == len(told) else None, alike, data)
