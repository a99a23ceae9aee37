"""Worker threads of a rank. They stop together when one of them fails.

[Note: Threads of a forked process] A forked process inherits torch's pool of threads, without its threads. The
first operation of each new thread replaces such a pool, without a lock: of several that begin at once, some find
none, and torch 2.13 fails with "Invalid thread pool!". So one thread is the first, before any other starts. It is a
thread of its own, because the calling thread has often computed before the fork, and does not look at the pool
again. ``torch.set_num_threads`` would replace the pool as well, but it also changes settings of the whole process,
those of MKL among them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Generic, ParamSpec, TypeVar

import torch

from shardwise.files.storage import ReadPolicy

Task = TypeVar("Task")
Buffer = TypeVar("Buffer")
P = ParamSpec("P")

_CHECK_INTERVAL_S: Final = 0.1


@cache
def renew_thread_pool() -> None:
    """Give torch a pool of threads, if this process was forked. Called before threads start that touch tensors.

    It costs 0.1 ms, once in a process. See [Note: Threads of a forked process].
    """
    thread = threading.Thread(target=torch.get_num_threads, name="shardwise-first")
    thread.start()
    thread.join()


os.register_at_fork(after_in_child=renew_thread_pool.cache_clear)


def count_computing_workers(policy: ReadPolicy, processors: int) -> int:
    """Return the number of workers that compute at once: as many as read if reads cross a network."""
    return policy.concurrency if policy.is_remote else max(1, min(policy.concurrency, processors))


@dataclass
class WorkerPool(Generic[Task, Buffer]):
    """Threads, each with a buffer of its own, that take tasks in their order.

    The threads are daemons, unlike those of :class:`concurrent.futures.ThreadPoolExecutor`, which the interpreter
    joins at its end: one that hangs in a read of a dead file system does not keep the process alive.

    Args:
        function: function of a task and a buffer, run on the thread of the buffer.
        buffers: one for each thread.
        check: called periodically by the waiting thread. An exception of it ends the work.
    """

    function: Callable[[Task, Buffer], None]
    buffers: Sequence[Buffer]
    check: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: bool = False
    _failure: BaseException | None = None
    _at_work: int = 0

    def __post_init__(self) -> None:
        self._finished = threading.Condition(self._lock)

    def run(self, tasks: Sequence[Task]) -> None:
        """Carry out all tasks. The first error is raised after the other workers have finished their current tasks.

        When ``check`` raises, the workers are not waited for.
        """
        renew_thread_pool()  # before the threads, which may compute with torch
        pending = iter(tasks)
        buffers = self.buffers[: max(1, min(len(self.buffers), len(tasks)))]
        self._at_work = len(buffers)
        threads: list[threading.Thread] = []
        for number, buffer in enumerate(buffers):
            name = f"shardwise-worker-{number}"
            threads.append(threading.Thread(target=self._serve, args=(pending, buffer), name=name, daemon=True))
        try:
            for thread in threads:
                thread.start()  # may raise, and those that run must end then
            with self._finished:
                while self._at_work:
                    # With a timeout: check() runs, and Ctrl-C is raised, also while a worker hangs in a read.
                    self._finished.wait(_CHECK_INTERVAL_S)
                    # With the lock held, so check() must not wait for a worker.
                    if self.check is not None:
                        self.check()
        finally:
            # After an exception of check() or Ctrl-C, workers end with their current tasks, which nobody awaits.
            self._stop = True
        for thread in threads:
            thread.join()  # its buffer is freed before others are allocated
        if self._failure is not None:
            raise self._failure

    def _serve(self, pending: object, buffer: Buffer) -> None:
        try:
            while not self._stop:
                with self._lock:
                    # One iterator for all workers: an iterator must not be advanced by two threads at once.
                    task: Task | None = next(pending, None)  # type: ignore[call-overload]
                if task is None:
                    break
                self.function(task, buffer)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error  # the first one counts
                self._stop = True
        # Even after an error, so that run() does not wait for this worker.
        with self._finished:
            self._at_work -= 1
            self._finished.notify_all()


@contextmanager
def in_background(function: Callable[P, object], *args: P.args, **keywords: P.kwargs) -> Iterator[None]:
    """Run a function on another thread during the block. The block ends after it, with its error if it raised.

    An executor would refuse the function once the main thread has ended, while a checkpoint is still in progress.
    """
    renew_thread_pool()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function(*args, **keywords)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="shardwise-background")
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failures:  # not reached if the block raised: its error counts
        raise failures.pop()  # the list would keep the error, and the error the list
