"""How ranks come to be, given what they are: this process, processes of ours, or processes of a launcher."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from tqdm import tqdm

from shardwise.errors import ShardwiseError
from shardwise.execution.local_ranks import LocalRanks, RankError
from shardwise.execution.world import World

_BOTH_BACKENDS = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a rank that a launcher started: among all ranks, and among those of its machine."""

    rank: int
    size: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class EndAtOnce:
    """Ranks are ended when whoever started them is interrupted or terminated."""


@dataclass(frozen=True, slots=True)
class AskFirst:
    """Ranks are sent SIGTERM then, and have all the time they want to finish; a second signal ends them at once."""


Ending: TypeAlias = EndAtOnce | AskFirst


def run_alone(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function in this process, without a process group; its one value."""
    return [function(*args)]


def run_spawned(size: int, function: Callable[..., Any], *args: Any, ending: Ending = EndAtOnce()) -> list[Any]:
    """Call the function on ``size`` new processes of this machine; its values by rank.

    Each has a GPU of its own where there are enough, else all compute on the CPU. When this process is interrupted
    (Ctrl-C) or terminated, they end as ``ending`` says.

    Raises:
        ShardwiseError: as raised by the function, on the lowest rank where it was.
        RankError: when a rank failed otherwise.
    """
    with _terminated_like_interrupted():
        with _deaf_to_interrupts():
            ranks = LocalRanks(size, backend=_BOTH_BACKENDS if _gpu_for_each(size) else "gloo")
        try:
            with _passing_on(ranks) if isinstance(ending, AskFirst) else nullcontext():
                values = ranks.run(_call_seated, size, function, args)
        except RankError as error:
            raise _meant(error) from error
        except BaseException:
            ranks.kill()
            raise
        ranks.close()
        return values


def run_seated(seat: Seat, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function as a rank that a launcher started; its values by rank on the first, none on the others.

    The ranks meet as torch's launcher has it (``MASTER_ADDR`` and ``MASTER_PORT``, which torch reads). Afterwards
    the process group is left in order. When the function raises, it is left as it is: the other ranks may never
    come to its end.

    Collective: yes, over all ranks.
    """
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(seat.local_rank)
        backend = _BOTH_BACKENDS
    dist.init_process_group(backend, init_method="env://", rank=seat.rank, world_size=seat.size)
    values = World.current().gather(function(*args))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    dist.destroy_process_group()
    return values if seat.rank == 0 else []


def this_place() -> tuple[int, int]:
    """This rank, and how many there are."""
    world = World.current()
    return world.rank, world.size


def this_device() -> torch.device:
    """Where this rank computes: its GPU, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if dist.is_initialized() and "nccl" not in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _gpu_for_each(size: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= size


def _call_seated(size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # Else tqdm makes a lock for several processes, which outlives this one: a worker ends without ceremony.
    tqdm.set_lock(threading.RLock())
    if _gpu_for_each(size):
        torch.cuda.set_device(dist.get_rank())
    return function(*args)


def _meant(error: RankError) -> ShardwiseError:
    """The error a rank raised on purpose, rather than those of ranks that then missed it."""
    for _, found in sorted(error.errors.items()):
        if isinstance(found, ShardwiseError):
            return found
    return error


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started meanwhile do not hear Ctrl-C, which a terminal sends to all; whoever started them does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _passing_on(ranks: LocalRanks) -> Iterator[None]:
    """The first SIGINT or SIGTERM is passed on to the ranks as SIGTERM; the next one is this process's own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        restore()
        ranks.send_signal(signal.SIGTERM)

    for number in numbers:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        restore()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM raises, so that what this process started is ended first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
