"""A base in four bits: how long it takes to bring up, its memory, and what a step of a LoRA on it costs.

``python -m benchmarks.four_bit_base``. Gloo ranks bring a Qwen3 shape up from bfloat16 files, as numbers and in
four bits, in turn; each load has processes of its own, which load a tiny model first. The roof of the second is the
longer of the first, which only reads, and of packing as many numbers that are in memory, on the same ranks at once.
Memory is growth of RssAnon + RssShmem while loading, by rank, under a cgroup of what is promised where one can be
made. Steps are a LoRA's by shardwise's own loop, on both bases in the same processes, in turn.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import caps
from benchmarks.checkpoints import SHAPES, write
from benchmarks.meter import MemoryWatch
from benchmarks.place import commit, machine, say
from benchmarks.training import LEARNING_RATE, MODELS, SMALL, Job, batches, quieten, train_by_shardwise
from tests.support.local_ranks import LocalRanks

BRING_UP_LIMIT = 1.2
STEP_LIMIT = 1.15
SPARE_BYTES = 32 << 20
BUDGET_BYTES = 64 << 20


def load(folder: str, warm_up: str, form: str, most_bytes: int | None = None) -> dict[str, Any]:
    """One load on every rank, which the kernel kills where it takes more than ``most_bytes``. Collective: yes."""
    import torch
    import torch.distributed as dist

    import shardwise

    quieten()
    options = shardwise.options.LoadOptions(progress=False, budget_bytes=BUDGET_BYTES)
    keywords: dict[str, Any] = {} if form == "bfloat16" else {"quantization": shardwise.options.Nf4()}
    shardwise.from_pretrained(warm_up, dtype=torch.bfloat16, options=options, **keywords)
    watch = MemoryWatch()
    if most_bytes is not None:
        caps.enter(most_bytes)
    dist.barrier()
    start = time.perf_counter()
    with watch:
        model, report = shardwise.from_pretrained(
            folder, dtype=torch.bfloat16, options=options, output_loading_info=True, **keywords
        )
    dist.barrier()
    return {
        "seconds": time.perf_counter() - start,
        "phases": report.seconds,
        "shard_bytes": report.placed_bytes,
        "grown_bytes": watch.growth,
        "packed": sum(layer.weight.numel() * 2 for layer in model.modules() if hasattr(layer, "packing")),
    }


def pack(numel: int) -> float:
    """Seconds to pack so many numbers of this rank, that are in memory. Collective: yes."""
    import torch
    import torch.distributed as dist

    from shardwise.conversion.four_bit import quantize_rows
    from shardwise.tensors import Form4

    quieten()
    rows, width = 1024, 2048
    values = torch.randn(rows, width).bfloat16()
    packed, scales = torch.empty(rows, width // 2, dtype=torch.uint8), torch.empty(rows, width // 64)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(-(-numel // values.numel())):
        quantize_rows(values, 64, Form4.NF4, packed, scales)
    dist.barrier()
    return time.perf_counter() - start


def take_steps(job: Job, turns: int) -> dict[str, list[float]]:
    """Seconds of steps on each base, but for the first of each turn. Collective: yes."""
    import torch.distributed as dist
    from benchmarks.arms import adapter_config

    import shardwise

    quieten()
    bases: dict[str, dict[str, Any]] = {"bfloat16": {}, "nf4": {"quantization": shardwise.options.Nf4()}}
    models = {
        name: shardwise.from_pretrained(
            job.folder, dtype=job.dtype, tuning=shardwise.Lora(adapter_config()), **keywords
        )
        for name, keywords in bases.items()
    }
    found: dict[str, list[float]] = {name: [] for name in bases}
    for _ in range(turns):
        for name, model in models.items():
            report = train_by_shardwise(model, batches(job, job.steps, dist.get_rank()))
            found[name] += report.seconds[1:]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8, help="rows of 128 tokens of a step, on each of two ranks")
    parser.add_argument("--model", default=SMALL.name, choices=sorted(MODELS), help="of the steps")
    parser.add_argument("--out", type=Path, help="results, as .json")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    given = parser.parse_args(argv)
    shape = SHAPES["qwen3-1.7b"]
    tiny = write(shape.tiny(), given.dir)
    plain = tiny if given.quick else write(shape, given.dir)
    runs: dict[str, list[dict[str, Any]]] = {"bfloat16": [], "nf4": []}
    roofs: list[float] = []
    for _ in range(given.repeats):
        for form, own in runs.items():
            with LocalRanks(given.ranks, timeout_s=300) as world:
                found = world.run(load, str(plain), str(tiny), form)
                own.append(max(found, key=lambda one: one["seconds"]))
                if form == "nf4":
                    roofs.append(max(world.run(pack, own[-1]["packed"] // given.ranks)))
            say(f"{form}: {own[-1]['seconds']:.2f} s")
    ratios = [
        four["seconds"] / max(numbers["seconds"], roof)
        for four, numbers, roof in zip(runs["nf4"], runs["bfloat16"], roofs, strict=True)
    ]
    promised = max(run["shard_bytes"] for run in runs["nf4"]) + BUDGET_BYTES + SPARE_BYTES
    is_capped = caps.why_not() is None
    if is_capped:
        with LocalRanks(given.ranks, timeout_s=300) as world:
            world.run(load, str(plain), str(tiny), "nf4", promised)
        caps.clean_up()
    trained = write(MODELS[given.model].tiny() if given.quick else MODELS[given.model], given.dir)
    words = int(MODELS[given.model].config["vocab_size"]) if not given.quick else 100
    job = Job(str(trained), 4, given.rows, 128, words, "bfloat16")
    with LocalRanks(2, timeout_s=900) as world:
        steps = world.run(take_steps, job, given.repeats)[0]
    step = statistics.median(steps["nf4"]) / statistics.median(steps["bfloat16"])
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.four_bit_base" + (" --quick" if given.quick else ""),
        "commit": commit(),
        "machine": machine(),
        "model": plain.name,
        "ranks": given.ranks,
        "bring_up": {"ratio": statistics.median(ratios), "limit": BRING_UP_LIMIT, "runs": runs, "packing": roofs},
        "memory": {
            "promised_bytes": promised,
            "most_grown_bytes": max(run["grown_bytes"] for run in runs["nf4"]),
            "is_capped": is_capped,
        },
        "step": {"model": trained.name, "ratio": step, "limit": STEP_LIMIT, "seconds": steps},
        "learning_rate": LEARNING_RATE,
    }
    grown = max(run["grown_bytes"] for run in runs["nf4"])
    brought_up = statistics.median(ratios)
    print(
        f"{plain.name}, {given.ranks} ranks: brought up in {brought_up:.2f} of the longer of reading and packing "
        f"(at most {BRING_UP_LIMIT}); grown by {grown >> 20} MiB of {promised >> 20} promised a rank, "
        f"{'under' if is_capped else 'without'} a cgroup; a step of a LoRA ({trained.name}, 2 ranks) "
        f"{step:.2f} of that on bfloat16 (at most {STEP_LIMIT})"
    )
    place = given.out or Path("benchmarks/results", f"four-bit-base-{datetime.now(UTC):%Y-%m-%d-%H%M}.json")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(results, indent=1))
    return 0 if statistics.median(ratios) <= BRING_UP_LIMIT and step <= STEP_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
