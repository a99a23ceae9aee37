"""What the ranks of a test world hand to each other."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardwise.errors import StorageError
from shardwise.execution.moving.exchange import exchange
from shardwise.execution.ranks.world import World
from shardwise.planning.moves.exchange import WantedBoxes, dealt, from_sources, rounds
from shardwise.planning.moves.parcels import Parcel
from shardwise.tensors import Box

CPU = torch.device("cpu")

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.uint32,
    torch.complex64,
    torch.complex128,
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


def through(way: str) -> AbstractContextManager[object]:
    """Bytes go by collectives, or by whatever way is the best: on one machine, windows."""
    return patch(f"{exchange.__module__}.open_windows", lambda *_: None) if way == "collectives" else nullcontext()


def hand_over(source_of: list[int] | None, budget: int, way: str = "") -> tuple[list[str], dict[str, int]]:
    """Names of what did not arrive bitwise in all of its boxes, and the traffic. No sources: dealt among all."""
    world = World.current()
    everything = tensors()
    wanted = [
        WantedBoxes(name, tensor.itemsize, tuple(boxes(name, rank, world.size) for rank in range(world.size)))
        for name, tensor in everything.items()
    ]
    if source_of is None:
        plan = rounds(dealt(wanted, range(world.size), budget // 8), budget)
    else:
        spread = from_sources(wanted, [source_of] * len(wanted))
        plan = rounds(spread.first, budget) + rounds(spread.then, budget)
    found = {name: tensor.clone().view(-1).view(torch.uint8).fill_(1).view(tensor.dtype).view(tensor.shape)
             for name, tensor in everything.items()}  # fmt: skip
    written = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in everything.items()}

    def give(parcel: Parcel) -> torch.Tensor:
        is_source = source_of is None or source_of[world.rank] == world.rank
        return of_box((everything if is_source else found)[parcel.tensor], parcel.box)

    def take(parcel: Parcel, values: torch.Tensor) -> None:
        of_box(found[parcel.tensor], parcel.box).copy_(values)
        of_box(written[parcel.tensor], parcel.box).add_(1)

    with world, through(way):
        dtypes = {name: tensor.dtype for name, tensor in everything.items()}
        traffic = exchange(world, plan, give, take, dtypes, CPU, budget_bytes=budget)
    wrong = []
    for item in wanted:
        mine = torch.zeros(everything[item.tensor].shape, dtype=torch.int32)
        for box in item.boxes[world.rank]:
            of_box(mine, box).fill_(1)
            one, other = (of_box(source[item.tensor], box).contiguous() for source in (found, everything))
            if not torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
                wrong.append(item.tensor)
        if not torch.equal(mine, written[item.tensor]):
            wrong.append(f"{item.tensor} not written once")
    return wrong, {"staging": traffic.staging_bytes, "rounds": traffic.rounds, "sent": traffic.sent_bytes}


def fail_half_way(failing: int, where: str, way: str) -> tuple[str, str, float]:
    """One rank raises in the middle; everybody gets the same error, soon."""
    world = World.current()
    whole = noise((64, 64), torch.float32, 0)
    wanted = [WantedBoxes("w", 4, tuple((Box((rank * 8, 0), (8, 64)),) for rank in range(world.size)))]
    plan = rounds(from_sources(wanted, [[0] * world.size]).first, 1024)
    calls = 0

    def spoil(call: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if world.rank == failing and call == where and calls > 3:
            raise StorageError("the disk is gone")
        return tensor

    begin = time.monotonic()
    try:
        with world, through(way):
            exchange(
                world,
                plan,
                lambda parcel: spoil("give", of_box(whole, parcel.box)),
                lambda parcel, values: spoil("take", values),
                {"w": torch.float32},
                CPU,
                budget_bytes=1 << 20,
            )
    except Exception as error:
        dist.barrier()  # the ranks are in step afterwards
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0
