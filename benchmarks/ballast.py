"""Memory held for a process that is measured, and given back as that process takes memory. No torch, no numpy.

On a virtual machine whose host takes free pages back, the first touch of memory costs several times what the second
one does. :func:`benchmarks.meter.back_memory` serves what takes a second or two: after that, the host has back what
is free. What takes longer has a :class:`Ballast` beside it, in a process of its own, so that nobody shares the
interpreter's lock with what is measured.
"""

import mmap
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_EVERY_S = 0.02
_LEAD_BYTES = 192 << 20
_HUGE_BYTES = 2 << 20
_ADVICE = (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE)


class Ballast:
    """Touched memory that this process may take while the context lasts, and that the host leaves alone until then.

    ``huge_bytes`` lie in huge pages, and are given back no faster than this process takes other memory. Of
    ``small_bytes``, in small pages, one page of each block as small as the host would take is held throughout; the
    others are free from the start.
    """

    def __init__(self, huge_bytes: int, small_bytes: int) -> None:
        sizes = [str(nbytes) for nbytes in (huge_bytes, small_bytes)]
        command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), *sizes]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._await(b"held\n")

    def __enter__(self) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.write(b"begin\n")
        self._holder.stdin.flush()
        self._await(b"begun\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.communicate()

    def _await(self, word: bytes) -> None:
        assert self._holder.stdout is not None
        if (told := self._holder.stdout.readline()) != word:
            raise RuntimeError(f"the holder of memory said {told!r} where {word!r} was due")


def hold(pid: int, sizes: Sequence[int]) -> None:
    """The holder: touch, say so, wait to begin, then follow the process until standard input ends."""
    huge, small = (_touched(nbytes, advice) for nbytes, advice in zip(sizes, _ADVICE, strict=True))
    block = mmap.PAGESIZE << _reported_order()
    for start in range(0, len(small), block):
        small.madvise(mmap.MADV_DONTNEED, start + mmap.PAGESIZE, block - mmap.PAGESIZE)
    print("held", flush=True)
    if os.read(0, 64) != b"begin\n":
        return
    began, given = _resident_bytes(pid), 0
    print("begun", flush=True)
    while not select.select([0], [], [], _EVERY_S)[0]:
        wanted = (_resident_bytes(pid) - began + _LEAD_BYTES) // _HUGE_BYTES * _HUGE_BYTES
        step = min(wanted, len(huge)) - given
        if step > 0:
            huge.madvise(mmap.MADV_DONTNEED, given, step)
            given += step


def _touched(nbytes: int, advice: int) -> mmap.mmap:
    whole = max(1, -(-nbytes // _HUGE_BYTES)) * _HUGE_BYTES
    region = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(advice)
    for start in range(0, whole, mmap.PAGESIZE):
        region[start] = 1
    return region


def _reported_order() -> int:
    """The host takes free blocks of as many pages as two to the power of this, and larger ones."""
    told = Path("/sys/module/page_reporting/parameters/page_reporting_order")
    return min(max(1, int(told.read_text())), 9) if told.is_file() else 9


def _resident_bytes(pid: int) -> int:
    """0 once the process has ended."""
    fields = Path(f"/proc/{pid}/statm").read_bytes().split()
    return int(fields[1]) * mmap.PAGESIZE


if __name__ == "__main__":
    hold(int(sys.argv[1]), [int(nbytes) for nbytes in sys.argv[2:]])
