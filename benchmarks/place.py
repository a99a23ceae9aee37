"""On what is measured: what a reader must know to compare, and what all benchmarks of loading and saving share."""

import argparse
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RANKS = 4
STAGING_BYTES = 256 << 20
SLACK_BYTES = 32 << 20


def machine() -> dict[str, Any]:
    """What a reader must know to compare."""
    packages = ("torch", "transformers", "accelerate", "safetensors", "numpy")

    def text(path: str) -> str | None:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return None

    model = next(
        (
            line.partition(":")[2].strip()
            for line in (text("/proc/cpuinfo") or "").splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "kernel": platform.release(),
        "processor": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "thp_enabled": text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "thp_defrag": text("/sys/kernel/mm/transparent_hugepage/defrag"),
        "load_average_before": os.getloadavg()[0],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def commit() -> str:
    here = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "../src", "."], cwd=here, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        carried = here.parent / "build" / "gpu" / "commit"  # of `make wheels-for-gpu`
        return carried.read_text().strip() if carried.is_file() else "unknown"
    return f"{name} with changes" if changed else name


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``: where ranks hold what they measure."""
    parser.add_argument("--device", default="cpu", help="cpu, or an accelerator of which each rank has one: cuda")


def own_device() -> Any:
    """Return the device of this rank: the accelerator that the process group works on, or the CPU."""
    import torch
    import torch.distributed as dist

    from shardwise.models.torch_api import accelerator, has_collectives

    kind = accelerator() if dist.is_initialized() else None
    if kind is None or not has_collectives(kind):
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def synchronize() -> None:
    """Wait until the device of this rank has done what it was given."""
    import torch

    if own_device().type != "cpu":
        torch.accelerator.synchronize()


def say(line: str) -> None:
    print(line, flush=True)
