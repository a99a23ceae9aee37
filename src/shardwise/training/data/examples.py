"""Examples end to end in arrays, in memory or mapped; and a choice of those of several data sets."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from shardwise.training.texts.masking import Example


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
