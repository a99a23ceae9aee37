"""Shipped for tests and benchmarks, ours and users': small worlds, a storage on a port, what storages promise.

The names below are loaded when they are first used: the server needs no torch, and only the suite needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.testing.http_store import HttpStore, HttpStoreProcess
    from shardwise.testing.storage_suite import StorageReaderSuite
    from shardwise.testing.world import run_world
    from shardwise.testing.writer_suite import StorageWriterSuite, WritableStorage

_HOMES = {
    "HttpStore": "shardwise.testing.http_store",
    "HttpStoreProcess": "shardwise.testing.http_store",
    "StorageReaderSuite": "shardwise.testing.storage_suite",
    "StorageWriterSuite": "shardwise.testing.writer_suite",
    "WritableStorage": "shardwise.testing.writer_suite",
    "run_world": "shardwise.testing.world",
}

__all__ = [
    "HttpStore",
    "HttpStoreProcess",
    "StorageReaderSuite",
    "StorageWriterSuite",
    "WritableStorage",
    "run_world",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
