"""Instruments: what a load costs, what is in the page cache, whether two models are the same. No torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

_SAMPLE_S = 0.005
_MASK = (1 << 64) - 1


# ── time, processor, page faults ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Usage:
    """What this process has used so far. Seconds, and counts of page faults."""

    user_s: float
    system_s: float
    minor_faults: int
    major_faults: int

    @classmethod
    def now(cls) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_utime, used.ru_stime, used.ru_minflt, used.ru_majflt)

    def since(self, before: Usage) -> Usage:
        return Usage(
            self.user_s - before.user_s,
            self.system_s - before.system_s,
            self.minor_faults - before.minor_faults,
            self.major_faults - before.major_faults,
        )


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


class MemoryWatch:
    """Highest RssAnon + RssShmem of this process over its level at the start, sampled by a process of its own.

    A thread would take the interpreter's lock from the load two hundred times a second. Pages of mapped files are
    not counted: they can be dropped at any time.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-E", "-c", _WATCH, str(os.getpid()), str(_SAMPLE_S)]
        self._watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._watch.stdout is not None
        self._watch.stdout.readline()  # it has begun
        self.before = self.highest = anonymous_bytes()
        self.samples = 0

    @property
    def growth(self) -> int:
        return self.highest - self.before

    def __enter__(self) -> Self:
        assert self._watch.stdin is not None
        assert self._watch.stdout is not None
        self._watch.stdin.write(b"begin\n")
        self._watch.stdin.flush()
        self._watch.stdout.readline()  # what was before is forgotten
        self.before = self.highest = anonymous_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        told, _ = self._watch.communicate(b"end")
        highest, samples = map(int, told.split())
        self.highest, self.samples = max(self.highest, highest, anonymous_bytes()), samples


def anonymous_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    text = Path("/proc/self/status").read_bytes()
    return 1024 * sum(int(text.partition(name)[2].split(None, 1)[0]) for name in (b"RssAnon:", b"RssShmem:"))


_WATCH = """
import os, select, sys
status = os.open(f"/proc/{sys.argv[1]}/status", os.O_RDONLY)
highest = samples = 0
print("ready", flush=True)
while True:
    if select.select([0], [], [], float(sys.argv[2]))[0]:
        if os.read(0, 64) != b"begin\\n":
            break
        highest = samples = 0
        print("begun", flush=True)
    text = os.pread(status, 4096, 0)
    if b"RssAnon:" not in text:
        break  # the process has ended
    level = sum(int(text.partition(name)[2].split(None, 1)[0]) for name in (b"RssAnon:", b"RssShmem:"))
    highest, samples = max(highest, 1024 * level), samples + 1
print(highest, samples)
"""
"""The program of the watching process: samples until anything comes on its standard input."""


def back_memory(nbytes: int, barrier: Callable[[], object]) -> None:
    """Touch this much memory and give it back, so that the next allocations find pages that exist.

    A virtual machine's free memory may belong to its host (free page reporting); the first touch then costs
    several times as much as the same touch a moment later. Without this, an arm's time depends on how long ago
    somebody else used as much memory. ``nbytes`` are touched in small pages and as many in huge ones, since an
    allocator takes the one kind from other places than the other, and all ranks give them back at the same time.

    The host has it back after two seconds; see :mod:`benchmarks.ballast`.

    Collective: yes.
    """
    held: list[mmap.mmap] = []
    for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE):
        held.append(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        held[-1].madvise(advice)
        pages = np.frombuffer(held[-1], dtype=np.uint8)
        pages[:: mmap.PAGESIZE] = 1
        del pages
    barrier()
    for memory in held:
        memory.close()
    barrier()


def free_bytes() -> int:
    """Memory that nobody uses, not even the page cache (MemFree)."""
    text = Path("/proc/meminfo").read_text()
    return 1024 * int(text.partition("MemFree:")[2].split(None, 1)[0])


def available_bytes() -> int:
    """Memory that can be had without swapping (MemAvailable)."""
    text = Path("/proc/meminfo").read_text()
    return 1024 * int(text.partition("MemAvailable:")[2].split(None, 1)[0])


# ── what else the machine does ────────────────────────────────────────────────────────────────────


def machine_busy_s() -> float:
    """Processor seconds that have been used on this machine by anybody, stolen ones (by its host) included."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def take_priority() -> bool:
    """Put all threads of this process before everybody else's; whether that was permitted (it takes root)."""
    group = Path("/proc/self/autogroup")  # sched(7): sessions share the processors evenly, nice counts within one
    try:
        if group.exists():
            if os.getsid(0) != os.getpid():
                os.setsid()
            group.write_text("-20")
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), -20)
    except OSError:
        return False
    return True


def wait_for_quiet(patience_s: float) -> None:
    """Return when the machine has been nearly idle for 0.3 s, or after ``patience_s``."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        before = machine_busy_s()
        time.sleep(0.3)
        if machine_busy_s() - before <= 0.05 * 0.3 * (os.cpu_count() or 1) + 0.01:
            return


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
    """Ask the kernel to forget the files' pages."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_fraction(files: Iterable[Path]) -> float:
    """Which part of the files' pages is in the page cache (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    present = total = 0
    for path in files:
        size = path.stat().st_size
        pages = -(-size // mmap.PAGESIZE)
        # A private writable map, since ctypes wants a writable buffer. Nothing is written.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=protection)
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), found)
        del start
        mapped.close()
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        present += int((np.frombuffer(found, dtype=np.uint8) & 1).sum())
        total += pages
    return present / max(1, total)


# ── whether two models are the same ───────────────────────────────────────────────────────────────

_TABLE = 1 << 20


@cache
def _weights() -> Any:
    rng = np.random.Generator(np.random.PCG64(20))
    return rng.integers(0, 1 << 64, size=_TABLE, dtype=np.uint64) | np.uint64(1)


def _mix(block: int) -> int:
    """A 64-bit number for a block of elements, unlike that of any other (splitmix64)."""
    value = (block + 1) * 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def checksum(elements: Any, first: int) -> int:
    """The sum, modulo 2**64, of each element's bits times a number that belongs to its place.

    ``elements`` is a contiguous array of unsigned integers; ``first`` is the place of its first one in the whole
    tensor. The sums of all pieces of a tensor add up to that of the whole, however it was cut.
    """
    weights = _weights()
    total = done = 0
    while done < len(elements):
        block, column = divmod(first + done, _TABLE)
        part = elements[done : done + _TABLE - column].astype(np.uint64)
        inner = int(np.dot(part, weights[column : column + len(part)]))
        total += inner + _mix(block) * int(part.sum())
        done += len(part)
    return total & _MASK


def timestamp() -> float:
    """Seconds on a clock that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
