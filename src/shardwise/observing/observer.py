"""Samples the memory of this process on a thread and records its phases, as lines of JSON.

[Note: A rank's file] ``observed/rank-00003.jsonl`` in the folder of a run. The first line is an object with the
run, the rank, and ``columns``. Each later line is a sample, a list with a number for each column (``t`` in seconds
since the beginning, which all ranks share; memory, and bytes read and written, in KiB), or an object with ``t``,
``thread`` and ``begin`` (the name of a phase) or ``end``; the last line has ``"closed": true``. Each line is
appended in one write, so that a process that is killed leaves whole lines.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.observing.phases import observed_by
from shardwise.report.names import shown_ranks

FOLDER = "observed"

_STATUS = {"anonymous": b"RssAnon", "shared": b"RssShmem", "file": b"RssFile", "peak": b"VmHWM"}
_TRAFFIC = {"read": b"rchar", "written": b"wchar"}
_DEVICE = ("allocated", "reserved", "used")
COLUMNS = ("t", *_STATUS, *_DEVICE, *_TRAFFIC)

_COUNT = re.compile(rb"^(\w+):\s+(\d+)", re.MULTILINE)


def host_memory() -> dict[str, int]:
    """Return the memory of this process by kind, in KiB, as Linux counts it.

    Raises:
        ConfigError: this system does not count memory by kind.
    """
    try:
        counts = _counts("status")
        return {name: counts[key] for name, key in _STATUS.items()}
    except (OSError, KeyError) as error:
        raise ConfigError(
            f"this process cannot be observed: /proc/self/status has no {error}. Use Linux 4.5 or newer."
        ) from error


def _counts(name: str) -> dict[bytes, int]:
    return {key: int(number) for key, number in _COUNT.findall(Path("/proc/self", name).read_bytes())}


def _traffic() -> list[int]:
    """Return the bytes read and written by system calls, in KiB; zeros if the system does not show them."""
    try:
        counts = _counts("io")
    except OSError:
        return [0, 0]
    return [counts[key] >> 10 for key in _TRAFFIC.values()]


class RankObserver:
    """Records samples and phases of this process, within its ``with`` block.

    If the file cannot be written any more, or an accelerator fails, the recording ends and nothing else:
    :attr:`fault` has the reason.

    Args:
        file: the descriptor of an empty file, closed at the end of the block.
        header: of the file's first line.
        device_memory: returns bytes of the accelerator in tensors, reserved by torch, and used by all processes.
        samples_per_second: of the thread; each begin and end of a phase is sampled as well.
    """

    def __init__(
        self,
        file: int,
        header: Mapping[str, Any],
        device_memory: Callable[[], Sequence[int]],
        samples_per_second: float,
    ) -> None:
        self.fault = ""
        self._is_closed = False
        self._file = file
        self._device_memory = device_memory
        self._period_s = 1 / samples_per_second
        self._process = os.getpid()
        self._threads = {threading.get_ident(): 0}
        self._lock = threading.RLock()  # a signal handler may mark a phase while a line is written
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_over, name="shardwise-observer", daemon=True)
        self._marks = observed_by(self._mark)
        self._began = time.perf_counter()
        self._write(lambda _: {**header, "columns": COLUMNS, "host": socket.gethostname(), "pid": self._process})

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
        self._write(lambda t: {"t": t, "closed": True})
        with self._lock:
            self._is_closed = True
            os.close(self._file)

    def sample(self) -> None:
        """Write down the memory of this moment."""

        def line(t: float) -> list[float]:
            device = [count >> 10 for count in self._device_memory()]
            return [t, *host_memory().values(), *device, *_traffic()]

        self._write(line)

    def _mark(self, name: str | None) -> None:
        def line(t: float) -> dict[str, Any]:
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            return {"t": t, **({"end": True} if name is None else {"begin": name}), "thread": thread}

        if name is None:
            self.sample()
        self._write(line)
        if name is not None:
            self.sample()

    def _sample_until_over(self) -> None:
        while not self._is_over.wait(self._period_s) and not self.fault:
            self.sample()

    def _write(self, line_at: Callable[[float], object]) -> None:
        """Append a line of this moment, so that lines are in the order of their times."""
        with self._lock:
            if self._is_closed or self.fault or os.getpid() != self._process:
                return
            try:
                text = json.dumps(line_at(round(time.perf_counter() - self._began, 4)), separators=(",", ":"))
                os.write(self._file, text.encode() + b"\n")
            except (OSError, RuntimeError, ConfigError) as error:  # RuntimeError: of an accelerator
                self.fault = str(error)


def create_rank_file(run: Path, rank: int) -> int:
    """Create or empty the file of a rank, which one process at a time may record into; returns its descriptor.

    Raises:
        StorageError: it cannot be written, or another process records into it.
    """
    path = run / FOLDER / f"rank-{rank:05d}.jsonl"
    file = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if _is_locked_by_another(file):
            raise StorageError(
                f"{path}: another process records into this file. Name another folder, and call observe after "
                "torch.distributed.init_process_group, so that ranks have files of their own."
            )
        os.ftruncate(file, 0)
    except (OSError, StorageError) as error:
        if file is not None:
            os.close(file)
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path}: it cannot be written ({error.strerror or error})") from error
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


Floats = npt.NDArray[np.float64]

_TRAINER_STATE = "trainer_state.json"

_MAX_LINE_BYTES = 1 << 20
_MAX_STATE_BYTES = 1 << 28
_MAX_NAME = 80
_MAX_TRAININGS = 64
_BAD_VALUE = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)
"""Raised for values that nothing of ours has written."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One time that a thread was in a phase: the names of the phases around it and its own, and seconds."""

    path: tuple[str, ...]
    thread: int
    start: float
    stop: float


@dataclass(frozen=True)
class RankRecord:
    """An observed rank. ``samples`` has an array for each column of ``COLUMNS``: seconds, and KiB."""

    run: str
    rank: int
    world_size: int
    host: str
    samples: Mapping[str, Floats]
    phases: Sequence[PhaseSpan]
    last_s: float
    is_closed: bool
    bad_lines: int = 0

    @property
    def host_kib(self) -> Floats:
        """Memory of its own, anonymous and shared: mapped files belong to the kernel, which takes them back."""
        return self.samples["anonymous"] + self.samples["shared"]

    def peak_kib(self, name: str = "") -> float:
        """Return the largest sample of a column, or of :attr:`host_kib`; 0 without samples."""
        return float((self.samples[name] if name else self.host_kib).max(initial=0.0))


@dataclass(frozen=True)
class RunRecord:
    """The folder of a run: its ranks in order, and curves by training ("" for the folder's own) and by name.

    Each curve has steps and values, an array each.
    """

    path: Path
    ranks: Sequence[RankRecord] = ()
    curves: Mapping[str, Mapping[str, tuple[Floats, Floats]]] = field(default_factory=dict)
    notes: Sequence[str] = ()


def read_run(path: Path) -> RunRecord:
    """Read what there is now; a run may be under way, ended, or killed.

    Raises:
        FormatError: the folder has nothing that a run leaves.
        StorageError: it is not there, or cannot be read.
    """
    if not path.is_dir():
        raise StorageError(f"{path}: there is no such folder. Name the output folder of a run.")
    try:
        files = sorted((path / FOLDER).glob("rank-*.jsonl"))
        found = [rank for file in files if (rank := _read_rank(file)) is not None]
        curves = _read_curves(path)
    except OSError as error:
        raise StorageError(f"{path}: it cannot be read ({error.strerror or error})") from error
    if not found and not curves:
        raise FormatError(
            f"{path}: there is neither {FOLDER}/ with files of ranks, nor {_TRAINER_STATE}. "
            "Name the output folder of a training, or of shardwise.observe."
        )
    first = min(found, key=lambda rank: rank.rank, default=None)
    ranks = {rank.rank: rank for rank in found if first is not None and rank.run == first.run}
    ordered = [ranks[number] for number in sorted(ranks)]
    return RunRecord(path, ordered, curves, _notes(ordered))


def _notes(ranks: Sequence[RankRecord]) -> list[str]:
    notes = []
    if missing := sorted(set(range(ranks[0].world_size)) - {rank.rank for rank in ranks}) if ranks else []:
        notes.append(f"no file of rank {shown_ranks(missing)} of {ranks[0].world_size}")
    for rank in ranks:
        if rank.bad_lines:
            notes.append(f"rank {rank.rank}: {rank.bad_lines} lines were skipped, which are not of an observer")
        if not rank.is_closed:
            notes.append(f"rank {rank.rank} did not end in order; its last line is of second {rank.last_s:.1f}")
    return notes


# Ranks


def _read_rank(path: Path) -> RankRecord | None:
    """Return None for a file that does not begin as those of observers do."""
    lines = _lines(path)
    try:
        header = next(lines)
        run, rank, world_size = str(header["run"]), int(header["rank"]), int(header["world_size"])
        if header["columns"] != list(COLUMNS) or not 0 <= rank < world_size < 1 << 20:
            return None
        host = str(header["host"])[:_MAX_NAME]
    except (StopIteration, *_BAD_VALUE):
        return None
    reading = _RankLines()
    for line in lines:
        try:
            reading.take(line)
        except _BAD_VALUE:
            reading.bad_lines += 1
    table = np.array(reading.samples).reshape(-1, len(COLUMNS))
    table = table[np.argsort(table[:, 0], kind="stable")]
    samples = {name: table[:, number] for number, name in enumerate(COLUMNS)}
    phases, last_s = reading.spans(), reading.last_s
    return RankRecord(run, rank, world_size, host, samples, phases, last_s, reading.is_closed, reading.bad_lines)


class _RankLines:
    """Samples and phases of the lines of a rank's file."""

    def __init__(self) -> None:
        self.samples = array("d")
        self.last_s = 0.0
        self.is_closed = False
        self.bad_lines = 0
        self._done: list[PhaseSpan] = []
        self._open: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)

    def take(self, line: Any) -> None:
        """Add a line; raises one of _BAD_VALUE for one that is not an observer's."""
        if isinstance(line, list):
            self.last_s = _number(line[0])
            values = [_number(value) for value in line]
            if len(values) != len(COLUMNS):
                raise ValueError("a sample of other columns")
            self.samples.extend(values)
            return
        self.last_s = _number(line["t"])
        if line.get("closed"):
            self.is_closed = True
            return
        thread = int(line["thread"])
        if "begin" in line:
            self._open[thread].append((str(line["begin"])[:_MAX_NAME], self.last_s))
        else:
            self._close(thread, self.last_s)

    def _close(self, thread: int, stop: float) -> None:
        path = tuple(name for name, _ in self._open[thread])
        _, start = self._open[thread].pop()
        self._done.append(PhaseSpan(path, thread, start, stop))

    def spans(self) -> list[PhaseSpan]:
        """Return all phases in the order of their beginnings; open ones last until the last line."""
        for thread, stack in self._open.items():
            while stack:
                self._close(thread, self.last_s)
        return sorted(self._done, key=lambda span: (span.start, len(span.path)))


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e18:
        raise ValueError("not a number")
    return float(value)


def _lines(path: Path) -> Iterator[Any]:
    """Yield the JSON values of the lines of a file; None for a line that has none."""
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield None


# Curves


def _read_curves(path: Path) -> dict[str, dict[str, tuple[Floats, Floats]]]:
    """Read the curves of a training in this folder, and of trainings in the folders in it."""
    folders = {"": path}
    folders |= {entry.name: entry for entry in sorted(path.iterdir()) if not entry.name.startswith("checkpoint")}
    found: dict[str, dict[str, tuple[Floats, Floats]]] = {}
    for name, folder in folders.items():
        if len(found) < _MAX_TRAININGS and (curves := _curves_of(_logged(folder))):
            found[name[:_MAX_NAME]] = curves
    return found


def _logged(folder: Path) -> Iterator[Any]:
    """Yield what a training has logged: the history of the Trainer's newest checkpoint."""
    places = [folder / _TRAINER_STATE, *folder.glob(f"checkpoint-*/{_TRAINER_STATE}")]
    files = [place for place in places if place.is_file() and place.stat().st_size <= _MAX_STATE_BYTES]
    if not files:
        return
    try:
        yield from json.loads(max(files, key=lambda file: file.stat().st_mtime).read_bytes())["log_history"]
    except _BAD_VALUE:
        return


def _curves_of(logged: Iterator[Any]) -> dict[str, tuple[Floats, Floats]]:
    """Return steps and values of each number that was logged with a step."""
    curves: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in logged:
        if not isinstance(line, dict):
            continue
        for name in ("loss", "eval_loss", "learning_rate", "grad_norm"):
            try:
                curves[name].append((_number(line["step"]), _number(line[name])))
            except _BAD_VALUE:
                continue
    return {
        name: (np.array([step for step, _ in pairs]), np.array([value for _, value in pairs]))
        for name, pairs in curves.items()
        if pairs
    }
