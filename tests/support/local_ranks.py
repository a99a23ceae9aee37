"""Ranks as processes of this machine, for any number of calls: tests and benchmarks."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.closing import Closing
from tests.support.fork_server import live_as_rank, start_server

from shardwise.core import machine
from shardwise.core.errors import ShardwiseError

LIMIT_S = 1000.0
"""Seconds after which a call counts as hung: less than a test has (pyproject.toml), so that its ranks are named."""

_GRACE_S = 100.0
"""Seconds that the other ranks have to fail by themselves after one has failed."""


class ProcessEnded(RuntimeError):
    """A rank's process has ended in the middle of a call."""


class RankError(ShardwiseError):
    """A rank failed: ``failures`` has its traceback (or how its process ended) by rank."""

    def __init__(self, failures: dict[int, str], errors: dict[int, BaseException]) -> None:
        self.failures = failures
        self.errors = errors
        lines = [f"[rank {rank}] {line}" for rank, text in sorted(failures.items()) for line in text.splitlines()]
        super().__init__("\n".join(lines))


class LocalRanks(Closing):
    """``size`` fresh processes with a process group of gloo, kept for any number of calls.

    Functions and arguments are pickled, so functions belong to importable modules. Nothing listens on a port: the
    ranks meet through a ``FileStore``. After a failure or a timeout the processes are gone.

    Args:
        size: number of ranks.
        timeout_s: hard limit of each call.
        device: "cpu", or the kind of accelerator ("cuda") that rank ``i`` has the ``i``-th of; its collectives are
            added to gloo's.
        is_forked: fork ranks from one process that has imported what most need. Otherwise each rank is spawned and
            imports what it needs, which takes it seconds.
    """

    def __init__(
        self, size: int, *, timeout_s: float = LIMIT_S, device: str = "cpu", is_forked: bool = False
    ) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-ranks-")
        context: Any = start_server() if is_forked else multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        store = str(Path(self._folder.name) / "store")
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, size, store, device, theirs), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return int(pid)

    def send_signal(self, number: int) -> None:
        """Send a signal to every process that still runs."""
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank; the values by rank.

        Raises:
            RankError: a rank raised, or ended.
            RankError: ranks did not finish in time, of which it is the only fault.
        """
        self.start(function, *args)
        return self.finish()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call without waiting for it.

        Raises:
            RankError: the processes are gone since an earlier call, or were closed.
        """
        if not self._pipes:
            cause = "its process is gone since an earlier call failed, or these ranks were closed; start others"
            raise RankError(dict.fromkeys(range(self.size), cause), {})
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # told when its answer is waited for
                pipe.send_bytes(message)

    def finish(self) -> list[Any]:
        """The values of the call begun, by rank."""
        deadline = time.monotonic() + self.timeout_s
        values: dict[int, Any] = {}
        failures: dict[int, str] = {}
        errors: dict[int, BaseException] = {}
        pending = dict(enumerate(self._pipes))
        while pending:
            ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in pending:
                    failures[rank] = "did not finish in time; it was ended"
                break
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                kind, value = self._receive(rank)
                del pending[rank]
                if kind == "value":
                    values[rank] = value
                else:
                    failures[rank], errors[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:
            self.kill()
            raise RankError(failures, errors)
        return [values[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(self._pipes[rank].recv_bytes())
            return str(kind), value
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(timeout=LIMIT_S)
            code = self._processes[rank].exitcode
            return "failure", (f"its process ended with exit code {code}", ProcessEnded(f"exit code {code}"))

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Let the processes end."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []
        self._pipes = []
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, device: str, pipe: Connection) -> None:
    """The life of a worker: calls from the pipe until it closes."""
    live_as_rank()
    failure = _failure_of(lambda: _join(rank, size, store, device))
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, KeyboardInterrupt):
            break
        pipe.send_bytes(failure or _answer(message))
    # gloo's threads sometimes abort a process that leaves in order.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _join(rank: int, size: int, store: str, device: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, machine.processor_count() // size))
    backend = "gloo"
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)  # type: ignore[attr-defined]


def _answer(message: bytes) -> bytes:
    """Make the call, and pickle what comes of it."""
    answers: list[bytes] = []

    def call() -> None:
        function, args = pickle.loads(message)
        answers.append(pickle.dumps(("value", function(*args))))

    return _failure_of(call) or answers[0]


def _failure_of(action: Callable[[], None]) -> bytes | None:
    """Act; what went wrong, pickled."""
    try:
        action()
    except BaseException as error:
        return pickle.dumps(("failure", (traceback.format_exc(), _portable(error))))
    return None


def _portable(error: BaseException) -> BaseException:
    """The error itself where it survives pickling, else one with its text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return copy if isinstance(copy, BaseException) else RuntimeError(str(error))
