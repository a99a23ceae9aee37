"""The roof: the same bytes read into fresh memory, or written to a file, by bare processes.

They import neither torch nor shardwise.
"""

import mmap
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import meter

MADV_POPULATE_WRITE = 23
"""Linux 5.14; see madvise(2). Not named in Python's mmap module before 3.14."""

READS: dict[str, int | None] = {
    "roof": None,
    "roof_populate": MADV_POPULATE_WRITE,
    "roof_hugepage": mmap.MADV_HUGEPAGE,
}
"""What is advised for the fresh memory. Which one is the fastest depends on the machine."""

_READ_BYTES = 64 << 20
_WRITE_BYTES = 16 << 20


def measure_read(variant: str, folder: Path, size: int, cold: bool, patience_s: float) -> list[Any]:
    """Each process reads a contiguous part of the checkpoint. Facts by rank."""
    files = [str(path) for path in meter.files_of(folder)]
    return _run_bare("read", size, files, READS[variant], cold, patience_s)


def measure_write(nbytes: int, out: Path, size: int, backed_bytes: int, patience_s: float) -> list[Any]:
    """Each process writes its part of one file, whose space is allocated, and syncs it. Facts by rank."""
    return _run_bare("write", size, nbytes, str(out), backed_bytes, patience_s)


def _run_bare(what: str, size: int, *args: Any) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(size)
    pipes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        context.Process(target=_serve, args=(what, theirs, barrier, rank, size, *args), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    return [pipe.recv() for pipe in pipes]


def _serve(what: str, pipe: Connection, *args: Any) -> None:
    pipe.send(_read(*args) if what == "read" else _write(*args))


def _read(
    barrier: Any, rank: int, size: int, files: Sequence[str], advice: int | None, cold: bool, patience_s: float
) -> dict[str, float]:
    sizes = [os.path.getsize(path) for path in files]
    start, stop = sum(sizes) * rank // size, sum(sizes) * (rank + 1) // size
    if rank == 0:
        meter.drop_cache(map(Path, files)) if cold else meter.warm_cache(map(Path, files))
        meter.wait_for_quiet(patience_s)
    barrier.wait()
    with meter.Stopwatch() as watch:
        memory = mmap.mmap(-1, stop - start, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if advice is not None:
            memory.madvise(advice)
        target = memoryview(memory)
        done = first = 0
        for path, length in zip(files, sizes, strict=True):
            at, end = max(start, first), min(stop, first + length)
            with open(path, "rb", buffering=0) as file:
                while at < end:
                    piece = target[done : done + min(_READ_BYTES, end - at)]
                    count = os.preadv(file.fileno(), [piece], at - first)
                    at, done = at + count, done + count
            first += length
    return watch.facts()


def _write(
    barrier: Any, rank: int, size: int, nbytes: int, out: str, backed_bytes: int, patience_s: float
) -> dict[str, float]:
    start, stop = nbytes * rank // size, nbytes * (rank + 1) // size
    memory = memoryview(bytearray(os.urandom(1 << 20)) * (((stop - start) >> 20) + 1))
    if rank == 0:
        os.sync()
        meter.wait_for_quiet(patience_s)
    barrier.wait()
    meter.back_memory(backed_bytes, barrier.wait)
    with meter.Stopwatch() as watch:
        if rank == 0:
            os.makedirs(out)
            with open(f"{out}/roof", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        barrier.wait()
        with open(f"{out}/roof", "r+b", buffering=0) as file:
            at = start
            while at < stop:
                count = min(_WRITE_BYTES, stop - at)
                at += os.pwrite(file.fileno(), memory[at - start : at - start + count], at)
            os.fsync(file.fileno())
        barrier.wait()
    return watch.facts()
