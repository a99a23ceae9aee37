"""Moves bytes from every rank to every other, round by round: by collectives, or through windows.

[Note: Rounds] All ranks go through the same rounds. In a round each rank packs what it gives, all meet (see [Note:
Nobody waits in a collective] in :mod:`shardwise.execution.ranks.line`), and what was packed moves. Packing is where
a rank may read, compute or fail; it lies before the meeting, and unpacking after it, so that between a meeting and
its collective there is nothing that can keep a rank away.

A round is unpacked before the next but one is packed, and where it moves by a collective, before the next one is.
So collectives take one block of memory, as large as what is sent and received in one round. Windows take what is
sent in two, and nothing for what is received, which is read where the sender has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.execution.memory.shared_memory import open_windows
from shardwise.execution.ranks.world import World
from shardwise.planning.moves.parcels import Load, ToAll, ToEach

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
