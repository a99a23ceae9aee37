"""Carrying out an assembly: what ranks give is packed, sent, and put together, round by round.

[Note: One round ahead] When a round has been put together, the next is packed, all ranks meet (see
[Note: Nobody waits in a collective] in :mod:`shardwise.execution.line`), and its bytes are on their way while the
caller has the round that is complete. What can fail on one rank alone lies before the meeting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from shardwise.execution.sharing import place_of
from shardwise.execution.world import World
from shardwise.models.view import Held, local_boxes, strided_view
from shardwise.planning.assembly import Block, Gift, Piece, Round
from shardwise.planning.giving import Boxes
from shardwise.tensors import Box

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""From torch 2.13 on it has the first name, and warns of the second."""

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
    Memory: a bucket for what is sent and one for what comes; one bucket, and a quarter more at most, for both where
    every rank gets what all give.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when packing, ``room`` or putting together failed.
        RankLostError: a rank has been lost, or has left.
    """
    transport = _Transport(world, giver, room, dtype_of)
    world.together(lambda: transport.allocate(rounds, device))
    with contextlib.closing(transport):
        for arriving, leaving in zip([None, *rounds], [*rounds, None], strict=True):
            world.together(partial(transport.step, arriving, leaving))
            if leaving is not None:
                transport.send(leaving)
            if arriving is not None:
                yield arriving


class _Transport:
    """The buffers of one rank, and what is under way."""

    def __init__(self, world: World, giver: Giver, room: Room, dtype_of: Mapping[str, torch.dtype]) -> None:
        self._world = world
        self._giver = giver
        self._room = room
        self._dtype_of = dtype_of
        self._outgoing = self._incoming = torch.empty(0, dtype=torch.uint8)
        self._under_way: list[dist.Work] = []

    def allocate(self, rounds: Sequence[Round], device: torch.device) -> None:
        rank = self._world.rank
        out_bytes = max((item.sent_bytes(rank) for item in rounds), default=0)
        in_bytes = max((item.received_bytes(rank) for item in rounds), default=0)
        self._outgoing = torch.empty(out_bytes, dtype=torch.uint8, device=device)
        self._incoming = torch.empty(in_bytes, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def step(self, arriving: Round | None, leaving: Round | None) -> None:
        """Put together what has come, and pack the next; nobody is kept waiting meanwhile."""
        kept = {} if arriving is None else self._keep(arriving)
        while self._under_way:
            self._world.wait_for(self._under_way[0])
            del self._under_way[0]
        if arriving is not None:
            self._take(arriving, kept)
        if leaving is not None:
            self._give(leaving)

    def send(self, items: Round) -> None:
        """Begin to move what all ranks have packed."""
        world, group = self._world, self._world.group
        if not items.lanes:
            return
        if not items.is_for_all:
            self._begin(
                dist.all_to_all_single(
                    self._incoming[: items.received_bytes(world.rank)],
                    self._outgoing[: items.sent_bytes(world.rank)],
                    output_split_sizes=[items.lanes.get((giver, world.rank), 0) for giver in range(world.size)],
                    input_split_sizes=[items.lanes.get((world.rank, taker), 0) for taker in range(world.size)],
                    group=group,
                    async_op=True,
                )
            )
        elif items.is_padded:
            parts = self._incoming[: items.received_bytes(world.rank)]
            own = parts[world.rank * items.part_bytes :][: items.part_bytes]
            self._begin(_all_gather(parts, own, group=group, async_op=True))
        else:
            for lane, start in self._starts(items).items():
                part = self._incoming[start : start + items.lanes[lane]]
                self._begin(dist.broadcast(part, group=group, group_src=lane[0], async_op=True))

    def close(self) -> None:
        """Wait for what is under way: nobody is kept waiting for it, and its memory is in use."""
        for work in self._under_way:
            with contextlib.suppress(
                Exception
            ):  # a rank that is lost is told of at the next meeting, if there is one
                self._world.wait_for(work)
        self._under_way.clear()

    def _begin(self, work: dist.Work | None) -> None:
        assert work is not None
        self._under_way.append(work)

    def _keep(self, items: Round) -> dict[int, torch.Tensor]:
        """The memory of blocks that come here, by number, with what this rank gives to itself in place."""
        memory: dict[int, torch.Tensor] = {}
        for number, block in enumerate(items.blocks):
            if self._world.rank in block.targets:
                self._world.check()
                memory[number] = self._room(block)
                for gift in block.gifts:
                    if gift.source == self._world.rank:
                        for piece, values in self._values(block, gift):
                            strided_view(memory[number], piece.target).copy_(values)
        return memory

    def _take(self, items: Round, memory: Mapping[int, torch.Tensor]) -> None:
        for number, block, gift, place in self._places(items):
            if self._world.rank not in block.targets or gift.source == self._world.rank:
                continue
            self._world.check()
            values = self._flat(self._incoming, place, block, gift)
            for piece in gift.pieces:
                count = piece.target.numel
                strided_view(memory[number], piece.target).copy_(values[:count].view(piece.target.sizes))
                values = values[count:]

    def _give(self, items: Round) -> None:
        buffer = self._incoming if items.is_for_all else self._outgoing
        for _, block, gift, place in self._places(items):
            if gift.source != self._world.rank or block.targets == (gift.source,):
                continue
            self._world.check()
            room = self._flat(buffer, place, block, gift)
            for piece, values in self._values(block, gift):
                room[: piece.source.numel].view(piece.source.sizes).copy_(values)
                room = room[piece.source.numel :]

    def _values(self, block: Block, gift: Gift) -> Iterator[tuple[Piece, torch.Tensor]]:
        """What this rank gives of a block, piece by piece."""
        for piece in gift.pieces:
            share = self._giver.share(block.leaves[piece.leaf], piece.share)
            yield piece, strided_view(share, piece.source)

    def _flat(self, buffer: torch.Tensor, start: int, block: Block, gift: Gift) -> torch.Tensor:
        """A gift's elements in a buffer."""
        return buffer[start : start + gift.numel * block.itemsize].view(self._dtype_of[block.key])

    def _places(self, items: Round) -> Iterator[tuple[int, Block, Gift, int]]:
        """What travels of each block and concerns this rank, and where it lies in the buffer of its lane."""
        starts = self._starts(items)
        for number, block in enumerate(items.blocks):
            for gift in block.gifts:
                lane = (gift.source, gift.source if items.is_for_all else block.targets[0])
                if lane in starts:
                    yield number, block, gift, starts[lane]
                    starts[lane] += block.staged_bytes(gift)

    def _starts(self, items: Round) -> dict[tuple[int, int], int]:
        """Where each lane that concerns this rank begins in its buffer."""
        rank, lanes = self._world.rank, sorted(items.lanes)
        if items.is_padded:
            return {lane: lane[0] * items.part_bytes for lane in lanes}
        if items.is_for_all:
            return _one_by_one(lanes, items.lanes)
        coming = [lane for lane in lanes if lane[1] == rank]
        going = [lane for lane in lanes if lane[0] == rank]
        return _one_by_one(coming, items.lanes) | _one_by_one(going, items.lanes)


def _one_by_one(
    lanes: Sequence[tuple[int, int]], sizes: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    starts = accumulate((sizes[lane] for lane in lanes), initial=0)
    return dict(zip(lanes, starts, strict=False))
