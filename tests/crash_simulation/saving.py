"""Saves as small as they can be: two ranks, two files and an index, or one file."""

import json
from collections.abc import Sequence

from tests.support.memory_storage import MemoryReader

from shardwise.storage.contract import StorageWriter

INDEX = "model.safetensors.index.json"
NBYTES = 3 * 4096 + 100
HALF = 5000

OLD = bytes([1]) * NBYTES
NEW = bytes(range(2, 102)) * (NBYTES // 100 + 1)
NEW = NEW[:NBYTES]


def old_save() -> dict[str, bytes]:
    names = ["model-0ld-1", "model-0ld-2"]
    return {INDEX: json.dumps(names).encode(), names[0]: OLD, names[1]: OLD, "config.json": b"{}"}


def see(reader: MemoryReader) -> list[bytes]:
    """All that the index names."""
    names = json.loads(reader.read(INDEX, 0, reader.size(INDEX)))
    return [reader.read(name, 0, reader.size(name)) for name in names]


def begin(coordinator: StorageWriter, names: Sequence[str]) -> None:
    for name in names:
        coordinator.create(name, NBYTES)


def fill(writer: StorageWriter, rank: int, names: Sequence[str]) -> None:
    """What one of two ranks does."""
    start, stop = (0, HALF) if rank == 0 else (HALF, NBYTES)
    for name in names:
        writer.write(name, start, [memoryview(NEW)[start:stop]])
    for name in names:
        writer.sync(name)


def commit(coordinator: StorageWriter, names: Sequence[str]) -> None:
    coordinator.sync_names()
    older = [name for name in coordinator.list() if name.startswith("model-") and name not in names]
    coordinator.replace(INDEX, json.dumps(list(names)).encode())
    for name in older:
        coordinator.remove(name)
    coordinator.sync_names()
