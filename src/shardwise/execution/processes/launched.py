"""Finds ranks that are there already: this process alone, or those that a launcher has started together.

torchrun keeps one store for all generations of ranks that it starts: what an earlier one has left there (addresses,
messages) is found by the next. Numbers of restarts do not tell them apart, as each machine counts its own. So the
first rank of a generation draws a name, and hands it to whoever asks, by a word that the asking rank has drawn.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from shardwise.errors import RankLostError
from shardwise.execution.ranks.world import World
from shardwise.models.torch_words import accelerator, both_backends, has_collectives, module_of

_BETWEEN_LOOKS_S = 0.05


def store_of_generation(store: Store, rank: int, size: int, *, patience_s: float = 600.0) -> Store:
    """The part of a store that ranks of this generation have for themselves.

    Collective: yes, over all ranks; nothing else is there yet by which they could meet.

    Raises:
        RankLostError: ranks have not come for so long.
    """
    if rank == 0:
        name = _named_by_first(store, size, patience_s)
    else:
        word = uuid.uuid4().hex
        store.set(f"{_ASKED}/{rank}", word)
        try:
            store.wait([f"{_NAMED}/{word}"], timedelta(seconds=patience_s))
        except RuntimeError as error:  # of the store, whose class of errors is torch's own
            raise RankLostError(
                f"rank {rank} has waited {patience_s:.0f} s for the first of this generation, which did not come"
            ) from error
        name = store.get(f"{_NAMED}/{word}").decode()
        store.add(f"{_COME}/{name}", 1)
    return PrefixStore(f"{_GENERATION}/{name}", store)


_GENERATION = "shardwise generation"
_ASKED, _NAMED, _COME = (f"{_GENERATION}/{word}" for word in ("asked", "named", "come"))


def _named_by_first(store: Store, size: int, patience_s: float) -> str:
    """Draw a name, and tell it to all; words that ranks of earlier generations have left are answered as well."""
    name = uuid.uuid4().hex
    answered: dict[int, bytes] = {}
    end = time.monotonic() + patience_s
    while store.add(f"{_COME}/{name}", 0) < size - 1:
        for rank in range(1, size):
            key = f"{_ASKED}/{rank}"
            if store.check([key]) and answered.get(rank) != (word := store.get(key)):
                store.set(f"{_NAMED}/{word.decode()}", name)
                answered[rank] = word
        if time.monotonic() > end:
            raise RankLostError(
                f"not all of the {size} ranks of this generation have come within {patience_s:.0f} s"
            )
        time.sleep(_BETWEEN_LOOKS_S)
    return name


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
