"""Data sets as they are trained on: which rows an epoch takes, in which order, and what became of the others.

[Note: Weights] Without weights an epoch takes each row of each data set once. With them it takes as many rows as
all have together, dealt to the data sets by their weights, to the nearest row (what is left over goes to the
largest remainders). A data set that gives more rows than it has is gone through again within the epoch, each time
in another order; one that gives fewer goes on in the next epoch where it has stopped. So over a training all rows
of one data set come equally often, but for one. Everything follows from seed, epoch, and the numbers of rows; ranks
have no part in it.
"""

from __future__ import annotations

import bisect
import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from shardwise.errors import ConfigError
from shardwise.training.data.examples import ChosenExamples, ExampleRows, PlacesOfFile, TokenTable
from shardwise.training.data.sources import DataName, each_shown
from shardwise.training.texts.layouts import LayoutName
from shardwise.training.texts.rows import RowFault


@dataclass(frozen=True, slots=True)
class OnceEach:
    """Every row comes once in an epoch."""


@dataclass(frozen=True, slots=True)
class ByWeight:
    """Each data set gives its share of an epoch's rows.

    Attributes:
        weights: of the data sets, of any sum.
        counts: of their rows, one data set after the other.
    """

    weights: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def shares(self) -> tuple[int, ...]:
        """How many rows of each data set an epoch takes."""
        total = sum(self.counts)
        exact = [weight * total / sum(self.weights) for weight in self.weights]
        whole = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda number: whole[number] - exact[number])
        for number in by_remainder[: total - sum(whole)]:
            whole[number] += 1
        return tuple(whole)


Mixing: TypeAlias = OnceEach | ByWeight
EVERY_ROW: Final = OnceEach()


def mixing_of(counts: Sequence[int], weights: Sequence[float | None]) -> Mixing:
    """How data sets of so many rows are mixed; all of the weights are numbers, or none is.

    Raises:
        ConfigError: a data set would not give a single row.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return EVERY_ROW
    mixing = ByWeight(tuple(given), tuple(counts))
    for weight, share, count in zip(given, mixing.shares, counts, strict=True):
        if not share or not count:
            raise ConfigError(
                f"data.train: of the data set with the weight {weight:g} an epoch of {sum(counts)} rows would take "
                f"none (it has {count} rows to learn); give it a greater weight, or leave it out"
            )
    return mixing


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The rows of every epoch, by their numbers."""

    count: int
    """Of rows in an epoch."""
    mixing: Mixing = EVERY_ROW

    @property
    def identity(self) -> int | None:
        """A number that is another for other shares; None where each row comes once."""
        if isinstance(self.mixing, OnceEach):
            return None
        return zlib.crc32(repr((self.mixing.shares, self.mixing.counts)).encode())

    def of_epoch(self, seed: int, epoch: int) -> list[int]:
        """All rows of an epoch, in order: the same for the same arguments."""
        shuffle = np.random.default_rng([seed, epoch])
        if isinstance(self.mixing, OnceEach):
            return list(shuffle.permutation(self.count).tolist())
        shares, counts = self.mixing.shares, self.mixing.counts
        firsts = np.cumsum([0, *counts])
        parts = [
            _drawn(seed, number, count, epoch * share, share) + firsts[number]
            for number, (count, share) in enumerate(zip(counts, shares, strict=True))
        ]
        return list(shuffle.permutation(np.concatenate(parts)).tolist())


def _drawn(seed: int, number: int, count: int, start: int, share: int) -> NDArray[np.int64]:
    """Rows ``start <= i < start + share`` of a data set that is gone through again and again."""
    drawn: list[NDArray[np.int64]] = []
    while share:
        turn, at = divmod(start, count)
        order = np.random.default_rng([seed, number, turn]).permutation(count)[at : at + share]
        drawn.append(order)
        start, share = start + len(order), share - len(order)
    return np.concatenate([np.empty(0, dtype=np.int64), *drawn])


def held_out_rows(
    hashes: Sequence[NDArray[np.uint64]], fraction: float, seed: int
) -> list[NDArray[np.bool_]] | None:
    """Of the rows of each data set which are held out, by what is in them; None where no two differ.

    Of all rows that differ a fraction is held out, to the nearest row but at least one, and not all. Which ones is
    as good as drawn: those whose hashes, mixed with the seed, are least. So another order of rows changes nothing.
    """
    different = np.unique(np.concatenate(hashes))
    if len(different) < 2:
        return None
    count = min(max(round(fraction * len(different)), 1), len(different) - 1)
    chosen = different[np.argsort(_mixed(different, seed), kind="stable")[:count]]
    return [np.isin(own, chosen) for own in hashes]


def _mixed(hashes: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Other numbers, which are all over the place (the finaliser of splitmix64)."""
    mixed = hashes ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


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
