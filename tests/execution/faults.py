"""Functions that ranks run and that fail."""

import os
import socket
import threading
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.support.world import attempt
from torch import nn

from shardwise.engines.arguments import require_same_arguments
from shardwise.errors import FormatError, StorageError
from shardwise.execution.agreement import require_same_settings
from shardwise.execution.audit import require_equal_buffers
from shardwise.execution.collective_errors import translate_collective_errors
from shardwise.execution.replicas import require_alike_models
from shardwise.execution.tensor_metadata import held_by_rank, metadata_by_name
from shardwise.execution.world import Clock, World
from shardwise.models.view import collect_tensors
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


def out_of_memory() -> tuple[str, str]:
    """The second rank runs out of memory while the first waits for it."""
    world = World.current(call="training")
    world.all_gather_object(None)

    def step() -> None:
        with translate_collective_errors(world, lambda: "in step 2"):
            if world.rank == 1:
                raise MemoryError("no more")
            world.all_gather_object(None)

    return attempt(step)


def disagree() -> tuple[str, str]:
    world = World.current()
    return attempt(world.require_equal, "odd" if world.rank == 2 else "even", "the number")


def subgroup_errors() -> list[str]:
    """Messages of differences between the ranks 1 and 2, in a group of their own."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    with World.current(group) as world:
        odd = "odd" if world.rank == 1 else "even"
        model, first_only, last_only = nn.Linear(world.rank + 1, 1), nn.Module(), nn.Module()
        (last_only if world.rank else first_only).register_buffer("table", torch.ones(1), persistent=False)
        facts = world.all_gather(metadata_by_name, {"w": model.weight})
        calls = (
            (world.require_equal, odd, "the number"),
            (require_same_arguments, world, lambda: {"dtype": odd}),
            (require_same_settings, world, {"size": odd}),
            (world.run_all, held_by_rank, facts, world.global_ranks),
            (require_alike_models, world, collect_tensors(model), ()),
            (require_equal_buffers, world, collect_tensors(first_only)),
            (require_equal_buffers, world, collect_tensors(last_only)),
        )
        return [attempt(*call)[1] for call in calls]


def first_on_host(with_names: bool = False) -> bool:
    """With names, every rank has a host name of its own, as containers of one machine have."""
    name = f"container-{dist.get_rank()}" if with_names else socket.gethostname()
    with mock.patch("socket.gethostname", return_value=name):
        return World.current().is_first_at(machine.mount_namespace())


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    threading.Event().wait()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def raise_here(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("not like this")
    return dist.get_rank()


def add(one: int, other: int) -> int:
    return one + other + dist.get_rank()


def gone_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise StorageError("gone")


def fail_in_a_step() -> tuple[str, str, list[str]]:
    """The message, the step and the notes of an error that one rank raises in a phase of a call."""
    with World.current(call="load") as world, Clock().phase("read"):
        try:
            world.run_all(gone_on, 1)
        except StorageError as error:
            return str(error), error.phase, error.__notes__
    return "", "", []
