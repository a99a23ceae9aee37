"""Give me these bytes: files read by range, from a folder, memory, a URL, or fetched from the hub first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.storage.hub import HubOptions, is_local, resolve
from shardwise.storage.local import LocalReader
from shardwise.storage.memory import MemoryReader
from shardwise.storage.opening import OpenStorage, open_storage
from shardwise.storage.policy import LOCAL, MEMORY, NETWORK_FILE_SYSTEM, OBJECT_STORE, ReadPolicy
from shardwise.storage.reader import CannotListError, PageCache, StorageReader
from shardwise.storage.retries import Retries
from shardwise.storage.urls import is_url
from shardwise.storage.writer import StorageWriter, WritePolicy

if TYPE_CHECKING:
    from shardwise.storage.remote import RemoteReader

__all__ = [
    "LOCAL",
    "MEMORY",
    "NETWORK_FILE_SYSTEM",
    "OBJECT_STORE",
    "CannotListError",
    "HubOptions",
    "LocalReader",
    "MemoryReader",
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
    "resolve",
]


def __getattr__(name: str) -> Any:
    # Loaded when it is first used: ssl and the HTTP client take longer to import than everything else here.
    if name != "RemoteReader":
        raise AttributeError(f"module 'shardwise.storage' has no attribute {name!r}")
    from shardwise.storage.remote import RemoteReader

    globals()[name] = RemoteReader
    return RemoteReader
