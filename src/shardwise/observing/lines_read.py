"""Reads lines that others write: of a file that grows, of ``metrics.jsonl``; and what may be taken from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.observing.bounded import Floats, standing_out

MOST_LINE = 1 << 20
"""Bytes; ours are shorter."""

_CHUNK = 1 << 22
_TAIL = 512


class GrowingFile:
    """Reads on where it has come to.

    Whether the file is another one is told by the bytes before that place, which a file that was appended to has
    still: the number of an inode is given again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0
        self._tail = b""
        self._rest = b""

    def read_on(self, begin_anew: Callable[[], None], take: Callable[[bytes], None]) -> None:
        """Hand over the whole lines that have come, without their ends; what is too long for a line is cut.

        Where another file is read now, ``begin_anew`` is called first. Where there is none, nothing is.

        Raises:
            OSError: it cannot be read.
        """
        if not self.path.is_file():  # a pipe would be waited for
            return
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return
        with file:
            file.seek(self._place - len(self._tail))
            if file.read(len(self._tail)) != self._tail:
                self._place, self._tail, self._rest = 0, b"", b""
                file.seek(0)
                begin_anew()
            while chunk := file.read(_CHUNK):
                self._place += len(chunk)
                self._tail = (self._tail + chunk)[-_TAIL:]
                *whole, rest = (self._rest + chunk).split(b"\n")
                self._rest = rest[: MOST_LINE + 1]
                for line in whole:
                    take(line)


_MOST_NUMBER = 1e18
_MOST_WORDS = 80


def number_in(facts: Mapping[str, Any], name: str) -> float | None:
    """A number under this name; None where there is none, or one that nothing can be done with."""
    value = facts.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if -_MOST_NUMBER < value < _MOST_NUMBER else None


def words_of(text: str, most: int = _MOST_WORDS) -> str:
    """The beginning of a text on one line, without what a terminal obeys, and what no encoding has."""
    kept = text[:most]
    return kept if kept.isprintable() else "".join(sign if sign.isprintable() else "\ufffd" for sign in kept)


_MOST_STEP = 1 << 50
_MOST_OF_ONE = 1 << 16
_NEWEST = 256
"""Lines that stay as they are."""

_SEEN = {
    "step": ("loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes", "fullest_bytes"),
    "evaluation": ("loss",),
}
"""What is drawn, by the kind of its line."""


class MetricsLines:
    """The lines of a file of metrics, which grows, or is replaced where a training goes on.

    Of more lines than ``most``, those stay in which what is drawn is the least or the most of its part, with the
    first and the newest.
    """

    def __init__(self, path: Path, most: int = _MOST_OF_ONE) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self._file = GrowingFile(path)
        self._most = most

    def read_on(self) -> None:
        """Take in what is there now; raises OSError."""
        self._file.read_on(self.lines.clear, self._take)

    def _take(self, line: bytes) -> None:
        try:
            found = json.loads(line) if len(line) <= MOST_LINE else None
        except (ValueError, RecursionError):
            return
        if not (isinstance(found, dict) and isinstance(found.get("kind"), str) and _is_step(found.get("step"))):
            return
        self.lines.append(found)
        if len(self.lines) >= self._most:
            self._thin()

    def _thin(self) -> None:
        older = self.lines[:-_NEWEST]
        columns = [_column(older, kind, key) for kind, keys in _SEEN.items() for key in keys]
        places = standing_out(columns, self._most // 2 - _NEWEST)
        self.lines[:-_NEWEST] = [older[int(place)] for place in places]


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_STEP


def _column(lines: Sequence[Mapping[str, Any]], kind: str, key: str) -> Floats:
    """A number of each line; NaN where it is of another kind, or has none."""
    numbers = [number_in(line, key) if line["kind"] == kind else None for line in lines]
    return np.array([np.nan if number is None else number for number in numbers], np.float64)
