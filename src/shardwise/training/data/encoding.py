"""Blocks of rows as tokens, by one process: what it is asked, and what it answers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwise.training.data.row_blocks import Broken, RowBlock, RowValue
from shardwise.training.texts.layouts import LayoutName, RowWords
from shardwise.training.texts.masking import Example
from shardwise.training.texts.rows import Row, RowError, RowFault, row_of

TokenArray: TypeAlias = NDArray[np.int32]


class RowsEncoder(Protocol):
    """Makes tokens of rows."""

    def encode_many(self, rows: Sequence[Row]) -> Sequence[Sequence[Example] | RowFault]:
        """The examples of each row, at full length, or what is wrong with it."""
        ...

    def facts(self) -> Any:
        """All that decides what comes out, as plain JSON values."""
        ...


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the rows of a data set become tokens; can be pickled where its encoder can."""

    encoder: RowsEncoder
    words: RowWords
    max_length: int


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """The examples of a block, end to end. Places are counted from 1 in the block.

    Attributes:
        tokens, supervised: of all examples, (tokens,).
        lengths: of each, (examples,).
        places: of the row of each, (examples,).
        hashes: of the row of each by its tokens, (examples,): those of one row have one.
        cut: places of rows longer than ``max_length``, of which the end was cut off.
        skipped: places of rows with nothing left to learn.
        faults: rows that cannot be used.
        layouts: how many rows had which.
        rows: how many there are, of any kind.
        broken: where nothing more could be read.
        place_count: how many places the block has.
    """

    tokens: TokenArray
    supervised: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    cut: tuple[int, ...]
    skipped: tuple[int, ...]
    faults: tuple[RowFault, ...]
    layouts: dict[LayoutName, int]
    rows: int
    place_count: int
    broken: Broken | None = None


@dataclass
class _EncodedRows:
    """What has been made of a block so far."""

    examples: list[Example] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)

    def add(self, place: int, whole: Sequence[Example], max_length: int) -> None:
        cut = [example.cut(max_length) for example in whole]
        learned = [example for example in cut if example.supervised.any()]
        if any(len(short.tokens) < len(long.tokens) for short, long in zip(cut, whole, strict=True)):
            self.cut.append(place)
        if not learned:
            self.skipped.append(place)
        number = _hash_of(whole)
        for example in learned:
            self.examples.append(example)
            self.places.append(place)
            self.hashes.append(number)


def _hash_of(examples: Sequence[Example]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for example in examples:
        digest.update(len(example.tokens).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(example.tokens).data)
    return int.from_bytes(digest.digest(), "little")


def encode_block(block: RowBlock, encoding: Encoding) -> EncodedBlock:
    """Read a block, and make tokens of it.

    Raises:
        ConfigError: it cannot be read, or the tokenizer has no chat template, which its rows need.
    """
    found, made = block.read(), _EncodedRows()
    rows: list[Row] = []
    layouts: Counter[LayoutName] = Counter()
    for place, value in found.rows:
        row, layout = read_row(place, value, encoding.words)
        if layout is not None:
            layouts[layout] += 1
        if isinstance(row, RowFault):
            made.faults.append(row)
        else:
            rows.append(row)
    for row, outcome in zip(rows, encoding.encoder.encode_many(rows), strict=True):
        if isinstance(outcome, RowFault):
            made.faults.append(outcome)
        else:
            made.add(row.line, outcome, encoding.max_length)
    return EncodedBlock(
        tokens=np.concatenate([np.empty(0, np.int32), *(example.tokens for example in made.examples)]),
        supervised=np.concatenate([np.empty(0, np.bool_), *(example.supervised for example in made.examples)]),
        lengths=np.array([len(example.tokens) for example in made.examples], np.int64),
        places=np.array(made.places, np.int64),
        hashes=np.array(made.hashes, np.uint64),
        cut=tuple(made.cut),
        skipped=tuple(made.skipped),
        faults=tuple(sorted(made.faults)),
        layouts=dict(layouts),
        rows=len(found.rows),
        place_count=found.places,
        broken=found.broken,
    )


def read_row(place: int, value: RowValue, words: RowWords) -> tuple[Row | RowFault, LayoutName | None]:
    """The row that a value is, or what is wrong with it; and the layout it has."""
    if isinstance(value, RowError):
        return RowFault(place, str(value)), None
    layout: LayoutName | None = None
    try:
        layout, ours = words.in_ours(value)
        return row_of(place, ours), layout
    except RowError as error:
        return RowFault(place, str(error)), layout
