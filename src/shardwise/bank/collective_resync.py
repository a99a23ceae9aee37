"""Keeps ranks in step when one of them leaves a pass that the others wait in.

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
from typing import TypeAlias, TypeVar

from torch import nn

from shardwise.errors import RankMismatchError
from shardwise.execution.outcomes import Stopped
from shardwise.execution.world import World
from shardwise.models.gradients import Gather, gather_zeros, seeing_gathers

Recover: TypeAlias = Callable[[], object]
"""Has FSDP2 forget a pass that was broken off on this rank."""

T = TypeVar("T")

_LOOK_S = 0.02
"""Between two looks whether another rank has failed."""


@contextmanager
def in_step(world: World, root: nn.Module | None, recover: Recover) -> Iterator[CollectiveResync]:
    """A block in which all ranks pass through a base, and then meet. See [Note: In step].

    Args:
        world: the ranks.
        root: the outermost FSDP2 module, or None if nothing is gathered.
        recover: has FSDP2 forget a pass that was broken off on this rank.
    """
    keeper = CollectiveResync(world, root if world.size > 1 else None, recover)
    try:
        yield keeper
    finally:
        keeper.end()


class CollectiveResync:
    """Synchronization of one block of a rank with the others. See :func:`in_step`."""

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
        """Passes through the base. To be called in a phase, at the end of which all ranks meet.

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
        """On a thread of its own."""
        while not self._has_ended.wait(_LOOK_S):
            try:
                self._world.check()
            except Stopped:
                self._settle()
                return

    def _settle(self) -> None:
        with self._lock:
            self._is_stopping = True
        try:
            with World.current(self._world.group, self._world.timeouts, "/in step", "forward_backward") as beside:
                self._longest = beside.all_reduce_object(self._gathered, longest)
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


def longest(gathered: Sequence[list[Gather]]) -> list[Gather]:
    """The most that a rank has gathered, of all of which the others' are beginnings.

    Raises:
        RankMismatchError: they are not.
    """
    most = max(gathered, key=len)
    for rank, own in enumerate(gathered):
        if own != most[: len(own)]:
            raise RankMismatchError(
                f"rank {rank} has gathered other groups of the base than the rank that is ahead, so the ranks "
                "cannot be synchronized, and no collective of this process group is reliable. Start all ranks "
                "again, and resume from the last save"
            )
    return most
