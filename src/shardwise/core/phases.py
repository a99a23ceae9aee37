"""Phases and work of a process, marked in the code, for error messages and for ranks that wait for this one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


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


def current_phases() -> str:
    """Return the phases that this thread is in, outermost first, as in "load, read"."""
    return ", ".join(_PHASES.names)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark the block as a phase of this thread."""
    names = _PHASES.names
    depth = len(names)
    names.append(name)
    if names is _MAIN_THREAD.phases:
        _MAIN_THREAD.changed_s = time.monotonic()
    try:
        yield
    finally:
        del names[depth:]
        if names is _MAIN_THREAD.phases:
            _MAIN_THREAD.changed_s = time.monotonic()


@contextmanager
def busy_with(work: str) -> Iterator[None]:
    """Mark the block as work of this rank alone, on which other ranks may wait. See ``ranks/slow_ranks.py``.

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
    # A phase that began within the work counts in place of it, because ranks meet at its end.
    work, depth = (_MAIN_THREAD.busy or [("", 0)])[-1]
    return ", ".join(phases), work if depth == len(phases) else "", _MAIN_THREAD.changed_s
