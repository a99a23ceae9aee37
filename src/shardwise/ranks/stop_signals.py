"""Stops that are requested by signals: SIGTERM, SIGUSR1, SIGHUP and Ctrl-C.

[Note: One request] A signal to a process group reaches a rank that ``shardwise train`` has started twice, directly
and from its parent process. The parent passes a request on as SIGUSR2, which is never more than a request. Of the
other signals, those within a second of the first are the same request (``timeout`` sends two), and a later one
means "now". So does any before the first rank is in the block of ``stopping_on_signals``, which makes a file then.

[Note: Signals in a collective] Python runs a handler in the main thread between two bytecodes, so never while that
thread is in a collective of torch, or computes for long. So a thread of its own receives the numbers of signals
through ``signal.set_wakeup_fd``. It makes the request, and ends a process that does not end by itself.

[Note: Signals to data workers] A data loader raises an error if a signal ends one of its worker processes, and so a
signal to the process group would cost the steps since the last checkpoint. Workers of a process that can be asked
to stop ignore these signals, unless it sends them itself. They begin to when they call their init function: before,
a forked one has run for milliseconds, and a spawned one imports. Programs that they start have the signals blocked.
Other children of the process, also programs, get the signals as those of any program do.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from shardwise.core.phases import main_thread_work
from shardwise.ranks.failure_detection import describe_wait

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)

RELAYED: Final = signal.SIGUSR2
"""The signal by which a parent process passes a request on to its ranks."""

_RECEIVED: Final = (*STOP_SIGNALS, RELAYED)

SAME_REQUEST_S: Final = 1.0

_PATIENCE_S: Final = 60.0
"""Seconds that a rank with a request waits for another rank, once it is known to wait for it."""

_PATIENCE_AT_CTRL_C_S: Final = 10.0
"""The same after Ctrl-C to this process itself: somebody waits for its end."""

_RAISE_S: Final = 5.0
"""Seconds in which the main thread leaves the block after a request to stop now, before the process exits."""

_log = logging.getLogger(__name__)


def acknowledge_stop() -> None:
    """Write to stderr that a requested stop was received. Safe in a signal handler: raises nothing."""
    with contextlib.suppress(OSError):  # the terminal, or the reader of the pipe, may be gone
        os.write(2, b"finishing the current step, then saving. Press Ctrl-C again to stop now\n")


def ignore_stop_signals() -> None:
    """Ignore stop signals but Ctrl-C from now on, in a process that is about to end."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)


def get_handlers(numbers: Iterable[signal.Signals]) -> dict[signal.Signals, Any]:
    """Return the handlers of signals, for ``signal.signal`` to restore."""
    # None is a handler that C code has installed, which Python cannot restore.
    return {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}


class StoppedNowError(SystemExit):
    """A signal ends this process at once. The exit code is that of shells, 128 and the signal."""


def raise_signal(number: int) -> NoReturn:
    """Raise what ends this process by a signal."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise StoppedNowError(128 + number)


class StopRequest:
    """Request of a signal to this process to stop. The ranks agree on it after each step.

    See [Note: One request] and [Note: Signals in a collective].
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The first signal, once it has been received."""
        self._made_s = 0.0
        self._number_now: int | None = None
        self._has_left = threading.Event()

    @property
    def is_made(self) -> bool:
        return self.number is not None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Make the request, or raise what ends this process, if a signal means "now". A signal handler.

        Whether it means that is for the other thread to say, because this one may be called long after the signal.
        """
        if self._number_now is not None:
            raise_signal(self._number_now)
        self._make(number)

    def receive(self, wakeups: socket.socket) -> None:
        """Receive the numbers of signals until the main thread leaves the block. Runs on a thread of its own."""
        while not self._has_left.is_set():
            # After a request it also looks, each second, whether another rank keeps this one from stopping.
            is_waiting = self.is_made and self._number_now is None
            if select.select([wakeups], [], [], 1.0 if is_waiting else None)[0]:
                self._note(wakeups.recv(1)[0])
            else:
                patience_s = _PATIENCE_AT_CTRL_C_S if self.number == signal.SIGINT else _PATIENCE_S
                if time.monotonic() - self._made_s > patience_s:
                    self._end_wait()

    def _end_wait(self) -> None:
        """End the process if it has waited for another rank for long. In a save it waits on, as was asked."""
        phases, *_ = main_thread_work()
        wait = describe_wait()
        if wait and ", " not in phases:
            _log.error("stopped while waiting for %s. Earlier checkpoints are complete", wait)
            self._end_now(self.number or signal.SIGTERM)

    def leave(self) -> None:
        """Note that the main thread has left the block."""
        self._has_left.set()

    def _make(self, number: int) -> None:
        if self.is_made:
            return
        # Before the number: the other thread compares the time as soon as the request is made.
        self._made_s = time.monotonic()
        self.number = number
        if number == signal.SIGINT:  # the other signals come from programs
            acknowledge_stop()

    def _note(self, number: int) -> None:
        if number not in _RECEIVED:
            return
        if not self.is_made:
            self._make(number)
        elif number != RELAYED and time.monotonic() - self._made_s > SAME_REQUEST_S and self._number_now is None:
            self._end_now(number)

    def _end_now(self, number: int) -> None:
        """Raise in the main thread, or else end the process: a collective cannot be interrupted."""
        # Before the signal, whose handler raises only if this is set.
        self._number_now = number
        main = threading.main_thread().ident
        assert main is not None, "it has been started"
        signal.pthread_kill(main, number)
        if not self._has_left.wait(_RAISE_S):
            os._exit(128 + number)


_handlers_outside: list[dict[signal.Signals, Any]] = []
"""For each block that this process is in, the handlers that signals had before, the outermost block first."""

_announcements: list[Path] = []
"""Files that a parent process looks for before it passes a request on."""


def announce_stoppable(file: Path) -> None:
    """Have this process make a file as soon as a stop can be requested of it, by ``stopping_on_signals``."""
    _announcements.append(file)


def _leave_in_child() -> None:
    """Give signals to a child that was forked within a block the handlers that they had outside of it."""
    if _handlers_outside:
        signal.set_wakeup_fd(-1)  # it belongs to the parent, which would take the child's signals for its own
        for number, handler in _handlers_outside[0].items():
            signal.signal(number, handler)
        _handlers_outside.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def shield_data_workers(loader: Any) -> None:
    """Keep stop signals from the workers of a data loader, torch's or accelerate's, if this process is in a block.

    See [Note: Signals to data workers].
    """
    if _handlers_outside and loader.num_workers > 0:
        loader = getattr(loader, "base_dataloader", loader)  # accelerate's have torch's
        loader.worker_init_fn = _ShieldedWorker(loader.worker_init_fn)


class _ShieldedWorker:
    """Init function of a data worker, which calls the loader's own. Picklable, for new processes, if that is."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init
        self._end, ours = multiprocessing.Pipe(duplex=False)
        # Called when this process ends, before it waits for its children.
        Finalize(self, ours.close, exitpriority=0)

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _RECEIVED)
        # A spawned worker has threads that libraries have started before, and that do not block them. A signal of
        # the parent that one of them takes is lost, so the worker ends when the pipe is closed, too.
        for number in _RECEIVED:
            signal.signal(number, _ignore)
        threading.Thread(target=_obey_parent, name="shardwise-signals", daemon=True).start()
        threading.Thread(target=_end_with, args=(self._end,), name="shardwise-end", daemon=True).start()
        if self._init is not None:
            self._init(worker)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal to a data worker. Unlike SIG_IGN, it is not kept by programs that the worker starts."""


def _obey_parent() -> None:
    """End this process when its parent sends it a signal, as a data loader does at its end."""
    while signal.sigwaitinfo(_RECEIVED).si_pid != os.getppid():
        pass
    os._exit(0)  # as torch's own handler does


def _end_with(end: Connection) -> None:
    """End this process when its parent closes a pipe. A forked one has both ends, and never sees that."""
    with contextlib.suppress(EOFError):
        end.recv_bytes()
    os._exit(0)


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """Have stop signals request a stop within the block. A later one, by more than a second, ends this process.

    Slurm can send SIGUSR1 before the end of a job (``--signal=USR1@120``). SIGHUP, of a terminal that is closed, is
    a request unless it is ignored (``nohup``). On another thread than the main thread, which does not get signals,
    this does nothing.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    wakeups, sender = socket.socketpair()
    sender.setblocking(False)  # set_wakeup_fd requires it
    receiver = threading.Thread(target=request.receive, args=(wakeups,), name="shardwise-signals", daemon=True)
    receiver.start()
    handlers = get_handlers(_RECEIVED)
    # Before the handlers: a signal that is handled has been seen by the receiver's thread, too.
    fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    for number, handler in handlers.items():
        # Started ranks ignore SIGINT, since the parent process passes Ctrl-C on, and outside of the block RELAYED.
        if handler != signal.SIG_IGN or number == RELAYED:
            signal.signal(number, request.handle)
    _handlers_outside.append(handlers)
    try:
        # After the handlers: the parent process passes requests on once the file exists.
        for file in _announcements:
            file.touch()
        yield request
    finally:
        del _handlers_outside[-1:]  # a forked child that comes here has none
        # First: the thread ends a process whose main thread does not leave the block in time.
        request.leave()
        for number, handler in handlers.items():
            # After a request, signals that are on their way must not end the process before it has reported.
            is_late = request.is_made and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if is_late else handler)
        signal.set_wakeup_fd(fd)
        sender.send(b"\0")  # closing it would not wake the thread: children of this process have it, too
        receiver.join()
        sender.close()
        wakeups.close()
