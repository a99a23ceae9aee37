"""Saving, measured: shardwise, its peers and the roof, in one run, in turn. ``python -m benchmarks.save``.

Four gloo ranks hold a model and save it to a folder that is not there yet. The clock runs from a barrier until the
last rank has returned and every file, and the folder, has been synced to the disk: by the arm itself where it
does so, by the benchmark where it does not. The roof is as many processes that ``pwrite`` as many bytes into one
file whose space has been set aside, and sync it.
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import meter
from benchmarks.checkpoints import SHAPES, write
from benchmarks.limits import Limit
from benchmarks.meter import Usage
from benchmarks.place import RANKS, SLACK_BYTES, STAGING_BYTES, commit, machine
from safetensors import safe_open
from tests.support.local_ranks import LocalRanks

ARMS = ("shardwise", "transformers", "hugging_face_storage_writer", "roof")
RATIOS = {"transformers": 0.15, "hugging_face_storage_writer": 0.15, "roof": 1.3}
_CALL_BYTES = 16 << 20


@dataclass(frozen=True)
class Job:
    """What to measure: an arm, the checkpoint that it holds, a tiny one to begin with, and where to save."""

    arm: str
    folder: str
    warm_up: str
    out: str
    patience_s: float


def measure(job: Job) -> dict[str, Any]:
    """Save once. Collective: yes, over all ranks."""
    import torch
    import torch.distributed as dist
    import transformers
    from benchmarks.arms import ARMS as LOADERS
    from benchmarks.arms import Request

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    load = LOADERS["transformers" if job.arm == "transformers" else "shardwise"]
    save = _SAVES[job.arm]
    save(load(Request(Path(job.warm_up))).model, Path(f"{job.out}-tiny"))
    model = load(Request(Path(job.folder))).model
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{job.out}-tiny", ignore_errors=True)
        os.sync()
        meter.wait_for_quiet(job.patience_s)
    priority = meter.take_priority()
    dist.barrier()
    watch = meter.MemoryWatch()
    dist.barrier()
    meter.back_memory(_free_share(), dist.barrier)  # at last: what is free goes back to the host within seconds
    with watch as memory:
        dist.barrier()
        before, busy = Usage.now(), meter.machine_busy_s()
        start = meter.timestamp()
        facts = save(model, Path(job.out))
        returned = meter.timestamp()
        dist.barrier()
        if dist.get_rank() == 0 and job.arm != "shardwise":
            _sync(Path(job.out))
        dist.barrier()
        stop = meter.timestamp()
        used, busy = Usage.now().since(before), meter.machine_busy_s() - busy
    return {
        "start": start,
        "returned": returned,
        "stop": stop,
        "usage": vars(used),
        "machine_busy_s": busy,
        "priority": priority,
        "growth_bytes": memory.growth,
        "facts": facts,
    }


def _free_share() -> int:
    """Bytes that a rank has to touch twice so that all have touched most of what is free.

    The page cache takes any of it, so that all of it must exist; see :func:`benchmarks.meter.back_memory`.
    """
    return meter.free_bytes() * 2 // 5 // RANKS


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _with_shardwise(model: Any, out: Path) -> Mapping[str, Any]:
    import shardwise

    return dict(shardwise.save(model, out).seconds)


def _with_transformers(model: Any, out: Path) -> Mapping[str, Any]:
    model.save_pretrained(out)
    return {}


def _with_storage_writer(model: Any, out: Path) -> Mapping[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    state = dict(model.named_parameters())
    writer = HuggingFaceStorageWriter(
        str(out), fqn_to_index_mapping=dict.fromkeys(state, 1), save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer)
    return {}


_SAVES: dict[str, Callable[[Any, Path], Mapping[str, Any]]] = {
    "shardwise": _with_shardwise,
    "transformers": _with_transformers,
    "hugging_face_storage_writer": _with_storage_writer,
}


# ── the roof ──────────────────────────────────────────────────────────────────────────────────────


def roof(nbytes: int, out: Path, patience_s: float) -> list[dict[str, Any]]:
    """As many processes write as many bytes, each to its part of a file."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(RANKS)
    pipes = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        arguments = (barrier, rank, nbytes, str(out), patience_s, theirs)
        context.Process(target=_pour, args=arguments, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    return [pipe.recv() for pipe in pipes]


def _pour(barrier: Any, rank: int, nbytes: int, out: str, patience_s: float, pipe: Connection) -> None:
    start, stop = nbytes * rank // RANKS, nbytes * (rank + 1) // RANKS
    memory = bytearray(os.urandom(1 << 20)) * ((stop - start >> 20) + 1)
    if rank == 0:
        os.sync()
        meter.wait_for_quiet(patience_s)
    priority = meter.take_priority()
    barrier.wait()
    meter.back_memory(_free_share(), barrier.wait)
    before, busy = Usage.now(), meter.machine_busy_s()
    began = meter.timestamp()
    if rank == 0:
        os.makedirs(out)
        descriptor = os.open(f"{out}/roof", os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(descriptor, 0, nbytes)
    barrier.wait()
    if rank:
        descriptor = os.open(f"{out}/roof", os.O_WRONLY)
    view, place = memoryview(memory), start
    while place < stop:
        count = min(_CALL_BYTES, stop - place)
        place += os.pwrite(descriptor, view[place - start : place - start + count], place)
    os.fsync(descriptor)
    os.close(descriptor)
    barrier.wait()
    ended = meter.timestamp()
    used, busy = Usage.now().since(before), meter.machine_busy_s() - busy
    pipe.send(
        {
            "start": began,
            "returned": ended,
            "stop": ended,
            "usage": vars(used),
            "machine_busy_s": busy,
            "priority": priority,
            "growth_bytes": 0,
            "facts": {},
        }
    )


# ── running ───────────────────────────────────────────────────────────────────────────────────────


def main() -> int:
    """Measure, show, write down; the exit status says whether every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7b", choices=sorted(SHAPES))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one save")
    parser.add_argument("--idle-wait", type=float, default=60, help="seconds to wait for an idle machine")
    given = parser.parse_args()
    began = time.perf_counter()
    shape = SHAPES[given.model]
    folder, warm_up = write(shape, given.dir), write(shape.tiny(), given.dir)
    arms = [arm for arm in given.arms.split(",") if arm in ARMS]
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    out = given.dir / "saved"
    kept: dict[str, Path] = {}
    same = "not compared"
    for repeat in range(given.repeats):
        for arm in arms:
            shutil.rmtree(out, ignore_errors=True)
            if arm == "roof":
                found = roof(shape.nbytes, out, given.idle_wait)
            else:
                job = Job(arm, str(folder), str(warm_up), str(out), given.idle_wait)
                with LocalRanks(RANKS, timeout_s=given.timeout) as ranks:
                    found = ranks.run(measure, job)
            runs[arm].append(_summary(found))
            print(f"  {repeat + 1}/{given.repeats} {arm:30s} {runs[arm][-1]['wall_s']:.3f} s", flush=True)
            if repeat == 0 and arm in ("shardwise", "transformers"):
                kept[arm] = given.dir / f"saved-{arm}"
                shutil.rmtree(kept[arm], ignore_errors=True)
                out.rename(kept[arm])
        if repeat == 0 and len(kept) == 2:
            same = _compare(*(kept[arm] / "model.safetensors" for arm in ("shardwise", "transformers")))
        for path in (*kept.values(), out):
            shutil.rmtree(path, ignore_errors=True)
    table = {arm: _statistics(found) for arm, found in runs.items()}
    limits = _limits(table)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.save", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "model": shape.name,
        "bytes": shape.nbytes,
        "minutes": (time.perf_counter() - began) / 60,
        "file": same,
        "limits": [vars(limit) | {"verdict": limit.verdict} for limit in limits],
        "arms": table,
        "runs": runs,
    }
    text = "\n".join(_lines(results)) + "\n"
    print(text)
    place = given.out or Path("benchmarks/results", f"save-{datetime.now(UTC):%Y-%m-%d-%H%M}")
    place.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{place}.json").write_text(json.dumps(results, indent=1))
    Path(f"{place}.md").write_text(text)
    return 1 if same == "DIFFERENT" or any(limit.verdict == "FAIL" for limit in limits) else 0


def _compare(ours: Path, theirs: Path) -> str:
    """What one file has that the other has not, in words."""
    if filecmp.cmp(ours, theirs, shallow=False):
        return "byte for byte the same"
    with safe_open(ours, "np") as one, safe_open(theirs, "np") as other:
        # A gathered state dict has lost its ties: transformers stores a tied head twice.
        twice = set(other.keys()) - set(one.keys())
        if set(one.keys()) - set(other.keys()) or not twice <= {"lm_head.weight"}:
            return "DIFFERENT"
    with safe_open(ours, "pt") as one, safe_open(theirs, "pt") as other:
        if any(not one.get_tensor(key).equal(other.get_tensor(key)) for key in one.keys()):  # noqa: SIM118
            return "DIFFERENT"
    return f"the same tensors, and transformers stores {', '.join(sorted(twice))} once more"


def _summary(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    start = min(rank["start"] for rank in ranks)
    wall = max(rank["stop"] for rank in ranks) - start
    used = sum(rank["usage"]["user_s"] + rank["usage"]["system_s"] for rank in ranks)
    busy = max(rank["machine_busy_s"] for rank in ranks)
    facts = [rank["facts"] for rank in ranks]
    return {
        "wall_s": wall,
        "user_s": sum(rank["usage"]["user_s"] for rank in ranks),
        "system_s": sum(rank["usage"]["system_s"] for rank in ranks),
        "growth_bytes": max(rank["growth_bytes"] for rank in ranks),
        "others_share": max(0.0, busy - used) / (wall * len(os.sched_getaffinity(0))),
        "phases": {phase: max(fact[phase] for fact in facts) for phase in facts[0]},
    }


def _statistics(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    walls = [run["wall_s"] for run in runs]
    return {
        "wall_s": {"median": statistics.median(walls), "min": min(walls), "max": max(walls)},
        "user_s": statistics.median(run["user_s"] for run in runs),
        "system_s": statistics.median(run["system_s"] for run in runs),
        "growth_bytes": max(run["growth_bytes"] for run in runs),
        "others_share": statistics.median(run["others_share"] for run in runs),
        "phases": {phase: statistics.median(run["phases"][phase] for run in runs) for phase in runs[0]["phases"]},
    }


def _limits(table: Mapping[str, Any]) -> list[Limit]:
    ours = table.get("shardwise")
    if ours is None:
        return []
    median = ours["wall_s"]["median"]
    found = [
        Limit(f"time / {arm}", median / table[arm]["wall_s"]["median"], most)
        for arm, most in RATIOS.items()
        if arm in table
    ]
    most_mib = (STAGING_BYTES + SLACK_BYTES) / (1 << 20)
    return [*found, Limit("memory growth of a rank, MiB", ours["growth_bytes"] / (1 << 20), most_mib)]


_ABOUT = (
    "The clock runs until all is synced to the disk. Processor time is summed over the ranks; memory "
    "is that of the "
    "rank with most."
)


def _lines(results: Mapping[str, Any]) -> list[str]:
    host = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    memory = f"{host['memory_bytes'] / 2**30:.0f} GiB"
    cpus = f"{host['cpus']} cores ({host['processor']}), {memory}, Linux {host['kernel']}"
    lines = [
        "# Saving",
        "",
        f"{results['date']}, commit {results['commit']}, {results['minutes']:.0f} minutes.",
        f"`{results['command']}`",
        f"{cpus}; Python {host['python']}, {versions}.",
        f"{RANKS} gloo ranks hold {results['model']}, {results['bytes'] / 1e9:.2f} GB bf16. {_ABOUT}",
        f"What shardwise saved and what transformers saved: {results['file']}.",
        "",
        "| promise | measured | at most | |",
        "|---|--:|--:|---|",
        *(
            f"| {limit['name']} | {limit['value']:.3g} | {limit['most']:g} | {limit['verdict']} |"
            for limit in results["limits"]
        ),
        "",
        "| arm | seconds | min .. max | shardwise / it | user s | system s | memory growth MiB | others |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    ours = results["arms"].get("shardwise", {}).get("wall_s", {}).get("median")
    for name, arm in results["arms"].items():
        wall = arm["wall_s"]
        ratio = f"{ours / wall['median']:.3f}" if ours else "-"
        span = f"{wall['min']:.3f} .. {wall['max']:.3f}"
        used = f"{arm['user_s']:.2f} | {arm['system_s']:.2f} | {arm['growth_bytes'] / 2**20:.0f}"
        lines.append(f"| {name} | {wall['median']:.3f} | {span} | {ratio} | {used} | {arm['others_share']:.0%} |")
    phases = results["arms"].get("shardwise", {}).get("phases", {})
    words = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in phases.items())
    return [*lines, "", f"shardwise by phase, seconds of the slowest rank: {words}."]


if __name__ == "__main__":
    sys.exit(main())
