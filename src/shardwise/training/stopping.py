"""Being asked to stop: by SIGTERM or SIGUSR1, as schedulers do before they take a machine away, or by Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask to stop."""


class StopRequest:
    """Whether somebody has asked this rank to stop. The ranks agree on it in each step."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that asked."""
        self._woken: int | None = None
        self._has_come = False

    @property
    def is_made(self) -> bool:
        return self.number is not None

    def has_come(self) -> bool:
        """Whether a signal has come, heard or not: the main thread hears none while it waits in a collective."""
        if self._woken is not None:
            with suppress(OSError):  # there is nothing to read
                self._has_come |= not set(ASKING).isdisjoint(os.read(self._woken, 1 << 10))
        return self._has_come or self.is_made

    @contextmanager
    def noting_arrivals(self) -> Iterator[None]:
        """In this block the system's own handler writes down each signal that comes. Of the main thread."""
        self._woken, written = os.pipe()
        for end in (self._woken, written):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            woken, self._woken = self._woken, None
            os.close(woken)
            os.close(written)


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1 and SIGINT ask to stop; a second one ends this process, as it would have without this.

    SIGUSR1 is what Slurm is asked to send some time before the end (``--signal=USR1@120``).

    Signals are the main thread's affair: in any other one nothing is asked.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, _frame: FrameType | None) -> None:
        if not request.is_made:
            request.number = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in ASKING}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # who started this process keeps Ctrl-C from it, and passes it on
            signal.signal(number, ask)
    try:
        with request.noting_arrivals():
            yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
