"""Carrying out an exchange: parcels packed, sent and unpacked, round by round, within a fixed staging memory.

How bytes move is for :mod:`shardwise.execution.carriers` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardwise.execution.carriers import Carrier, ToEach, open_carrier
from shardwise.execution.world import World
from shardwise.planning.exchange import Agenda, Parcel, Round

Give = Callable[[Parcel], torch.Tensor]
"""The values of a parcel's box, of the box's sizes; any strides, any device. It is asked once for each parcel."""

Take = Callable[[Parcel, torch.Tensor], object]
"""Gets the values of a parcel's box: memory that is used again afterwards, so they have to be copied."""

DtypeOf = Callable[[Parcel], torch.dtype]
"""The dtype of a parcel's elements, the same on every rank."""


@dataclass(slots=True)
class Traffic:
    """What an exchange moved, as seen by one rank, in bytes. ``kept_bytes`` went from this rank to itself."""

    sent_bytes: int = 0
    received_bytes: int = 0
    kept_bytes: int = 0
    staging_bytes: int = 0
    rounds: int = 0

    def __add__(self, then: Traffic) -> Traffic:
        """What two exchanges moved, one after the other: the second uses the staging memory of the first."""
        return Traffic(
            sent_bytes=self.sent_bytes + then.sent_bytes,
            received_bytes=self.received_bytes + then.received_bytes,
            kept_bytes=self.kept_bytes + then.kept_bytes,
            staging_bytes=max(self.staging_bytes, then.staging_bytes),
            rounds=self.rounds + then.rounds,
        )


def exchange(
    world: World,
    rounds: Sequence[Round],
    give: Give,
    take: Take,
    dtype_of: DtypeOf,
    device: torch.device,
    *,
    budget_bytes: int,
    moves: Sequence[bool] | None = None,
) -> Traffic:
    """Hand over all parcels: each rank calls ``give`` for what it is the source of, ``take`` for what it gets.

    Bytes are moved: every dtype arrives bitwise. What a rank gives to itself goes straight from ``give`` to
    ``take``. ``device`` is where staging lies: of the kind that the process group's backend moves. ``rounds`` have
    the parcels of all ranks; or those of this rank only, and then ``moves`` is that of the
    :class:`~shardwise.planning.exchange.Agenda`.

    Collective: yes.
    Memory: ``budget_bytes``, which no round of the ranks exceeds.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when ``give`` or ``take`` raised on any.
        RankLostError: a rank has been lost.
    """
    if moves is None:
        moves = Agenda.of_all(rounds).moves
    cargos = [_Cargo.of(items, world, number) for number, items in enumerate(rounds)]
    carrier = open_carrier(world, [cargo.load for cargo in cargos], moves, device, budget_bytes=budget_bytes)
    hold = _Hold(world, carrier, give, take, dtype_of, Traffic(rounds=len(cargos), staging_bytes=carrier.nbytes))
    for arriving, leaving in zip([None, *cargos], [*cargos, None], strict=True):
        world.together(partial(hold.step, arriving, leaving))
        if leaving is not None:
            carrier.send(leaving.number)
    return hold.traffic


@dataclass(frozen=True, slots=True)
class _Lane:
    """A parcel on its way to or from a rank, and where it begins in what goes there or comes from there."""

    parcel: Parcel
    rank: int
    start: int


@dataclass(frozen=True, slots=True)
class _Cargo:
    """One rank's part of a round."""

    number: int
    given: tuple[tuple[Parcel, tuple[_Lane, ...]], ...]
    """Parcels this rank gives, each with its ways to others."""
    kept: frozenset[Parcel]
    """Those of them that it takes itself, too."""
    taken: tuple[_Lane, ...]
    load: ToEach

    @classmethod
    def of(cls, items: Round, world: World, number: int) -> _Cargo:
        rank = world.rank
        sent, received = [0] * world.size, [0] * world.size
        given: dict[Parcel, list[_Lane]] = {parcel: [] for parcel in items if parcel.source == rank}
        taken: list[_Lane] = []
        for parcel in items:
            if parcel.source == rank:
                for target in parcel.targets:
                    if target != rank:
                        given[parcel].append(_Lane(parcel, target, sent[target]))
                        sent[target] += parcel.staged_bytes
            elif rank in parcel.targets:
                taken.append(_Lane(parcel, parcel.source, received[parcel.source]))
                received[parcel.source] += parcel.staged_bytes
        return cls(
            number=number,
            given=tuple((parcel, tuple(lanes)) for parcel, lanes in given.items()),
            kept=frozenset(parcel for parcel in given if rank in parcel.targets),
            taken=tuple(taken),
            load=ToEach(tuple(sent), tuple(received)),
        )


class _Hold:
    """Where one rank packs and unpacks."""

    def __init__(
        self, world: World, carrier: Carrier, give: Give, take: Take, dtype_of: DtypeOf, traffic: Traffic
    ) -> None:
        self.traffic = traffic
        self._world = world
        self._carrier = carrier
        self._give = give
        self._take = take
        self._dtype_of = dtype_of

    @torch.no_grad()
    def step(self, arriving: _Cargo | None, leaving: _Cargo | None) -> None:
        """Unpack what has come, and pack the next; nobody is kept waiting meanwhile."""
        if arriving is not None:
            self._carrier.wait()
            for lane in arriving.taken:
                self._world.check()
                self._take(lane.parcel, self._view(self._carrier.inbox(arriving.number, lane.rank), lane))
                self.traffic.received_bytes += lane.parcel.nbytes
        if leaving is not None:
            for parcel, lanes in leaving.given:
                self._world.check()
                values = self._give(parcel)
                if tuple(values.shape) != parcel.box.sizes or values.dtype != self._dtype_of(parcel):
                    raise ValueError(f"{parcel} was given as {tuple(values.shape)} {values.dtype}")
                for lane in lanes:
                    self._view(self._carrier.outbox(leaving.number, lane.rank), lane).copy_(values)
                    self.traffic.sent_bytes += parcel.nbytes
                if parcel in leaving.kept:
                    self._take(parcel, values)
                    self.traffic.kept_bytes += parcel.nbytes

    def _view(self, box: torch.Tensor, lane: _Lane) -> torch.Tensor:
        parcel = lane.parcel
        flat = box[lane.start : lane.start + parcel.nbytes].view(self._dtype_of(parcel))
        return flat.view(parcel.box.sizes)
