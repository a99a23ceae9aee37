"""``observe``: memory and phases of every rank, recorded while a block runs.

[Note: A rank's file] ``observed/rank-00003.jsonl`` in the folder of a run. The first line is an object with the
run, the rank, and ``columns``. Each later line is a sample, a list with a number for each column (``t`` in seconds
since the common start, memory, and bytes read and written in KiB), or an object with ``t``, ``thread`` and
``begin`` (the name of a phase) or ``end``. The last line has ``"closed": true``. Each line is appended in one
write, so that a process that is killed leaves whole lines.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from shardwise.errors import ConfigError, StorageError
from shardwise.execution.processes import this_device
from shardwise.execution.world import World
from shardwise.models.torch_api import memory_in_use
from shardwise.observing import COLUMNS, FOLDER, STATUS, TRAFFIC, is_observed, observed_by


@contextmanager
def observe(run_dir: str | os.PathLike[str], *, samples_per_second: float = 20.0) -> Iterator[RankObserver]:
    """Record this rank's memory and traffic within the block, and the phases of shardwise's functions.

    Writes a file for each rank into ``run_dir/observed``, replacing an earlier one. ``shardwise report`` draws
    them. The block may hold anything. A file that cannot be written any more ends the recording and nothing else:
    ``fault``, of the object that the block is given, has the reason.

    Collective: yes, at its beginning, over the default process group, if there is one: enter it after
    ``init_process_group``.

    Args:
        run_dir: a local folder that all ranks of a machine see, in which other files may be.
        samples_per_second: from 0.1 to 100.

    Raises:
        ConfigError: this process is observed already, or the system does not count memory by kind.
        StorageError: the file cannot be written, or another process writes it.

    Every error is the same on every rank.
    """
    device, world = this_device(), World.current(call="observe")
    with world:
        with world.broadcast("choose a run id") as exchange:
            if world.rank == 0:
                exchange.local = secrets.token_hex(8)
        run = exchange.result
        with world.collective("begin the save"):
            file = _begin(Path(run_dir), world.rank, samples_per_second)
    header = {"run": run, "rank": world.rank, "world_size": world.size, "device": device.type}
    with RankObserver(file, header, device, samples_per_second) as observer:
        yield observer


def _begin(run: Path, rank: int, samples_per_second: float) -> int:
    """Check that this process can be observed. Return the descriptor of its file."""
    if type(samples_per_second) not in (int, float) or not 0.1 <= samples_per_second <= 100:
        raise ConfigError(f"samples_per_second={samples_per_second!r}: give a number from 0.1 to 100")
    if is_observed():
        raise ConfigError("this process is observed already. Leave that block first")
    host_memory()
    return create_rank_file(run, rank)


_COUNT = re.compile(rb"^(\w+):\s+(\d+)", re.MULTILINE)


def host_memory() -> dict[str, int]:
    """Return the memory of this process by kind, in KiB, as Linux counts it.

    Raises:
        ConfigError: this system does not count memory by kind.
    """
    try:
        counts = _counts("status")
        return {name: counts[key] for name, key in STATUS.items()}
    except (OSError, KeyError) as error:
        raise ConfigError(
            f"this process cannot be observed: /proc/self/status has no {error}. Use Linux 4.5 or newer"
        ) from error


def _counts(name: str) -> dict[bytes, int]:
    return {key: int(number) for key, number in _COUNT.findall(Path("/proc/self", name).read_bytes())}


def _traffic() -> list[int]:
    """Return the bytes read and written by system calls, in KiB. Zeros if the system does not report them."""
    try:
        counts = _counts("io")
    except OSError:
        return [0, 0]
    return [counts[key] >> 10 for key in TRAFFIC.values()]


class RankObserver:
    """Records samples and phases of this process, within its ``with`` block.

    If the file cannot be written any more, or an accelerator fails, the recording ends and nothing else:
    :attr:`fault` has the reason.

    Args:
        file: the descriptor of an empty file, closed at the end of the block.
        header: of the file's first line.
        device: the accelerator whose memory is recorded, or the CPU.
        samples_per_second: of the thread. Each begin and end of a phase is sampled as well.
    """

    def __init__(
        self, file: int, header: Mapping[str, Any], device: torch.device, samples_per_second: float
    ) -> None:
        self.fault = ""
        self._is_closed = False
        self._file = file
        self._device = device
        self._period_s = 1 / samples_per_second
        self._process = os.getpid()
        self._threads = {threading.get_ident(): 0}
        self._lock = threading.RLock()  # a signal handler may mark a phase while a line is written
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_over, name="shardwise-observer", daemon=True)
        self._marks = observed_by(self._mark)
        self._began = time.perf_counter()
        self._write({**header, "columns": COLUMNS, "host": socket.gethostname(), "pid": self._process})

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        self._marks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._marks.__exit__(None, None, None)
        self._is_over.set()
        if os.getpid() != self._process:
            return
        self._thread.join()
        self.sample()
        self._write({"closed": True})
        with self._lock:
            self._is_closed = True
            os.close(self._file)

    def sample(self) -> None:
        """Write the current memory."""
        self._write()

    def _mark(self, name: str | None) -> None:
        if os.getpid() != self._process:  # a forked child, in which no thread releases the lock
            return
        with self._lock:
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        if name is None:
            self.sample()
            self._write({"end": True, "thread": thread})
        else:
            self._write({"begin": name, "thread": thread})
            self.sample()

    def _sample_until_over(self) -> None:
        while not self._is_over.wait(self._period_s) and not self.fault:
            self.sample()

    def _write(self, entry: Mapping[str, Any] | None = None) -> None:
        """Append an entry with its time, or a sample. Lines are in the order of their times."""
        with self._lock:
            if self._is_closed or self.fault or os.getpid() != self._process:
                return
            try:
                t = round(time.perf_counter() - self._began, 4)
                line = self._sample(t) if entry is None else {"t": t, **entry}
                os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")
            except (OSError, RuntimeError, ConfigError) as error:  # RuntimeError: of an accelerator
                self.fault = str(error)

    def _sample(self, t: float) -> list[float]:
        device = (0, 0, 0) if self._device.type == "cpu" else memory_in_use(self._device)
        return [t, *host_memory().values(), *(count >> 10 for count in device), *_traffic()]


def create_rank_file(run: Path, rank: int) -> int:
    """Create or empty the file of a rank. Only one process at a time may record into it. Returns its descriptor.

    Raises:
        StorageError: it cannot be written, or another process records into it.
    """
    path = run / FOLDER / f"rank-{rank:05d}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"{path}: it cannot be written ({error.strerror or error})") from error
    if _is_locked_by_another(file):
        os.close(file)
        raise StorageError(
            f"{path}: another process records into this file. Name another folder, and call observe after "
            "torch.distributed.init_process_group, so that ranks have files of their own"
        )
    os.ftruncate(file, 0)
    return file


def _is_locked_by_another(file: int) -> bool:
    """Lock a file for this process, not for its children. A file system without locks has none by others."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
