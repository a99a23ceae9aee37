"""Names lost ranks where a collective fails, and ends ranks that are stuck in one."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from shardwise.core.errors import RankLostError, ShardwiseError, TrainingError
from shardwise.ranks.control_channel import ADVICE_ON_WAITS, ControlChannel
from shardwise.ranks.failure_detection import describe_wait
from shardwise.ranks.outcomes import describe_out_of_memory, is_out_of_memory

if TYPE_CHECKING:
    from shardwise.ranks.world import World

Where: TypeAlias = Callable[[], str]
"""Returns a description of the operation, the same on all ranks."""

WhenStuck: TypeAlias = Callable[[ShardwiseError], object]


_COLLECTIVE = re.compile(
    r"gloo|nccl|hccl|xccl|connection (closed|reset|refused)|broken pipe|socket|process group|watchdog",
    re.IGNORECASE,
)
"""Found in errors of the backends of process groups; gloo raises nothing but a RuntimeError."""

_ADVICE_ON_MEMORY = "Use smaller batches, activation checkpointing or more ranks"

_STUCK_S = 5.0
"""A rank that is still in a collective this long after another was lost will not return from it in time."""

_CHECK_S = 1.0


@contextmanager
def translate_collective_errors(world: World, where: Where, when_stuck: WhenStuck | None = None) -> Iterator[None]:
    """Translate errors of torch's own collectives in this block, which fail when a rank is lost.

    An error of a collective then becomes one that names the lost rank. A rank that runs out of memory, or
    raises any other error, also KeyboardInterrupt or SystemExit, announces it to the others. ``where`` is a
    description of the operation, the same on all ranks. They must have met over the control channel before.

    A collective may also wait for a lost rank for as long as its backend does, and cannot be canceled. After some
    seconds of this, ``when_stuck`` is called on another thread, which does not depend on the store, because this
    rank may be the one that is cut off.

    Raises:
        TrainingError: a rank has run out of memory. The same on every rank.
        RankLostError: a rank is lost, or has left the block. The same on every rank, except that a rank with an
            error of its own raises that error.
    """
    channel, has_left = world.channel, threading.Event()
    watching = threading.Thread(
        target=_watch, args=(channel, where, when_stuck, has_left), name="shardwise-stuck", daemon=True
    )
    # Two blocks: the watch has to end before anything below waits for other ranks.
    watching.start()
    try:
        try:
            yield
        finally:
            has_left.set()
            watching.join(timeout=_CHECK_S)  # its arguments may keep the model alive
    except Exception as error:
        if channel is not None and _was_raised_together(error):
            raise
        is_out, is_broken = is_out_of_memory(error), is_collective_error(error)
        # Before await_verdict(): this rank waits no longer, and the next heartbeat forgets for whom it did.
        slow = describe_wait() if is_broken else ""
        cause = describe_out_of_memory(error, _ADVICE_ON_MEMORY) if is_out else f"{type(error).__name__}: {error}"
        kind = TrainingError if is_out else RankLostError
        if channel is None:
            if is_out:
                raise TrainingError(f"{where()}: {cause}") from error
            raise
        # Its own error: the others have to hear of it. One of a collective may be caused by any rank: the detector
        # decides, and only if it finds nobody lost this rank announces that it leaves.
        if is_out or not is_broken:
            channel.abort(cause, kind)
        try:
            channel.await_verdict()
        except (RankLostError, TrainingError) as lost:
            if is_out or is_broken:
                raise type(lost)(f"{where()}: {lost}") from error
        else:
            channel.abort(cause, kind)
        if slow:
            raise RankLostError(f"{where()}: waited in a collective for {slow}. {ADVICE_ON_WAITS}") from error
        raise
    except (KeyboardInterrupt, SystemExit) as error:  # its process may live on, to upload or to tidy up
        if channel is not None:
            channel.abort(f"{type(error).__name__}: {error}")
        raise


def _was_raised_together(error: Exception) -> bool:
    """Return whether ranks have raised this error together at the end of a phase, or it names a lost rank.

    It then has a phase, or its cause has. The other ranks may still have files to remove, and must not take this
    one for a rank that has left them. Errors that all ranks compute alike, as of ``require_equal``, have no phase.
    They are announced, which changes nothing.
    """
    phases = getattr(error, "phase", ""), getattr(error.__cause__, "phase", "")
    return isinstance(error, RankLostError) or any(phases)


def _watch(
    channel: ControlChannel | None, where: Where, when_stuck: WhenStuck | None, has_left: threading.Event
) -> None:
    if channel is None or when_stuck is None:
        return
    lost_s = math.inf
    while not has_left.wait(min(channel.timeouts.heartbeat_interval_s, _CHECK_S)):
        lost = channel.loss()
        lost_s = math.inf if lost is None else min(lost_s, time.monotonic())
        if lost is not None and time.monotonic() - lost_s >= _STUCK_S:
            when_stuck(type(lost)(f"{where()}: {lost}"))
            return


def is_collective_error(error: BaseException) -> bool:
    """Return True if ranks could not communicate. The cause may be on another rank."""
    is_known = isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error)) is not None
    return is_known or isinstance(error, dist.DistError)
