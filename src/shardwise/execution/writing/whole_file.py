"""Writes a sharded state as one file of ``torch.save``: the first rank writes, nobody holds the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from shardwise.errors import PlacementError
from shardwise.execution.moving.distribute import LocalTensor
from shardwise.execution.moving.reshard import Handover, facts_of, hand_over, held_by_rank, landing
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.marked_folder import Saving
from shardwise.execution.writing.sink import Sink
from shardwise.execution.writing.torch_out import Levels, Nest, RoomyFile
from shardwise.layout import LocalBox
from shardwise.models.dtypes import from_torch, to_torch
from shardwise.planning.saves.commit import WrittenFiles, fresh
from shardwise.planning.saves.save_plan import Extent, Saved, extents
from shardwise.storage.writing.opening import open_writer
from shardwise.tensors import Box, Strided


def write_whole_file(
    world: World,
    saving: Saving,
    name: str,
    tensors: Mapping[Levels, torch.Tensor],
    objects: Nest,
    *,
    budget_bytes: int,
    device: torch.device,
) -> tuple[int, WrittenFiles]:
    """Write tensors, shards or whole, and other values into one file, which is to have this name.

    ``tensors`` are the same ones on every rank; one that is there twice is written once. ``objects`` are the first
    rank's. ``device`` is where staging lies. The bytes of the tensors are returned.

    Collective: yes.
    Memory: ``budget_bytes``.

    Raises:
        DisagreementError: ranks have different tensors.
        PlacementError: ranks do not have, together, all of a tensor, or a file cannot hold its dtype or its name.
        StorageError: the file could not be written.
    """
    keys: dict[int, str] = {}
    key_of = {at: keys.setdefault(id(tensor), ".".join(map(str, at))) for at, tensor in tensors.items()}
    world.together(lambda: _require_apart(key_of, tensors))
    once = {key_of[at]: tensors[at] for at in sorted(tensors, key=lambda at: key_of[at])}
    told = world.each(lambda: {key: facts_of(tensor, key) for key, tensor in once.items()})
    held = world.together(lambda: held_by_rank(once, told))
    saved = world.together(
        lambda: {
            at: (key_of[at], from_torch(tensor.dtype, key_of[at]), tuple(tensor.shape))
            for at, tensor in tensors.items()
        }
    )
    with ExitStack() as closing:

        def opened() -> RoomyFile | None:
            if world.rank:
                return None
            writer = closing.enter_context(open_writer(saving.folder))
            return RoomyFile(Sink(writer), fresh(name, saving.token))

        file = world.together(opened)
        nbytes = _write(world, file, saved, objects, once, held, budget_bytes, device)
        return nbytes, WrittenFiles({} if file is None else {name: file.nbytes})


def _write(
    world: World,
    file: RoomyFile | None,
    saved: Mapping[Levels, Saved],
    objects: Nest,
    once: Mapping[str, torch.Tensor],
    held: Mapping[str, tuple[tuple[Box, ...], ...]],
    budget_bytes: int,
    device: torch.device,
) -> int:
    places = world.from_first(lambda: [] if file is None else file.begin(saved, objects))
    for block in extents([(place.start, item) for place, item in places], budget_bytes // 2):
        _carry(world, file, block, once, held, budget_bytes // 2, device)
    world.together(lambda: None if file is None else file.sync())
    return sum(place.nbytes for place, _ in places)


def _require_apart(key_of: Mapping[Levels, str], tensors: Mapping[Levels, torch.Tensor]) -> None:
    of: dict[str, int] = {}
    for at, key in key_of.items():
        if of.setdefault(key, id(tensors[at])) != id(tensors[at]):
            raise PlacementError(f"{key}: two tensors have this name, with dots in other places; rename one")


def _carry(
    world: World,
    file: RoomyFile | None,
    block: Sequence[Extent],
    tensors: Mapping[str, torch.Tensor],
    held: Mapping[str, tuple[tuple[Box, ...], ...]],
    budget_bytes: int,
    device: torch.device,
) -> None:
    """Bring a block to the first rank, which writes it. Collective: yes."""
    arrived: list[torch.Tensor] = []

    def begin() -> list[Handover]:
        items: list[Handover] = []
        for extent in block:
            into, dtype = None, to_torch(extent.dtype)
            if file is not None:
                arrived.append(torch.empty(extent.box.sizes, dtype=dtype, device="cpu"))
                into = LocalTensor(arrived[-1], (LocalBox(extent.box, Strided.contiguous(extent.box.sizes)),))
            wanted = tuple((extent.box,) if rank == 0 else () for rank in range(world.size))
            mine = landing(tensors[extent.key], extent.key)
            name = f"{extent.key} at {extent.box.offsets}"
            items.append(Handover(name, dtype, held[extent.key], wanted, mine, into))
        return items

    hand_over(world, world.together(begin), budget_bytes=budget_bytes, device=device)
    world.together(lambda: None if file is None else file.write(block, arrived))
