"""Carries out an exchange: packs, moves and unpacks parcels, round by round, within bounded staging memory.

[Note: Rounds] All ranks go through the same rounds. In a round each rank packs what it gives, all meet (see [Note:
Nobody waits in a collective] in :mod:`shardwise.execution.ranks.line`), and what was packed moves. Packing is where
a rank may read, compute or fail; it lies before the meeting, and unpacking after it, so that between a meeting and
its collective there is nothing that can keep a rank away.

A round is unpacked before the next but one is packed, and where it moves by a collective, before the next one is.
So collectives take one block of memory, as large as what is sent and received in one round. Windows take what is
sent in two, and nothing for what is received, which is read where the sender has it.

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
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.execution.memory.host_memory import open_windows
from shardwise.execution.ranks.world import World
from shardwise.planning.moves.parcels import Load, Parcel, RankPart, Round, ToAll, ToEach
from shardwise.tensors import numel

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""From torch 2.13 on it has the first name, and warns of the second."""

_OFFSET_BYTES = 8


class Carrier(Protocol):
    """Moves bytes between ranks. A rank packs outboxes, all meet, it sends, waits, and unpacks inboxes."""

    nbytes: int
    """The memory it takes on this rank."""

    def outbox(self, number: int, target: int) -> torch.Tensor:
        """Where to pack what goes to a rank in a round; for a :class:`ToAll` round ``target`` does not matter."""

    def send(self, number: int) -> None:
        """Begin to move a round, which all ranks have packed. What fails is raised by :meth:`wait`."""

    def wait(self) -> None:
        """Until what was sent to this rank is there. To be called where what it raises is told to all ranks."""

    def inbox(self, number: int, source: int) -> torch.Tensor:
        """What has come from a rank in a round."""


def open_carrier(
    world: World,
    loads: Sequence[Load],
    moves: Sequence[bool],
    device: torch.device,
    *,
    budget_bytes: float = math.inf,
) -> Carrier:
    """A way from every rank to every other: windows if all ranks see one memory, else collectives.

    Args:
        world: the ranks.
        loads: this rank's rounds.
        moves: whether any rank sends anything in a round, the same on every rank.
        device: where the memory of collectives is to lie: of the kind that the group's backend moves.
        budget_bytes: what a window may take on each rank; where one would take more, collectives are the way.

    Collective: yes.
    """
    by_collective = _ByCollective(world, loads, moves, device)
    if not any(moves):
        return by_collective
    nbytes = _window_bytes(loads, world.rank)
    if all(world.each(lambda: nbytes <= budget_bytes and device.type == "cpu")):
        windows = open_windows(world, nbytes + 2 * _table_bytes(world))
        if windows is not None:
            return _ThroughWindows(world, loads, moves, windows)
    world.together(by_collective.allocate)
    return by_collective


class _ByCollective:
    """One block: what is sent, by target, and what is received, by source; or the parts of all ranks."""

    def __init__(self, world: World, loads: Sequence[Load], moves: Sequence[bool], device: torch.device) -> None:
        self._world = world
        self._loads = loads
        self._moves = moves
        self._device = device
        self._under_way: list[dist.Work] = []
        self._failure: Exception | None = None
        self.nbytes = max(map(self._staged, loads), default=0)
        self._block = torch.empty(0, dtype=torch.uint8)

    def allocate(self) -> None:
        self._block = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)

    def outbox(self, number: int, target: int) -> torch.Tensor:
        load = self._loads[number]
        if isinstance(load, ToAll):
            return self._part(load, self._world.rank)
        return self._block[sum(load.sent[:target]) :][: load.sent[target]]

    def inbox(self, number: int, source: int) -> torch.Tensor:
        load = self._loads[number]
        if isinstance(load, ToAll):
            return self._part(load, source)
        return self._block[sum(load.sent) + sum(load.received[:source]) :][: load.received[source]]

    def send(self, number: int) -> None:
        if self._moves[number]:
            try:
                self._send(number)
            except Exception as error:  # told to all by whoever waits: between meetings nobody would know
                self._failure = error

    def _send(self, number: int) -> None:
        load, group = self._loads[number], self._world.group
        if isinstance(load, ToEach):
            middle = sum(load.sent)
            received = self._block[middle : middle + sum(load.received)]
            self._begin(
                dist.all_to_all_single(
                    received,
                    self._block[:middle],
                    output_split_sizes=list(load.received),
                    input_split_sizes=list(load.sent),
                    group=group,
                    async_op=True,
                )
            )
        elif load.is_padded:
            size = max(load.parts)
            parts = self._block[: size * self._world.size]
            own = parts[size * self._world.rank :][:size]
            self._begin(_all_gather(parts, own, group=group, async_op=True))
        else:
            for source, size in enumerate(load.parts):
                if size:
                    part = self._part(load, source)
                    self._begin(dist.broadcast(part, group=group, group_src=source, async_op=True))

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        # What has failed is not waited for again: it may never end.
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            self._world.wait_for(work)

    def _begin(self, work: dist.Work | None) -> None:
        assert work is not None
        self._under_way.append(work)

    def _part(self, load: ToAll, source: int) -> torch.Tensor:
        start = max(load.parts) * source if load.is_padded else sum(load.parts[:source])
        return self._block[start:][: load.parts[source]]

    def _staged(self, load: Load) -> int:
        if isinstance(load, ToEach):
            return sum(load.sent) + sum(load.received)
        return max(load.parts) * self._world.size if load.is_padded else sum(load.parts)


class _ThroughWindows:
    """Packed in this rank's window, read in those of the others.

    A window begins with two tables, for even and for odd rounds, of where what is for each rank lies: others need
    not know all that a rank gives. Rounds lie at the beginning and at the end of the rest in turn.
    """

    def __init__(
        self, world: World, loads: Sequence[Load], moves: Sequence[bool], windows: tuple[torch.Tensor, ...]
    ) -> None:
        self._world = world
        self._loads = loads
        self._moves = moves
        self._windows = windows
        self._tables = [
            [half.view(torch.int64)[: world.size] for half in window[: 2 * _table_bytes(world)].chunk(2)]
            for window in windows
        ]
        self._packed = -1
        self.nbytes = _window_bytes(loads, world.rank)

    def outbox(self, number: int, target: int) -> torch.Tensor:
        load, own = self._loads[number], self._world.rank
        if self._packed != number:
            self._tables[own][number % 2].copy_(torch.tensor(self._starts(number)))
            self._packed = number
        start = int(self._tables[own][number % 2][target])
        return self._windows[own][start:][: load.parts[own] if isinstance(load, ToAll) else load.sent[target]]

    def inbox(self, number: int, source: int) -> torch.Tensor:
        load = self._loads[number]
        start = int(self._tables[source][number % 2][self._world.rank])
        return self._windows[source][start:][
            : load.parts[source] if isinstance(load, ToAll) else load.received[source]
        ]

    def send(self, number: int) -> None:
        """Nothing moves."""

    def wait(self) -> None:
        """All is there."""

    def _starts(self, number: int) -> list[int]:
        """Where what is for each rank begins in this rank's window."""
        load, own = self._loads[number], self._world.rank
        total = _given_bytes(load, own)
        first = len(self._windows[own]) - total if number % 2 else 2 * _table_bytes(self._world)
        if isinstance(load, ToAll):
            return [first] * self._world.size
        return [first + start for start in accumulate(load.sent[:-1], initial=0)]


def _window_bytes(loads: Sequence[Load], rank: int) -> int:
    """Of what this rank gives in any two rounds that follow each other."""
    given = [_given_bytes(load, rank) for load in loads]
    return max((first + then for first, then in pairwise([0, *given])), default=0)


def _table_bytes(world: World) -> int:
    return -(-world.size * _OFFSET_BYTES // 64) * 64


def _given_bytes(load: Load, rank: int) -> int:
    return load.parts[rank] if isinstance(load, ToAll) else sum(load.sent)


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
