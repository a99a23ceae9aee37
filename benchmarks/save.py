"""Saving: shardwise, its peers and the roof. ``python -m benchmarks.save``.

Gloo ranks hold a model and save it to a new folder. The clock runs from a barrier until the last rank has
returned and all files are synced to the disk: by the arm itself, or else by the benchmark. Before it, free
memory is touched, so that the page cache, of which peers take much, finds pages that exist. The roof: as many
processes write as many bytes into one file whose space is allocated, and sync it.
"""

import argparse
import filecmp
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import meter, results, roof
from benchmarks.harness.checkpoints import SHAPES
from benchmarks.harness.results import SLACK_MIB, STAGING_MIB, Limit, say
from safetensors import safe_open

ARMS = ("shardwise", "transformers", "hugging_face_storage_writer", "roof")
RATIOS = {"transformers": 0.15, "hugging_face_storage_writer": 0.15, "roof": 1.3}


@dataclass(frozen=True)
class Save:
    """An arm, the checkpoint that it holds, a tiny one for first calls, the new folder, and memory to touch."""

    arm: str
    source: str
    warm_up: str
    out: str
    backed_bytes: int
    patience_s: float


def measure(job: Save) -> dict[str, Any]:
    """Save once. Collective: yes."""
    import torch.distributed as dist
    from benchmarks.harness.loaders import LOADERS, Request
    from benchmarks.harness.training import quieten

    quieten()
    load = LOADERS["transformers" if job.arm == "transformers" else "shardwise"]
    save(job.arm, load(Request(job.warm_up)).model, f"{job.out}-tiny")
    model = load(Request(job.source)).model
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{job.out}-tiny", ignore_errors=True)
        os.sync()
        meter.wait_for_quiet(job.patience_s)
    memory = meter.MemoryWatch()
    dist.barrier()
    # Right before the clock: the host of a virtual machine reclaims free pages within seconds.
    meter.back_memory(job.backed_bytes, dist.barrier)
    with memory, meter.Stopwatch() as watch:
        phases = save(job.arm, model, job.out)
        dist.barrier()
        if dist.get_rank() == 0 and job.arm != "shardwise":
            meter.sync_files(Path(job.out))
        dist.barrier()
    return {**watch.facts(), "growth_bytes": memory.growth_bytes, "phases": phases}


def save(arm: str, model: Any, out: str) -> Mapping[str, float]:
    """Return seconds by phase, of our arm. Collective: yes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    import shardwise

    if arm == "shardwise":
        return dict(shardwise.save(model, out).seconds)
    if arm == "transformers":
        model.save_pretrained(out)
        return {}
    state_dict = dict(model.named_parameters())
    files = dict.fromkeys(state_dict, 1)
    writer = HuggingFaceStorageWriter(out, files, save_distributed=True, enable_consolidation=True)
    dcp.save(state_dict, storage_writer=writer)
    return {}


def compare(ours: Path, theirs: Path) -> str:
    """What distinguishes two files, in words. Different values are an error."""
    if filecmp.cmp(ours, theirs, shallow=False):
        return "byte for byte the same"
    with safe_open(ours, "pt") as one, safe_open(theirs, "pt") as other:
        more = set(other.keys()) - set(one.keys())
        different = [key for key in one.keys() if not one.get_tensor(key).equal(other.get_tensor(key))]  # noqa: SIM118
    # A gathered state dict has lost its ties: transformers stores a tied head twice.
    if different or not more <= {"lm_head.weight"}:
        raise RuntimeError(f"{ours} and {theirs} differ in {[*different, *more]}")
    return f"the same tensors, and transformers stores {', '.join(sorted(more))} once more"


def run_arms(options: argparse.Namespace) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """The runs by arm, and how the file of transformers compares with ours."""
    shape = SHAPES[options.model]
    folder, tiny = results.write_shape(options, shape)
    nbytes = sum(path.stat().st_size for path in meter.files_of(folder))
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms}
    comparison = "not compared"
    for arm in results.turns(options.arms, options.repeats):
        out = options.dir / f"saved-{arm}"
        shutil.rmtree(out, ignore_errors=True)
        # Touched in two ways on each rank: four fifths of what is free.
        backed_bytes = 0 if options.tiny else meter.free_bytes() * 2 // 5 // options.ranks
        if arm == "roof":
            ranks = roof.measure_write(nbytes, out, options.ranks, backed_bytes, options.idle_wait)
        else:
            with results.start_ranks(options) as world:
                ranks = world.run(
                    measure, Save(arm, str(folder), str(tiny), str(out), backed_bytes, options.idle_wait)
                )
        run: dict[str, Any] = dict(meter.join_ranks(ranks))
        if arm != "roof":
            run["growth_bytes"] = max(rank["growth_bytes"] for rank in ranks)
            run["phases"] = {phase: max(rank["phases"][phase] for rank in ranks) for phase in ranks[0]["phases"]}
        runs[arm].append(run)
        say(f"  {arm:30s} {run['seconds']:.3f} s")
        saved = [options.dir / f"saved-{each}" / "model.safetensors" for each in ("shardwise", "transformers")]
        if comparison == "not compared" and all(path.is_file() for path in saved):
            comparison = compare(*saved)
        if arm == "roof" or len(runs[arm]) > 1:
            shutil.rmtree(out)
    for arm in options.arms:
        shutil.rmtree(options.dir / f"saved-{arm}", ignore_errors=True)
    return runs, comparison


def lines_of(runs: Mapping[str, Any], comparison: str) -> Iterator[str]:
    yield f"What shardwise saved and what transformers saved: {comparison}."
    yield ""
    figures, nbytes = ("user_s", "system_s", "others_share"), ("growth_bytes",)
    yield from results.runs_table("arm", runs, "shardwise", figures=figures, nbytes=nbytes)
    if ours := runs.get("shardwise"):
        yield results.phases_line(ours[-1])


def limits_of(runs: Mapping[str, Any]) -> list[Limit]:
    seconds = results.medians(runs, "seconds")
    if "shardwise" not in seconds:
        return []
    limits = [
        Limit(f"time / {arm}", seconds["shardwise"] / seconds[arm], most)
        for arm, most in RATIOS.items()
        if arm in seconds
    ]
    growth_mib = results.most_mib(runs["shardwise"], "growth_bytes")
    return [*limits, Limit("memory growth of a rank, MiB", growth_mib, STAGING_MIB + SLACK_MIB)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(SHAPES), help="[qwen3-1.7b]")
    results.add_choice(parser, "--arms", ARMS, f"of {', '.join(ARMS)}")
    parser.add_argument("--idle-wait", type=float, default=60, help="seconds to wait for an idle machine [60]")
    options = results.parse(parser, argv)
    report = results.describe(options, "save")
    runs, comparison = run_arms(options)
    report |= {"model": options.model, "file": comparison, "runs": runs}
    return results.publish(options, report, lines_of(runs, comparison), limits_of(runs))


if __name__ == "__main__":
    sys.exit(main())
