"""A sharded state becomes one file of ``torch.save``: the first rank writes, and nobody holds the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.errors import PlacementError
from shardwise.execution.distribute import LocalTensor
from shardwise.execution.handover import Handover, facts_of, hand_over, held_by_rank, landing
from shardwise.execution.torch_out import Levels, Nest, RoomyFile
from shardwise.execution.world import World
from shardwise.layout import LocalBox
from shardwise.models.dtypes import from_torch, to_torch
from shardwise.planning.save_plan import Saved
from shardwise.storage import open_writer
from shardwise.tensors import Box, ByteRange, Strided, row_blocks


def write_whole_file(
    world: World,
    path: Path,
    tensors: Mapping[Levels, torch.Tensor],
    objects: Nest,
    *,
    budget_bytes: int,
    device: torch.device,
) -> int:
    """Write tensors, shards or whole, and other values into one file that takes the place of any older one.

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
        file = world.together(
            lambda: (
                RoomyFile(closing.enter_context(open_writer(path.parent)), path.name) if world.rank == 0 else None
            )
        )
        return _write(world, file, saved, objects, once, held, budget_bytes, device)


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
    try:
        places = world.from_first(lambda: [] if file is None else file.begin(saved, objects))
        for batch in _batches(places, budget_bytes // 2):
            _carry(world, file, batch, once, held, budget_bytes // 2, device)
        world.together(lambda: None if file is None else file.sync())
        world.together(lambda: None if file is None else file.commit({}))
    except BaseException:
        if file is not None:
            file.undo()
        raise
    return sum(place.nbytes for place, _ in places)


def _require_apart(key_of: Mapping[Levels, str], tensors: Mapping[Levels, torch.Tensor]) -> None:
    of: dict[str, int] = {}
    for at, key in key_of.items():
        if of.setdefault(key, id(tensors[at])) != id(tensors[at]):
            raise PlacementError(f"{key}: two tensors have this name, with dots in other places; rename one")


@dataclass(frozen=True, slots=True)
class _Extent:
    """A row-major run of a tensor, and the byte of the file where it begins."""

    key: str
    dtype: torch.dtype
    box: Box
    start: int

    @property
    def name(self) -> str:
        return f"{self.key} at {self.box.offsets}"


def _batches(places: Sequence[tuple[ByteRange, Saved]], nbytes: int) -> Iterator[list[_Extent]]:
    """The file in order, about so many bytes at a time."""
    batch: list[_Extent] = []
    size = 0
    for place, (key, dtype, shape) in places:
        start = place.start
        for box in row_blocks(shape, max(1, nbytes // dtype.itemsize)):
            length = box.numel * dtype.itemsize
            if batch and size + length > nbytes:
                yield batch
                batch, size = [], 0
            batch.append(_Extent(key, to_torch(dtype), box, start))
            start += length
            size += length
    if batch:
        yield batch


def _carry(
    world: World,
    file: RoomyFile | None,
    batch: Sequence[_Extent],
    tensors: Mapping[str, torch.Tensor],
    held: Mapping[str, tuple[tuple[Box, ...], ...]],
    budget_bytes: int,
    device: torch.device,
) -> None:
    """Bring blocks to the first rank, which writes them. Collective: yes."""
    arrived: list[torch.Tensor] = []

    def begin() -> list[Handover]:
        items: list[Handover] = []
        for block in batch:
            into = None
            if file is not None:
                arrived.append(torch.empty(block.box.sizes, dtype=block.dtype, device="cpu"))
                into = LocalTensor(arrived[-1], (LocalBox(block.box, Strided.contiguous(block.box.sizes)),))
            wanted = tuple((block.box,) if rank == 0 else () for rank in range(world.size))
            mine = landing(tensors[block.key], block.key)
            items.append(Handover(block.name, block.dtype, held[block.key], wanted, mine, into))
        return items

    hand_over(world, world.together(begin), budget_bytes=budget_bytes, device=device)

    def write() -> None:
        if file is not None:
            for block, value in zip(batch, arrived, strict=True):
                file.write(block.start, value)

    world.together(write)
