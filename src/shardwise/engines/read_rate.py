"""How fast this machine reads a checkpoint, found by reading a part of it."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from shardwise.errors import ConfigError
from shardwise.formats.opening import open_checkpoint
from shardwise.storage.names import HubOptions
from shardwise.storage.reading.opening import open_storage

_READ_BYTES = 256 << 20
"""The most that is read: of each file as much as of the others, in the requests that the storage likes."""


def measured_read_rate(name_or_path: str | os.PathLike[str], hub: HubOptions = HubOptions()) -> float:  # noqa: B008
    """Bytes per second, of one process. What the page cache has comes from there, as it would in a load.

    Collective: no. Reads up to 256 MiB; downloads nothing of a hub's repository.

    Raises:
        ConfigError: there is nothing to read.
        StorageError: it cannot be read.
    """
    opened = open_storage(name_or_path, replace(hub, local_files_only=True), download=False)
    with opened.reader as reader:
        index = open_checkpoint(reader, weights_name=opened.file, variant=hub.variant)
        policy = reader.policy
        step = min(policy.request_bytes, _READ_BYTES)
        starts = [[(file, start) for start in range(0, size, step)] for file, size in index.files.items()]
        turns = (ask for turn in itertools.zip_longest(*starts) for ask in turn if ask is not None)
        asks = list(itertools.islice(turns, max(_READ_BYTES // step, 1)))
        if not asks:
            raise ConfigError(f"{index.root}: there is nothing to read, so that no rate can be measured")

        def read(ask: tuple[str, int]) -> int:
            file, start = ask
            buffer = memoryview(bytearray(min(step, index.files[file] - start)))
            reader.read_into(file, start, buffer)
            return len(buffer)

        began = time.perf_counter()
        with ThreadPoolExecutor(policy.concurrency) as workers:
            nbytes = sum(workers.map(read, asks))
        return nbytes / max(time.perf_counter() - began, 1e-9)
