"""Reads replicated tensors once: each rank that holds a box reads a share of it, and sends it to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.core.computed import computes
from shardwise.core.expression import count_stored_rows
from shardwise.core.layout import LocalBox, locate_box
from shardwise.fsdp.named_tensors import TensorRef, boxes_by_rank
from shardwise.ranks.world import World
from shardwise.transfer import move_plan
from shardwise.transfer.move import LocalTensor, Transfer, transfer
from shardwise.transfer.move_plan import Boxes
from shardwise.transfer.read import ReadExecutor, ReadItem


def select_shared(
    world: World, tensors: Mapping[str, TensorRef], items: Sequence[ReadItem]
) -> dict[str, tuple[Boxes, ...]]:
    """Return the tensors that several ranks hold, by name, with the boxes that each rank holds."""
    ranks = dist.get_process_group_ranks(world.group)
    boxes_by_layout: dict[object, tuple[Boxes, ...]] = {}  # a cache: many tensors have equal shapes and placements
    shared: dict[str, tuple[Boxes, ...]] = {}
    for item in items:
        tensor = tensors[item.fqn].tensor
        # Computed blocks and rows that are initialized are not plain file ranges: each rank makes its own.
        if computes(item.expression) or count_stored_rows(item.expression) is not None:
            continue
        # A mesh of a part of the ranks: the others do not know its boxes.
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() != world.size:
            continue
        # Boxes of all ranks, worked out from the placement without communication.
        placement = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        layout = tuple(tensor.shape), placement
        if layout not in boxes_by_layout:
            boxes_by_layout[layout] = boxes_by_rank(tensor, item.fqn, ranks)
        boxes = boxes_by_layout[layout]
        if any(len(holders) > 1 for holders in move_plan.find_holders(boxes).values()):
            shared[item.fqn] = boxes
    return shared


def keep_local_shares(
    world: World, shared: Mapping[str, tuple[Boxes, ...]], items: Sequence[ReadItem]
) -> list[ReadItem]:
    """Return the read items, those of shared tensors with only this rank's share of the boxes."""
    shares = _divide_into_shares(shared, items)
    items_to_read: list[ReadItem] = []
    for item in items:
        if item.fqn in shares:
            share = shares[item.fqn][world.rank]
            item = replace(item, boxes=tuple(LocalBox(box, locate_box(box, item.boxes)) for box in share))
        items_to_read.append(item)
    return items_to_read


def _divide_into_shares(
    shared: Mapping[str, tuple[Boxes, ...]], items: Sequence[ReadItem]
) -> dict[str, tuple[Boxes, ...]]:
    """Return the boxes that each rank reads, by name. Small tensors are read by one holder, in turn."""
    # Sorted, so that all ranks take turns in one order: modules may register tensors in the order of a set.
    ordered = sorted((item.fqn, item.dtype.itemsize) for item in items if item.fqn in shared)
    in_turn = move_plan.shares_in_turn((shared[name], itemsize) for name, itemsize in ordered)
    return {name: shares for (name, _), shares in zip(ordered, in_turn, strict=True)}


def exchange_shared(
    world: World,
    shared: Mapping[str, tuple[Boxes, ...]],
    tensors: Mapping[str, TensorRef],
    items: Sequence[ReadItem],
    executor: ReadExecutor,
) -> None:
    """Send the shares that this rank has read to the other ranks that hold their boxes, and receive theirs.

    Collective: yes.
    Memory: half of the budget, and a share that is not one contiguous run.
    """
    shares = _divide_into_shares(shared, items)
    # Sorted as in _divide_into_shares: all ranks execute the transfers in one order.
    shared_items = sorted((item for item in items if item.fqn in shared), key=attrgetter("fqn"))
    transfers = []
    for item in shared_items:
        tensor, sent, needed = tensors[item.fqn], shares[item.fqn], shared[item.fqn]
        local = LocalTensor(tensor.local, item.boxes)  # source and target: a rank sends from its own shard
        transfers.append(Transfer(item.fqn, tensor.tensor.shape, item.dtype, sent, needed, local, local))
        # The audit counts elements that arrive from other ranks, as well as those that were read.
        received = sum(box.numel for box in needed[world.rank]) - sum(box.numel for box in sent[world.rank])
        executor.count(item.fqn, received)
    device = next((item.device for item in shared_items if item.device.type != "cpu"), shared_items[0].device)
    transfer(world, transfers, budget_bytes=executor.budget_bytes // 2, device=device)
