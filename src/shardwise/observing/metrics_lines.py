"""Reads ``metrics.jsonl`` of a training, in bounded memory however many steps it has taken."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.observing.bounded import Floats, standing_out
from shardwise.observing.growing_file import MOST_LINE, GrowingFile
from shardwise.observing.plain import number_in

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
