"""Worlds of ranks to which something happens.

What befalls a rank ends its world, so that every test needs one of its own. They are forked from a process that has
everything imported, which takes milliseconds, and meet through a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.closing import Closing
from tests.support.fork_server import start_server

_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class End:
    """How a rank's call ended: the error's type and text ("" for none) or a value, and when."""

    error: str
    text: str
    value: Any
    at_s: float


@dataclass
class Outcome:
    """What became of a world. ``struck_at_s`` is None when nothing befell it."""

    ends: dict[int, End] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    struck_at_s: float | None = None
    started_at_s: float = 0.0

    def errors(self, *, without: int | None = None) -> dict[int, tuple[str, str]]:
        return {rank: (end.error, end.text) for rank, end in self.ends.items() if rank != without}

    def seconds(self, *, without: int | None = None) -> float:
        """From the blow to the last rank's end."""
        assert self.struck_at_s is not None, f"nothing befell this world: {self.errors()}"
        return max(end.at_s for rank, end in self.ends.items() if rank != without) - self.struck_at_s


@dataclass(slots=True)
class Seat:
    """What a rank knows: its place, and the pipe to the test, through which it tells that it is about to be struck.

    A rank that leaves ends its process with its call; else it stays until the test is over.
    """

    rank: int
    size: int
    pipe: Connection
    leaves: bool = False

    def tell(self) -> None:
        self.pipe.send(("struck", time.monotonic()))

    def wait_to_be_stopped(self) -> None:
        """Tell, and go on only after having been stopped and continued."""
        self.pipe.send(("stop me", time.monotonic()))
        self.pipe.recv()


Meet = Callable[[Path, int, int], Any]
"""The process group's store, from a folder that the ranks share, the rank, and how many there are."""


def through_a_file(folder: Path, rank: int, size: int) -> Any:
    import torch.distributed as dist

    return dist.FileStore(str(folder / "store"), size)


def through_rank_0(folder: Path, rank: int, size: int) -> Any:
    """Rank 0 holds the store, at a port that the system chose and that no other process can have."""
    import torch.distributed as dist

    place = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        os.replace(folder / "port.new", place)
        return store
    while not place.exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(place.read_text()), size, is_master=False, wait_for_workers=False)


class Doomed(Closing):
    """A world of ranks that call one function, ``function(seat, *args)``, once."""

    def __init__(self, size: int, *, meet: Meet = through_a_file) -> None:
        self.size = size
        # In memory where that can be: a disk that is busy with something else is no fault of a rank.
        self._temporary = tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None)
        self.folder = Path(self._temporary.name)
        self.outcome = Outcome()
        self._meet = meet
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._stopped: list[int] = []

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self.outcome.started_at_s = time.monotonic()
        for rank in range(self.size):
            ours, theirs = start_server().Pipe()
            process = start_server().Process(
                target=_live, args=(rank, self.size, self.folder, self._meet, theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.outcome.pids = [process.pid for process in self._processes]

    def finish(self, *, limit_s: float) -> Outcome:
        """Wait until every rank has ended or is stopped; those that have not in time are missing in ``ends``."""
        deadline = time.monotonic() + limit_s
        gone: set[int] = set()
        while pending := {
            self._pipes[rank]: rank
            for rank in range(self.size)
            if rank not in gone and rank not in self.outcome.ends and rank not in self._stopped
        }:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    gone.add(rank)
                    continue
                if kind == "end":
                    self.outcome.ends[rank] = value
                elif kind == "stop me":
                    self.stop(rank)
                else:
                    self.outcome.struck_at_s = value
        return self.outcome

    def wait_for_blow(self) -> None:
        """Until every rank has told that it is about to be struck."""
        for pipe in self._pipes:
            kind, self.outcome.struck_at_s = pipe.recv()
            assert kind == "struck"

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 40.0) -> Outcome:
        self.start(function, *args)
        return self.finish(limit_s=limit_s)

    def stop(self, rank: int) -> None:
        """SIGSTOP, at a moment when the rank does not hold the lock of the file through which all meet."""
        store = self.folder / "store"
        with store.open("rb") if store.exists() else contextlib.nullcontext() as file:
            if file is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            os.kill(self.outcome.pids[rank], signal.SIGSTOP)
            while _states_of_threads(self.outcome.pids[rank]) != {"T"}:
                time.sleep(0.001)
        self._stopped.append(rank)
        self.outcome.struck_at_s = time.monotonic()

    def go_on(self, rank: int) -> None:
        """SIGCONT."""
        self._stopped.remove(rank)
        os.kill(self.outcome.pids[rank], signal.SIGCONT)
        self._pipes[rank].send("go on")

    def close(self) -> None:
        """End what is left, stopped processes too."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._temporary.cleanup()


def _states_of_threads(pid: int) -> set[str]:
    """All of them: a thread that waits for the lock may yet be given it after the first thread has stopped."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}


def _live(
    rank: int, size: int, folder: Path, meet: Meet, pipe: Connection, function: Callable[..., Any], args: Any
) -> None:
    """The life of a rank."""
    import torch.distributed as dist
    from tests.quiet import quieten

    quieten()
    gc.freeze()
    dist.init_process_group("gloo", store=meet(folder, rank, size), rank=rank, world_size=size)
    seat = Seat(rank, size, pipe)
    error = text = ""
    value = None
    try:
        value = function(seat, *args)
    except BaseException as caught:
        error, text = type(caught).__name__, str(caught)
    pipe.send(("end", End(error, text, value, time.monotonic())))
    if seat.leaves:
        os._exit(1)
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)
