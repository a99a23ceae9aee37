"""Phases of a process, marked in the code, and the columns of an observer's records.

:func:`shardwise.observe` records, :mod:`shardwise.pictures` reads and draws.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_OBSERVERS: list[Callable[[str | None], None]] = []


class _Phases(threading.local):
    """The phases that a thread is in, outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []


_PHASES = _Phases()

os.register_at_fork(after_in_child=_OBSERVERS.clear)  # a child is another process than the one that is observed


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
        _OBSERVERS.clear()


def current_step() -> str:
    """Return the phases that this thread is in, outermost first, as in "load, read"."""
    return ", ".join(_PHASES.names)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark the block as a phase of this thread. Costs next to nothing in a process that is not observed."""
    observers, names = [*_OBSERVERS], _PHASES.names
    depth = len(names)
    names.append(name)
    for mark in observers:
        mark(name)
    try:
        yield
    finally:
        del names[depth:]
        for mark in observers:
            mark(None)


FOLDER = "observed"

STATUS = {"anonymous": b"RssAnon", "shared": b"RssShmem", "file": b"RssFile", "peak": b"VmHWM"}
TRAFFIC = {"read": b"rchar", "written": b"wchar"}
COLUMNS = ("t", *STATUS, "allocated", "reserved", "used", *TRAFFIC)
"""Of a sample: seconds, and KiB."""
