"""Worlds of ranks to which something happens.

What befalls a rank ends its world, so that every test needs one of its own. They are forked from a process that has
everything imported, which takes milliseconds, and meet through a file.

[Note: A silence] A rank that is stopped is lost after a silence. Here that takes an hour, longer than any test, by
clocks of the ranks that go forward when a test says so, each after its rank has seen the others' heartbeats. So no
rank is lost because it is slow, or the one that waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
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
from tests.support.local_ranks import LIMIT_S

from shardwise.core import machine
from shardwise.ranks import failure_detection
from shardwise.ranks.timeouts import Timeouts

_IN_MEMORY = Path("/dev/shm")

PATIENT = Timeouts(heartbeat_interval_s=0.1, heartbeat_timeout_s=3600, join_timeout_s=3600)
"""Nobody waits as long: who ends has been told, or has noticed. See [Note: A silence]."""

_SILENCE_S = 4000.0
"""By which a clock goes forward: longer than a rank may be silent, and shorter than the store may be."""


@dataclass(frozen=True, slots=True)
class End:
    """How a rank's call ended: the error's type and text ("" for none) or a value."""

    error: str
    text: str
    value: Any


@dataclass
class Outcome:
    """What became of a world, and whether something befell it."""

    ends: dict[int, End] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    is_struck: bool = False

    def errors(self) -> dict[int, tuple[str, str]]:
        return {rank: (end.error, end.text) for rank, end in self.ends.items()}


@dataclass(slots=True)
class Seat:
    """What a rank knows: its place, and the pipe to the test, through which it tells that it is about to be struck.

    A rank that leaves ends its process with its call; else it stays until the test is over.
    """

    rank: int
    size: int
    pipe: Connection
    folder: Path
    leaves: bool = False

    def tell(self) -> None:
        self.pipe.send(("struck", None))

    def wait_to_be_stopped(self) -> None:
        """Tell, and go on only after having been stopped and continued."""
        self.pipe.send(("stop me", None))
        self.pipe.recv()

    def wait_for_others(self, what: str) -> None:
        """Until each of them has "looked" at the others, has felt a "silence", or has "ended" its call."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        while not all(Path(self.folder, f"{what}-{rank}").exists() for rank in others):
            time.sleep(0.005)

    def be_silent(self) -> None:
        """Return after a silence, in the calls that the others are in."""
        self.wait_for_others("looked")
        Path(self.folder, "silence").touch()
        self.wait_for_others("silence")


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

    def finish(self) -> Outcome:
        """Wait until every rank has ended or is stopped; those that hang are missing in ``ends``."""
        deadline = time.monotonic() + LIMIT_S
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
                    self.outcome.is_struck = True
        return self.outcome

    def wait_for_blow(self) -> None:
        """Until every rank has told, once more, that it is about to be struck."""
        for pipe in self._pipes:
            kind, _ = pipe.recv()
            assert kind == "struck"

    def wait_for_moment(self, draw: random.Random) -> None:
        """Until some moment in the work of ranks that tell before each part of it, however long that takes."""
        for _ in range(draw.randint(1, 5)):
            start = time.monotonic()
            self.wait_for_blow()
        time.sleep(draw.uniform(0.0, time.monotonic() - start))

    def run(self, function: Callable[..., Any], *args: Any) -> Outcome:
        self.start(function, *args)
        return self.finish()

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
        self.outcome.is_struck = True
        holds_store = self._meet is through_rank_0 and rank == 0
        (self.folder / ("silence of the store" if holds_store else "silence")).touch()

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


def _go_forward(seat: Seat) -> None:
    """Give the detector of this process a clock that goes forward after a silence. See [Note: A silence]."""
    update = failure_detection.Detector.update
    forward_s = 0.0

    def running_s() -> float:
        nonlocal forward_s
        if (seat.folder / "silence of the store").exists():  # which nobody can look into
            forward_s += _SILENCE_S
        # Not time.monotonic(): a rank that goes on a little before another must not count the stop of both.
        return machine.running_s() + forward_s

    def update_and_go_forward(self: Any, *args: Any) -> None:
        nonlocal forward_s
        is_silent = (seat.folder / "silence").exists()
        update(self, *args)
        Path(seat.folder, f"looked-{seat.rank}").touch()
        if is_silent and not forward_s and any(watcher.timeouts == PATIENT for watcher in self.watchers):
            forward_s = _SILENCE_S
            Path(seat.folder, f"silence-{seat.rank}").touch()

    failure_detection.running_s = running_s
    failure_detection.Detector.update = update_and_go_forward  # type: ignore[method-assign]


def _live(
    rank: int, size: int, folder: Path, meet: Meet, pipe: Connection, function: Callable[..., Any], args: Any
) -> None:
    """The life of a rank."""
    import torch.distributed as dist
    from tests.quiet import quieten

    quieten()
    gc.freeze()
    dist.init_process_group("gloo", store=meet(folder, rank, size), rank=rank, world_size=size)
    seat = Seat(rank, size, pipe, folder)
    _go_forward(seat)
    error = text = ""
    value = None
    try:
        value = function(seat, *args)
    except BaseException as caught:
        error, text = type(caught).__name__, str(caught)
    pipe.send(("end", End(error, text, value)))
    Path(folder, f"ended-{rank}").touch()
    if seat.leaves:
        os._exit(1)
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)
