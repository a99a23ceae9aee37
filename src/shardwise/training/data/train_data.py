"""Data sets as they are trained on: examples, their places, and what became of their rows."""

from __future__ import annotations

import bisect
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from shardwise.training.data.examples import ChosenExamples, ExampleRows
from shardwise.training.data.mixing import EVERY_ROW, ByWeight, Mixing, mixing_of
from shardwise.training.data.sources import DataName, each_shown
from shardwise.training.data.token_table import PlacesOfFile, TokenTable
from shardwise.training.texts.layouts import LayoutName
from shardwise.training.texts.rows import RowFault


@dataclass(frozen=True, slots=True)
class TrainData:
    """The examples of one or several data sets, and what became of their rows."""

    path: str
    examples: ExampleRows
    pad_token_id: int
    cut_lines: tuple[int, ...]
    """Rows longer than ``max_length``, of which the end was cut off."""
    skipped_lines: tuple[int, ...]
    """Rows that had nothing left to learn within ``max_length``."""
    malformed: tuple[RowFault, ...] = ()
    """Rows that could not be used and were left out on request."""
    unit: Literal["line", "row"] = "line"
    """What the places of rows are numbers of."""
    files: tuple[PlacesOfFile, ...] = ()
    """Where there are several: by which of them the places of rows are named."""
    mixing: Mixing = EVERY_ROW
    """Which rows an epoch takes."""
    layouts: Mapping[LayoutName, int] = field(default_factory=dict)
    """How many rows had which layout."""
    names: tuple[str, ...] = ()
    """Of the data sets."""
    notes: tuple[str, ...] = ()
    """What is worth knowing of how they were read, on this machine."""

    @property
    def rows(self) -> int:
        """From which the examples are: a chat may make several."""
        return len(np.unique(self.examples.lines))

    @property
    def tokens(self) -> int:
        return self.examples.token_count

    @property
    def supervised_tokens(self) -> int:
        return self.examples.supervised_count

    def shares(self) -> list[tuple[str, int, int]]:
        """Of data sets with weights: the name, how many rows an epoch takes, and how many there are."""
        if not isinstance(self.mixing, ByWeight):
            return []
        return list(zip(self.names, self.mixing.shares, self.mixing.counts, strict=True))

    def show_places(self, lines: Sequence[int]) -> str:
        """Rows by their places; with the files they are in, where there are several."""
        return self.name_rows(lines) if self.files else f"{self.unit} {', '.join(map(str, lines))}"

    def name_rows(self, lines: Sequence[int]) -> str:
        """Rows by their places, with the files they are in."""
        of_file: dict[tuple[str, str], list[int]] = {}
        for line in lines:
            name, unit, place = self._place(line)
            of_file.setdefault((name, unit), []).append(place)
        return "; ".join(
            f"{name}, {unit if len(places) == 1 else f'{unit}s'} {', '.join(map(str, places))}"
            for (name, unit), places in of_file.items()
        )

    def _place(self, line: int) -> tuple[str, str, int]:
        if not self.files:
            return self.path, self.unit, line
        file = self.files[bisect.bisect_left(self.files, line, key=lambda file: file.first) - 1]
        return file.name, file.unit, line - file.first


@dataclass(frozen=True, slots=True)
class FoundData:
    """Data sets as tokens, and what is worth knowing of how they were read."""

    names: tuple[DataName, ...]
    tables: tuple[TokenTable, ...]
    notes: tuple[str, ...]

    def looked_at(self) -> FoundData:
        """The same, for rows that are not learned: nothing is told of the others, and weights do not count."""
        none = np.empty(0, np.int64)
        tables = (replace(table, cut=none, skipped=none, faults=(), layouts={}) for table in self.tables)
        return FoundData(tuple(replace(name, weight=None) for name in self.names), tuple(tables), ())


def put_together(
    found: FoundData, tokenizer: PreTrainedTokenizerBase, chosen: Sequence[NDArray[np.int64]] | None
) -> TrainData:
    """Data sets as one, whose places are counted through; of each the rows of these numbers, or all."""
    names, tables = found.names, found.tables
    firsts: list[int] = np.cumsum([0, *(table.places for table in tables)])[:-1].tolist()
    files = tuple(
        PlacesOfFile(file.name, file.unit, file.first + first)
        for table, first in zip(tables, firsts, strict=True)
        for file in table.files
    )
    if len(tables) == 1 and chosen is None:
        examples: ExampleRows = tables[0].examples
        counts = [len(examples)]
    else:
        rows = [np.arange(len(table.examples)) for table in tables] if chosen is None else chosen
        examples = ChosenExamples([table.examples for table in tables], rows, firsts)
        counts = [len(each) for each in rows]
    layouts: Counter[LayoutName] = Counter()
    for table in tables:
        layouts.update(table.layouts)

    def moved(each: Sequence[NDArray[np.int64]]) -> tuple[int, ...]:
        return tuple(np.concatenate([own + first for own, first in zip(each, firsts, strict=True)]).tolist())

    return TrainData(
        path=os.fspath(Path(names[0].path)) if len(names) == 1 else each_shown(names),
        examples=examples,
        pad_token_id=next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None),
        cut_lines=moved([table.cut for table in tables]),
        skipped_lines=moved([table.skipped for table in tables]),
        malformed=tuple(
            RowFault(fault.line + first, fault.cause)
            for table, first in zip(tables, firsts, strict=True)
            for fault in table.faults
        ),
        unit="line" if all(file.unit == "line" for file in files) else "row",
        files=files if len(files) > 1 else (),
        mixing=mixing_of(counts, [name.weight for name in names]),
        layouts=dict(layouts),
        names=tuple(name.path for name in names),
        notes=found.notes,
    )
