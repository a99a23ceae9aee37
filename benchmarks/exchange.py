"""Values from rank 0 to the shards of all ranks: the exchange against a broadcast of every tensor.

    python -m benchmarks.exchange --ranks 2 4 --mib 512 --budget-mib 16 64 256 --repeats 5

Arms are interleaved. Prints medians in GB/s: bytes of the model by seconds until every rank has its shards.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from shardwise.execution.moving.exchange import exchange
from shardwise.execution.processes.local_ranks import LocalRanks
from shardwise.execution.ranks.world import World
from shardwise.planning.moves.exchange import WantedBoxes, from_sources, rounds
from shardwise.planning.moves.parcels import Parcel
from shardwise.tensors import Box

_ROWS, _WIDTH = 2048, 1024  # 8 MiB of float32


def measure(mib: int, budgets: list[int]) -> dict[str, float]:
    """Seconds by arm, in this order: a broadcast of every tensor, then an exchange for each budget (MiB)."""
    world = World.current()
    count, part = mib // 8, _ROWS // world.size
    source = [torch.full((_ROWS, _WIDTH), float(number)) for number in range(count)] if world.rank == 0 else []
    mine = [torch.zeros(part, _WIDTH) for _ in range(count)]
    seconds: dict[str, float] = {}
    dist.barrier()
    start = time.perf_counter()
    for number in range(count):
        whole = source[number] if world.rank == 0 else torch.empty(_ROWS, _WIDTH)
        dist.broadcast(whole, src=0)
        mine[number].copy_(whole[world.rank * part : (world.rank + 1) * part])
    dist.barrier()
    seconds["broadcast"] = time.perf_counter() - start
    held = tuple((Box((rank * part, 0), (part, _WIDTH)),) for rank in range(world.size))
    wanted = [WantedBoxes(str(number), 4, held) for number in range(count)]

    def take(parcel: Parcel, values: torch.Tensor) -> None:
        first = parcel.box.offsets[0] - world.rank * part
        mine[int(parcel.tensor)].narrow(0, first, parcel.box.sizes[0]).copy_(values)

    def give(parcel: Parcel) -> torch.Tensor:
        return source[int(parcel.tensor)].narrow(0, parcel.box.offsets[0], parcel.box.sizes[0])

    for budget in budgets:
        for tensor in mine:
            tensor.fill_(-1.0)
        dist.barrier()
        start = time.perf_counter()
        plan = rounds(from_sources(wanted, [[0] * world.size] * count).first, budget << 20)
        exchange(world, plan, give, take, dict.fromkeys(map(str, range(count)), torch.float32), torch.device("cpu"))
        dist.barrier()
        seconds[f"exchange, {budget} MiB"] = time.perf_counter() - start
        assert all(bool((tensor == float(number)).all()) for number, tensor in enumerate(mine))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--budget-mib", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for size in arguments.ranks:
        with LocalRanks(size, timeout_s=600) as ranks:
            runs = [ranks.run(measure, arguments.mib, arguments.budget_mib)[0] for _ in range(arguments.repeats)]
        for arm in runs[0]:
            rates = sorted(arguments.mib * 2**20 / run[arm] / 1e9 for run in runs)
            listed = " ".join(f"{rate:.2f}" for rate in rates)
            print(f"{size} ranks  {arm:<20} {statistics.median(rates):.2f} GB/s   ({listed})")


if __name__ == "__main__":
    main()
