"""Finds ranks that are there already: this process alone, or the processes of a launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.execution.processes.generations import store_of_generation
from shardwise.execution.ranks.world import World
from shardwise.models.accelerators import accelerator, both_backends, has_collectives, module_of


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a rank that a launcher started: among all ranks, and among those of its machine.

    ``has_generations``: the launcher starts ranks again, and keeps its store.
    """

    rank: int
    size: int
    local_rank: int
    has_generations: bool = False


def run_alone(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function in this process, without a process group; its one value."""
    return [function(*args)]


def run_seated(seat: Seat, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function as a rank that a launcher started; its values by rank on the first, none on the others.

    The ranks meet as torch's launcher has it (``MASTER_ADDR`` and ``MASTER_PORT``, which torch reads). Afterwards
    the process group is left in order. When the function raises, it is left as it is: the other ranks may never
    come to its end.

    Collective: yes, over all ranks.
    """
    backend = "gloo"
    kind = accelerator()
    if kind is not None:
        module_of(kind).set_device(seat.local_rank)
        backend = both_backends(kind)
    store, _, _ = next(rendezvous("env://", seat.rank, seat.size))
    if seat.has_generations:
        store = store_of_generation(store, seat.rank, seat.size)
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size)
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
    """Where this rank computes: its accelerator, else the CPU."""
    kind = accelerator()
    if kind is None or (dist.is_initialized() and not has_collectives(kind)):
        return torch.device("cpu")
    return torch.device(kind.type, module_of(kind).current_device())
