"""Rows as tokens: read and tokenised by all ranks together."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.training.chat_options import ChatOptions
from shardwise.training.masking import Encoder, Example
from shardwise.training.rows import RowFault, refuse
from shardwise.training.sources import DataName, RowSource, name_of, open_source


@dataclass(frozen=True, slots=True)
class RefuseRows:
    """A row that cannot be used is an error, which names all of them."""


@dataclass(frozen=True, slots=True)
class SkipRows:
    """Rows that cannot be used are left out, and told."""


Malformed: TypeAlias = RefuseRows | SkipRows

_CHATS = ChatOptions()
_BATCH_ROWS = 256


class Examples(Sequence[Example]):
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

    @classmethod
    def joined(cls, parts: Sequence[Examples]) -> Examples:
        """The rows of all parts, by their lines."""
        lines = np.concatenate([part.lines for part in parts])
        owner = np.concatenate([np.full(len(part), number) for number, part in enumerate(parts)])
        place = np.concatenate([np.arange(len(part)) for part in parts])
        order = np.argsort(lines, kind="stable")
        lengths = np.concatenate([part.lengths for part in parts])[order]
        ends = np.cumsum(lengths, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        tokens, supervised = np.empty(total, np.int32), np.empty(total, np.bool_)
        for index, end, length in zip(order.tolist(), ends.tolist(), lengths.tolist(), strict=True):
            example = parts[owner[index]][int(place[index])]
            tokens[end - length : end] = example.tokens
            supervised[end - length : end] = example.supervised
        return cls(tokens, supervised, ends, lines[order])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.ends, prepend=0)

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

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start, end = int(self.ends[index - 1]) if index else 0, int(self.ends[index])
        return Example(self.tokens[start:end], self.supervised[start:end])


@dataclass(frozen=True, slots=True)
class TrainData:
    """The examples of a file, and what became of its rows."""

    path: str
    examples: Examples
    pad_token_id: int
    cut_lines: tuple[int, ...]
    """Rows longer than ``max_length``, of which the end was cut off."""
    skipped_lines: tuple[int, ...]
    """Rows that had nothing left to learn within ``max_length``."""
    malformed: tuple[RowFault, ...] = ()
    """Rows that could not be used and were left out on request."""
    unit: Literal["line", "row"] = "line"
    """What the places of rows are numbers of."""

    @property
    def tokens(self) -> int:
        return len(self.examples.tokens)

    @property
    def supervised_tokens(self) -> int:
        return int(self.examples.supervised.sum())


def read_data(
    data: str | os.PathLike[str] | DataName,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    malformed: Malformed = RefuseRows(),
    chats: ChatOptions = _CHATS,
) -> TrainData:
    """Read and tokenise rows: of JSON lines, Parquet, or a data set of ``datasets``.

    Every rank reads and tokenises its share, and has all in the end.

    Collective: yes, over the default process group.
    Memory: 5 bytes for a token and 16 for a row, twice while the shares are put together.

    Raises:
        ConfigError: the data cannot be read, the tokenizer has no chat template, or rows are malformed; all of
            them by line or row (up to 20), and the same error on every rank.
    """
    world = World.current()
    name = name_of(data)
    source = world.together(lambda: open_source(name))
    encoder = Encoder(tokenizer, chats)
    shares = world.each(lambda: _encode_share(source, world, encoder, max_length))
    faults = sorted({fault for share in shares for fault in share.faults})
    if not isinstance(malformed, SkipRows):
        refuse(name.path, faults, unit=source.unit)
    count = sum(share.rows for share in shares)
    if not count:
        raise ConfigError(f"{name.path}: there are no rows; give it one JSON object on each line")
    examples = Examples.joined([share.examples for share in shares])
    if not len(examples):
        raise ConfigError(
            f"{name.path}: in none of its {count} rows is there a token to learn within "
            f"max_length={max_length}; raise it, or look at what the chat template makes of the rows"
        )
    return TrainData(
        path=os.fspath(Path(name.path)),
        examples=examples,
        pad_token_id=next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None),
        cut_lines=tuple(sorted(line for share in shares for line in share.cut_lines)),
        skipped_lines=tuple(sorted(line for share in shares for line in share.skipped_lines)),
        malformed=tuple(faults),
        unit=source.unit,
    )


@dataclass(frozen=True)
class _RankRows:
    """What a rank made of its rows."""

    examples: Examples
    rows: int
    faults: list[RowFault]
    cut_lines: list[int]
    skipped_lines: list[int]


def _encode_share(source: RowSource, world: World, encoder: Encoder, max_length: int) -> _RankRows:
    examples: list[Example] = []
    lines: list[int] = []
    faults: list[RowFault] = []
    cut_lines: list[int] = []
    skipped_lines: list[int] = []
    count = 0
    found = source.share(world.rank, world.size)
    while batch := list(islice(found, _BATCH_ROWS)):
        count += len(batch)
        faults += [row for row in batch if isinstance(row, RowFault)]
        rows = [row for row in batch if not isinstance(row, RowFault)]
        for row, made in zip(rows, encoder.encode_many(rows), strict=True):
            if isinstance(made, RowFault):
                faults.append(made)
                continue
            cut = [example.cut(max_length) for example in made]
            if any(len(short.tokens) < len(whole.tokens) for short, whole in zip(cut, made, strict=True)):
                cut_lines.append(row.line)
            kept = [example for example in cut if example.supervised.any()]
            examples += kept
            lines += [row.line] * len(kept)
            if not kept:
                skipped_lines.append(row.line)
    return _RankRows(Examples.of(examples, lines), count, faults, cut_lines, skipped_lines)
