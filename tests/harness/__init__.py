"""Shipped for tests and benchmarks, ours and users': worlds, a storage on a port, what storages promise, crashes.

The names below are loaded when they are first used: the server needs no torch, and only the suite needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.harness.crashes import (
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
    from tests.harness.http_store import HttpStore, HttpStoreProcess
    from tests.harness.storage_suite import StorageReaderSuite
    from tests.harness.world import run_world
    from tests.harness.writer_suite import StorageWriterSuite, WritableStorage

_HOMES = {
    "BEFORE": "tests.harness.crashes",
    "CrashState": "tests.harness.crashes",
    "Effect": "tests.harness.crashes",
    "EffectLog": "tests.harness.crashes",
    "Entry": "tests.harness.crashes",
    "HttpStore": "tests.harness.http_store",
    "HttpStoreProcess": "tests.harness.http_store",
    "KilledState": "tests.harness.crashes",
    "RecordingWriter": "tests.harness.crashes",
    "StorageReaderSuite": "tests.harness.storage_suite",
    "StorageWriterSuite": "tests.harness.writer_suite",
    "WritableStorage": "tests.harness.writer_suite",
    "assert_nothing_is_lost": "tests.harness.crashes",
    "assert_old_or_new": "tests.harness.crashes",
    "may_be_found": "tests.harness.crashes",
    "recorded": "tests.harness.crashes",
    "run_world": "tests.harness.world",
    "states_after_crash": "tests.harness.crashes",
    "states_after_kill": "tests.harness.crashes",
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
        raise AttributeError(f"module 'tests.harness' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
