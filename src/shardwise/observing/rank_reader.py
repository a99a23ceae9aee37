"""Reads a rank's file back, as far as it is there. See [Note: A rank's file].

Lines that are not whole, and what is not as it should be, are passed over and counted: a file may have been cut by
a kill, or be another program's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.observing import rank_file
from shardwise.observing.lines_read import MOST_LINE, GrowingFile, words_of
from shardwise.observing.rank_file import SAMPLED, SHARED, VERSION
from shardwise.observing.rank_record import RankRecord

_MOST_NUMBER = 1e18
_MOST_SECONDS = 1e11
_MOST_RANKS = 1 << 20
_MOST_RATE = 1000.0
_MOST_EARLIER = 1 << 12
_DECODER = json.JSONDecoder()


class RankReader:
    """Reads a file, and on each further call what has been added to it; anew where another has taken its place."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.record: RankRecord | None = None
        """Of the newest time that it was observed; None where there is none."""
        self.earlier: dict[str, None] = {}
        """The runs before that, by their names."""
        self.odd_lines = 0
        """That could not be understood."""

    def read_on(self) -> None:
        """Take in what is there now.

        Raises:
            OSError: it cannot be read.
        """
        self._file.read_on(self._begin_anew, self._take)

    def _take(self, line: bytes) -> None:
        if not line:
            return
        try:
            text = str(line, "utf-8")
            found, end = _DECODER.raw_decode(text) if len(line) <= MOST_LINE else (None, -1)
            is_taken = end == len(text) and self._is_taken(found)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError):
            is_taken = False
        self.odd_lines += not is_taken

    def _is_taken(self, found: object) -> bool:
        """Whether it is of ours; raises as what it is made of does."""
        if isinstance(found, dict) and "observed" in found:
            return self._is_begun(found)
        if self.record is None:
            return False
        if isinstance(found, list):
            return _take_list(self.record, found)
        return isinstance(found, dict) and _take_object(self.record, found)

    def _is_begun(self, found: Mapping[str, Any]) -> bool:
        if found["observed"] != VERSION:
            return False
        record = _header(found)
        if rank_file.name_of(record.rank) != self._file.path.name:
            return False
        if self.record is not None and len(self.earlier) < _MOST_EARLIER:
            self.earlier[self.record.run] = None
        self.record = record
        return True


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


def _take_object(record: RankRecord, found: Mapping[str, Any]) -> bool:
    t = _seconds(found["t"])
    if found.get("end") is True:
        record.hear(t)
        record.is_ended = True
    elif isinstance(found.get("tell"), str):
        record.tell(t, found)
    else:
        return False
    return True


def _take_list(record: RankRecord, line: list[Any]) -> bool:
    kind, *rest = line
    t = _seconds(rest[0])
    match kind:
        case rank_file.SAMPLE if len(rest) == len(SAMPLED):
            record.take_sample(_numbers(rest))
        case rank_file.SHARES if len(rest) == len(SHARED):
            record.take_shares(_numbers(rest))
        case rank_file.BEGIN if len(rest) == 3 and isinstance(rest[2], str):
            record.begin(t, int(rest[1]), words_of(rest[2]))
        case rank_file.END:
            record.end(t, int(rest[1]))
        case _:
            return False
    return True


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < _MOST_SECONDS:  # type: ignore[operator]
        raise ValueError("no time")
    return float(value)  # type: ignore[arg-type]


def _numbers(values: list[Any]) -> list[float]:
    """The same, where all are numbers that may be: hundreds of thousands of them are looked at."""
    if not set(map(type, values)) <= {int, float} or not (min(values) >= 0 and sum(values) < _MOST_NUMBER):
        raise ValueError("no numbers")
    return values
