"""Carrying out an exchange: parcels packed, sent and unpacked, round by round, within a fixed staging memory.

[Note: Rounds] All ranks go through the same rounds. In a round each rank packs what it gives, all meet (see
[Note: Nobody waits in a collective] in :mod:`shardwise.execution.line`), and one ``all_to_all_single`` moves the
bytes. Packing is where a rank may read, compute or fail; it lies before the meeting, and unpacking after the
collective, so that between a meeting and its collective there is nothing that can keep a rank away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

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
    moves: Sequence[bool] | None = None,
) -> Traffic:
    """Hand over all parcels: each rank calls ``give`` for what it is the source of, ``take`` for what it gets.

    Bytes are moved: every dtype arrives bitwise. What a rank gives to itself goes straight from ``give`` to
    ``take``. ``device`` is where staging lies: of the kind that the process group's backend moves. ``rounds`` have
    the parcels of all ranks; or those of this rank only, and then ``moves`` is that of the
    :class:`~shardwise.planning.exchange.Agenda`.

    Collective: yes.
    Memory: one staging block, as large as the largest round of this rank: at most the budget of the rounds.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when ``give`` or ``take`` raised on any.
        RankLostError: a rank has been lost.
    """
    if moves is None:
        moves = Agenda.of_all(rounds).moves
    cargos = [_Cargo.of(items, world, is_shared=is_shared) for items, is_shared in zip(rounds, moves, strict=True)]
    traffic = Traffic(rounds=len(cargos), staging_bytes=max((cargo.staging_bytes for cargo in cargos), default=0))
    hold = _Hold(world, give, take, dtype_of, traffic)
    world.together(lambda: hold.allocate(device))
    for arriving, leaving in zip([None, *cargos], [*cargos, None], strict=True):
        world.together(partial(hold.step, arriving, leaving))
    return traffic


@dataclass(frozen=True, slots=True)
class _Lane:
    """A parcel at its place in a staging block."""

    parcel: Parcel
    start: int


@dataclass(frozen=True, slots=True)
class _Cargo:
    """One rank's part of a round. Staging holds all that goes out, by target, and then all that comes in."""

    given: tuple[tuple[Parcel, tuple[int, ...]], ...]
    """Parcels this rank gives, each with where its copies start in staging."""
    kept: frozenset[Parcel]
    """Those of them that it takes itself, too."""
    taken: tuple[_Lane, ...]
    sent: tuple[int, ...]
    """Staged bytes by target."""
    received: tuple[int, ...]
    """Staged bytes by source."""
    is_shared: bool
    """Whether any rank sends anything in this round."""

    @classmethod
    def of(cls, items: Round, world: World, *, is_shared: bool) -> _Cargo:
        rank = world.rank
        sent, received = [0] * world.size, [0] * world.size
        outgoing: list[tuple[Parcel, int, int]] = []
        incoming: list[tuple[Parcel, int]] = []
        for parcel in items:
            if parcel.source == rank:
                for target in parcel.targets:
                    if target != rank:
                        outgoing.append((parcel, target, sent[target]))
                        sent[target] += parcel.staged_bytes
            elif rank in parcel.targets:
                incoming.append((parcel, received[parcel.source]))
                received[parcel.source] += parcel.staged_bytes
        target_starts, source_starts = _starts(sent), _starts(received)
        places: dict[Parcel, list[int]] = {parcel: [] for parcel in items if parcel.source == rank}
        for parcel, target, offset in outgoing:
            places[parcel].append(target_starts[target] + offset)
        return cls(
            given=tuple((parcel, tuple(starts)) for parcel, starts in places.items()),
            kept=frozenset(parcel for parcel in places if rank in parcel.targets),
            taken=tuple(
                _Lane(parcel, sum(sent) + source_starts[parcel.source] + offset) for parcel, offset in incoming
            ),
            sent=tuple(sent),
            received=tuple(received),
            is_shared=is_shared,
        )

    @property
    def staging_bytes(self) -> int:
        return sum(self.sent) + sum(self.received)


class _Hold:
    """The staging block of one rank, and what it does with it."""

    def __init__(self, world: World, give: Give, take: Take, dtype_of: DtypeOf, traffic: Traffic) -> None:
        self._world = world
        self._give = give
        self._take = take
        self._dtype_of = dtype_of
        self._traffic = traffic
        self._staging = torch.empty(0, dtype=torch.uint8)

    def allocate(self, device: torch.device) -> None:
        self._staging = torch.empty(self._traffic.staging_bytes, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def step(self, arriving: _Cargo | None, leaving: _Cargo | None) -> None:
        """Send what was packed, unpack what has come, and pack the next; nobody is kept waiting meanwhile."""
        if arriving is not None:
            self._send(arriving)
            for lane in arriving.taken:
                self._world.check()
                self._take(lane.parcel, self._view(lane))
                self._traffic.received_bytes += lane.parcel.nbytes
        if leaving is not None:
            for parcel, starts in leaving.given:
                self._world.check()
                values = self._give(parcel)
                if tuple(values.shape) != parcel.box.sizes or values.dtype != self._dtype_of(parcel):
                    raise ValueError(f"{parcel} was given as {tuple(values.shape)} {values.dtype}")
                for start in starts:
                    self._view(_Lane(parcel, start)).copy_(values)
                    self._traffic.sent_bytes += parcel.nbytes
                if parcel in leaving.kept:
                    self._take(parcel, values)
                    self._traffic.kept_bytes += parcel.nbytes

    def _send(self, cargo: _Cargo) -> None:
        if not cargo.is_shared:
            return
        middle, end = sum(cargo.sent), cargo.staging_bytes
        work = dist.all_to_all_single(
            self._staging[middle:end],
            self._staging[:middle],
            output_split_sizes=list(cargo.received),
            input_split_sizes=list(cargo.sent),
            group=self._world.group,
            async_op=True,
        )
        assert work is not None
        self._world.wait_for(work)

    def _view(self, lane: _Lane) -> torch.Tensor:
        parcel = lane.parcel
        flat = self._staging[lane.start : lane.start + parcel.nbytes].view(self._dtype_of(parcel))
        return flat.view(parcel.box.sizes)


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts
