"""``observe``: what this process needs and does, written down while it runs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.execution.processes.launched import this_device
from shardwise.execution.ranks.world import World
from shardwise.models.torch_words import memory_in_use
from shardwise.observing.own_memory import OwnMemory
from shardwise.observing.phases import is_listened_to
from shardwise.observing.rank_file import RankFile
from shardwise.observing.sampler import DeviceUse, Place, RankObserver
from shardwise.storage.machine import boot


@contextmanager
def observe(run_dir: str | os.PathLike[str], *, samples_per_second: float = 20.0) -> Iterator[RankObserver]:
    """Within the block, sample this rank's memory and traffic, and mark the phases of what shardwise does in it.

    What is found goes into ``run_dir/observed``, a file for each rank, appended as it happens, whole up to a kill;
    ``shardwise report`` and ``shardwise top`` read it. The block may hold anything, ours or not. A file that cannot
    be written any more ends the observing and nothing else: ``fault``, of what the block is given, says so.

    Collective: yes, at its beginning, over the default process group, if there is one: enter it once that is there.

    Args:
        run_dir: a local folder that all ranks of a machine see, in which other things may be.
        samples_per_second: how often memory is looked at, from 0.1 to 100.

    Raises:
        ConfigError: there is an observer in this process already, or the system does not count memory by kind.
        StorageError: the file cannot be written, or another process writes it.

    Every error is the same on every rank.
    """
    world = World.current(call="observe")
    device = this_device()

    def opened() -> tuple[OwnMemory, RankFile]:
        if type(samples_per_second) not in (int, float) or not 0.1 <= samples_per_second <= 100:
            raise ConfigError(f"samples_per_second={samples_per_second!r}: give a number from 0.1 to 100")
        if is_listened_to():
            raise ConfigError("this process is observed already; leave that block before another one begins")
        memory = OwnMemory()
        try:
            return memory, RankFile(Path(run_dir), world.rank)
        except BaseException:
            memory.close()
            raise

    def used() -> DeviceUse:
        return DeviceUse() if device.type == "cpu" else DeviceUse(*memory_in_use(device))

    with world:
        run = world.from_first(lambda: secrets.token_hex(8))
        memory, file = world.together(opened)
    place = Place(run, world.rank, world.size, boot(), "" if device.type == "cpu" else str(device))
    with RankObserver(file, place, memory, used, samples_per_second) as observer:
        yield observer
