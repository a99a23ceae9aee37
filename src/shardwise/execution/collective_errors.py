"""Names lost ranks where a collective fails, and ends ranks that are stuck in one."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from shardwise.errors import RankLostError, ShardwiseError
from shardwise.execution.control_channel import ControlChannel

if TYPE_CHECKING:
    from shardwise.execution.world import World

Where: TypeAlias = Callable[[], str]
"""Returns a description of the operation, the same on all ranks."""

Condition: TypeAlias = Callable[[], bool]
"""Returns whether this rank was asked to stop."""


_COLLECTIVE = re.compile(
    r"gloo|nccl|hccl|xccl|connection (closed|reset|refused)|broken pipe|socket|process group|watchdog",
    re.IGNORECASE,
)
"""Found in errors of the backends of process groups; gloo raises nothing but a RuntimeError."""


_MEMORY = re.compile(r"out of memory|DefaultCPUAllocator|can.t allocate memory|not enough memory", re.IGNORECASE)


WhenStuck: TypeAlias = Callable[[RankLostError], object]


_STUCK_S = 5.0
"""A rank that is still in a collective so long after another was lost will not come out of it in time."""


_ASKED_S = 1.0
"""The same of a rank that was asked to stop."""


@contextmanager
def translate_collective_errors(
    world: World,
    where: Where,
    when_stuck: WhenStuck | None = None,
    is_asked: Condition = bool,
) -> Iterator[None]:
    """In this block ranks compute by collectives of torch's own, which break when one of them is gone.

    An exception of a collective then becomes an error that names the lost rank. A rank that runs out of memory, or
    raises any other error, announces it to the others. ``where`` is a description of the operation, the same on all
    ranks. The ranks have met before.

    A collective may also wait for a lost rank for as long as its backend does, and cannot be called back. After
    some seconds of this, ``when_stuck`` is called on another thread, which does not depend on the store, because
    this rank may be the one that is cut off. It is called earlier if this rank ``is_asked`` to stop.

    Raises:
        RankLostError: a rank is lost, has left the block, or has run out of memory. The same on every rank.
    """
    line = world.meetings
    try:
        with _watched(line, where, when_stuck, is_asked):
            yield
    except ShardwiseError:
        raise
    except Exception as error:
        is_out, is_broken = is_out_of_memory(error), is_of_a_collective(error)
        cause = _out_of_memory(error) if is_out else f"{type(error).__name__}: {error}"
        if line is None:
            if is_out:
                raise RankLostError(f"{where()}: {cause}") from error
            raise
        if is_out or not is_broken:
            line.leave(cause)
        try:
            line.find_lost()
        except RankLostError as lost:
            if is_out or is_broken:
                raise RankLostError(f"{where()}: {lost}") from error
        else:
            line.leave(cause)
        raise


@contextmanager
def _watched(
    line: ControlChannel | None, where: Where, when_stuck: WhenStuck | None, is_asked: Condition
) -> Iterator[None]:
    if line is None:
        yield
        return
    has_left = threading.Event()

    def watch() -> None:
        since = math.inf
        while not has_left.wait(min(line.timeouts.heartbeat_interval_s, _ASKED_S)):
            in_haste = is_asked()
            lost = line.lost(in_haste=in_haste)
            since = math.inf if lost is None else min(since, time.monotonic())
            if lost is not None and time.monotonic() - since >= (_ASKED_S if in_haste else _STUCK_S):
                if when_stuck is not None:
                    when_stuck(RankLostError(f"{where()}: {lost}"))
                return

    watching = threading.Thread(target=watch, name="shardwise-stuck", daemon=True)
    watching.start()
    try:
        yield
    finally:
        has_left.set()
        watching.join(timeout=_ASKED_S)  # it holds on to what was trained


def _out_of_memory(error: BaseException) -> str:
    detail = str(error).partition("\n")[0] or type(error).__name__
    return f"out of memory ({detail}). Smaller batches, activation checkpointing or more ranks take less"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if this process, or its device, has no memory left."""
    import torch
    import torch.distributed as dist

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, dist.DistError) and _tells(_MEMORY, error)


def is_of_a_collective(error: BaseException) -> bool:
    """Return True if ranks could not communicate. The cause may be on another rank."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _tells(_COLLECTIVE, error))


def _tells(pattern: re.Pattern[str], error: BaseException) -> bool:
    return pattern.search(str(error)) is not None
