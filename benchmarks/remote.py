"""Loading over HTTP: the time it takes against what the server's bandwidth and latency allow.

A server on this machine (:class:`benchmarks.http_process.HttpStoreProcess`) sends no more than a given number
of bytes per second to all connections together, and begins each answer late. Four ranks load from it, as one group
of shards and as two replicas of two, into memory that exists (see :class:`benchmarks.ballast.Ballast`). Part of
``benchmarks.load``; alone by ``python -m benchmarks.remote``.
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.http_process import HttpStoreProcess
from tests.support.local_ranks import LocalRanks

from shardwise.storage.contract import OBJECT_STORE

BYTES_PER_S = 200e6
LATENCY_S = 0.02
MOST = 1.15
_BESIDE_SHARDS_BYTES = 300 << 20


def measure(folder: Path, warm_up: Path, ranks: int, repeats: int, timeout_s: float) -> dict[str, Any]:
    """Makespans over the bound ``max(bytes / bandwidth, requests * latency / concurrency)``, for both meshes."""
    found: dict[str, Any] = {"bytes_per_s": BYTES_PER_S, "latency_s": LATENCY_S, "meshes": {}}
    runs: dict[str, list[dict[str, Any]]] = {"fsdp": [], "hsdp 2x2": []}
    for _ in range(repeats):
        for name, of in runs.items():
            of.append(_once(folder, warm_up, ranks, 2 if name != "fsdp" else 1, timeout_s))
    for name, of in runs.items():
        middle = sorted(of, key=lambda run: run["ratio"])[len(of) // 2]
        ratios = [run["ratio"] for run in of]
        found["meshes"][name] = {
            **middle,
            "ratio": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        }
    return found


def _once(folder: Path, warm_up: Path, ranks: int, replicas: int, timeout_s: float) -> dict[str, Any]:
    with (
        HttpStoreProcess(warm_up) as tiny,
        HttpStoreProcess(folder, latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S) as store,
        LocalRanks(ranks, timeout_s=timeout_s) as world,
    ):
        shards = sum(path.stat().st_size for path in folder.glob("*.safetensors")) * replicas // ranks
        told = world.run(load_from, store.url, tiny.url, replicas, shards)
        counters = store.counters
    seconds = max(one["seconds"] for one in told)
    nbytes = told[0]["checkpoint_bytes"]
    by_bandwidth = nbytes / BYTES_PER_S
    by_latency = counters.requests * LATENCY_S / (OBJECT_STORE.concurrency * ranks)
    return {
        "seconds": seconds,
        "bound_s": max(by_bandwidth, by_latency),
        "ratio": seconds / max(by_bandwidth, by_latency),
        "requests": counters.requests,
        "phases": told[0]["phases"],
        "read_fraction": sum(one["read_bytes"] for one in told) / nbytes,
    }


def load_from(url: str, warm_up: str, replicas: int, nbytes: int) -> dict[str, Any]:
    """One rank: load from the server, warmed on the tiny model; ``nbytes`` of shards come into being."""
    import torch
    import torch.distributed as dist
    from benchmarks.ballast import Ballast
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise

    torch.set_num_threads(1)
    sizes = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    sharding = shardwise.Sharding(mesh=mesh["shard"] if replicas == 1 else mesh)
    shardwise.from_pretrained(warm_up, sharding=sharding)
    held = Ballast(nbytes, _BESIDE_SHARDS_BYTES)
    dist.barrier()
    with held:
        began = time.perf_counter()
        model, report = shardwise.from_pretrained(url, sharding=sharding, output_loading_info=True)
        seconds = time.perf_counter() - began
    del model
    return {
        "seconds": seconds,
        "read_bytes": report.read_bytes,
        "phases": dict(report.seconds),
        "checkpoint_bytes": report.checkpoint_bytes,
    }


def main() -> None:
    """Measure one model, and write the outcome to ``results``."""
    from benchmarks.checkpoints import SHAPES, write
    from benchmarks.place import RANKS, commit, machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    given = parser.parse_args()
    shape = SHAPES[given.model]
    folder, warm_up = write(shape, given.dir), write(shape.tiny(), given.dir)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.remote --model {given.model} --repeats {given.repeats}",
        "commit": commit(),
        "machine": machine(),
        **measure(folder, warm_up, RANKS, given.repeats, timeout_s=600),
    }
    text = json.dumps(results, indent=1) + "\n"
    out = (
        Path(__file__).parent
        / "results"
        / f"remote-{results['date'][:10]}-{given.model}-{results['commit'][:12]}.json"
    )
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
