"""Brings up the process group of ranks that a launcher such as torchrun has started."""

from __future__ import annotations

import logging
import socket
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
from shardwise.execution.failure_detector import address_of, detector_of
from shardwise.execution.meetings import TELL_AGAIN_S, TELL_S, waiting_for
from shardwise.execution.world import World
from shardwise.models.torch_words import accelerator, both_backends, default_store, has_collectives, module_of

_log = logging.getLogger(__name__)

_POLL_S = 0.05

RENDEZVOUS_S = 600.0
"""Seconds that ranks which a launcher has started wait for each other."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a rank that a launcher started, among all ranks and among those of its machine.

    ``host`` and ``port`` are those of the store, which the launcher keeps where it ``has_store``, else rank 0.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    has_store: bool = False


class _Wait:
    """A wait for other ranks, ``size`` in all, that is logged and has an end."""

    def __init__(self, size: int, address: str, patience_s: float) -> None:
        self.size = size
        self.address = address
        self._end = time.monotonic() + patience_s
        self._tell_at = time.monotonic() + TELL_S

    def pause(self, missing: Sequence[int]) -> None:
        """Sleep for a moment; ``missing`` are the ranks that have not come.

        Raises:
            RankLostError: naming them, when the wait is over.
        """
        now = time.monotonic()
        words = waiting_for(missing, self.size, self.address)
        if now > self._end:
            raise RankLostError(f"{words}, for too long; start every rank, with one MASTER_ADDR and port")
        if now > self._tell_at:
            self._tell_at = now + TELL_AGAIN_S
            _log.warning("%s", words)
        time.sleep(_POLL_S)


def run_seated(seat: Seat, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function as a rank that a launcher started; its values by rank on the first, none on the others.

    Afterwards the process group is left in order. When the function raises, it is left as it is: the other ranks
    may never come to its end. Collective: yes, over all ranks.

    Raises:
        ConfigError: there cannot be a store at this host and port.
        RankLostError: ranks have not come within ten minutes, or could not connect to each other.
    """
    backend = "gloo"
    kind = accelerator()
    if kind is not None:
        module_of(kind).set_device(seat.local_rank)
        backend = both_backends(kind)
    joint = _joint_store(seat)
    try:
        store = store_of_generation(joint, seat.rank, seat.size)
        limit = timedelta(seconds=RENDEZVOUS_S)
        dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size, timeout=limit)
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise RankLostError(f"rank {seat.rank}: it cannot connect to the other ranks ({cause})") from error
    detector_of(default_store(), seat.rank)
    own = function(*args)
    with World.current() as world:
        values = world.gather(own)
    if dist.is_initialized():  # accelerate may have ended it
        dist.destroy_process_group()
    return values if seat.rank == 0 else []


def _joint_store(seat: Seat) -> Store:
    """The store of all ranks, which is there when its holder is."""
    address = f"{seat.host}:{seat.port}"
    holds = seat.rank == 0 and not seat.has_store
    waiting = _Wait(seat.size, address, RENDEZVOUS_S)
    while not (holds or _answers(seat)):  # torch logs each failure in fifty lines
        waiting.pause([0])
    limit = timedelta(seconds=RENDEZVOUS_S)
    try:
        return TCPStore(seat.host, seat.port, seat.size, holds, limit, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise ConfigError(f"{address}: ranks cannot meet there ({cause}); choose another MASTER_PORT") from error


def _answers(seat: Seat) -> bool:
    try:
        socket.create_connection((seat.host, seat.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def store_of_generation(store: Store, rank: int, size: int, *, patience_s: float = RENDEZVOUS_S) -> Store:
    """Wait for all ranks; the part of a store that ranks started together have for themselves.

    torchrun keeps one store for all ranks that it starts, again and again, and each machine has its own count of
    restarts. So rank 0 draws a name, and hands it to each rank that asks by a word which that rank has drawn.

    Raises:
        RankLostError: naming ranks that have not come for so long.
    """
    waiting = _Wait(size, address_of(store), patience_s)
    name = word = uuid.uuid4().hex
    if rank:
        store.set(f"shardwise/asks/{rank}", word)
        while not store.check([f"shardwise/told/{word}"]):
            waiting.pause([0])
        name = store.get(f"shardwise/told/{word}").decode()
    store.set(f"{name}/here/{rank}", "")
    while missing := [other for other in range(size) if not store.check([f"{name}/here/{other}"])]:
        for other in missing if rank == 0 else ():
            if store.check([f"shardwise/asks/{other}"]):
                store.set(f"shardwise/told/{store.get(f'shardwise/asks/{other}').decode()}", name)
        waiting.pause(missing)
    return PrefixStore(name, store)


def this_place() -> tuple[int, int]:
    """This rank, and how many there are."""
    world = World.current()
    return world.rank, world.size


def this_device() -> torch.device:
    """This rank's accelerator, else the CPU."""
    kind = accelerator()
    if kind is None or (dist.is_initialized() and not has_collectives(kind)):
        return torch.device("cpu")
    return torch.device(kind.type, module_of(kind).current_device())
