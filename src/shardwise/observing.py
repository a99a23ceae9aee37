"""Phases of a process, marked in the code, and the columns of an observer's records.

:func:`shardwise.observe` records, :mod:`shardwise.pictures` reads and draws.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

_OBSERVERS: list[Callable[[str | None], None]] = []


class _MainThread:
    """Phases and work of the main thread, for other threads to read."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.busy: list[tuple[str, int]] = []
        """Work, and the number of phases around it."""
        self.changed_s = time.monotonic()


_MAIN_THREAD = _MainThread()


class _Phases(threading.local):
    """The phases that a thread is in, outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []
        if threading.current_thread() is threading.main_thread():
            _MAIN_THREAD.phases = self.names


_PHASES = _Phases()

os.register_at_fork(after_in_child=_OBSERVERS.clear)  # a forked child is not observed


def is_observed() -> bool:
    """Return whether this process is observed."""
    return bool(_OBSERVERS)


@contextmanager
def observed_by(mark: Callable[[str | None], None]) -> Iterator[None]:
    """Call ``mark(name)`` when a thread enters a phase within the block, and ``mark(None)`` when it leaves it."""
    _OBSERVERS.append(mark)
    try:
        yield
    finally:
        with suppress(ValueError):  # in a forked child, whose observers are none
            _OBSERVERS.remove(mark)


def current_phases() -> str:
    """Return the phases that this thread is in, outermost first, as in "load, read"."""
    return ", ".join(_PHASES.names)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark the block as a phase of this thread. Costs next to nothing in a process that is not observed."""
    observers, names = [*_OBSERVERS], _PHASES.names
    depth = len(names)
    names.append(name)
    if names is _MAIN_THREAD.phases:
        _MAIN_THREAD.changed_s = time.monotonic()
    for mark in observers:
        mark(name)
    try:
        yield
    finally:
        del names[depth:]
        if names is _MAIN_THREAD.phases:
            _MAIN_THREAD.changed_s = time.monotonic()
        for mark in observers:
            mark(None)


@contextmanager
def busy_with(work: str) -> Iterator[None]:
    """Mark the block as work of this rank alone, on which other ranks may wait. See ``execution/slow_ranks.py``.

    With "", the block is work of all ranks, inside of such work.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _MAIN_THREAD.busy.append((work, len(_PHASES.names)))
    _MAIN_THREAD.changed_s = time.monotonic()
    try:
        yield
    finally:
        _MAIN_THREAD.busy.pop()
        _MAIN_THREAD.changed_s = time.monotonic()


def main_thread_work() -> tuple[str, str, float]:
    """Return the phases of the main thread, its work, and when one of them changed, by the monotonic clock."""
    phases = [*_MAIN_THREAD.phases]
    work, depth = (_MAIN_THREAD.busy or [("", 0)])[-1]
    return ", ".join(phases), work if depth == len(phases) else "", _MAIN_THREAD.changed_s


FOLDER = "observed"

STATUS = {"anonymous": b"RssAnon", "shared": b"RssShmem", "file": b"RssFile", "peak": b"VmHWM"}
TRAFFIC = {"read": b"rchar", "written": b"wchar"}
COLUMNS = ("t", *STATUS, "allocated", "reserved", "used", *TRAFFIC)
"""Columns of a sample: ``t`` in seconds, the others in KiB."""

_LABELS: Mapping[str, str] = {
    "index": "read headers",
    "materialize": "allocate shards",
    "read": "read weights",
    "share": "exchange weights between ranks",
    "fill": "initialize missing tensors",
    "audit": "check completeness",
    "agree": "compare ranks",
    "wrap": "shard",
    "exchange": "move values between ranks",
    "create": "create files",
    "write": "write files",
    "sync": "flush to disk",
    "verify": "read back",
    "stage": "copy to the host",
    "wait": "wait for the previous save",
    "collect": "collect the state",
    "open": "open the checkpoint",
    "compare": "compare replicas",
    "optimizer": "create the optimizer",
    "optim_step": "optimizer step",
    "the Trainer's steps": "training steps",
    "the Trainer's callbacks": "callbacks",
    "Trainer._save_checkpoint": "save a checkpoint",
    "Trainer.save_model": "save the model",
    "the tenants' passes": "training steps",
}
"""Labels of phases. Phases that are not listed are named after public functions, and shown under that name."""


def get_label(phase_name: str) -> str:
    """Return the name of a phase in tables and pictures."""
    return _LABELS.get(phase_name.removeprefix("AdapterBank."), phase_name)
