"""Shipped for tests and benchmarks, ours and users': worlds, a storage on a port, what storages promise, crashes.

The names below are loaded when they are first used: the server needs no torch, and only the suite needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.testing.crashes import (
        BEFORE,
        CrashState,
        Effect,
        EffectLog,
        Entry,
        KilledState,
        RecordingWriter,
        assert_nothing_is_lost,
        assert_old_or_new,
        may_be_found,
        recorded,
        states_after_crash,
        states_after_kill,
    )
    from shardwise.testing.http_store import HttpStore, HttpStoreProcess
    from shardwise.testing.storage_suite import StorageReaderSuite
    from shardwise.testing.world import run_world
    from shardwise.testing.writer_suite import StorageWriterSuite, WritableStorage

_HOMES = {
    "BEFORE": "shardwise.testing.crashes",
    "CrashState": "shardwise.testing.crashes",
    "Effect": "shardwise.testing.crashes",
    "EffectLog": "shardwise.testing.crashes",
    "Entry": "shardwise.testing.crashes",
    "HttpStore": "shardwise.testing.http_store",
    "HttpStoreProcess": "shardwise.testing.http_store",
    "KilledState": "shardwise.testing.crashes",
    "RecordingWriter": "shardwise.testing.crashes",
    "StorageReaderSuite": "shardwise.testing.storage_suite",
    "StorageWriterSuite": "shardwise.testing.writer_suite",
    "WritableStorage": "shardwise.testing.writer_suite",
    "assert_nothing_is_lost": "shardwise.testing.crashes",
    "assert_old_or_new": "shardwise.testing.crashes",
    "may_be_found": "shardwise.testing.crashes",
    "recorded": "shardwise.testing.crashes",
    "run_world": "shardwise.testing.world",
    "states_after_crash": "shardwise.testing.crashes",
    "states_after_kill": "shardwise.testing.crashes",
}

__all__ = [
    "BEFORE",
    "CrashState",
    "Effect",
    "EffectLog",
    "Entry",
    "HttpStore",
    "HttpStoreProcess",
    "KilledState",
    "RecordingWriter",
    "StorageReaderSuite",
    "StorageWriterSuite",
    "WritableStorage",
    "assert_nothing_is_lost",
    "assert_old_or_new",
    "may_be_found",
    "recorded",
    "run_world",
    "states_after_crash",
    "states_after_kill",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
