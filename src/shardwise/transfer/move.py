"""Movement of tensors between ranks: gather, scatter, resharding, and assembly of a checkpoint's tensors.

[Note: Rounds] All ranks execute the same rounds (``move_plan``). A rank packs the data that it sends, all ranks
synchronize (see [Note: No rank waits in a collective] in ``ranks/control_channel.py``), and one all-to-all moves
the bytes. Of a round for all ranks, each sender broadcasts its part, which it has staged once: in an all-to-all it
would be staged for each rank, and rounds would be the smaller, the more ranks there are. Packing and unpacking,
which can fail on one rank alone, precede a synchronization, so a failed rank never misses a collective that others
have entered. The collectives of a round overlap with the caller's work on the previous round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.distributed as dist

from shardwise.core.expression import Stored
from shardwise.core.layout import LocalBox, locate_box
from shardwise.core.tensors import Box, DType, Strided, numel
from shardwise.fsdp.named_tensors import local_boxes, local_tensor, strided_view
from shardwise.fsdp.torch_private import object_device
from shardwise.ranks.world import World
from shardwise.transfer import move_plan
from shardwise.transfer.memory import trim_heap
from shardwise.transfer.move_plan import Block, Boxes, Piece, Round, StateForm
from shardwise.transfer.staging import DeviceStaging, HostStaging, StagingBuffer, pinned_bytes
from shardwise.transfer.tensor_metadata import describing_tensors, metadata_by_name

GetShare: TypeAlias = Callable[[str, int], torch.Tensor]
"""Returns a share of a tensor that this rank sends, by name and number, as a row-major tensor."""

BufferFor: TypeAlias = Callable[[str, Box], torch.Tensor]
"""Returns flat memory for the elements of a tensor's box, in the dtype in which they are wanted."""


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
class _LocalRound:
    """One rank's part of a round.

    Attributes:
        sent: bytes that it sends to each rank, by rank. 0 in a broadcast.
        received: bytes that it receives from each rank, by rank. In a broadcast its own are among them.
        keeps: blocks whose pieces it copies from its own shares.
        sends: blocks and pieces, and their byte offset in the data for each target, by rank of the target. In a
            broadcast the only target is the rank itself.
        receives: blocks and pieces, their source, and their byte offset in the data from that source.
        is_broadcast: each rank broadcasts its part.
        received_starts: byte offset in staging memory of what comes from each rank, by rank.
    """

    sent: list[int]
    received: list[int]
    keeps: list[tuple[Block, tuple[Piece, ...]]] = field(default_factory=list)
    sends: list[tuple[Block, tuple[Piece, ...], dict[int, int]]] = field(default_factory=list)
    receives: list[tuple[Block, tuple[Piece, ...], int, int]] = field(default_factory=list)
    is_broadcast: bool = False
    received_starts: list[int] = field(default_factory=list)

    @classmethod
    def from_blocks(cls, blocks: Round, rank: int, size: int) -> _LocalRound:
        local = cls([0] * size, [0] * size, is_broadcast=blocks[0].is_broadcast)
        # Sender and receiver walk over the same blocks in the same order, so their offsets agree without messages.
        for block in blocks:
            for source, pieces in block.pieces_by_rank:
                nbytes = block.staged_bytes(pieces)
                if source == rank:
                    if rank in block.targets:
                        local.keeps.append((block, pieces))
                    if block.is_broadcast:
                        local.sends.append((block, pieces, {rank: local.received[rank]}))
                        local.received[rank] += nbytes
                        continue
                    others = [target for target in block.targets if target != rank]
                    local.sends.append((block, pieces, {target: local.sent[target] for target in others}))
                    for target in others:
                        local.sent[target] += nbytes
                elif rank in block.targets:
                    local.receives.append((block, pieces, source, local.received[source]))
                    local.received[source] += nbytes
        # As all_to_all_single lays them out: the input in front, the output behind it, each ordered by rank.
        local.received_starts = list(accumulate(local.received, initial=sum(local.sent)))
        return local


@dataclass
class ShardExchange:
    """One rank's side of moving tensors, round by round.

    Args:
        world: the ranks.
        rounds: the same on every rank.
        get_share: this rank's shares.
        buffer_for: returns memory for each block that this rank receives, before the block's round is yielded. If
            None, blocks are put into ``received``, on ``device``, and the caller removes them after each round.
        dtypes: the dtype in which a tensor is sent, by key. Sources cast to it.
        device: of staging memory, unless it is the host and the process group moves an accelerator's tensors only.
        staging: for copies between the host and an accelerator.
        failure: what has failed on this rank outside of a phase. The next round raises it on all ranks.
    """

    world: World
    rounds: Sequence[Round]
    get_share: GetShare
    buffer_for: BufferFor | None
    dtypes: Mapping[str, torch.dtype]
    device: torch.device
    staging: StagingBuffer = field(default_factory=partial(HostStaging, 0))
    traffic: Traffic = field(default_factory=Traffic)
    received: dict[tuple[str, Box], torch.Tensor] = field(default_factory=dict)
    failure: Exception | None = None
    _staging: torch.Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.uint8))
    _works: list[dist.Work] = field(default_factory=list)

    def run(self) -> Generator[Round]:
        """Yield each round when all of it has arrived. See [Note: Rounds].

        All ranks iterate over the generator in step. Closing it on all ranks after the same round is allowed.

        Collective: yes.
        Memory: the bucket of the plan.

        Raises:
            CheckpointError: (or a subclass) the same on every rank, when anything raised on any.
            RankLostError: a rank has been lost, or has left.
        """
        local = [_LocalRound.from_blocks(blocks, self.world.rank, self.world.size) for blocks in self.rounds]
        self.traffic.staging_bytes = max((sum(part.sent) + sum(part.received) for part in local), default=0)
        # In iteration n, round n is packed while round n - 1 arrives. The last iteration (None) only unpacks.
        arriving: _LocalRound | None = None
        try:
            for number, leaving in enumerate([*local, None]):
                # All that can fail on one rank alone is in this block. At its end all ranks know whether it did, so
                # either all of them start the next collectives or none does.
                with self.world.collective("copy into staging memory"):
                    self._step(arriving, leaving)
                # The condition is of the whole round, not of this rank's part: all ranks enter or none does.
                if leaving is not None and any(_is_sent(block) for block in self.rounds[number]):
                    self._send(leaving)
                # After the start of the next collectives, so that they run while the caller uses this round.
                if arriving is not None:
                    yield self.rounds[number - 1]
                arriving = leaving
        finally:
            # Collectives in progress use the staging memory, which is freed next. The next synchronization reports
            # their errors, if any.
            with contextlib.suppress(Exception):
                self._wait()

    @torch.no_grad()
    def _step(self, arriving: _LocalRound | None, leaving: _LocalRound | None) -> None:
        """Unpack the round that has arrived and pack the next, without communication."""
        # Staging memory of a round, in bytes: what is sent, by target, then what is received, by source.
        if arriving is not None:
            # Local copies first, while the collectives may still be running.
            for block, pieces in arriving.keeps:
                self._put(block, pieces, self._source_values(block, pieces))
                self.traffic.kept_bytes += _nbytes(block, pieces)
            self._wait()
            for block, pieces, source, start in arriving.receives:
                offset = arriving.received_starts[source] + start
                self._put(block, pieces, self._staging_views(block, pieces, offset))
                self.traffic.received_bytes += _nbytes(block, pieces)
        # Only now: both rounds use the same staging memory, and the arriving one has been unpacked.
        if leaving is not None:
            # Before the first round, also on a rank that neither sends nor receives: its empty tensors' device
            # selects the backend of the collectives, which must be that of the other ranks.
            if arriving is None and self.world.size > 1:
                # A group may move no tensors of the host: dist.init_process_group() without a backend.
                device = object_device(self.world.group) if self.device.type == "cpu" else self.device
                self._staging = torch.empty(self.traffic.staging_bytes, dtype=torch.uint8, device=device)
            for block, pieces, starts in leaving.sends:
                if leaving.is_broadcast:
                    offsets = [leaving.received_starts[rank] + start for rank, start in starts.items()]
                else:
                    offsets = [sum(leaving.sent[:target]) + start for target, start in starts.items()]
                by_target = [self._staging_views(block, pieces, offset) for offset in offsets]
                # Piece by piece, so that a source that computes its values does so once for all targets.
                for values, *copies in zip(self._source_values(block, pieces), *by_target, strict=True):
                    for copy in copies:
                        self.staging.copy(values, copy)
                self.traffic.sent_bytes += _nbytes(block, pieces) * len({*block.targets} - {self.world.rank})

    def _source_values(self, block: Block, pieces: Sequence[Piece]) -> Iterator[torch.Tensor]:
        for piece in pieces:
            self.world.check()
            yield strided_view(self.get_share(block.leaves[piece.leaf], piece.share), piece.source)

    def _put(self, block: Block, pieces: Sequence[Piece], values: Iterator[torch.Tensor]) -> None:
        memory = self._buffer(block.key, block.box)
        for piece, value in zip(pieces, values, strict=True):
            self.world.check()
            self.staging.copy(value, strided_view(memory, piece.target))

    def _buffer(self, key: str, box: Box) -> torch.Tensor:
        if self.buffer_for is not None:
            return self.buffer_for(key, box)
        if (key, box) not in self.received:
            self.received[key, box] = torch.empty(box.numel, dtype=self.dtypes[key], device=self.device)
        return self.received[key, box]

    def _staging_views(self, block: Block, pieces: Sequence[Piece], start: int) -> Iterator[torch.Tensor]:
        """Yield the memory of each piece, from byte ``start`` of the staging memory on."""
        flat = self._staging[start : start + _nbytes(block, pieces)].view(self.dtypes[block.key])
        for piece in pieces:
            yield flat[: piece.target.numel].view(piece.target.sizes)
            flat = flat[piece.target.numel :]

    def _send(self, local: _LocalRound) -> None:
        """Start the collectives of a round that all ranks have packed. Their errors are raised by :meth:`_wait`."""
        sent = sum(local.sent)
        received = self._staging[sent : sent + sum(local.received)]
        group = self.world.group
        try:
            if local.is_broadcast:
                # In the order of ranks, of which all know how much each sends.
                for source, part in enumerate(received.split(local.received)):
                    if len(part):
                        self._works.append(dist.broadcast(part, group=group, group_src=source, async_op=True))
            else:
                work = dist.all_to_all_single(
                    received, self._staging[:sent], local.received, local.sent, group=group, async_op=True
                )
                self._works.append(work)
        except Exception as error:  # all ranks learn of it at the next synchronization
            self.failure = error

    def _wait(self) -> None:
        works, self._works = self._works, []  # one that has failed may never end: it is waited for once
        for work in works:
            self.world.wait_for(work)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what has failed on this rank outside of a phase."""
        if self.failure is not None:
            raise self.failure


def _is_sent(block: Block) -> bool:
    """Return whether any rank sends pieces of a block to another."""
    return any(set(block.targets) - {source} for source, _ in block.pieces_by_rank)


def _nbytes(block: Block, pieces: Sequence[Piece]) -> int:
    return sum(piece.target.numel for piece in pieces) * block.itemsize


def box_view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of a box in its contiguous tensor as a view, if they are adjacent."""
    start = sum(at * stride for at, stride in zip(box.offsets, tensor.stride(), strict=True))
    return tensor.view(-1)[start : start + box.numel]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Local memory of a tensor on this rank, and the boxes in it."""

    local: torch.Tensor
    boxes: tuple[LocalBox, ...]

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, name: str) -> LocalTensor:
        return cls(local_tensor(tensor), local_boxes(tensor, name))

    @classmethod
    def full(cls, tensor: torch.Tensor) -> LocalTensor:
        """Return the local memory of a full tensor."""
        place = Strided(0, tuple(tensor.shape), tuple(tensor.stride()))
        return cls(tensor, (LocalBox(Box.whole(tuple(tensor.shape)), place),))

    def view(self, box: Box) -> torch.Tensor:
        """Return the elements of a box, which is within one of this rank's."""
        return strided_view(self.local, locate_box(box, self.boxes))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor to move between ranks. All but ``source`` and ``target`` is the same on every rank.

    Attributes:
        name: unique among the transfers.
        shape: of the full tensor.
        dtype: in which it is sent and received.
        source_boxes: boxes of the ranks that have the tensor, by rank. They are equal or do not overlap.
        target_boxes: boxes of the ranks that need the tensor, by rank. A rank that has its box uses its own values.
        source: source memory on this rank, or None.
        target: target memory on this rank, or None.
    """

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    source_boxes: tuple[Boxes, ...]
    target_boxes: tuple[Boxes, ...]
    source: LocalTensor | None
    target: LocalTensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return numel(self.shape) * self.dtype.itemsize

    def move(self) -> move_plan.Move:
        """Return the elements to receive from other ranks, counted regardless of their dtype."""
        missing: list[Boxes] = []  # by rank
        for targets, sources in zip(self.target_boxes, self.source_boxes, strict=True):
            missing.append(tuple(box for box in targets if not _is_local(box, sources)))
        expression = Stored(self.name, tuple(self.shape), DType.U8)
        return move_plan.Move(self.name, expression, self.dtype.itemsize, missing)

    def copy_local(self, rank: int, staging: StagingBuffer) -> int:
        """Copy this rank's own values. Return their bytes."""
        local = [box for box in self.target_boxes[rank] if box.numel and _is_local(box, self.source_boxes[rank])]
        for box in local:
            staging.copy(_require_memory(self.source).view(box), _require_memory(self.target).view(box))
        return sum(box.numel for box in local) * self.dtype.itemsize


def _is_local(box: Box, boxes: Boxes) -> bool:
    """Return whether a box lies within one of a rank's boxes."""
    return any(local.intersect(box) == box for local in boxes)


def _require_memory(local: LocalTensor | None) -> LocalTensor:
    assert local is not None, "the plan has this rank send or receive a tensor of which it has no memory"
    return local


@torch.no_grad()
def transfer(world: World, items: Sequence[Transfer], *, budget_bytes: int, device: torch.device) -> Traffic:
    """Move all tensors from their sources to their targets. ``device`` is that of staging memory.

    Collective: yes. Memory: ``budget_bytes``, and a share that is not one contiguous run.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when anything raised on any.
    """
    by_name = {item.name: item for item in items}
    in_turn = move_plan.shares_in_turn((item.source_boxes, item.dtype.itemsize) for item in items)
    shares = dict(zip(by_name, in_turn, strict=True))
    last: dict[tuple[str, int], torch.Tensor] = {}  # at most one: consecutive pieces are parts of the same share

    def get_share(name: str, number: int) -> torch.Tensor:
        if (name, number) not in last:
            last.clear()  # freed before the next is made contiguous
            source = _require_memory(by_name[name].source)
            last[name, number] = source.view(shares[name][world.rank][number]).contiguous()
        return last[name, number]

    with world.collective("plan the moves"):
        rounds = move_plan.plan_rounds([[item.move() for item in items]], shares, budget_bytes)
        staging = _allocate_staging(items, budget_bytes)
    # Without buffer_for: blocks arrive in memory of their own and are copied to the targets, which may be
    # strided, cast or on another device.
    exchange = ShardExchange(
        world, rounds, get_share, None, {item.name: item.dtype for item in items}, device, staging
    )
    for _ in exchange.run():
        # While the next round travels, so in no phase: the next one raises what fails here, on all ranks.
        try:
            for (name, box), values in exchange.received.items():
                staging.copy(values.view(box.sizes), _require_memory(by_name[name].target).view(box))
        except Exception as error:
            exchange.failure = error
        exchange.received.clear()
    with world.collective("copy what stays on this rank"):
        exchange.raise_failure()
        for item in items:
            exchange.traffic.kept_bytes += item.copy_local(world.rank, staging)
    return exchange.traffic


def _allocate_staging(items: Sequence[Transfer], budget_bytes: int) -> StagingBuffer:
    """Return a buffer for copies between this rank's host memory and its accelerator, if it has tensors there."""
    memories = [memory for item in items for memory in (item.source, item.target) if memory is not None]
    device = next((memory.local.device for memory in memories if memory.local.device.type != "cpu"), None)
    if device is None:
        return HostStaging(0)
    largest = max(item.nbytes for item in items)
    return DeviceStaging(pinned_bytes(budget_bytes // 2, largest), device, is_side=False)


Prepare: TypeAlias = Callable[[Sequence[str]], Mapping[str, LocalTensor]]
"""Allocates memory for tensors, just before they are received."""


def distribute(
    world: World, items: list[Transfer], prepare: Prepare, *, budget_bytes: int, device: torch.device
) -> Traffic:
    """Transfer all tensors, as many at once as fit into ``budget_bytes``, or one that is larger.

    Collective: yes. Memory: ``budget_bytes``, in addition to the tensors that ``prepare`` allocates. ``items`` is
    emptied, so that a source can free each tensor that it has sent.
    """
    traffic = Traffic()
    items.reverse()  # popped from the end, in the order of the caller
    while items:
        batch, used = [items.pop()], 0
        while items and (used := used + batch[-1].nbytes) + items[-1].nbytes <= budget_bytes:
            batch.append(items.pop())
        # Just before the values arrive, so that the targets of later batches take no memory yet.
        with world.collective("allocate shards"):
            targets = prepare([item.name for item in batch])
        batch = [replace(item, target=targets[item.name]) for item in batch]
        traffic.add(transfer(world, batch, budget_bytes=budget_bytes, device=device))
        trim_heap()
    return traffic


def gather(
    world: World,
    tensors: Mapping[str, torch.Tensor],
    form: StateForm,
    *,
    budget_bytes: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return full tensors on the CPU on the target ranks, and none on the others.

    ``tensors`` are of the same names on every rank, shards or full tensors, and not on meta. Replicas must have
    equal values.

    Collective: yes. Memory: ``budget_bytes``, and the full tensors on the ranks that get them.

    Raises:
        RankMismatchError: ranks have different tensors.
        ShardingError: ranks do not have, together, all of a tensor.
    """
    with describing_tensors(world) as exchange:
        exchange.local = metadata_by_name(tensors)
    boxes = exchange.result
    # Shards of all ranks are the sources. The full tensors on the receiving ranks are the targets.
    ranks = move_plan.receivers(form, world.size)
    gathered: dict[str, torch.Tensor] = {}
    items: list[Transfer] = []

    with world.collective("allocate full tensors"):
        for name, tensor in tensors.items():
            # Every rank describes every transfer. Those that receive nothing have no target memory.
            target = None
            if world.rank in ranks:
                gathered[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                target = LocalTensor.full(gathered[name])
            target_boxes = move_plan.full_on_ranks(ranks, tuple(tensor.shape), world.size)
            source = LocalTensor.from_tensor(tensor, name)
            items.append(Transfer(name, tensor.shape, tensor.dtype, boxes[name], target_boxes, source, target))
    transfer(world, items, budget_bytes=budget_bytes, device=device)
    return gathered
