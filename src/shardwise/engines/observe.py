"""``observe``: memory and phases of every rank, recorded while a block runs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.execution.processes import this_device
from shardwise.execution.world import World
from shardwise.models.torch_words import memory_in_use
from shardwise.observing.observer import RankObserver, create_rank_file, host_memory
from shardwise.observing.phases import is_observed


@contextmanager
def observe(run_dir: str | os.PathLike[str], *, samples_per_second: float = 20.0) -> Iterator[RankObserver]:
    """Record this rank's memory and traffic within the block, and the phases of what shardwise does in it.

    Writes a file for each rank into ``run_dir/observed``, in place of an earlier one; ``shardwise report`` draws
    them. The block may hold anything. A file that cannot be written any more ends the recording and nothing else:
    ``fault``, of the object that the block is given, has the reason.

    Collective: yes, at its beginning, over the default process group, if there is one: enter it after
    ``init_process_group``.

    Args:
        run_dir: a local folder that all ranks of a machine see, in which other files may be.
        samples_per_second: from 0.1 to 100.

    Raises:
        ConfigError: this process is observed already, or the system does not count memory by kind.
        StorageError: the file cannot be written, or another process writes it.

    Every error is the same on every rank.
    """
    device = this_device()
    world = World.current(call="observe")

    def create() -> int:
        if type(samples_per_second) not in (int, float) or not 0.1 <= samples_per_second <= 100:
            raise ConfigError(f"samples_per_second={samples_per_second!r}: give a number from 0.1 to 100")
        if is_observed():
            raise ConfigError("this process is observed already; leave that block before another one begins")
        host_memory()
        return create_rank_file(Path(run_dir), world.rank)

    def device_memory() -> Sequence[int]:
        return (0, 0, 0) if device.type == "cpu" else memory_in_use(device)

    with world:
        run = world.from_first(lambda: secrets.token_hex(8))
        file = world.together(create)
    header = {"run": run, "rank": world.rank, "world_size": world.size, "device": device.type}
    with RankObserver(file, header, device_memory, samples_per_second) as observer:
        yield observer
