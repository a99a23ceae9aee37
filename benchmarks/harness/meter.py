"""Instruments: seconds, processor time, memory over time, the page cache. Without torch."""

import json
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

_SAMPLE_S = 0.01
_TICKS_S = 0.04
"""The error of processor times that the kernel counts in ticks."""


# ── time ──────────────────────────────────────────────────────────────────────────────────────────


def timestamp() -> float:
    """Seconds on a clock that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Stopwatch:
    """What a block takes on this rank: seconds, processor seconds, page faults, bytes from the disk."""

    def __enter__(self) -> Self:
        self._before, self.start = _read_counters(), timestamp()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop = timestamp()
        after = _read_counters()
        self.used = {name: value - self._before[name] for name, value in after.items()}

    def facts(self) -> dict[str, float]:
        return {"start": self.start, "stop": self.stop, **self.used}


def _read_counters() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "user_s": usage.ru_utime,
        "system_s": usage.ru_stime,
        "minor_faults": usage.ru_minflt,
        "disk_bytes": int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0]),
        "machine_s": machine_busy_s(),
    }


def join_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A run, from the facts of its ranks: from the first start to the last stop, and sums of what was used."""
    run = {"seconds": max(rank["stop"] for rank in ranks) - min(rank["start"] for rank in ranks)}
    for name in ("user_s", "system_s", "minor_faults", "disk_bytes"):
        run[name] = sum(rank[name] for rank in ranks)
    others_s = max(rank["machine_s"] for rank in ranks) - run["user_s"] - run["system_s"] - _TICKS_S
    run["others_share"] = max(0.0, others_s) / (run["seconds"] * len(os.sched_getaffinity(0)))
    return run


def machine_busy_s() -> float:
    """Processor seconds that this machine has spent on anything, including those that its host has taken."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience_s: float) -> None:
    """Return when the machine has been nearly idle for 0.3 s, or after ``patience_s``."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        before = machine_busy_s()
        time.sleep(0.3)
        if machine_busy_s() - before <= 0.05 * 0.3 * (os.cpu_count() or 1) + 0.01:
            return


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


class MemoryWatch:
    """Private and shared memory (RssAnon + RssShmem) of this process over time, in a block.

    Sampled by a process beside it, because a thread would take the interpreter's lock a hundred times a second.
    Pages of mapped files are recorded separately: the kernel can reclaim them.

    Attributes:
        samples: (seconds, private and shared bytes, mapped bytes); the first is from before the block.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-E", "-c", _WATCH, str(os.getpid()), str(_SAMPLE_S)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._wait_for(b"ready\n")  # starting it is not part of the block
        self.samples: list[tuple[float, int, int]] = []

    def __enter__(self) -> Self:
        assert self._process.stdin is not None
        self._process.stdin.write(b"begin\n")
        self._process.stdin.flush()
        self._wait_for(b"begun\n")
        return self

    def __exit__(self, *error: object) -> None:
        answer, _ = self._process.communicate(b"end")
        self.samples = [(seconds, own, mapped) for seconds, own, mapped in json.loads(answer)]

    def _wait_for(self, line: bytes) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != line:
            raise RuntimeError("the process that samples memory has ended")

    @property
    def growth_bytes(self) -> int:
        """The highest level above the first."""
        return max(own for _, own, _ in self.samples) - self.samples[0][1]


_WATCH = """
import json, os, select, sys, time
status = os.open(f"/proc/{sys.argv[1]}/status", os.O_RDONLY)
def sample():
    lines = os.pread(status, 4096, 0).splitlines()
    kib = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith(b"Rss")}
    own, mapped = kib[b"RssAnon:"] + kib[b"RssShmem:"], kib[b"RssFile:"]
    samples.append((time.clock_gettime(time.CLOCK_MONOTONIC), own << 10, mapped << 10))
samples = []
print("ready", flush=True)
if os.read(0, 64) == b"begin\\n":
    sample()
    print("begun", flush=True)
    while not select.select([0], [], [], float(sys.argv[2]))[0]:
        sample()
    sample()
    print(json.dumps(samples))
"""
"""The program of the sampling process. It ends when anything comes on its standard input, or that is closed."""


def back_memory(nbytes: int, barrier: Callable[[], object]) -> None:
    """Touch this much memory and free it, so that pages exist when the page cache of a save needs them.

    Free memory of a virtual machine may belong to its host (free page reporting): its first touch takes several
    times as long as the next one. The host reclaims it after two seconds. ``nbytes`` are touched in small pages,
    and as many in huge ones, because an allocator takes them from different places. Collective: yes.
    """
    regions = []
    for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE):
        region = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.madvise(advice)
        np.frombuffer(region, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
        regions.append(region)
    barrier()
    for region in regions:
        region.close()
    barrier()


def free_bytes() -> int:
    """Memory that nothing uses, not even the page cache (MemFree)."""
    text = Path("/proc/meminfo").read_text()
    return 1024 * int(text.partition("MemFree:")[2].split(None, 1)[0])


# ── the page cache ────────────────────────────────────────────────────────────────────────────────


def files_of(folder: Path) -> list[Path]:
    """The files with tensors."""
    return sorted(folder.glob("*.safetensors"))


def warm_cache(files: Iterable[Path]) -> None:
    """Read everything once."""
    block = bytearray(16 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def drop_cache(files: Iterable[Path]) -> None:
    """Ask the kernel to drop the files' pages."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_files(folder: Path) -> None:
    """Sync a folder and all that is in it to the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def spread(values: Iterable[Any]) -> dict[str, float]:
    ordered = np.sort(list(values))
    return {"median": float(np.median(ordered)), "min": float(ordered[0]), "max": float(ordered[-1])}
