"""Shards whole tensors that some ranks hold, over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.execution.moving.exchange import Traffic, exchange
from shardwise.execution.ranks.world import World
from shardwise.layout import LocalBox, place_of
from shardwise.models.view import strided_view
from shardwise.planning.moves.exchange import WantedBoxes, from_sources, rounds
from shardwise.planning.moves.parcels import Parcel, Round
from shardwise.tensors import Box


@dataclass(slots=True)
class Shipment:
    """A tensor under way.

    Attributes:
        name: the same on every rank.
        dtype: in which it travels and arrives.
        boxes: what each rank is to have, by rank.
        source_of: from whom, by rank.
        live: on the sources, the whole tensor. Let go of once all of it has been given.
    """

    name: str
    dtype: torch.dtype
    boxes: tuple[tuple[Box, ...], ...]
    source_of: tuple[int, ...]
    live: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Where a tensor lies on this rank: local memory, and the boxes that are in it."""

    local: torch.Tensor
    boxes: tuple[LocalBox, ...]

    def view(self, box: Box) -> torch.Tensor:
        """The elements of a box, which lies in one of this rank's."""
        return strided_view(self.local, place_of(box, self.boxes))


Prepare = Callable[[Sequence[str]], Mapping[str, LocalTensor]]
"""Makes memory for tensors, just before the first of them arrives."""


def distribute(
    world: World, shipments: Sequence[Shipment], prepare: Prepare, *, budget_bytes: int, device: torch.device
) -> Traffic:
    """Bring every shipment to all ranks. ``device`` is where staging lies.

    Collective: yes.
    Memory: ``budget_bytes``, beside what ``prepare`` makes. A source lets go of every whole tensor when its last
    part has left.
    """
    spread = from_sources(
        [WantedBoxes(item.name, item.dtype.itemsize, item.boxes) for item in shipments],
        [item.source_of for item in shipments],
    )
    plan = [*rounds(spread.first, budget_bytes), *rounds(spread.then, budget_bytes)]
    yard = _Yard(world, shipments, prepare, plan)
    dtypes = {item.name: item.dtype for item in shipments}
    traffic = exchange(world, plan, yard.give, yard.take, dtypes, device, budget_bytes=budget_bytes)
    world.together(yard.close)
    return traffic


class _Yard:
    """One rank's shipments: those it still has whole, and those that have arrived."""

    def __init__(
        self, world: World, shipments: Sequence[Shipment], prepare: Prepare, all_rounds: Sequence[Round]
    ) -> None:
        self._rank = world.rank
        self._shipments = {item.name: item for item in shipments}
        self._prepare = prepare
        self._landed: dict[str, LocalTensor] = {}
        self._wave_of = dict.fromkeys(self._shipments, len(all_rounds))
        """The round in which a tensor first arrives anywhere; after all of them what has no elements."""
        for number in reversed(range(len(all_rounds))):
            self._wave_of.update(dict.fromkeys((parcel.tensor for parcel in all_rounds[number].parcels), number))
        self._waiting = sorted(self._shipments, key=self._wave_of.__getitem__, reverse=True)
        self._to_give = Counter(
            parcel.tensor
            for items in all_rounds
            for parcel in items.parcels
            if parcel.source == world.rank and self._shipments[parcel.tensor].source_of[world.rank] == world.rank
        )
        for item in shipments:
            if not self._to_give[item.name]:
                item.live = None

    def give(self, parcel: Parcel) -> torch.Tensor:
        """From a tensor that this rank has whole, or from what has arrived here."""
        item = self._shipments[parcel.tensor]
        if item.source_of[self._rank] != self._rank:
            return self._landing(parcel.tensor).view(parcel.box)
        assert item.live is not None
        values = item.live
        for dim, (offset, size) in enumerate(zip(parcel.box.offsets, parcel.box.sizes, strict=True)):
            values = values.narrow(dim, offset, size)
        self._to_give[item.name] -= 1
        if not self._to_give[item.name]:
            item.live = None
        return values

    def take(self, parcel: Parcel, values: torch.Tensor) -> None:
        self._landing(parcel.tensor).view(parcel.box).copy_(values)

    def close(self) -> None:
        """Make memory for what has no elements here, too."""
        if self._waiting:
            self._landed |= self._prepare(self._waiting)
            self._waiting = []

    def _landing(self, name: str) -> LocalTensor:
        if name not in self._landed:
            wave: list[str] = []
            while self._waiting and self._wave_of[self._waiting[-1]] <= self._wave_of[name]:
                wave.append(self._waiting.pop())
            self._landed |= self._prepare(wave)
        return self._landed[name]
