"""Functions that ranks run and that fail."""

import os
import socket
import time
from typing import Any
from unittest import mock

import torch.distributed as dist
from tests.harness.world import attempt

from shardwise.errors import FormatError, StorageError
from shardwise.execution import Timeouts
from shardwise.execution.world import World
from shardwise.storage import machine


def raise_on(ranks: tuple[int, ...], same: bool) -> tuple[str, str]:
    world = World.current()

    def phase() -> int:
        if world.rank in ranks:
            raise StorageError("the disk is gone" if same else f"disk {world.rank} is gone")
        return world.rank

    return attempt(world.run_all, phase)


def first_fails() -> tuple[str, str, list[int]]:
    """The first rank's failure is everybody's, and the ranks are in step afterwards."""
    world = World.current()

    def read() -> int:
        assert world.rank == 0
        raise FormatError("the header lies")

    return *attempt(world.broadcast, read), world.all_gather_object(world.rank)


def first_shares() -> Any:
    return World.current().broadcast(lambda: {"rank": dist.get_rank()})


def foreign_error() -> tuple[str, str]:
    return attempt(World.current().run_all, lambda: {}["absent"])


def disagree() -> tuple[str, str]:
    world = World.current()
    return attempt(world.require_equal, "odd" if world.rank == 2 else "even", "the number")


def first_on_host(with_names: bool = False) -> bool:
    """With names, every rank has a host name of its own, as containers of one machine have."""
    name = f"container-{dist.get_rank()}" if with_names else socket.gethostname()
    with mock.patch("socket.gethostname", return_value=name):
        return World.current().is_first_of(machine.file_space())


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    time.sleep(60)


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def raise_here(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("not like this")
    return dist.get_rank()


def add(one: int, other: int) -> int:
    return one + other + dist.get_rank()


def gone_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise StorageError("gone")


def inner_group_missed() -> tuple[list[tuple[str, str]], list[list[int]]]:
    """Ranks of a group meet within a call that one of them leaves before it comes to them; then in another call.

    The last rank is in no such group. Returns what was raised, and what the group's ranks told each other then.
    """
    group = _pairs()
    errors, told = [], []
    for turn in range(2):

        def meet(turn: int = turn) -> list[int]:
            if turn == 0 and dist.get_rank() == 0:
                raise StorageError("gone")
            if dist.get_rank() == 2:
                return []
            with World.current(group, QUICK, around=world) as peers:
                return peers.all_gather_object(dist.get_rank() + turn)

        try:
            with World.current(timeouts=QUICK, call="load") as world:
                told.append(world.run_all(meet))
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
    return errors, told


QUICK = Timeouts(heartbeat_interval_s=0.1, heartbeat_timeout_s=3.0, join_timeout_s=10.0)

_groups: list[dist.ProcessGroup] = []


def _pairs() -> dist.ProcessGroup | None:
    """The first two ranks."""
    if not _groups:
        _groups.append(dist.new_group([0, 1]))
    return _groups[0]
