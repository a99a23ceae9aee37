"""Worlds, a storage on a port, what storages promise, and crashes, for tests and benchmarks.

Names are loaded when they are first used: the server needs no torch, and only the suites need pytest.
"""

import importlib
from typing import Any

_NAMES = {
    "http_store": ("HttpStore",),
    "storage_suite": ("StorageReaderSuite",),
    "writer_suite": ("StorageWriterSuite", "WritableStorage"),
    "world": ("run_world",),
    "crashes": (
        *("BEFORE", "CrashState", "Effect", "EffectLog", "Entry", "KilledState", "recorded"),
        *("assert_nothing_is_lost", "may_be_found", "states_after_crash", "states_after_kill"),
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"tests.support.{module}"), name)
    raise AttributeError(f"module 'tests.support' has no attribute {name!r}")
