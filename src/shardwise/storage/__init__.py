"""Give me these bytes: files read by range, from a folder, from memory, or fetched from the hub first."""

from shardwise.storage.hub import HubOptions, is_local, resolve
from shardwise.storage.local import LocalReader
from shardwise.storage.memory import MemoryReader
from shardwise.storage.policy import LOCAL, MEMORY, NETWORK_FILE_SYSTEM, OBJECT_STORE, ReadPolicy
from shardwise.storage.reader import StorageReader

__all__ = [
    "LOCAL",
    "MEMORY",
    "NETWORK_FILE_SYSTEM",
    "OBJECT_STORE",
    "HubOptions",
    "LocalReader",
    "MemoryReader",
    "ReadPolicy",
    "StorageReader",
    "is_local",
    "resolve",
]
