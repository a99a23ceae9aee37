"""What surrounds a measurement: arguments, arms in turn, limits, tables, and the files of results."""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.checkpoints import Shape, write
from benchmarks.harness.meter import spread
from tests.support.local_ranks import LocalRanks

ROOT = Path(__file__).parents[2]
STAGING_MIB = 256
"""The default budget of a load and a save."""
SLACK_MIB = 32
"""What libraries may allocate beside the shards and the budget."""
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors", "numpy")


@dataclass(frozen=True)
class Limit:
    """A promise: a value, mostly a ratio of medians, that is at most ``most``."""

    name: str
    value: float
    most: float

    @property
    def is_kept(self) -> bool:
        return self.value <= self.most


def parser(doc: str | None, *, ranks: int = 4, repeats: int | None = 5) -> argparse.ArgumentParser:
    """Arguments that all benchmarks have."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tiny", action="store_true", help="shapes that take seconds, to see that it runs")
    arguments.add_argument("--ranks", type=int, default=ranks)
    if repeats is not None:
        arguments.add_argument(
            "--repeats", type=int, default=repeats, help=f"rounds, in which arms take turns [{repeats}]"
        )
    arguments.add_argument(
        "--device", default="cpu", help="cpu, or an accelerator of which each rank has one: cuda"
    )
    arguments.add_argument(
        "--out", type=Path, help="results, as .json and .md [benchmarks/results; none with --tiny]"
    )
    arguments.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    arguments.add_argument("--timeout", type=float, default=1800, help="seconds for one measurement [1800]")
    arguments.set_defaults(began=time.monotonic())
    return arguments


def add_choice(arguments: argparse.ArgumentParser, flag: str, choices: Iterable[str], text: str) -> None:
    """Add an argument that takes some of these names; without it, all of them."""
    choices = list(choices)
    arguments.add_argument(flag, nargs="+", choices=choices, default=choices, metavar="NAME", help=text)


def parse(arguments: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """With ``--tiny``, one round unless told otherwise. Ranks inherit one thread, and no way to the Hub."""
    options = arguments.parse_args(argv)
    repeats = arguments.get_default("repeats")
    if options.tiny and repeats is not None and options.repeats == repeats:
        options.repeats = 1
    options.command = list(argv if argv is not None else sys.argv[1:])
    options.dir.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return options


def write_shape(options: argparse.Namespace, shape: Shape) -> tuple[Path, Path]:
    """The folder of a checkpoint, and of a tiny one of its architecture for first calls."""
    tiny = write(shape.tiny(), options.dir)
    return (tiny if options.tiny else write(shape, options.dir)), tiny


def start_ranks(options: Any, size: int | None = None) -> LocalRanks:
    """Start as many processes as there are ranks. They import what they need by themselves, but for tiny shapes."""
    is_forked = options.tiny and options.device == "cpu"  # CUDA does not survive a fork
    return LocalRanks(size or options.ranks, timeout_s=options.timeout, device=options.device, is_forked=is_forked)


def turns(arms: Iterable[str], repeats: int) -> Iterator[str]:
    """All arms once in each round, in another order in each: an arm finds memory as the last one has left it."""
    for repeat in range(repeats):
        order = list(arms)
        if repeat:
            random.Random(repeat).shuffle(order)
        yield from order


def medians(runs: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> dict[str, float]:
    """By arm, the median of a figure over its runs. Arms without it are left out."""
    return {arm: spread(run[key] for run in of)["median"] for arm, of in runs.items() if of and key in of[0]}


def slowest(steps: Sequence[Sequence[float]]) -> list[float]:
    """From the seconds of steps by rank: of each step that of the slowest, without the first, which sets up."""
    return [max(each) for each in zip(*steps, strict=True)][1:]


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of Markdown. The first column is of words, all others of numbers."""
    head = [f"| {' | '.join(columns)} |", f"|---|{'--:|' * (len(columns) - 1)}"]
    return [*head, *(f"| {' | '.join(map(_cell, row))} |" for row in rows), ""]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.001 else f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def runs_table(
    what: str,
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    ours: str,
    *,
    figures: Sequence[str] = (),
    nbytes: Sequence[str] = (),
) -> list[str]:
    """By arm: seconds, what ours takes over it, medians of more figures, and the most bytes of any run in MiB."""
    runs = {arm: of for arm, of in runs.items() if of}
    ours_s = medians(runs, "seconds").get(ours)
    rows = []
    for arm, of in runs.items():
        seconds = spread(run["seconds"] for run in of)
        row = [arm, seconds["median"], f"{seconds['min']:.3g} .. {seconds['max']:.3g}"]
        row += [None if ours_s is None else ours_s / seconds["median"]]
        row += [medians({arm: of}, key).get(arm) for key in figures]
        row += [most_mib(of, key) if key in of[0] else None for key in nbytes]
        rows.append(row)
    names = [f"{key.removesuffix('_bytes').replace('_', ' ')}, MiB" for key in nbytes]
    figures = [f"{key[:-2]}, s" if key.endswith("_s") else key.replace("_", " ") for key in figures]
    return table([what, "seconds", "min .. max", f"{ours} / it", *figures, *names], rows)


def most_mib(runs: Iterable[Mapping[str, Any]], key: str) -> float:
    return float(max(run[key] for run in runs) / 2**20)


def phases_line(run: Mapping[str, Any]) -> str:
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in run["phases"].items())
    return f"shardwise by phase, seconds of the slowest rank: {phases}."


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


def machine() -> dict[str, Any]:
    """What a reader must know to compare."""
    cpuinfo = _text("/proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "versions": {one.name: one.version for one in importlib.metadata.distributions() if one.name in _PACKAGES},
        "kernel": platform.release(),
        "processor": names[0] if names else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "thp_enabled": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average_before": os.getloadavg()[0],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def commit() -> str:
    """The commit, and whether the sources differ from it."""
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--", "src", "benchmarks/*.py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return _text(str(ROOT / "build" / "gpu" / "commit")) or "unknown"  # of `make wheels-for-gpu`
    return f"{name} with changes" if changes else name


def describe(options: argparse.Namespace, module: str) -> dict[str, Any]:
    """Date, command, commit and machine. Taken before the measurement, because the load average counts."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([f"python -m benchmarks.{module}", *options.command]),
        "commit": commit(),
        "machine": machine(),
        "ranks": options.ranks,
        "device": options.device,
    }


def publish(
    options: argparse.Namespace,
    results: dict[str, Any],
    lines: Iterable[str],
    limits: Sequence[Limit] = (),
    name: str = "",
) -> int:
    """Print results, and write them as .json with every run and as .md. Return 1 if a promise is not kept."""
    module = results["command"].split()[2].rpartition(".")[2]
    host = results["machine"]
    results["minutes"] = (time.monotonic() - options.began) / 60
    results["limits"] = [vars(limit) for limit in limits]
    head = [
        f"# {module}{name}",
        "",
        f"{results['date']}, commit {results['commit']}, {results['minutes']:.1f} minutes. `{results['command']}`",
        "",
        f"{options.ranks} ranks on {options.device}; {host['cpus']} cores ({host['processor']}), "
        f"{host['memory_bytes'] / 2**30:.0f} GiB, load average {host['load_average_before']:.1f} before; Linux "
        f"{host['kernel']}, Python {host['python']}, "
        + ", ".join(f"{package} {version}" for package, version in host["versions"].items()),
        "",
    ]
    if options.tiny:
        head += ["Tiny shapes: figures mean nothing.", ""]
    if limits:
        verdicts = [(one.name, one.value, one.most, "kept" if one.is_kept else "**MISSED**") for one in limits]
        head += table(["promise", "measured", "at most", ""], verdicts)
    text = "\n".join([*head, *lines]).rstrip() + "\n"
    print(text, flush=True)
    out = options.out
    if out is None and not options.tiny:
        out = ROOT / "benchmarks" / "results" / f"{module}{name}-{results['date'][:10]}-{results['commit'][:12]}"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").write_text(json.dumps(results, indent=1) + "\n")
        Path(f"{out}.md").write_text(text)
    return int(not options.tiny and not all(limit.is_kept for limit in limits))


def say(line: str) -> None:
    print(line, flush=True)
