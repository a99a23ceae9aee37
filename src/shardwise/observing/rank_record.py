"""Reads a rank's file back, as far as it is there. See [Note: A rank's file].

Lines that are not whole, and what is not as it should be, are passed over and counted: a file may have been cut by
a kill, or be another program's.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.observing import rank_file
from shardwise.observing.plain import words_of
from shardwise.observing.rank_file import SAMPLED, SHARED, VERSION

_MOST_DEEP = 64
_MOST_NUMBER = 1e18
_MOST_SECONDS = 1e11
_MOST_RANKS = 1 << 20
_MOST_RATE = 1000.0
_CHUNK = 1 << 22
_HEAD = 512


@dataclass(slots=True)
class PhaseSpan:
    """A phase of one thread. ``stop`` is None while nobody has left it; ``path`` has the phases around it first."""

    path: tuple[str, ...]
    lane: int
    start: float
    stop: float | None = None

    @property
    def name(self) -> str:
        return self.path[-1]


@dataclass(slots=True)
class RankRecord:
    """One time that a rank was observed; times in seconds since ``began``."""

    run: str
    """The same of all ranks that began together."""
    rank: int
    world_size: int
    machine: str
    host: str
    device: str
    pid: int
    began: float
    """In seconds since 1970, by the clock of its host."""
    samples_per_second: float
    rows: array[float] = field(default_factory=lambda: array("d"))
    """Samples one after the other, each as of ``SAMPLED``: 96 bytes, a day of one rank is hundreds of megabytes."""
    shares: list[list[float]] = field(default_factory=list)
    phases: list[PhaseSpan] = field(default_factory=list)
    """In the order of their beginnings."""
    facts: list[Mapping[str, Any]] = field(default_factory=list)
    is_ended: bool = False
    """Whether it came to its end; one that was killed did not."""
    last: float = 0.0
    """When it was last heard of."""
    stacks: dict[int, list[PhaseSpan]] = field(default_factory=dict)

    @property
    def until(self) -> float:
        """When it was last heard of, in seconds since 1970."""
        return self.began + self.last

    @property
    def peak_kib(self) -> float:
        """The most host memory of the process, by the kernel's count; 0 where nothing was sampled."""
        return self.newest().get("peak", 0.0)

    @property
    def count(self) -> int:
        """Samples that there are."""
        return len(self.rows) // len(SAMPLED)

    def samples(self) -> Mapping[str, npt.NDArray[np.float64]]:
        """By name, as of ``SAMPLED``: seconds, and KiB."""
        table = np.array(self.rows, np.float64).reshape(-1, len(SAMPLED))
        return {name: table[:, column] for column, name in enumerate(SAMPLED)}

    def newest(self, back: int = 0) -> Mapping[str, float]:
        """The last sample, or one so many before it, by name; empty where there is none."""
        if back >= self.count:
            return {}
        start = len(self.rows) - (back + 1) * len(SAMPLED)
        return dict(zip(SAMPLED, self.rows[start : start + len(SAMPLED)], strict=True))

    def now_in(self) -> tuple[str, ...]:
        """The phases that its first thread is in; of another one where the first is in none."""
        return next((stack[-1].path for _, stack in sorted(self.stacks.items()) if stack), ())


class RankReader:
    """Reads a file, and on each further call what has been added to it; anew where another has taken its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin_anew(b"")

    def _begin_anew(self, head: bytes) -> None:
        self.records: list[RankRecord] = []
        self.odd_lines = 0
        """That could not be understood."""
        self._head = head
        self._place = 0
        self._rest = b""
        self._paths: dict[tuple[str, ...], tuple[str, ...]] = {}

    def read_on(self) -> None:
        """Take in what is there now.

        Raises:
            OSError: it cannot be read.
        """
        if not self.path.is_file():  # a pipe would be waited for
            return
        with self.path.open("rb") as file:
            head = file.read(_HEAD)  # which has the name of the run: an inode's number is given again
            if not head.startswith(self._head) or os.fstat(file.fileno()).st_size < self._place:
                self._begin_anew(head)
            self._head = head
            file.seek(self._place)
            while chunk := file.read(_CHUNK):
                self._place += len(chunk)
                self._take_in(self._rest + chunk)

    def _take_in(self, text: bytes) -> None:
        *whole, rest = text.split(b"\n")
        self._rest = rest[: _MOST_LINE + 1]
        for line in whole:
            if line and not self._is_taken(line):
                self.odd_lines += 1

    def _is_taken(self, line: bytes) -> bool:
        if len(line) > _MOST_LINE:
            return False
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return False
        try:
            if isinstance(found, list):
                return bool(self.records) and _take(self.records[-1], found, self._paths)
            if isinstance(found, dict):
                return self._take_object(found)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):
            pass
        return False

    def _take_object(self, found: dict[str, Any]) -> bool:
        if "observed" in found:
            if found["observed"] != VERSION:
                return False
            record = _header(found)
            if rank_file.name_of(record.rank) != self.path.name:
                return False
            self.records.append(record)
            return True
        if not self.records:
            return False
        record = self.records[-1]
        t = _seconds(found["t"])
        if found.get("end") is True:
            record.is_ended = True
        elif isinstance(found.get("tell"), str):
            record.facts.append(found)
        else:
            return False
        record.last = max(record.last, t)
        return True


_MOST_LINE = 1 << 20
"""Bytes; ours are shorter."""


def _header(found: Mapping[str, Any]) -> RankRecord:
    rank, size, pid = found["rank"], found["world_size"], found["pid"]
    if not (
        type(rank) is type(size) is type(pid) is int and 0 <= rank < size <= _MOST_RANKS and pid < _MOST_NUMBER
    ):
        raise ValueError("no such rank")
    run, machine, host, device = (words_of(str(found[name])) for name in ("run", "machine", "host", "device"))
    began, rate = _seconds(found["began"]), _seconds(found["samples_per_second"])
    if not 0 < rate <= _MOST_RATE:
        raise ValueError("no such rate")
    return RankRecord(run, rank, size, machine, host, device, pid, began, rate)


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < _MOST_SECONDS:  # type: ignore[operator]
        raise ValueError("no time")
    return float(value)  # type: ignore[arg-type]


def _numbers(values: list[Any]) -> list[float]:
    """The same, where all are numbers that may be: hundreds of thousands of them are looked at."""
    if not set(map(type, values)) <= {int, float} or not (min(values) >= 0 and sum(values) < _MOST_NUMBER):
        raise ValueError("no numbers")
    return values


def _take(record: RankRecord, line: list[Any], paths: dict[tuple[str, ...], tuple[str, ...]]) -> bool:
    """``paths`` has each once: a run has as many phases as steps."""
    kind, *rest = line
    t = _seconds(rest[0])
    match kind:
        case rank_file.SAMPLE if len(rest) == len(SAMPLED):
            record.rows.extend(_numbers(rest))
        case rank_file.SHARES if len(rest) == len(SHARED):
            record.shares.append(_numbers(rest))
        case rank_file.BEGIN:
            _, lane, name = rest
            stack = record.stacks.setdefault(int(lane), [])
            if len(stack) >= _MOST_DEEP or not isinstance(name, str):
                return False
            path = (*(stack[-1].path if stack else ()), words_of(name))
            stack.append(PhaseSpan(paths.setdefault(path, path), int(lane), t))
            record.phases.append(stack[-1])
        case rank_file.END:
            record.stacks[int(rest[1])].pop().stop = t
        case _:
            return False
    record.last = max(record.last, t)
    return True
