"""A data set as tokens: its examples, and what became of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.training.data.encoding import EncodedBlock
from shardwise.training.data.examples import Examples
from shardwise.training.data.row_files import PlaceUnit, RowFile
from shardwise.training.texts.layouts import LayoutName
from shardwise.training.texts.rows import RowFault


@dataclass(frozen=True, slots=True)
class PlacesOfFile:
    """A file of a data set: its rows have the places after ``first``, by ``unit`` from 1."""

    name: str
    unit: PlaceUnit
    first: int


@dataclass(frozen=True)
class TokenTable:
    """A data set as tokens.

    Attributes:
        examples: by their places, which are counted through all files.
        hashes: of the row of each example by its tokens, (examples,).
        rows: how many there are in the files.
        cut: places of rows of which the end was cut off.
        skipped: places of rows with nothing left to learn.
        faults: rows that cannot be used.
        layouts: how many rows had which.
        files: in their order.
        places: how many there are.
    """

    examples: Examples
    hashes: NDArray[np.uint64]
    rows: int
    cut: NDArray[np.int64]
    skipped: NDArray[np.int64]
    faults: tuple[RowFault, ...]
    layouts: Mapping[LayoutName, int]
    files: tuple[PlacesOfFile, ...]
    places: int

    def called(self, names: Sequence[str]) -> TokenTable:
        """The same of files that are called so now: they may have been moved since it was made."""
        files = tuple(replace(file, name=name) for file, name in zip(self.files, names, strict=True))
        return replace(self, files=files)


@dataclass
class _Gathered:
    """Of each block."""

    tokens: list[NDArray[np.int32]] = field(default_factory=lambda: [np.empty(0, np.int32)])
    supervised: list[NDArray[np.bool_]] = field(default_factory=lambda: [np.empty(0, np.bool_)])
    lengths: list[NDArray[np.int64]] = field(default_factory=lambda: [np.empty(0, np.int64)])
    places: list[NDArray[np.int64]] = field(default_factory=lambda: [np.empty(0, np.int64)])
    hashes: list[NDArray[np.uint64]] = field(default_factory=lambda: [np.empty(0, np.uint64)])


def gathered(files: Sequence[RowFile], blocks: Iterable[tuple[int, EncodedBlock]]) -> TokenTable:
    """The table of all blocks of files, which are in order.

    Memory: 5 bytes for a token and 32 for a row, and while they are put together the tokens twice.

    Raises:
        ConfigError: a file is broken from some place on.
    """
    each = _Gathered()
    places: list[PlacesOfFile] = []
    faults: list[RowFault] = []
    cut: list[int] = []
    skipped: list[int] = []
    layouts: Counter[LayoutName] = Counter()
    rows = at = 0
    for number, block in blocks:
        places += [PlacesOfFile(file.name, file.unit, at) for file in files[len(places) : number + 1]]
        if (broken := block.broken) is not None:
            place = at - places[-1].first + broken.place
            raise ConfigError(f"{places[-1].name}: {places[-1].unit} {place}: {broken.cause}")
        each.tokens.append(block.tokens)
        each.supervised.append(block.supervised)
        each.lengths.append(block.lengths)
        each.places.append(block.places + at)
        each.hashes.append(block.hashes)
        faults += [RowFault(fault.line + at, fault.cause) for fault in block.faults]
        cut += [place + at for place in block.cut]
        skipped += [place + at for place in block.skipped]
        layouts.update(block.layouts)
        rows += block.rows
        at += block.place_count
    places += [PlacesOfFile(file.name, file.unit, at) for file in files[len(places) :]]
    ends = np.cumsum(np.concatenate(each.lengths), dtype=np.int64)
    lines = np.concatenate(each.places)
    tokens = np.concatenate(each.tokens)
    each.tokens.clear()
    examples = Examples(tokens, np.concatenate(each.supervised), ends, lines)
    hashes = np.concatenate(each.hashes)
    return TokenTable(
        examples,
        hashes,
        rows,
        np.array(cut, np.int64),
        np.array(skipped, np.int64),
        tuple(faults),
        dict(layouts),
        tuple(places),
        at,
    )
