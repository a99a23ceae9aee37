"""Starts ranks as processes and watches over them. Imports no torch: the ranks do, once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

from shardwise.errors import PlacementError, RankLostError, ShardwiseError
from shardwise.execution.processes.local_ranks import LocalRanks, ProcessEnded, RankError, start_server


@dataclass(frozen=True, slots=True)
class EndAtOnce:
    """Ranks are ended when whoever started them is interrupted or terminated."""


@dataclass(frozen=True, slots=True)
class AskFirst:
    """Ranks are sent SIGTERM then, and have all the time they want to finish; a second signal ends them at once."""


Ending: TypeAlias = EndAtOnce | AskFirst


def run_spawned(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    ending: Ending = EndAtOnce(),
    preloaded: Sequence[str] = ("torch",),
    timeout_s: float | None = None,
) -> list[Any]:
    """Call the function on ``size`` new processes of this machine; its values by rank.

    Each has an accelerator of its own where there are enough, else all compute on the CPU. When this process is
    interrupted (Ctrl-C) or terminated, they end as ``ending`` says. They are forked from a process that has
    imported ``preloaded``, so that this takes the time and the memory of one import, however many they are.

    Raises:
        ShardwiseError: as raised by the function, on the lowest rank where it was.
        RanksLateError: after ``timeout_s`` (None: never), what they import included, ranks had not come to their
            end, and were ended; none of them had failed.
        RankError: when a rank failed otherwise.
    """
    with _terminated_like_interrupted():
        with _deaf_to_interrupts():
            start_server(preloaded)
        ranks = LocalRanks(size, timeout_s=timeout_s, seat=at_own_gpu, preloaded=preloaded)
        try:
            with _passing_on(ranks) if isinstance(ending, AskFirst) else nullcontext():
                values = ranks.run(function, *args)
        except RankError as error:
            raise _meant(error) from error
        except BaseException:
            ranks.kill()
            raise
        ranks.close()
        return values


def at_own_gpu(rank: int, size: int) -> str:
    """Take this rank's accelerator, if there is one for each; the backends of its process group.

    Raises:
        PlacementError: a module that was imported before the ranks were forked has begun to use GPUs.
    """
    import torch
    from tqdm import tqdm

    from shardwise.models.torch_words import accelerator, both_backends, is_forked_from_cuda, module_of

    # Else tqdm makes a lock for several processes, which outlives this one: a worker ends without ceremony.
    tqdm.set_lock(threading.RLock())
    kind = accelerator()
    if kind is None or torch.accelerator.device_count() < size:
        return "gloo"
    if is_forked_from_cuda():
        raise PlacementError(
            "a library that was imported before the ranks were started uses CUDA already, and ranks cannot share "
            f"that; start them by torchrun --nproc-per-node {size} instead"
        )
    module_of(kind).set_device(rank)
    return both_backends(kind)


def _meant(error: RankError) -> ShardwiseError:
    """The error a rank raised on purpose, rather than those of ranks that then missed it.

    What nobody raised on purpose is shown with its traceback, and ranks that only missed that one are left out.
    """
    raised = {rank: found for rank, found in sorted(error.errors.items()) if not isinstance(found, ProcessEnded)}
    others = {rank: found for rank, found in raised.items() if not isinstance(found, RankLostError)}
    for found in (others or raised).values():
        if isinstance(found, ShardwiseError):
            return found
    return RankError({rank: error.failures[rank] for rank in others}, others) if others else error


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
    """The first SIGINT, SIGTERM or SIGUSR1 is passed on to the ranks as SIGTERM; the next is this process's own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
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
    """SIGTERM and SIGUSR1 raise, so that what this process started is ended first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
