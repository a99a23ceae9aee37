"""Transfers between the ranks of a test world."""

from unittest import mock

import torch
from tests.support.world import attempt

from shardwise.core.tensors import Box
from shardwise.fsdp.named_tensors import raw_bytes
from shardwise.ranks.world import World
from shardwise.transfer import move
from shardwise.transfer.move import LocalTensor, Transfer
from shardwise.transfer.replicas import equal_on_all

CPU = torch.device("cpu")

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64, torch.uint32),
]


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit random, so that NaNs have payloads."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    numel = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, high, (numel,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def of_box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def tensors() -> dict[str, torch.Tensor]:
    made = {f"{dtype}": noise((7, 3), dtype, number) for number, dtype in enumerate(DTYPES)}
    return made | {
        "scalar": noise((), torch.float64, 90),
        "none": torch.empty(0, 4),
        "column": noise((6, 8), torch.float32, 91),
        "strided": noise((8, 2), torch.float32, 92),
    }


def boxes(name: str, rank: int, size: int) -> tuple[Box, ...]:
    """Rows, columns, two strided runs, whole tensors, and empty shards."""
    if name == "scalar":
        return (Box((), ()),)
    if name == "none":
        return (Box((0, 0), (0, 4)),)
    if name == "column":
        return (Box((0, 8 * rank // size), (6, 8 * (rank + 1) // size - 8 * rank // size)),)
    if name == "strided":
        half = 4 // size
        return (Box((rank * half, 0), (half, 2)), Box((4 + rank * half, 0), (half, 2)))
    if name.endswith("float16"):
        return (Box((0, 0), (7, 3)),)
    rows = -(-7 // (size - 1 or 1))  # the last rank's shard is empty
    start = min(7, rank * rows)
    return (Box((start, 0), (min(7, start + rows) - start, 3)),)


def transfer(source_ranks: list[int] | None, budget: int) -> tuple[list[str], dict[str, int]]:
    """Names of what did not arrive bitwise in all of its boxes, and the traffic. No sources: from shards."""
    world = World.current()
    everything = tensors()
    wanted, items = {}, []
    found = {name: tensor.clone().view(-1).view(torch.uint8).fill_(1).view(tensor.dtype).view(tensor.shape)
             for name, tensor in everything.items()}  # fmt: skip
    for name, tensor in everything.items():
        whole = Box.whole(tuple(tensor.shape))
        shards = tuple(boxes(name, rank, world.size) for rank in range(world.size))
        if source_ranks is None:
            held, wanted[name] = shards, ((whole,),) * world.size
        else:
            held = tuple((whole,) if source == rank else () for rank, source in enumerate(source_ranks))
            wanted[name] = shards
        mine = LocalTensor.full(tensor) if held[world.rank] else None
        into = LocalTensor.full(found[name])
        items.append(Transfer(name, tensor.shape, tensor.dtype, held, wanted[name], mine, into))
    with world:
        traffic = move.transfer(world, items, budget_bytes=budget, device=CPU)
    wrong = []
    for name, tensor in everything.items():
        expected = tensor.clone().view(-1).view(torch.uint8).fill_(1).view(tensor.dtype).view(tensor.shape)
        for box in wanted[name][world.rank]:
            of_box(expected, box).copy_(of_box(tensor, box))
        if not torch.equal(raw_bytes(expected), raw_bytes(found[name])):
            wrong.append(name)
    return wrong, {"staging": traffic.staging_bytes, "sent": traffic.sent_bytes}


def receive_without_memory(budget: int) -> tuple[str, str]:
    """The second rank fails as it copies what has arrived, between two phases."""
    world = World.current()
    whole = Box.whole((4,))
    source = LocalTensor.full(torch.ones(4)) if world.rank == 0 else None
    item = Transfer("x", (4,), torch.float32, ((whole,), ()), ((), (whole,)), source, None)

    def call() -> None:
        with world:
            move.transfer(world, [item], budget_bytes=budget, device=CPU)

    return attempt(call)


def copy_without_memory() -> tuple[str, str]:
    """The second rank cannot allocate the copy of a buffer, of which each rank has another one."""
    world = World.current()
    tensors = {"table": torch.full((3,), float(world.rank))}
    error = MemoryError("none is left") if world.rank else None

    def call() -> None:
        with world, mock.patch.object(torch, "empty_like", side_effect=error, return_value=torch.zeros(3)):
            equal_on_all(world, tensors, {"table"}, budget_bytes=1024, device=CPU)

    return attempt(call)
