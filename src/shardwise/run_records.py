"""Reads the records of a run that was observed, and the curves of its trainings."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError, StorageError
from shardwise.observing import COLUMNS, FOLDER
from shardwise.report.names import format_ranks

Floats = npt.NDArray[np.float64]

_TRAINER_STATE = "trainer_state.json"
_MAX_LINE_BYTES = 1 << 20
_MAX_STATE_BYTES = 1 << 28
_MAX_NAME = 80
_MAX_TRAININGS = 64
_BAD_VALUE = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)
"""Raised for values that no observer has written."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One stay of a thread in a phase: names of the enclosing phases and its own, outermost first, and seconds."""

    path: tuple[str, ...]
    thread: int
    start: float
    stop: float

    @property
    def depth(self) -> int:
        return len(self.path)


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
        """The rank's own memory, anonymous and shared, without mapped files, which the kernel can reclaim."""
        return self.samples["anonymous"] + self.samples["shared"]

    def peak_kib(self, name: str = "") -> float:
        """Return the largest sample of a column, or of :attr:`host_kib`. 0 without samples."""
        return float((self.samples[name] if name else self.host_kib).max(initial=0.0))


@dataclass(frozen=True)
class RunRecord:
    """The folder of a run: its ranks in order, and curves by training ("" for the folder's own) and by name.

    Each curve has steps and values, an array each. ``settings`` are numbers of the Trainer's state, by training.
    """

    path: Path
    ranks: Sequence[RankRecord] = ()
    curves: Mapping[str, Mapping[str, tuple[Floats, Floats]]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()


def read_run(path: Path) -> RunRecord:
    """Read the current records of a run in progress, ended, or killed.

    Raises:
        FormatError: the folder has nothing that a run leaves.
        StorageError: it is not there, or cannot be read.
    """
    if not path.is_dir():
        raise StorageError(f"{path}: no such folder. Pass the output folder of a run")
    try:
        files = sorted((path / FOLDER).glob("rank-*.jsonl"))
        found = [rank for file in files if (rank := _read_rank(file)) is not None]
        states = _read_states(path)
    except OSError as error:
        raise StorageError(f"{path}: it cannot be read ({error.strerror or error})") from error
    curves = {name: curves for name, state in states.items() if (curves := _curves_in(state))}
    if not found and not curves:
        raise FormatError(
            f"{path}: there is neither {FOLDER}/ with files of ranks, nor {_TRAINER_STATE}. "
            "Name the output folder of a training, or of shardwise.observe"
        )
    first = min(found, key=attrgetter("rank"), default=None)
    ranks = {rank.rank: rank for rank in found if first is not None and rank.run == first.run}
    ordered = [ranks[number] for number in sorted(ranks)]
    settings = {name: _settings_in(states[name]) for name in curves}
    return RunRecord(path, ordered, curves, settings, _notes(ordered))


def _notes(ranks: Sequence[RankRecord]) -> list[str]:
    notes = []
    if missing := sorted(set(range(ranks[0].world_size)) - {rank.rank for rank in ranks}) if ranks else []:
        notes.append(f"no file of rank {format_ranks(missing)} of {ranks[0].world_size}")
    for rank in ranks:
        if rank.bad_lines:
            notes.append(f"rank {rank.rank}: {rank.bad_lines} lines were skipped, which no observer wrote")
        if not rank.is_closed:
            notes.append(f"rank {rank.rank} did not end in order. Its last line is of second {rank.last_s:.1f}")
    return notes


def _read_rank(path: Path) -> RankRecord | None:
    """Return None for a file that no observer has written."""
    lines = _lines(path)
    try:
        header = next(lines)
        run, rank, world_size = str(header["run"]), int(header["rank"]), int(header["world_size"])
        if header["columns"] != list(COLUMNS) or not 0 <= rank < world_size < 1 << 20:
            return None
        host = str(header["host"])[:_MAX_NAME]
    except (StopIteration, *_BAD_VALUE):
        return None
    records = _Records()
    bad_lines = 0
    for line in lines:
        try:
            records.add(line)
        except _BAD_VALUE:
            bad_lines += 1
    for thread, names in records.opened.items():  # phases without an end extend to the last line
        while names:
            records.end_phase(thread)
    table = np.array(records.samples).reshape(-1, len(COLUMNS))
    table = table[np.argsort(table[:, 0], kind="stable")]
    phases = sorted(records.phases, key=attrgetter("start", "depth"))
    columns = dict(zip(COLUMNS, table.T, strict=True))
    return RankRecord(run, rank, world_size, host, columns, phases, records.last_s, records.is_closed, bad_lines)


def _no_samples() -> array[float]:
    return array("d")


@dataclass
class _Records:
    """Samples and phases of a rank, read line by line. ``opened`` has names and starts of phases, by thread."""

    samples: array[float] = field(default_factory=_no_samples)
    phases: list[PhaseSpan] = field(default_factory=list)
    opened: defaultdict[int, list[tuple[str, float]]] = field(default_factory=partial(defaultdict, list))
    last_s: float = 0.0
    is_closed: bool = False

    def add(self, line: Any) -> None:
        """Add a line. One that no observer writes raises an error of ``_BAD_VALUE``."""
        if isinstance(line, list):
            values = [_number(value) for value in line]
            if len(values) != len(COLUMNS):
                raise ValueError("a sample of other columns")
            self.samples.extend(values)
            self.last_s = values[0]
            return
        self.last_s = _number(line["t"])
        if line.get("closed"):
            self.is_closed = True
        elif "begin" in line:
            self.opened[int(line["thread"])].append((str(line["begin"])[:_MAX_NAME], self.last_s))
        else:
            self.end_phase(int(line["thread"]))

    def end_phase(self, thread: int) -> None:
        path = tuple(name for name, _ in self.opened[thread])
        self.phases.append(PhaseSpan(path, thread, self.opened[thread].pop()[1], self.last_s))


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e18:
        raise ValueError("not a number")
    return float(value)


def _lines(path: Path) -> Iterator[Any]:
    """Yield the JSON value of each line of a file, or None for an invalid line."""
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield None


def _read_states(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the Trainer's states of a training in this folder, and of trainings in the folders in it, by name."""
    folders = {"": path}
    folders |= {entry.name: entry for entry in sorted(path.iterdir()) if not entry.name.startswith("checkpoint")}
    states = ((name[:_MAX_NAME], _latest_state(folder)) for name, folder in folders.items())
    return dict(itertools.islice(((name, state) for name, state in states if state), _MAX_TRAININGS))


def _latest_state(folder: Path) -> Mapping[str, Any]:
    """Return the state in the folder or in its newest checkpoint. Empty if there is none, or it is malformed."""
    places = [folder / _TRAINER_STATE, *folder.glob(f"checkpoint-*/{_TRAINER_STATE}")]
    files = [place for place in places if place.is_file() and place.stat().st_size <= _MAX_STATE_BYTES]
    try:
        state = json.loads(max(files, key=lambda file: file.stat().st_mtime).read_bytes())
        return state if isinstance(state, dict) else {}
    except _BAD_VALUE:  # also if there is no file
        return {}


def _curves_in(state: Mapping[str, Any]) -> dict[str, tuple[Floats, Floats]]:
    """Return steps and values of each number that has been logged with a step."""
    curves: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    logged = state.get("log_history")
    lines = [line for line in logged if isinstance(line, dict)] if isinstance(logged, list) else []
    for line, name in itertools.product(lines, ("loss", "eval_loss", "learning_rate", "grad_norm")):
        with contextlib.suppress(*_BAD_VALUE):
            curves[name].append((_number(line["step"]), _number(line[name])))
    return {name: (np.array(pairs)[:, 0], np.array(pairs)[:, 1]) for name, pairs in curves.items() if pairs}


def _settings_in(state: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("train_batch_size", "max_steps", "num_train_epochs"):
        with contextlib.suppress(*_BAD_VALUE):
            found[name] = _number(state[name])
    return found
