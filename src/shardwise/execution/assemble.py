"""Carrying out an assembly: what ranks give is packed, sent, and put together, round by round.

[Note: One round ahead] When a round has been put together, the next is packed, all ranks meet (see
[Note: Nobody waits in a collective] in :mod:`shardwise.execution.line`), and its bytes are on their way while the
caller has the round that is complete. What can fail on one rank alone lies before the meeting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial

import torch

from shardwise.execution.carriers import Carrier, Load, ToAll, ToEach, open_carrier
from shardwise.execution.sharing import place_of
from shardwise.execution.world import World
from shardwise.models.view import Held, local_boxes, strided_view
from shardwise.planning.assembly import Block, Gift, GivenPiece, Round
from shardwise.planning.giving import Boxes
from shardwise.tensors import Box

Room = Callable[[Block], torch.Tensor]
"""Flat memory for a block's elements, in the dtype in which they are wanted."""


class Giver:
    """This rank's shares of a model's tensors. Both ``held`` and ``shares`` are by name."""

    def __init__(self, held: Mapping[str, Held], shares: Mapping[str, Sequence[Boxes]], rank: int) -> None:
        self.held = held
        self._shares = shares
        self._rank = rank
        self._places: dict[tuple[str, int], torch.Tensor] = {}

    def box(self, name: str, number: int) -> Box:
        """What a share is of its tensor."""
        return self._shares[name][self._rank][number]

    def share(self, name: str, number: int) -> torch.Tensor:
        """A share as a row-major tensor. Memory: none where it lies like that in its tensor, else the share."""
        found = self._places.get((name, number))
        if found is None:
            item = self.held[name]
            place = place_of(self.box(name, number), local_boxes(item.tensor, item.fqn))
            found = self._places[name, number] = strided_view(item.local, place)
        return found.contiguous()


def values_of(giver: Giver, block: Block, gift: Gift) -> Iterator[tuple[GivenPiece, torch.Tensor]]:
    """What a rank gives of a block, piece by piece."""
    for piece in gift.pieces:
        share = giver.share(block.leaves[piece.leaf], piece.share)
        yield piece, strided_view(share, piece.source)


def part_of(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """The elements of a block in its tensor, which is contiguous."""
    start = sum(at * stride for at, stride in zip(block.box.offsets, tensor.stride(), strict=True))
    return tensor.view(-1)[start : start + block.box.numel]


def assemble(
    world: World,
    rounds: Sequence[Round],
    giver: Giver,
    room: Room,
    dtype_of: Mapping[str, torch.dtype],
    device: torch.device,
) -> Generator[Round]:
    """Put blocks together in the memory that ``room`` has for them on their targets; yields each complete round.

    A generator that all ranks go through alike. Closing it on all ranks after the same round is no fault.

    Args:
        world: the ranks.
        rounds: the same on every rank.
        giver: this rank's shares.
        room: called once for each block of which this rank is a target, before the block's round is yielded.
        dtype_of: by key, the dtype in which a tensor travels and arrives; givers cast.
        device: where buffers lie: of the kind that the process group's backend moves.

    Collective: yes.
    Memory: two buckets of those that the rounds were planned for.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when packing, ``room`` or putting together failed.
        RankLostError: a rank has been lost, or has left.
    """
    loads = [_load(items, world) for items in rounds]
    moves = [bool(items.lanes) for items in rounds]
    carrier = open_carrier(world, loads, moves, device)
    table = _Table(world, carrier, giver, room, dtype_of)
    numbered = [*enumerate(rounds)]
    try:
        for arriving, leaving in zip([None, *numbered], [*numbered, None], strict=True):
            world.together(partial(table.step, arriving, leaving))
            if leaving is not None:
                carrier.send(leaving[0])
            if arriving is not None:
                yield arriving[1]
    finally:  # nobody is kept waiting for what is under way, and its memory is in use
        with contextlib.suppress(Exception):  # a rank that is lost is told of at the next meeting, if there is one
            carrier.wait()


def _load(items: Round, world: World) -> Load:
    ranks = range(world.size)
    if items.is_for_all:
        return ToAll(tuple(items.lanes.get((giver, giver), 0) for giver in ranks), items.is_padded)
    return ToEach(
        sent=tuple(items.lanes.get((world.rank, taker), 0) for taker in ranks),
        received=tuple(items.lanes.get((giver, world.rank), 0) for giver in ranks),
    )


class _Table:
    """Where one rank packs what it gives, and puts together what it gets."""

    def __init__(
        self, world: World, carrier: Carrier, giver: Giver, room: Room, dtype_of: Mapping[str, torch.dtype]
    ) -> None:
        self._world = world
        self._carrier = carrier
        self._giver = giver
        self._room = room
        self._dtype_of = dtype_of

    @torch.no_grad()
    def step(self, arriving: tuple[int, Round] | None, leaving: tuple[int, Round] | None) -> None:
        """Put together what has come, and pack the next; nobody is kept waiting meanwhile."""
        kept = {} if arriving is None else self._keep(arriving[1])
        self._carrier.wait()
        if arriving is not None:
            self._take(*arriving, kept)
        if leaving is not None:
            self._give(*leaving)

    def _keep(self, items: Round) -> dict[int, torch.Tensor]:
        """The memory of blocks that come here, by number, with what this rank gives to itself in place."""
        memory: dict[int, torch.Tensor] = {}
        for number, block in enumerate(items.blocks):
            if self._world.rank in block.targets:
                self._world.check()
                memory[number] = self._room(block)
                for gift in block.gifts:
                    if gift.source == self._world.rank:
                        for piece, values in values_of(self._giver, block, gift):
                            strided_view(memory[number], piece.target).copy_(values)
        return memory

    def _take(self, turn: int, items: Round, memory: Mapping[int, torch.Tensor]) -> None:
        for number, block, gift, start in _places(items, self._world.rank):
            if self._world.rank not in block.targets or gift.source == self._world.rank:
                continue
            self._world.check()
            values = self._flat(self._carrier.inbox(turn, gift.source), start, block, gift)
            for piece in gift.pieces:
                count = piece.target.numel
                strided_view(memory[number], piece.target).copy_(values[:count].view(piece.target.sizes))
                values = values[count:]

    def _give(self, turn: int, items: Round) -> None:
        for _, block, gift, start in _places(items, self._world.rank):
            if gift.source != self._world.rank or block.targets == (gift.source,):
                continue
            self._world.check()
            room = self._flat(self._carrier.outbox(turn, block.targets[0]), start, block, gift)
            for piece, values in values_of(self._giver, block, gift):
                room[: piece.source.numel].view(piece.source.sizes).copy_(values)
                room = room[piece.source.numel :]

    def _flat(self, box: torch.Tensor, start: int, block: Block, gift: Gift) -> torch.Tensor:
        """A gift's elements in what goes to a rank, or comes from one."""
        return box[start : start + gift.numel * block.itemsize].view(self._dtype_of[block.key])


def _places(items: Round, rank: int) -> Iterator[tuple[int, Block, Gift, int]]:
    """What travels of each block and concerns a rank, and where it begins in its lane."""
    used: dict[tuple[int, int], int] = {}
    for number, block in enumerate(items.blocks):
        for gift in block.gifts:
            lane = (gift.source, gift.source if items.is_for_all else block.targets[0])
            if lane in items.lanes and (items.is_for_all or rank in lane):
                start = used.get(lane, 0)
                yield number, block, gift, start
                used[lane] = start + block.staged_bytes(gift)
