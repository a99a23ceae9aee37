"""Carries out an exchange: packs, sends and unpacks parcels, round by round, within bounded staging memory.

How bytes move is for :mod:`shardwise.execution.moving.carriers` to say.

[Note: One round ahead] When a round has been unpacked, the next is packed, all ranks meet (see [Note: Nobody waits
in a collective] in :mod:`shardwise.execution.ranks.line`), and its bytes are on their way while the caller has the
round that is complete. What can fail on one rank alone lies before the meeting.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardwise.execution.moving.carriers import open_carrier
from shardwise.execution.ranks.world import World
from shardwise.planning.moves.parcels import Parcel, RankPart, Round, ToEach
from shardwise.tensors import numel

Give = Callable[[Parcel], torch.Tensor]
"""The values of a parcel's box, of the box's sizes; any strides, any device. It is asked once for each parcel."""

Take = Callable[[Parcel, torch.Tensor], object]
"""Gets the values of a parcel's box: memory that is used again afterwards, so they have to be copied."""

GivePieces = Callable[[Parcel], Iterable[torch.Tensor]]
"""As :data:`Give`, of a parcel that has pieces: the values of each, in their order."""

TakePieces = Callable[[Parcel, Iterator[torch.Tensor]], object]
"""As :data:`Take`, of a parcel that has pieces."""

Meet = Callable[[Callable[[], None]], object]
"""Runs a step on every rank, until all have; raises the same error on all of them when one failed."""


@dataclass(slots=True)
class Traffic:
    """What an exchange moved, as seen by one rank, in bytes. ``kept_bytes`` went from this rank to itself."""

    sent_bytes: int = 0
    received_bytes: int = 0
    kept_bytes: int = 0
    staging_bytes: int = 0
    rounds: int = 0


def exchange(
    world: World,
    rounds: Sequence[Round],
    give: Give,
    take: Take,
    dtype_of: Mapping[str, torch.dtype],
    device: torch.device,
    *,
    budget_bytes: float = math.inf,
) -> Traffic:
    """Hand over all parcels: each rank calls ``give`` for what it is the source of, ``take`` for what it gets.

    Bytes are moved: every dtype arrives bitwise. What a rank gives to itself goes straight from ``give`` to
    ``take``.

    Args:
        world: the ranks.
        rounds: the same on every rank, or of each the parcels that concern it.
        give: called while a round is packed.
        take: called while a round is unpacked.
        dtype_of: by tensor, the dtype in which it travels, the same on every rank; what is given is cast.
        device: where staging lies: of the kind that the process group's backend moves.
        budget_bytes: what no round of the ranks exceeds.

    Collective: yes.
    Memory: ``budget_bytes``.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when ``give`` or ``take`` raised on any.
        RankLostError: a rank has been lost.
    """
    exchanging = Exchange(
        world,
        rounds,
        lambda parcel: (give(parcel),),
        lambda parcel, pieces: take(parcel, *pieces),
        dtype_of,
    )
    for _ in exchanging.run(device, world.together, budget_bytes=budget_bytes):
        pass
    return exchanging.traffic


class Exchange:
    """One rank's side of an exchange, round by round. As :func:`exchange`, with pieces.

    Attributes:
        traffic: what has been moved.
    """

    def __init__(
        self,
        world: World,
        rounds: Sequence[Round],
        give: GivePieces,
        take: TakePieces,
        dtype_of: Mapping[str, torch.dtype],
    ) -> None:
        self.traffic = Traffic(rounds=len(rounds))
        self._world = world
        self._rounds = rounds
        self._give = give
        self._take = take
        self._dtype_of = dtype_of

    def run(self, device: torch.device, meet: Meet, *, budget_bytes: float = math.inf) -> Generator[Round]:
        """Yields each round when all of it has been taken. See [Note: One round ahead].

        A generator that all ranks go through alike. Closing it on all ranks after the same round is no fault.

        Collective: yes.
        Memory: what the largest round moves, or of two where there are windows.
        """
        parts = [items.part(self._world.rank, self._world.size) for items in self._rounds]
        moves = [items.moves for items in self._rounds]
        carrier = self._carrier = open_carrier(
            self._world, [part.load for part in parts], moves, device, budget_bytes=budget_bytes
        )
        self.traffic.staging_bytes = carrier.nbytes
        try:
            for number, (arriving, leaving) in enumerate(zip([None, *parts], [*parts, None], strict=True)):
                meet(partial(self._step, number, arriving, leaving))
                if leaving is not None:
                    carrier.send(number)
                if arriving is not None:
                    yield self._rounds[number - 1]
        finally:
            # Nobody is kept waiting for what is under way, and its memory is in use. A rank that is lost is told of
            # at the next meeting, if there is one.
            with contextlib.suppress(Exception):
                carrier.wait()

    @torch.no_grad()
    def _step(self, number: int, arriving: RankPart | None, leaving: RankPart | None) -> None:
        """Unpack the round that has come, and pack the next; nobody is kept waiting meanwhile."""
        if arriving is not None:
            for parcel in arriving.keeps:
                self._world.check()
                self._take(parcel, iter(self._give(parcel)))
                self.traffic.kept_bytes += parcel.nbytes
            self._carrier.wait()
            for parcel, start in arriving.receives:
                self._world.check()
                self._take(parcel, self._pieces(parcel, self._carrier.inbox(number - 1, parcel.source), start))
                self.traffic.received_bytes += parcel.nbytes
        if leaving is not None:
            self._pack(number, leaving)

    def _pack(self, number: int, leaving: RankPart) -> None:
        for parcel, ways in leaving.sends:
            self._world.check()
            rooms = [self._pieces(parcel, self._carrier.outbox(number, target), start) for target, start in ways]
            given = self._give(parcel)
            if isinstance(leaving.load, ToEach) and self._world.rank in parcel.targets:
                given = list(given)
                self._take(parcel, iter(given))
                self.traffic.kept_bytes += parcel.nbytes
            for values, *places in zip(given, *rooms, strict=True):
                for place in places:
                    if values.shape != place.shape:
                        raise ValueError(f"{parcel} was given as {tuple(values.shape)}")
                    place.copy_(values)
            self.traffic.sent_bytes += parcel.nbytes * len(ways)

    def _pieces(self, parcel: Parcel, box: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
        """A parcel's values in what goes to a rank, or comes from one."""
        flat = box[start : start + parcel.nbytes].view(self._dtype_of[parcel.tensor])
        for sizes in parcel.sizes:
            yield flat[: numel(sizes)].view(sizes)
            flat = flat[numel(sizes) :]
