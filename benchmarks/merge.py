"""Merging, measured: sharded weights against accelerate's, and an adapter. ``python -m benchmarks.merge``.

At the end each merge of shardwise has to come to its end once more within a memory cgroup of 1 GiB.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks import caps
from benchmarks.checkpoints import SHAPES, Shape, write
from benchmarks.meter import MemoryWatch, Usage, cached_fraction, files_of, wait_for_quiet, warm_cache
from benchmarks.place import commit, machine, say

RANK = 16
CAP_BYTES = 1 << 30
ARMS = ("shardwise weights", "accelerate weights", "shardwise adapter")
CAPPED = ("shardwise weights", "shardwise adapter")


def prepare(shape: Shape, root: Path) -> Path:
    """A base, the same as a distributed checkpoint, and an adapter for all its linear modules."""
    from safetensors.torch import load_file, save_file

    base = write(shape, root)
    run, adapter = root / f"{shape.name}-run", root / f"{shape.name}-adapter"
    tensors: dict[str, torch.Tensor] = {}
    for file in files_of(base):
        tensors |= load_file(file)
    if not (run / "pytorch_model_fsdp_0" / ".metadata").is_file():
        import torch.distributed.checkpoint as dcp

        shutil.copytree(base, run, ignore=lambda _, names: [name for name in names if name != "config.json"])
        writer = dcp.FileSystemWriter(run / "pytorch_model_fsdp_0", thread_count=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": tensors}, storage_writer=writer, no_dist=True)
    if not (adapter / "adapter_config.json").is_file():
        adapter.mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        factors: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            if "_proj." in key:
                module = f"base_model.model.{key.removesuffix('.weight')}"
                factors[f"{module}.lora_A.weight"] = torch.rand((RANK, tensor.shape[1]), generator=generator)
                factors[f"{module}.lora_B.weight"] = torch.rand((tensor.shape[0], RANK), generator=generator)
        save_file(factors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 32}))
    return base


def run_arm(arm: str, shape: Shape, root: Path, out: Path) -> None:
    """One merge of this process."""
    run, adapter = root / f"{shape.name}-run", root / f"{shape.name}-adapter"
    if arm == "shardwise weights":
        from shardwise.interchange.merging_weights import merge_weights

        merge_weights(run, out)
    elif arm == "accelerate weights":
        from accelerate.utils import merge_fsdp_weights

        merge_fsdp_weights(str(run / "pytorch_model_fsdp_0"), str(out), safe_serialization=True)
        for file in files_of(out):  # shardwise does so, too
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    else:
        from shardwise.engines.merging_adapter import merge_adapter

        merge_adapter(root / shape.name, adapter, out)


def measure_here(arm: str, shape: Shape, root: Path, out: Path, cap_bytes: int) -> dict[str, float]:
    """In this process, which is fresh: once on a tiny model, then on this one, with a cap on that (0: none)."""
    from transformers.utils import logging as hf_logging

    warnings.simplefilter("ignore")
    hf_logging.disable_progress_bar()
    shutil.rmtree(out, ignore_errors=True)
    run_arm(arm, shape.tiny(), root, out)
    shutil.rmtree(out)
    folders = (
        root / shape.name,
        root / f"{shape.name}-run" / "pytorch_model_fsdp_0",
        root / f"{shape.name}-adapter",
    )
    files = [file for folder in folders for file in folder.iterdir() if file.is_file()]
    warm_cache(files)
    os.sync()
    wait_for_quiet(2)
    if cap_bytes:
        caps.enter(cap_bytes)
    start, before = time.perf_counter(), Usage.now()
    with MemoryWatch() as memory:
        run_arm(arm, shape, root, out)
        seconds, used = time.perf_counter() - start, Usage.now().since(before)
    processor_s = used.user_s + used.system_s
    return {
        "seconds": seconds,
        "processor_s": processor_s,
        "growth_mib": memory.growth / (1 << 20),
        "cached": cached_fraction(files),
    }


def same_values(root: Path, out: Path, shape: Shape) -> bool:
    """Whether the last outcome has the base's tensors, bit for bit."""
    from safetensors.torch import load_file

    wanted: dict[str, torch.Tensor] = {}
    for file in files_of(root / shape.name):
        wanted |= load_file(file)
    found: dict[str, torch.Tensor] = {}
    for file in files_of(out):
        found |= load_file(file)
    return all(torch.equal(found[key], wanted[key]) for key in found) and len(found) >= len(wanted) - shape.is_tied


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-1.7b", choices=[name for name in SHAPES if "moe" not in name])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "shardwise-benchmarks")
    parser.add_argument("--to", type=Path, help="Where the outcome goes; a tmpfs takes the disk out of the times.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shape = SHAPES[given.model]
    merged = (given.to or given.dir) / "shardwise-merged"
    if given.arm:
        print(json.dumps(measure_here(given.arm, shape, given.dir, merged, given.cap)))
        return 0
    for item in (shape, shape.tiny()):
        prepare(item, given.dir)
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.merge {' '.join(argv if argv is not None else sys.argv[1:])}".strip(),
        "commit": commit(),
        "machine": machine(),
        "model": shape.name,
        "to": str(merged.parent),
        "nbytes": shape.nbytes,
        "arms": {arm: [] for arm in ARMS},
        "same": {},
    }
    child = [sys.executable, "-m", "benchmarks.merge", "--model", given.model, "--dir", str(given.dir)]

    def measure(arm: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [*child, "--to", str(merged.parent), "--arm", arm, *more]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    for _ in range(given.repeats):
        for arm in ARMS:
            done = measure(arm)
            done.check_returncode()
            results["arms"][arm].append(json.loads(done.stdout.splitlines()[-1]))
            say(f"{arm}: {results['arms'][arm][-1]}")
            if "weights" in arm and arm not in results["same"]:
                results["same"][arm] = same_values(given.dir, merged, shape)
    results["capped"] = {}
    if why_not := caps.why_not():
        say(f"not under a cap: {why_not}")
    else:
        for arm in CAPPED:
            done = measure(arm, "--cap", str(CAP_BYTES))
            results["capped"][arm] = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else None
            say(f"{arm} under a cap: {results['capped'][arm] or done.stderr}")
        caps.clean_up()
    shutil.rmtree(merged, ignore_errors=True)
    out = given.out or Path(__file__).parent / "results" / f"merge-{results['date'][:10]}-{results['model']}.json"
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text(render(results))
    say(render(results))
    return 0 if all(results["capped"].values()) else 1


def render(results: dict[str, Any]) -> str:
    """The results as a page."""
    about = (
        f"{results['model']}, {results['nbytes'] / 1e9:.2f} GB bf16, files in the page cache, written to "
        f"{results['to']} and synced (accelerate's file by the benchmark); fresh processes, arms in turn, once on "
        "a tiny model first."
    )
    lines = [
        "# Merging",
        "",
        f"{results['date']}, commit {results['commit'][:12]}. `{results['command']}`",
        ", ".join(f"{key} {value}" for key, value in results["machine"].items() if isinstance(value, str | int)),
        about,
        "",
        "| arm | seconds | min .. max | processor seconds | memory growth MiB | values |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for arm, runs in results["arms"].items():
        seconds = [run["seconds"] for run in runs]
        growth = max(run["growth_mib"] for run in runs)
        same = {True: "same", False: "DIFFER", None: "-"}[results["same"].get(arm)]
        spread = f"{min(seconds):.2f} .. {max(seconds):.2f}"
        processor = statistics.median(run["processor_s"] for run in runs)
        median = statistics.median(seconds)
        lines.append(f"| {arm} | {median:.2f} | {spread} | {processor:.2f} | {growth:,.0f} | {same} |")
    if results["capped"]:
        lines += ["", f"Within a memory cgroup of {CAP_BYTES >> 20:,} MiB:"]
    for arm, run in results["capped"].items():
        lines.append(f"- {arm}: {'ends after ' + format(run['seconds'], '.2f') + ' s' if run else 'FAILS'}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
