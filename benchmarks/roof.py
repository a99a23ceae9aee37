"""The roof: the same bytes read into fresh memory by the same number of processes, and nothing else.

Imports neither torch nor shardwise.
"""

import mmap
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import meter
from benchmarks.meter import Usage

MADV_POPULATE_WRITE = 23
"""Linux 5.14; see madvise(2). Not named in Python's mmap module before 3.14."""

VARIANTS: dict[str, tuple[int, ...]] = {
    "roof": (),
    "roof_hugepage": (mmap.MADV_HUGEPAGE,),
    "roof_populate": (MADV_POPULATE_WRITE,),
    "roof_hugepage_populate": (mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE),
}
"""What the fresh memory is advised before it is read into."""

CASTING = {"roof_cast": "roof_populate", "roof_cast_hugepage": "roof_hugepage_populate"}
"""The same for a load that casts bf16 to float32: what is read into a small buffer is widened into fresh memory."""

ALL = (*VARIANTS, *CASTING)

_CALL_BYTES = 64 << 20
_CAST_BYTES = 4 << 20


def measure(
    variant: str, folder: Path, size: int, *, cold: bool, backed_bytes: int, patience_s: float
) -> list[dict[str, Any]]:
    """``size`` fresh processes read a contiguous part of the checkpoint each; what each took, by rank."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(size)
    files = [(str(path), path.stat().st_size) for path in meter.files_of(folder)]
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        advice, casts = VARIANTS[CASTING.get(variant, variant)], variant in CASTING
        arguments = (barrier, rank, size, files, advice, casts, cold, backed_bytes, patience_s, theirs)
        process = context.Process(target=_read, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    values = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return values


def _read(
    barrier: Any,
    rank: int,
    size: int,
    files: Sequence[tuple[str, int]],
    advice: Sequence[int],
    casts: bool,
    cold: bool,
    backed_bytes: int,
    patience_s: float,
    pipe: Connection,
) -> None:
    total = sum(length for _, length in files)
    start, stop = total * rank // size, total * (rank + 1) // size
    paths = [Path(name) for name, _ in files]
    cached = None
    if rank == 0:
        meter.drop_cache(paths) if cold else meter.warm_cache(paths)
        cached = meter.cached_fraction(paths)
        meter.wait_for_quiet(patience_s)
    priority = meter.take_priority()
    barrier.wait()
    if backed_bytes:
        meter.back_memory(backed_bytes, barrier.wait)
    staged = bytearray(_CAST_BYTES)
    narrow, piece = np.frombuffer(staged, dtype=np.uint16), memoryview(staged)
    barrier.wait()
    before, busy = Usage.now(), meter.machine_busy_s()
    began = meter.timestamp()
    nbytes = 2 * (stop - start) if casts else stop - start
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for each in advice:
        memory.madvise(each)
    target = memoryview(memory)
    wide = np.frombuffer(memory, dtype=np.uint32, count=nbytes // 4)
    done = first = 0
    for name, length in files:
        low, high = max(start, first), min(stop, first + length)
        if low < high:
            descriptor = os.open(name, os.O_RDONLY)
            place = low
            while place < high:
                if casts:
                    count = min(_CAST_BYTES, high - place)
                    got = os.preadv(descriptor, [piece[:count]], place - first)
                    into = wide[done // 2 : done // 2 + got // 2]
                    np.left_shift(narrow[: got // 2], 16, out=into, dtype=np.uint32)
                else:
                    count = min(_CALL_BYTES, high - place)
                    got = os.preadv(descriptor, [target[done : done + count]], place - first)
                place += got
                done += got
            os.close(descriptor)
        first += length
    ended = meter.timestamp()
    used, busy = Usage.now().since(before), meter.machine_busy_s() - busy
    pipe.send(
        {
            "rank": rank,
            "start": began,
            "returned": ended,
            "stop": ended,
            "usage": vars(used),
            "machine_busy_s": busy,
            "priority": priority,
            "bytes": done,
            "cached_fraction": cached,
        }
    )
