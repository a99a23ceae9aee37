"""Movement of tensors between ranks: gathers, scatters, resharding, and assembling of a checkpoint's tensors.

[Note: Rounds] All ranks go through the same rounds (:mod:`shardwise.planning.moves`). A rank packs the data that it
sends, all ranks synchronize (see [Note: Nobody waits in a collective] in
:mod:`shardwise.execution.control_channel`), and one all-to-all moves the bytes. Packing and unpacking, which can
fail on one rank alone, are before a meeting, so a failed rank never misses a collective that others have entered. A
round is on its way while the caller has the one before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from shardwise.conversion.expression import Stored
from shardwise.execution.memory import trim_heap
from shardwise.execution.tensor_facts import facts_by_name, held_by_rank
from shardwise.execution.world import World
from shardwise.layout import LocalBox, place_of
from shardwise.models.view import local_boxes, local_tensor, strided_view
from shardwise.planning import moves
from shardwise.tensors import Box, DType, Strided, numel

Share = Callable[[str, int], torch.Tensor]
"""A share of a tensor that this rank gives, by name and number, as a row-major tensor."""

Room = Callable[[str, Box], torch.Tensor]
"""Flat memory for the elements of a tensor's box, in the dtype in which they are wanted."""


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank has sent, received, and kept for itself."""

    sent_bytes: int = 0
    received_bytes: int = 0
    kept_bytes: int = 0
    staging_bytes: int = 0

    def add(self, other: Traffic) -> None:
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.kept_bytes += other.kept_bytes
        self.staging_bytes = max(self.staging_bytes, other.staging_bytes)


@dataclass
class _RankPart:
    """One rank's part of a round: pieces that it keeps, sends and receives, and the bytes by rank.

    Sent blocks have their offset in the data for their target, received blocks that in the data from their source.
    """

    sent: list[int]
    received: list[int]
    keeps: list[tuple[moves.Block, tuple[moves.Piece, ...]]] = field(default_factory=list)
    sends: list[tuple[moves.Block, tuple[moves.Piece, ...], dict[int, int]]] = field(default_factory=list)
    receives: list[tuple[moves.Block, tuple[moves.Piece, ...], int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, blocks: moves.Round, rank: int, size: int) -> _RankPart:
        part = cls([0] * size, [0] * size)
        for block in blocks:
            for source, given in block.given:
                nbytes = block.staged_bytes(given)
                if source == rank:
                    if rank in block.targets:
                        part.keeps.append((block, given))
                    others = [target for target in block.targets if target != rank]
                    part.sends.append((block, given, {target: part.sent[target] for target in others}))
                    for target in others:
                        part.sent[target] += nbytes
                elif rank in block.targets:
                    part.receives.append((block, given, source, part.received[source]))
                    part.received[source] += nbytes
        return part


@dataclass
class Exchange:
    """One rank's side of moving tensors, round by round.

    Args:
        world: the ranks.
        rounds: the same on every rank.
        share: this rank's shares.
        room: function that returns memory for each block that this rank receives, called before the block's round
            is yielded.
        dtype_of: the dtype in which a tensor is sent, by key. Sources cast to it.
        device: where staging memory lies: of the kind that the process group's backend moves.
    """

    world: World
    rounds: Sequence[moves.Round]
    share: Share
    room: Room
    dtype_of: Mapping[str, torch.dtype]
    device: torch.device
    traffic: Traffic = field(default_factory=Traffic)
    _staging: torch.Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.uint8))
    _work: dist.Work | None = None
    _failure: Exception | None = None

    def run(self) -> Generator[moves.Round]:
        """Yield each round when all of it has arrived. See [Note: Rounds].

        A generator that all ranks go through alike. Closing it on all ranks after the same round is no fault.

        Collective: yes.
        Memory: the bucket of the plan.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, when anything raised on any.
            RankLostError: a rank has been lost, or has left.
        """
        parts = [_RankPart.of(blocks, self.world.rank, self.world.size) for blocks in self.rounds]
        self.traffic.staging_bytes = max((sum(part.sent) + sum(part.received) for part in parts), default=0)
        arriving: _RankPart | None = None
        try:
            for number, leaving in enumerate([*parts, None]):
                self.world.run_all(partial(self._step, arriving, leaving))
                if leaving is not None:
                    self._send(leaving, any(_moves(block) for block in self.rounds[number]))
                if arriving is not None:
                    yield self.rounds[number - 1]
                arriving = leaving
        finally:
            # Nobody is kept waiting for what is under way, and its memory is in use. A rank that is lost is told of
            # at the next meeting, if there is one.
            with contextlib.suppress(Exception):
                self._wait()

    @torch.no_grad()
    def _step(self, arriving: _RankPart | None, leaving: _RankPart | None) -> None:
        """Unpack the round that has arrived and pack the next. No rank waits meanwhile."""
        if arriving is not None:
            for block, given in arriving.keeps:
                self._put(block, given, self._given(block, given))
                self.traffic.kept_bytes += _nbytes(block, given)
            self._wait()
            for block, given, source, start in arriving.receives:
                place = sum(arriving.sent) + sum(arriving.received[:source]) + start
                self._put(block, given, self._pieces(block, given, place))
                self.traffic.received_bytes += _nbytes(block, given)
        if leaving is not None:
            if self._staging.numel() < self.traffic.staging_bytes:
                self._staging = torch.empty(self.traffic.staging_bytes, dtype=torch.uint8, device=self.device)
            for block, given, starts in leaving.sends:
                places = [sum(leaving.sent[:target]) + start for target, start in starts.items()]
                for values, *copies in zip(
                    self._given(block, given), *(self._pieces(block, given, place) for place in places), strict=True
                ):
                    for copy in copies:
                        copy.copy_(values)
                self.traffic.sent_bytes += _nbytes(block, given) * len(places)

    def _given(self, block: moves.Block, given: Sequence[moves.Piece]) -> Iterator[torch.Tensor]:
        for piece in given:
            self.world.check()
            yield strided_view(self.share(block.leaves[piece.leaf], piece.share), piece.source)

    def _put(self, block: moves.Block, given: Sequence[moves.Piece], values: Iterator[torch.Tensor]) -> None:
        memory = self.room(block.key, block.box)
        for piece, value in zip(given, values, strict=True):
            self.world.check()
            strided_view(memory, piece.target).copy_(value)

    def _pieces(self, block: moves.Block, given: Sequence[moves.Piece], start: int) -> Iterator[torch.Tensor]:
        """The pieces in staging memory, from a byte of it on."""
        flat = self._staging[start : start + _nbytes(block, given)].view(self.dtype_of[block.key])
        for piece in given:
            yield flat[: piece.target.numel].view(piece.target.sizes)
            flat = flat[piece.target.numel :]

    def _send(self, part: _RankPart, is_needed: bool) -> None:  # noqa: FBT001
        """Start moving a round that all ranks have packed. Errors are raised by :meth:`_wait`."""
        if not is_needed:  # on any rank
            return
        sent = sum(part.sent)
        try:
            self._work = dist.all_to_all_single(
                self._staging[sent : sent + sum(part.received)],
                self._staging[:sent],
                output_split_sizes=part.received,
                input_split_sizes=part.sent,
                group=self.world.group,
                async_op=True,
            )
        except Exception as error:  # told to all by the next meeting: between meetings nobody would know
            self._failure = error

    def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        work, self._work = self._work, None  # what has failed is not waited for again: it may never end
        if work is not None:
            self.world.wait_for(work)


def _moves(block: moves.Block) -> bool:
    return any(set(block.targets) - {source} for source, _ in block.given)


def _nbytes(block: moves.Block, given: Sequence[moves.Piece]) -> int:
    return sum(piece.target.numel for piece in given) * block.itemsize


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of a box in its contiguous tensor as a view, if they are adjacent."""
    start = sum(at * stride for at, stride in zip(box.offsets, tensor.stride(), strict=True))
    return tensor.view(-1)[start : start + box.numel]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Local memory of a tensor on this rank, and the boxes in it."""

    local: torch.Tensor
    boxes: tuple[LocalBox, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> LocalTensor:
        return cls(local_tensor(tensor), local_boxes(tensor, name))

    @classmethod
    def whole(cls, tensor: torch.Tensor, box: Box | None = None) -> LocalTensor:
        """Memory that is all of a tensor, or a box of one."""
        place = Strided(0, tuple(tensor.shape), tuple(tensor.stride()))
        return cls(tensor, (LocalBox(box or Box.whole(tuple(tensor.shape)), place),))

    def view(self, box: Box) -> torch.Tensor:
        """The elements of a box, which lies in one of this rank's."""
        return strided_view(self.local, place_of(box, self.boxes))


@dataclass(frozen=True, slots=True)
class Handover:
    """A tensor under way. All but ``mine`` and ``into`` is the same on every rank.

    Attributes:
        name: that of no other.
        shape: of all of it.
        dtype: in which it travels and arrives.
        held: boxes by rank that hold the tensor, equal or without overlap.
        wanted: boxes by rank that need the tensor. A rank that holds its box uses its own values.
        mine: source memory on this rank, or None.
        into: target memory on this rank, or None.
    """

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    held: tuple[moves.Boxes, ...]
    wanted: tuple[moves.Boxes, ...]
    mine: LocalTensor | None
    into: LocalTensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return numel(self.shape) * self.dtype.itemsize

    def move(self) -> moves.Move:
        """Return the elements to receive from other ranks, counted regardless of their dtype."""
        lacking = tuple(
            tuple(box for box in wanted if not _is_held(box, held))
            for wanted, held in zip(self.wanted, self.held, strict=True)
        )
        return moves.Move(self.name, Stored(self.name, tuple(self.shape), DType.U8), self.dtype.itemsize, lacking)

    def take_own(self, rank: int) -> int:
        """Copy this rank's own values. Return their bytes."""
        own = [box for box in self.wanted[rank] if box.numel and _is_held(box, self.held[rank])]
        for box in own:
            _there(self.into).view(box).copy_(_there(self.mine).view(box))
        return sum(box.numel for box in own) * self.dtype.itemsize


def _is_held(box: Box, held: moves.Boxes) -> bool:
    return any(part.intersect(box) == box for part in held)


def _there(place: LocalTensor | None) -> LocalTensor:
    assert place is not None, "the plan has this rank give or take what it has no part in"
    return place


@torch.no_grad()
def hand_over(world: World, items: Sequence[Handover], *, budget_bytes: int, device: torch.device) -> Traffic:
    """Move all tensors from their sources to their targets. ``device`` is where staging lies.

    Collective: yes. Memory: ``budget_bytes``, and a share that is not one contiguous run.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when anything raised on any.
    """
    by_name = {item.name: item for item in items}
    shares = {
        item.name: moves.shares_by_rank(item.held, number % world.size, item.dtype.itemsize)
        for number, item in enumerate(items)
    }
    last: dict[tuple[str, int], torch.Tensor] = {}
    arrived: dict[tuple[str, Box], torch.Tensor] = {}

    def share(name: str, number: int) -> torch.Tensor:
        if (name, number) not in last:
            last.clear()
            last[name, number] = _there(by_name[name].mine).view(shares[name][world.rank][number]).contiguous()
        return last[name, number]

    def room(name: str, box: Box) -> torch.Tensor:
        if (name, box) not in arrived:
            place = _there(by_name[name].into).local
            arrived[name, box] = torch.empty(box.numel, dtype=by_name[name].dtype, device=place.device)
        return arrived[name, box]

    rounds = world.run_all(lambda: moves.plan_rounds([[item.move() for item in items]], shares, budget_bytes))
    exchange = Exchange(world, rounds, share, room, {item.name: item.dtype for item in items}, device)
    for _ in exchange.run():
        for (name, box), values in arrived.items():
            _there(by_name[name].into).view(box).copy_(values.view(box.sizes))
        arrived.clear()
    exchange.traffic.kept_bytes += sum(world.run_all(lambda: [item.take_own(world.rank) for item in items]))
    return exchange.traffic


Prepare = Callable[[Sequence[str]], Mapping[str, LocalTensor]]
"""Makes memory for tensors, just before they arrive."""


def distribute(
    world: World, items: list[Handover], prepare: Prepare, *, budget_bytes: int, device: torch.device
) -> Traffic:
    """Hand all tensors over, as many at once as are of ``budget_bytes``, or one that is larger.

    Collective: yes. Memory: ``budget_bytes``, in addition to the tensors that ``prepare`` makes. ``items`` is
    emptied: a source lets go of a tensor that it has given.
    """
    traffic = Traffic()
    items.reverse()
    while items:
        batch, used = [items.pop()], 0
        while items and (used := used + batch[-1].nbytes) + items[-1].nbytes <= budget_bytes:
            batch.append(items.pop())
        into = world.run_all(partial(prepare, [item.name for item in batch]))
        batch = [replace(item, into=into[item.name]) for item in batch]
        traffic.add(hand_over(world, batch, budget_bytes=budget_bytes, device=device))
        trim_heap()
    return traffic


def gather(
    world: World,
    tensors: Mapping[str, torch.Tensor],
    form: moves.StateForm,
    *,
    budget_bytes: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return full tensors on the CPU on the target ranks, and none on the others.

    ``tensors`` are of the same names on every rank, shards or whole, and not on meta. Replicas must have equal
    values.

    Collective: yes. Memory: ``budget_bytes``, and the full tensors on the ranks that get them.

    Raises:
        RankMismatchError: ranks have different tensors.
        ShardingError: ranks do not have, together, all of a tensor.
    """
    told = world.all_gather(facts_by_name, tensors)
    held = world.run_all(held_by_rank, told)
    targets = moves.receivers(form, world.size)
    made: dict[str, torch.Tensor] = {}

    def begin() -> list[Handover]:
        items: list[Handover] = []
        for name, tensor in tensors.items():
            into = None
            if world.rank in targets:
                made[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                into = LocalTensor.whole(made[name])
            wanted = moves.whole_on(targets, tuple(tensor.shape), world.size)
            mine = LocalTensor.of(tensor, name)
            items.append(Handover(name, tensor.shape, tensor.dtype, held[name], wanted, mine, into))
        return items

    hand_over(world, world.run_all(begin), budget_bytes=budget_bytes, device=device)
    return made
