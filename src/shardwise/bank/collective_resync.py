"""Synchronizes ranks after one of them has failed in a pass in which the others wait for it.

[Note: In step] FSDP2 gathers the groups of a base in one order on every rank, and a gather waits for all ranks. A
rank that fails in a pass therefore leaves the others waiting in their next gather. So each rank records its
gathers. When one fails, all ranks stop before their next gather and exchange these records. Ranks that are behind
take part, with zeros, in the gathers up to the longest record. Then no rank waits any more, the process group has
no open collective, and all ranks raise the error of the one that failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

from torch import nn

from shardwise.errors import RankMismatchError
from shardwise.execution.outcomes import Stopped
from shardwise.execution.world import World
from shardwise.models.gradients import Gather, gather_zeros, seeing_gathers

Recover: TypeAlias = Callable[[], object]
"""Resets FSDP2 after a pass that was interrupted on this rank."""

T = TypeVar("T")

_POLL_S = 0.02
"""Interval of checks for a failure of another rank."""


@contextmanager
def in_step(world: World, root: nn.Module | None, recover: Recover) -> Iterator[CollectiveResync]:
    """Synchronize the passes of all ranks through a base within the block. See [Note: In step].

    Args:
        world: the ranks.
        root: the outermost FSDP2 module, or None if nothing is gathered.
        recover: resets FSDP2 after a pass that was interrupted on this rank.
    """
    resync = CollectiveResync(world, root if world.size > 1 else None, recover)
    try:
        yield resync
    finally:
        resync.end()


class CollectiveResync:
    """State of one block of :func:`in_step` on this rank."""

    def __init__(self, world: World, root: nn.Module | None, recover: Recover) -> None:
        self._world, self._root, self._recover = world, root, recover
        self._gathered: list[Gather] = []
        self._longest: list[Gather] = []
        self._fault: Exception | None = None
        self._is_stopping = False
        self._lock = threading.Lock()
        self._has_ended, self._is_settled = threading.Event(), threading.Event()
        if root is not None:
            threading.Thread(target=self._watch, name="shardwise-in-step", daemon=True).start()

    def end(self) -> None:
        self._has_ended.set()

    def run(self, passes: Callable[[], T]) -> T:
        """Run passes through the base, in a phase of all ranks.

        Raises:
            Exception: as raised by ``passes``, after this rank is in step with the others.
            Stopped: another rank has failed.
        """
        with ExitStack() as stack:
            if self._root is not None:
                stack.enter_context(seeing_gathers(self._root, self._see))
            try:
                return passes()
            except Exception:
                stack.close()
                self._catch_up()
                raise

    def _see(self, gather: Gather) -> None:
        with self._lock:
            if self._is_stopping:
                raise Stopped("left its pass: another rank has failed")
            self._gathered.append(gather)

    def _watch(self) -> None:
        """Wait for a failure of another rank. Runs on its own thread."""
        while not self._has_ended.wait(_POLL_S):
            try:
                self._world.check()
            except Stopped:
                self._complete()
                return

    def _complete(self) -> None:
        with self._lock:
            self._is_stopping = True
        try:
            with World.current(self._world.group, self._world.timeouts, "/in step", "forward_backward") as world:
                self._longest = world.all_reduce_object(self._gathered, partial(longest, world.global_ranks))
        except Exception as error:
            self._fault = error
        self._is_settled.set()

    def _catch_up(self) -> None:
        if self._root is None:
            return
        self._world.interrupt()
        self._recover()
        self._is_settled.wait()
        if self._fault is not None:
            raise self._fault
        gather_zeros(self._root, self._longest[len(self._gathered) :])


def longest(global_ranks: Sequence[int], gathered: Sequence[list[Gather]]) -> list[Gather]:
    """Return the longest record of gathers.

    Raises:
        RankMismatchError: another record is not a prefix of it.
    """
    most = max(gathered, key=len)
    for rank, own in enumerate(gathered):
        if own != most[: len(own)]:
            raise RankMismatchError(
                f"rank {global_ranks[rank]} has gathered other groups of the base than the rank that is ahead, so "
                "the ranks cannot be synchronized, and no collective of this process group is reliable. Start all "
                "ranks again, and resume from the last save"
            )
    return most
