"""What the ranks of a test world send each other round by round, and look into."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.execution.exchanging import CPU, through

from shardwise.execution.memory import host_memory as common_memory
from shardwise.execution.memory.host_memory import Address
from shardwise.execution.moving.exchange import open_carrier
from shardwise.execution.ranks.world import World
from shardwise.planning.moves.parcels import Load, ToAll, ToEach

SIZES = [
    [[0, 16, 48], [32, 0, 0], [64, 16, 0]],
    [[0, 0, 0], [0, 0, 16], [0, 0, 0]],
    [[0, 16, 16], [16, 0, 16], [16, 16, 0]],
]
"""Bytes that each rank sends each other in a few rounds."""


def loads(rank: int) -> list[Load]:
    made: list[Load] = []
    for sizes in [*SIZES, *SIZES]:
        made.append(ToEach(tuple(sizes[rank]), tuple(row[rank] for row in sizes)))
        made.append(ToAll(tuple(map(sum, sizes)), is_padded=len(made) % 4 == 1))
    return made


def carried(way: str) -> tuple[str, list[str]]:
    """What carried the rounds, and what came that was not sent."""
    world = World.current()
    wrong: list[str] = []
    plan = loads(world.rank)
    with world, through(way):
        carrier = open_carrier(world, plan, [True] * len(plan), CPU)
        for number in range(len(plan) + 1):

            def step(number: int = number) -> None:
                carrier.wait()
                for source in range(world.size) if number else ():
                    load, found = plan[number - 1], carrier.inbox(number - 1, source)
                    to_all = isinstance(load, ToAll)
                    size = load.parts[source] if to_all else load.received[source]
                    mark = 9 if to_all else world.rank
                    wanted = torch.full((size,), 16 * (number - 1) + 4 * source + mark % 4, dtype=torch.uint8)
                    if (source != world.rank or to_all) and not torch.equal(found, wanted):
                        wrong.append(f"round {number - 1} from {source}")
                for target in range(world.size) if number < len(plan) else ():
                    mark = 9 if isinstance(plan[number], ToAll) else target
                    if target != world.rank or mark == 9:
                        carrier.outbox(number, target).fill_(16 * number + 4 * world.rank + mark % 4)

            world.together(step)
            if number < len(plan):
                carrier.send(number)
    return type(carrier).__name__, wrong


def looked_into(where: str) -> bool:
    """Whether windows are used when one rank cannot look into those of others, or looks into something else."""
    world = World.current()
    look = common_memory.enter

    def blind(address: Address) -> common_memory.Entered:
        if where == "absent":
            address = replace(address, path="/proc/1/fd/absent")
        if where == "other":
            address = replace(address, word=bytes(32))
        if where == "size":
            address = replace(address, nbytes=address.nbytes + 1)
        return look(address)

    with world, patch.object(common_memory, "enter", blind if world.rank == 1 else look):
        found = common_memory.open_windows(world, 64)
    dist.barrier()
    return found is not None
