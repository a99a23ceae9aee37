"""Reads a rank's file back, as far as it is there. See [Note: A rank's file].

Lines that are not whole, and what is not as it should be, are passed over and counted: a file may have been cut by
a kill, or be another program's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardwise.observing import rank_file
from shardwise.observing.rank_file import SAMPLED, SHARED, VERSION

_MOST_DEEP = 64
_MOST_NAME = 80
_MOST_NUMBER = 1e18


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

    rank: int
    world_size: int
    machine: str
    host: str
    device: str
    pid: int
    began: float
    """In seconds since 1970."""
    samples_per_second: float
    rows: list[list[float]] = field(default_factory=list)
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

    def samples(self) -> Mapping[str, npt.NDArray[np.float64]]:
        """By name, as of ``SAMPLED``: seconds, and KiB."""
        table = np.array(self.rows, np.float64).reshape(-1, len(SAMPLED))
        return {name: table[:, column] for column, name in enumerate(SAMPLED)}

    def newest(self, back: int = 0) -> Mapping[str, float]:
        """The last sample, or one so many before it, by name; empty where there is none."""
        return dict(zip(SAMPLED, self.rows[-1 - back], strict=True)) if len(self.rows) > back else {}

    def now_in(self) -> tuple[str, ...]:
        """The phases that its first thread is in."""
        stack = self.stacks.get(0, [])
        return stack[-1].path if stack else ()


class RankReader:
    """Reads a file, and on each further call what has been added to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[RankRecord] = []
        self.odd_lines = 0
        """That could not be understood."""
        self._place = 0
        self._rest = b""

    def read_on(self) -> None:
        """Take in what is there now.

        Raises:
            OSError: it cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(self._place)
            text = self._rest + file.read()
            self._place = file.tell()
        whole, newline, rest = text.rpartition(b"\n")
        self._rest = rest[:_MOST_LINE] if newline else text[:_MOST_LINE]
        for line in whole.split(b"\n") if newline else ():
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
                return bool(self.records) and _take(self.records[-1], found)
            if isinstance(found, dict):
                return self._take_object(found)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):
            pass
        return False

    def _take_object(self, found: dict[str, Any]) -> bool:
        if "observed" in found:
            if found["observed"] != VERSION:
                return False
            self.records.append(_header(found))
            return True
        if not self.records:
            return False
        record = self.records[-1]
        t = _number(found["t"])
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
    rank, size = int(found["rank"]), int(found["world_size"])
    if not 0 <= rank < size:
        raise ValueError("no such rank")
    machine, host, device = (str(found[name])[:_MOST_NAME] for name in ("machine", "host", "device"))
    rate = _number(found["samples_per_second"])
    return RankRecord(rank, size, machine, host, device, int(found["pid"]), _number(found["began"]), rate)


def _number(value: object) -> float:
    number = float(cast(float, value))
    if isinstance(value, bool | str) or not math.isfinite(number) or number < 0:
        raise ValueError("no number")
    return number


def _numbers(values: list[Any]) -> list[float]:
    """The same, where all are numbers that may be: hundreds of thousands of them are looked at."""
    if not set(map(type, values)) <= {int, float} or not (min(values) >= 0 and sum(values) < _MOST_NUMBER):
        raise ValueError("no numbers")
    return values


def _take(record: RankRecord, line: list[Any]) -> bool:
    kind, *rest = line
    t = _number(rest[0])
    match kind:
        case rank_file.SAMPLE if len(rest) == len(SAMPLED):
            record.rows.append(_numbers(rest))
        case rank_file.SHARES if len(rest) == len(SHARED):
            record.shares.append(_numbers(rest))
        case rank_file.BEGIN:
            _, lane, name = rest
            stack = record.stacks.setdefault(int(lane), [])
            if len(stack) >= _MOST_DEEP or not isinstance(name, str):
                return False
            around = stack[-1].path if stack else ()
            stack.append(PhaseSpan((*around, name[:_MOST_NAME]), int(lane), t))
            record.phases.append(stack[-1])
        case rank_file.END:
            record.stacks[int(rest[1])].pop().stop = t
        case _:
            return False
    record.last = max(record.last, t)
    return True
