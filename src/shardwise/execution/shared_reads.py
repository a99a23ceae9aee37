"""Reads once what several ranks hold, and sends it to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.conversion.computed import computes
from shardwise.conversion.expression import rows_stored
from shardwise.execution.moving import Handover, LocalTensor, hand_over
from shardwise.execution.reading import Destination, Placer
from shardwise.execution.workers import Ahead
from shardwise.execution.world import World
from shardwise.models.view import Held, boxes_of_ranks
from shardwise.planning.moves import Boxes, cut, holders_of
from shardwise.tensors import Box


def shared_boxes(
    world: World, held: Mapping[str, Held], items: Sequence[Destination]
) -> dict[str, tuple[Boxes, ...]]:
    """The tensors that ranks read together, by name, with the boxes that each rank holds: those with replicas."""
    ranks = dist.get_process_group_ranks(world.group)
    alike: dict[object, tuple[Boxes, ...]] = {}
    found: dict[str, tuple[Boxes, ...]] = {}
    for item in items:
        tensor = held[item.fqn].tensor
        lies = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        if computes(item.expression) or rows_stored(item.expression) is not None:
            continue
        if lies is not None and lies[0].size() != world.size:
            continue
        form = tuple(tensor.shape), lies
        if form not in alike:
            alike[form] = boxes_of_ranks(tensor, item.fqn, ranks)
        if any(len(holders) > 1 for holders in holders_of(alike[form]).values()):
            found[item.fqn] = alike[form]
    return found


@dataclass(frozen=True, slots=True)
class _SharedBlock:
    """A block of a tensor, the rank that reads it, and all that hold it."""

    item: Destination
    box: Box
    reader: int
    holders: tuple[int, ...]

    def handover(self, world: World, read: LocalTensor | None, into: LocalTensor, shape: Sequence[int]) -> Handover:
        held, wanted = (
            tuple((self.box,) if rank in ranks else () for rank in range(world.size))
            for ranks in ((self.reader,), self.holders)
        )
        name = f"{self.item.fqn} at {self.box.offsets}"
        return Handover(name, shape, self.item.dtype, held, wanted, read, into)


def read_shared(
    world: World,
    shared: Mapping[str, Sequence[Boxes]],
    held: Mapping[str, Held],
    items: Sequence[Destination],
    placer: Placer,
) -> None:
    """Read the shared tensors, each block by one of the ranks that hold it, and send it to the others.

    Collective: yes.
    Memory: the budget: a fifth for reading, for what has been read, for what is read ahead, and for what is sent.
    """
    budget_bytes = placer.budget_bytes // 5
    members = sorted((item for item in items if item.fqn in shared), key=lambda item: item.fqn)
    batches = list(_batches(members, shared, budget_bytes))

    def read(batch: Sequence[_SharedBlock]) -> dict[_SharedBlock, LocalTensor]:
        mine = [block for block in batch if block.reader == world.rank]
        values = placer.values_of([(block.item.expression, block.box, block.item.dtype) for block in mine])
        return {block: LocalTensor.whole(value, block.box) for block, value in zip(mine, values, strict=True)}

    waiting = Ahead(partial(read, batches[0])) if batches else None
    for number, batch in enumerate(batches):
        assert waiting is not None
        values = world.together(partial(waiting.value, world.check))
        waiting = Ahead(partial(read, batches[number + 1])) if number + 1 < len(batches) else None
        handovers = [
            block.handover(
                world,
                values.get(block),
                LocalTensor(held[block.item.fqn].local, block.item.boxes),
                held[block.item.fqn].tensor.shape,
            )
            for block in batch
        ]
        device = next((item.device for item in members if item.device.type != "cpu"), members[0].device)
        hand_over(world, handovers, budget_bytes=budget_bytes, device=device)
        for block in batch:
            if world.rank in block.holders:
                placer.count(block.item.fqn, block.box.numel)


def _batches(
    members: Sequence[Destination], shared: Mapping[str, Sequence[Boxes]], budget_bytes: int
) -> Iterator[list[_SharedBlock]]:
    """Blocks that are read at once: no rank holds more than the budget of them. The holders of a box take turns."""
    batch: list[_SharedBlock] = []
    used: Counter[int] = Counter()
    turn = 0
    for item in members:
        for whole, holders in holders_of(shared[item.fqn]).items():
            for box in cut(whole, max(1, budget_bytes // (4 * item.dtype.itemsize))):
                nbytes = box.numel * item.dtype.itemsize
                if any(used[rank] + nbytes > budget_bytes for rank in holders):
                    yield batch
                    batch, used = [], Counter()
                turn += 1
                batch.append(_SharedBlock(item, box, holders[turn % len(holders)], tuple(holders)))
                used.update(dict.fromkeys(holders, nbytes))
    if batch:
        yield batch
