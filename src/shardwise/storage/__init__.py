"""Give me these bytes, take these bytes: files read and written by range, in a folder, memory, or at a URL."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.storage.hub import HubOptions, is_local, resolve
from shardwise.storage.local import LocalReader
from shardwise.storage.local_writer import LocalWriter
from shardwise.storage.memory import MemoryReader
from shardwise.storage.memory_writer import MemoryWriter
from shardwise.storage.opening import OpenStorage, open_storage, open_writer
from shardwise.storage.policy import LOCAL, MEMORY, NETWORK_FILE_SYSTEM, OBJECT_STORE, ReadPolicy
from shardwise.storage.reader import CannotListError, PageCache, StorageReader
from shardwise.storage.retries import Retries
from shardwise.storage.urls import is_url
from shardwise.storage.writer import (
    DISK_WRITES,
    INCOMPLETE,
    LOCAL_WRITES,
    NETWORK_FILE_SYSTEM_WRITES,
    OBJECT_STORE_WRITES,
    StorageWriter,
    WritePolicy,
)

if TYPE_CHECKING:
    from shardwise.storage.fsspec_writer import FsspecWriter
    from shardwise.storage.remote import RemoteReader

__all__ = [
    "DISK_WRITES",
    "INCOMPLETE",
    "LOCAL",
    "LOCAL_WRITES",
    "MEMORY",
    "NETWORK_FILE_SYSTEM",
    "NETWORK_FILE_SYSTEM_WRITES",
    "OBJECT_STORE",
    "OBJECT_STORE_WRITES",
    "CannotListError",
    "FsspecWriter",
    "HubOptions",
    "LocalReader",
    "LocalWriter",
    "MemoryReader",
    "MemoryWriter",
    "OpenStorage",
    "PageCache",
    "ReadPolicy",
    "RemoteReader",
    "Retries",
    "StorageReader",
    "StorageWriter",
    "WritePolicy",
    "is_local",
    "is_url",
    "open_storage",
    "open_writer",
    "resolve",
]

_HOMES = {
    "FsspecWriter": "shardwise.storage.fsspec_writer",
    "RemoteReader": "shardwise.storage.remote",
}


def __getattr__(name: str) -> Any:
    # Loaded when they are first used: ssl and the HTTP client take longer to import than everything else here.
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.storage' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
