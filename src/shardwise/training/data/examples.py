"""A data set as tokens: examples end to end in arrays, in memory or mapped, and what became of its rows."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.training.data.encoding import EncodedBlock
from shardwise.training.data.row_files import PlaceUnit, RowFile
from shardwise.training.texts.layouts import LayoutName
from shardwise.training.texts.masking import Example
from shardwise.training.texts.rows import RowFault


class _ExampleSequence(Sequence[Example]):
    """What sequences of examples have in common."""

    lines: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        raise NotImplementedError

    def at(self, index: int) -> Example:
        """The example of this number, from 0."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self.at(number) for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.at(index % len(self))


class Examples(_ExampleSequence):
    """Rows as tokens, end to end in one array; 5 bytes for a token and 16 for a row.

    Args:
        tokens: of all rows, (tokens,).
        supervised: which of them are learned, (tokens,).
        ends: where each row ends in these, (rows,).
        lines: the place of each row where it was read, (rows,).
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        supervised: NDArray[np.bool_],
        ends: NDArray[np.int64],
        lines: NDArray[np.int64],
    ) -> None:
        self.tokens = tokens
        self.supervised = supervised
        self.ends = ends
        self.lines = lines

    @classmethod
    def of(cls, examples: Sequence[Example], lines: Sequence[int]) -> Examples:
        return cls(
            np.concatenate([np.empty(0, np.int32), *(example.tokens for example in examples)]),
            np.concatenate([np.empty(0, np.bool_), *(example.supervised for example in examples)]),
            np.cumsum([len(example.tokens) for example in examples], dtype=np.int64),
            np.array(lines, dtype=np.int64),
        )

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.ends, prepend=0)

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @cached_property
    def supervised_count(self) -> int:
        """Tokens that are learned."""
        return int(np.count_nonzero(self.supervised))

    @cached_property
    def greatest_token(self) -> int:
        """-1 where there are none."""
        return int(self.tokens.max()) if len(self.tokens) else -1

    @cached_property
    def digest(self) -> int:
        """A number that is another for other rows, or for another order of them."""
        arrays = (self.tokens, self.supervised, self.ends)
        found = 0
        for array in arrays:
            found = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, found)
        return found

    def __len__(self) -> int:
        return len(self.ends)

    def at(self, index: int) -> Example:
        start, end = int(self.ends[index - 1]) if index else 0, int(self.ends[index])
        return Example(self.tokens[start:end], self.supervised[start:end])


class ChosenExamples(_ExampleSequence):
    """Some rows of one or several data sets, in their order; nothing is copied.

    Args:
        parts: the data sets.
        chosen: of each the numbers of its rows, ascending.
        first_lines: of each what its places are moved by, so that no two rows have one place.
    """

    def __init__(
        self, parts: Sequence[Examples], chosen: Sequence[NDArray[np.int64]], first_lines: Sequence[int]
    ) -> None:
        self.parts = parts
        self.chosen = chosen
        self.starts = np.cumsum([0, *map(len, chosen)])
        self.lines = np.concatenate(
            [part.lines[rows] + first for part, rows, first in zip(parts, chosen, first_lines, strict=True)]
        )

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.concatenate([part.lengths[rows] for part, rows in zip(self.parts, self.chosen, strict=True)])

    @property
    def token_count(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def supervised_count(self) -> int:
        """Tokens that are learned."""
        whole = all(len(rows) == len(part) for part, rows in zip(self.parts, self.chosen, strict=True))
        if whole:
            return sum(part.supervised_count for part in self.parts)
        return sum(int(np.count_nonzero(example.supervised)) for example in self)

    @cached_property
    def greatest_token(self) -> int:
        """Of all rows of the data sets, the chosen ones or not."""
        return max(part.greatest_token for part in self.parts)

    @cached_property
    def digest(self) -> int:
        """A number that is another for other rows, or for another order of them."""
        if len(self.parts) == 1 and len(self.chosen[0]) == len(self.parts[0]):
            return self.parts[0].digest
        found = 0
        for part, rows in zip(self.parts, self.chosen, strict=True):
            found = zlib.crc32(part.digest.to_bytes(4, "little"), found)
            found = zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data, found)
        return found

    def __len__(self) -> int:
        return int(self.starts[-1])

    def at(self, index: int) -> Example:
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.parts[part].at(int(self.chosen[part][index - self.starts[part]]))


ExampleRows: TypeAlias = Examples | ChosenExamples


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
