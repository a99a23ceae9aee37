"""Finds ranks that are there already: this process alone, or those that a launcher has started together.

torchrun keeps one store for all generations of ranks that it starts: what an earlier one has left there (addresses,
messages) is found by the next. Numbers of restarts do not tell them apart, as each machine counts its own. So the
first rank of a generation draws a name, and hands it to whoever asks, by a word that the asking rank has drawn.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from shardwise.errors import ConfigError, RankLostError
from shardwise.execution.ranks.line import Patience
from shardwise.execution.ranks.lost_ranks import TELL_AGAIN_S, TELL_S, waiting_for
from shardwise.execution.ranks.whereabouts import address_of, keep_beating
from shardwise.execution.ranks.world import World
from shardwise.models.torch_words import (
    accelerator,
    both_backends,
    default_store,
    has_collectives,
    module_of,
)

_log = logging.getLogger(__name__)

_BETWEEN_LOOKS_S = 0.05

RENDEZVOUS_S = 600.0
"""How long ranks that a launcher has started wait for each other to come, and to connect to each other."""


class _Wait:
    """A wait for other ranks to come, of ``size`` in all, which is told of and has an end."""

    def __init__(self, size: int, address: str, patience_s: float) -> None:
        self.size = size
        self.address = address
        self.patience_s = patience_s
        self._end = time.monotonic() + patience_s
        self._tell_at = time.monotonic() + TELL_S

    def pause(self, missing: Callable[[], Sequence[int]]) -> None:
        """Sleep for a moment. ``missing`` are the ranks that have not come.

        Raises:
            RankLostError: naming them, when the wait is over.
        """
        now = time.monotonic()
        if now > self._end:
            ranks = waiting_for(missing(), self.size, self.address)
            raise RankLostError(
                f"{ranks} for {self.patience_s:.0f} s; start every rank, with one MASTER_ADDR and port"
            )
        if now > self._tell_at:
            self._tell_at = now + TELL_AGAIN_S
            _log.warning("%s", waiting_for(missing(), self.size, self.address))
        time.sleep(_BETWEEN_LOOKS_S)


def store_of_generation(store: Store, rank: int, size: int, *, patience_s: float = RENDEZVOUS_S) -> Store:
    """The part of a store that ranks of this generation have for themselves.

    Collective: yes, over all ranks; nothing else is there yet by which they could meet.

    Raises:
        RankLostError: naming ranks that have not come for so long.
    """
    wait = _Wait(size, address_of(store), patience_s)
    if rank == 0:
        name = _named_by_first(store, size, wait)
    else:
        word = uuid.uuid4().hex
        store.set(f"{_ASKED}/{rank}", word)
        while not store.check([f"{_NAMED}/{word}"]):
            wait.pause(lambda: [0])
        name = store.get(f"{_NAMED}/{word}").decode()
        store.set(f"{_COME}/{name}/{rank}", "1")
        store.add(f"{_COME}/{name}", 1)
    return PrefixStore(f"{_GENERATION}/{name}", store)


_GENERATION = "shardwise generation"
_ASKED, _NAMED, _COME = (f"{_GENERATION}/{word}" for word in ("asked", "named", "come"))


def _named_by_first(store: Store, size: int, wait: _Wait) -> str:
    """Draw a name, and tell it to all; words that ranks of earlier generations have left are answered as well."""
    name = uuid.uuid4().hex
    answered: dict[int, bytes] = {}
    while store.add(f"{_COME}/{name}", 0) < size - 1:
        for rank in range(1, size):
            key = f"{_ASKED}/{rank}"
            if store.check([key]) and answered.get(rank) != (word := store.get(key)):
                store.set(f"{_NAMED}/{word.decode()}", name)
                answered[rank] = word
        wait.pause(lambda: [rank for rank in range(1, size) if not store.check([f"{_COME}/{name}/{rank}"])])
    return name


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a rank that a launcher started: among all ranks, and among those of its machine.

    ``host`` and ``port`` are those of the store, which the launcher keeps where there are generations of ranks.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    has_generations: bool = False


def run_alone(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function in this process, without a process group; its one value."""
    return [function(*args)]


def run_seated(seat: Seat, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function as a rank that a launcher started; its values by rank on the first, none on the others.

    Rank 0 holds the store where the launcher does not. Afterwards the process group is left in order. When the
    function raises, it is left as it is: the other ranks may never come to its end.

    Collective: yes, over all ranks.

    Raises:
        ConfigError: there cannot be a store at this host and port.
        RankLostError: ranks have not come within ten minutes, or could not connect to each other.
    """
    backend = "gloo"
    kind = accelerator()
    if kind is not None:
        module_of(kind).set_device(seat.local_rank)
        backend = both_backends(kind)
    store = store_of_generation(_joint_store(seat), seat.rank, seat.size)
    _connect(backend, store, seat)
    keep_beating(default_store(), seat.rank, Patience().beat_s)
    own = function(*args)
    with World.current() as world:
        values = world.gather(own)
    sys.stdout.flush()
    sys.stderr.flush()
    dist.destroy_process_group()
    return values if seat.rank == 0 else []


def _joint_store(seat: Seat) -> Store:
    """The store of all ranks, which is there when its holder is."""
    address = f"{seat.host}:{seat.port}"
    holds = seat.rank == 0 and not seat.has_generations
    wait = _Wait(seat.size, address, RENDEZVOUS_S)
    while not (holds or _answers(seat)):  # torch tells of each failure in fifty lines
        wait.pause(lambda: [0])
    limit = timedelta(seconds=RENDEZVOUS_S)
    try:
        return TCPStore(seat.host, seat.port, seat.size, holds, limit, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        told = str(error).partition("\n")[0]
        raise ConfigError(f"{address}: ranks cannot meet there ({told}); choose another MASTER_PORT") from error


def _answers(seat: Seat) -> bool:
    try:
        socket.create_connection((seat.host, seat.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _connect(backend: str, store: Store, seat: Seat) -> None:
    """Make the process group of ranks that have all come."""
    others = [rank for rank in range(seat.size) if rank != seat.rank]
    words = f"{waiting_for(others, seat.size, address_of(store))}, to connect to them"
    told = threading.Timer(TELL_S, _log.warning, ("%s", words))
    told.daemon = True
    told.start()
    try:
        limit = timedelta(seconds=RENDEZVOUS_S)
        dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size, timeout=limit)
    except RuntimeError as error:
        raise RankLostError(f"{words}: {str(error).partition(chr(10))[0]}") from error
    finally:
        told.cancel()


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
