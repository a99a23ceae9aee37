"""Work in processes that are forked from this one, each with a folder and limits of its own."""

import ctypes
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that a process gets when its parent ends."""

_MORE_MEMORY = 4 << 30
"""That a mutant may take: one of a size asks for terabytes."""


@dataclass(frozen=True)
class Work:
    """For a process of its own: ``run`` gives whether it passed. Seconds of the processor until it is ended."""

    name: str
    run: Callable[[Path], bool]
    limit_s: float


def in_processes(works: Iterable[Work], jobs: int, scratch: Path) -> Iterator[tuple[str, bool, Path]]:
    """(name, whether it passed, folder) of each, in the order in which they end; ``jobs`` at a time.

    Each is forked from this process, and ended when it takes too long or too much. Its folder, with its output, is
    there until the next is asked for.
    """
    waiting = iter(works)
    running: dict[int, tuple[Work, Path, float]] = {}
    while True:
        while len(running) < jobs and (work := next(waiting, None)) is not None:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            running[_forked(work, folder)] = work, folder, time.monotonic() + 5 * work.limit_s + 30
        if not running:
            return
        time.sleep(0.003)
        for child, (work, folder, until) in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if not done and time.monotonic() > until:
                os.killpg(child, signal.SIGKILL)
                done, status = os.waitpid(child, 0)
            if done:
                del running[child]
                yield work.name, status == 0, folder
                shutil.rmtree(folder, ignore_errors=True)


def _forked(work: Work, folder: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever ends this process ends these, too
        output = os.open(folder / "output", os.O_RDWR | os.O_CREAT)
        for stream in (0, 1, 2):
            os.dup2(output, stream)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)  # where `tmp_path` is
        seconds = int(work.limit_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        memory = pages * resource.getpagesize() + _MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
        status = 0 if work.run(folder) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)
