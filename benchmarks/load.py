"""Loading: shardwise, its peers and the roof. ``python -m benchmarks.load``.

Gloo ranks load a checkpoint as a model sharded by FSDP2. Each load has its own processes. They first load a
tiny model of the same architecture, so that imports and first calls are not counted. The clock runs from a
barrier until the last rank has written to every page of every parameter: before that, values may be in mapped
files.

- warm: the files are in the page cache
- float32: the same, loaded as float32
- lora: the same, with PEFT's adapter of r=16 on all linear layers
- cold: the files are dropped from the page cache (storage below a virtual machine may cache them still);
  disk share: bytes that came from the disk, over those of the checkpoint
- http: from a server that sends 200 MB/s to all ranks, and begins each answer 20 ms late; the bound is the
  bandwidth
"""

import argparse
import gc
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import meter, results, roof
from benchmarks.harness.checkpoints import SHAPES, Shape
from benchmarks.harness.results import SLACK_MIB, STAGING_MIB, Limit, say
from tests.support.http_store import HttpStore
from tests.support.local_ranks import RankError

PEERS = ("transformers", "accelerate-efficient", "set_model_state_dict", "dcp")
ARMS_BY_ROW = {
    "warm": ("shardwise", *PEERS, *roof.READS),
    "float32": ("shardwise", "transformers", "dcp"),
    "lora": ("shardwise", *PEERS),
    "cold": ("shardwise", "transformers", "dcp", *roof.READS),
    "http": ("shardwise",),
}
NOT_ON_MOE = ("set_model_state_dict", "dcp")
"""They take tensors as they are stored, and the experts of this checkpoint are stored one by one."""

RATIOS = {"transformers": 0.9, "accelerate-efficient": 0.12, "set_model_state_dict": 0.25, "dcp": 1.0}
BY_ROOF = 1.1
"""Within this ratio of the roof, a load need not be faster than DCP."""
READ_PHASE_RATIO, READ_RATIO, HTTP_RATIO = 1.3, 1.02, 1.15
HTTP_BYTES_PER_S, HTTP_LATENCY_S = 200e6, 0.02


@dataclass(frozen=True)
class Load:
    """One load: a loader and its request, a tiny checkpoint for first calls, and how the files are prepared."""

    arm: str
    source: str
    warm_up: str
    row: str
    patience_s: float = 0.0

    @property
    def dtype(self) -> str:
        return "float32" if self.row == "float32" else "auto"


def measure(job: Load) -> dict[str, Any]:
    """Load once on this rank. Collective: yes."""
    import torch.distributed as dist
    from benchmarks.harness import values
    from benchmarks.harness.loaders import LOADERS, Request
    from benchmarks.harness.training import quieten

    quieten()
    load = LOADERS[job.arm]
    first = load(Request(job.warm_up, job.dtype, job.row == "lora"))
    values.write_to_pages(first.model)
    del first
    gc.collect()
    files = [] if job.row == "http" else meter.files_of(Path(job.source))
    dist.barrier()
    if dist.get_rank() == 0:
        meter.drop_cache(files) if job.row == "cold" else meter.warm_cache(files)
        meter.wait_for_quiet(job.patience_s)
    memory = meter.MemoryWatch()
    dist.barrier()
    with memory, meter.Stopwatch() as watch:
        loaded = load(Request(job.source, job.dtype, job.row == "lora"))
        values.write_to_pages(loaded.model)
    return {
        **watch.facts(),
        "growth_bytes": memory.growth_bytes,
        "shard_bytes": sum(map(values.span_bytes, values.local_tensors(loaded.model))),
        "facts": dict(loaded.facts),
        "sums": values.sum_values(loaded.model),
    }


def join(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One run, from what its ranks report."""
    run: dict[str, Any] = dict(meter.join_ranks(ranks))
    if "sums" not in ranks[0]:
        return run
    from benchmarks.harness.values import join_sums

    run["growth_bytes"] = max(rank["growth_bytes"] for rank in ranks)
    run["over_shards_bytes"] = max(rank["growth_bytes"] - rank["shard_bytes"] for rank in ranks)
    run["is_in_memory"] = min(rank["growth_bytes"] / max(1, rank["shard_bytes"]) for rank in ranks) > 0.97
    run["sums"] = join_sums([rank["sums"] for rank in ranks])
    facts = [rank["facts"] for rank in ranks if rank["facts"]]
    if facts:
        run["phases"] = {name: max(fact["phases"].get(name, 0) for fact in facts) for name in facts[0]["phases"]}
        run["read_phase_s"] = run["phases"].get("read", 0) + run["phases"].get("materialize", 0)
        run["read_fraction"] = sum(fact["read_bytes"] for fact in facts) / facts[0]["checkpoint_bytes"]
    return run


def run_once(options: argparse.Namespace, job: Load) -> dict[str, Any]:
    """In new processes."""
    if job.arm in roof.READS:
        is_cold, folder = job.row == "cold", Path(job.source)
        return join(roof.measure_read(job.arm, folder, options.ranks, is_cold, job.patience_s))
    with results.start_ranks(options) as world:
        return join(world.run(measure, job))


def run_row(options: argparse.Namespace, row: str, shape: Shape) -> dict[str, Any]:
    """All arms in turn, and whether their models hold the values of the first."""
    from benchmarks.harness.values import compare

    folder, tiny = results.write_shape(options, shape)
    nbytes = sum(path.stat().st_size for path in meter.files_of(folder))
    arms = [arm for arm in ARMS_BY_ROW[row] if ("roof" if arm in roof.READS else arm) in options.arms]
    arms = [arm for arm in arms if not (shape.is_moe and arm in NOT_ON_MOE)]
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    notes: dict[str, str] = {}
    first: dict[str, str] = {}
    for arm in results.turns(arms, options.repeats):
        try:
            with serve(folder, row) as source, serve(tiny, row) as warm_up:
                run = run_once(options, Load(arm, source, warm_up, row, options.idle_wait))
        except RankError as error:  # a peer may fail; the others are still compared
            if arm == "shardwise":
                raise
            notes[arm] = str(error).strip().splitlines()[-1]
            continue
        run["disk_share"] = run["disk_bytes"] / nbytes
        if sums := run.pop("sums", None):
            first = first or sums
            if (verdict := compare(first, sums)) != "same":
                notes[arm] = f"its values differ: {verdict}"
            elif not options.tiny and not run["is_in_memory"]:
                notes[arm] = "the clock stopped before all values were in memory"
        runs[arm].append(run)
        say(f"  {shape.name} {row} {arm:<24} {run['seconds']:7.3f} s")
    return {"row": row, "model": folder.name, "bytes": nbytes, "notes": notes, "runs": runs}


@contextmanager
def serve(folder: Path, row: str) -> Iterator[str]:
    """The folder itself, or for "http" its URL on a server in another process."""
    if row != "http":
        yield str(folder)
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_serve, args=(str(folder), theirs), daemon=True).start()
    theirs.close()
    yield ours.recv()
    ours.close()


def _serve(folder: str, pipe: Connection) -> None:
    with HttpStore(folder, latency_s=HTTP_LATENCY_S, bytes_per_s=HTTP_BYTES_PER_S) as store:
        pipe.send(store.url)
        pipe.poll(None)  # until the other end is closed


def limits_of(row: Mapping[str, Any]) -> list[Limit]:
    name, ours = f"{row['model']}, {row['row']}", row["runs"].get("shardwise")
    if not ours:
        return []
    seconds = results.medians(row["runs"], "seconds")
    ours_s = seconds["shardwise"]
    roof_s = min((seconds[arm] for arm in roof.READS if arm in seconds), default=0.0)
    limits = []
    for peer, most in RATIOS.items():
        if peer in seconds:
            most = max(most, BY_ROOF * roof_s / seconds[peer]) if peer == "dcp" else most
            limits.append(Limit(f"{name}: time / {peer}", ours_s / seconds[peer], most))
    if roof_s and row["row"] == "warm":
        read_s = results.medians(row["runs"], "read_phase_s")["shardwise"]
        limits.append(Limit(f"{name}: read phase / roof", read_s / roof_s, READ_PHASE_RATIO))
    if row["row"] == "http":
        limits.append(Limit(f"{name}: time / bandwidth", ours_s / (row["bytes"] / HTTP_BYTES_PER_S), HTTP_RATIO))
    over_mib = results.most_mib(ours, "over_shards_bytes")
    limits.append(Limit(f"{name}: memory over the shards, MiB", over_mib, STAGING_MIB + SLACK_MIB))
    limits.append(Limit(f"{name}: read / checkpoint", max(run["read_fraction"] for run in ours), READ_RATIO))
    return limits


def lines_of(row: Mapping[str, Any]) -> Iterator[str]:
    figures = ("user_s", "system_s", "others_share", "disk_share")
    nbytes = ("growth_bytes", "over_shards_bytes")
    what = f"{row['model']}, {row['row']}"
    yield from results.runs_table(what, row["runs"], "shardwise", figures=figures, nbytes=nbytes)
    yield from (f"{arm}: {note}" for arm, note in row["notes"].items())
    if ours := row["runs"].get("shardwise"):
        yield from (results.phases_line(ours[-1]), "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__)
    models = ["qwen3-0.6b", "qwen3-moe"]
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=models, help=f"[{' '.join(models)}]")
    results.add_choice(
        parser, "--rows", ARMS_BY_ROW, f"of {', '.join(ARMS_BY_ROW)}; a mixture of experts: warm only"
    )
    results.add_choice(parser, "--arms", ["shardwise", *PEERS, "roof"], f"of shardwise, {', '.join(PEERS)}, roof")
    parser.add_argument("--idle-wait", type=float, default=3.0, help="seconds to wait for an idle machine")
    options = results.parse(parser, argv)
    report = results.describe(options, "load")
    shapes = [SHAPES[model] for model in options.models]
    rows = [
        run_row(options, row, shape)
        for shape in shapes
        for row in options.rows
        if row == "warm" or not shape.is_moe
    ]
    limits = [limit for row in rows for limit in limits_of(row)]
    about = "Processor time is summed over the ranks; memory is of the rank with most; others: what else ran. "
    about += "The values of all models are equal, if nothing else is said."
    lines = [line for row in rows for line in lines_of(row)]
    return results.publish(options, {**report, "rows": rows}, [about, "", *lines], limits)


if __name__ == "__main__":
    sys.exit(main())
