"""The rows of one data set, read, tokenised and shuffled while they are trained on; the first rank has it.

[Note: Fillings of a buffer] The first rank reads files block by block, with the processes that tokenise, until it
has as many examples as the buffer is to hold: a filling. It is shuffled by seed, epoch and its number, and dealt
out from its beginning to its end, while the next one is made. So what a step takes follows from the files, the
seed, the size of the buffer, and a position of a few numbers: the block a filling begins with, and how much of it
is taken. Ranks have no part in it, and any number of them goes on from such a position with the same rows. A
filling ends with the files, which are then begun anew.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.workers import Ahead
from shardwise.training.data.batches import BatchLayout, Padded, pack_rows
from shardwise.training.data.encoding import EncodedBlock, Encoding
from shardwise.training.data.read_once import RowsAsked, SkipRows
from shardwise.training.data.row_files import ByStat, RowFile
from shardwise.training.data.tokenising import BlockStart, encoded_blocks, usable_processors
from shardwise.training.texts.masking import Example
from shardwise.training.texts.rows import RowFault, refuse

PLACE_BITS = 40
"""A row is known by the number of its file and its place there, as one number."""

StreamItem: TypeAlias = tuple[tuple[Example, ...], tuple[int, ...]]
"""Examples that are one row of a batch, and the places of their rows."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a data set is: the filling it is in, by what that begins with, and how much of it was taken."""

    epoch: int = 0
    filling: int = 0
    start: BlockStart = field(default_factory=BlockStart)
    taken: int = 0

    def to_list(self) -> list[int]:
        return [self.epoch, self.filling, self.start.file, self.start.block, self.start.place, self.taken]

    @classmethod
    def of(cls, values: Sequence[int]) -> Position:
        epoch, filling, file, block, place, taken = values
        return cls(epoch, filling, BlockStart(file, block, place), taken)


@dataclass(frozen=True, slots=True)
class _BufferFill:
    """Items in the order in which they are dealt out, and where the one after it begins."""

    items: list[StreamItem]
    after: Position


class _Closed(Exception):
    """Nobody wants the next filling any more."""


class BufferedStream:
    """The items of one data set, for ever; on the first rank alone."""

    def __init__(
        self,
        files: Sequence[RowFile],
        encoding: Encoding,
        asked: RowsAsked,
        layout: BatchLayout,
        *,
        rows: int,
        seed: int,
    ) -> None:
        self.files = files
        self.seen = [_facts_of(file) for file in files]
        """What each file was when the stream was opened: a position counts rows of just these bytes."""
        self.encoding = encoding
        self.asked = asked
        self.layout = layout
        self.rows = rows
        self.seed = seed
        self.position = Position()
        self._filling: _BufferFill | None = None
        self._next: Ahead[_BufferFill] | None = None
        self._blocks: Generator[tuple[int, EncodedBlock], None, None] | None = None
        self._at = Position()
        """Where ``_blocks`` are."""
        self._is_closed = threading.Event()

    def go_to(self, position: Position) -> None:
        """Go on from there."""
        self.close()
        self.position = position

    def take(self, world: World) -> StreamItem:
        """The next item.

        Raises:
            ConfigError: the data cannot be read, or rows cannot be used, or there is nothing to learn in them.
        """
        if self._filling is None:
            self._next = self._ahead(self.position)  # kept: whoever closes waits for it
            self._filling = self._next.value(world.check)
            self._next = self._ahead(self._filling.after)
        while self.position.taken >= len(self._filling.items):
            assert self._next is not None
            self.position, self._filling = self._filling.after, self._next.value(world.check)
            self._next = self._ahead(self._filling.after)
        item = self._filling.items[self.position.taken]
        self.position = replace(self.position, taken=self.position.taken + 1)
        return item

    def close(self) -> None:
        """End the processes that tokenise."""
        self._is_closed.set()
        if self._next is not None:
            with suppress(Exception):
                self._next.value(lambda: None)
        if self._blocks is not None:
            self._blocks.close()
        self._filling = self._next = self._blocks = None
        self._is_closed.clear()

    def _check(self) -> None:
        if self._is_closed.is_set():
            raise _Closed

    def _ahead(self, position: Position) -> Ahead[_BufferFill]:
        return Ahead(lambda: self._made(position))

    def _made(self, position: Position) -> _BufferFill:
        """The filling that begins there; the files are read on where they were read last."""
        if self._blocks is None or replace(position, taken=0) != self._at:
            if self._blocks is not None:
                self._blocks.close()
            asked = self.asked.options.effort
            processes = asked.processes or max(1, usable_processors() // 2)  # others train meanwhile
            effort = replace(asked, processes=processes, bytes_per_process=0)
            self._blocks = encoded_blocks(
                self.files, self.encoding, effort, start=position.start, check=self._check
            )
        examples: list[Example] = []
        lines: list[int] = []
        read: set[int] = set()
        at = position.start
        for number, block in self._blocks:
            read.add(number)
            if number != at.file:
                at = BlockStart(number)
            self._require_usable(self.files[number], at.place, block)
            ends = np.cumsum(block.lengths)
            for place, end, length in zip(
                block.places.tolist(), ends.tolist(), block.lengths.tolist(), strict=True
            ):
                examples.append(Example(block.tokens[end - length : end], block.supervised[end - length : end]))
                lines.append(number << PLACE_BITS | at.place + place)
            at = BlockStart(number, at.block + 1, at.place + block.place_count)
            if len(examples) >= self.rows:
                after = Position(position.epoch, position.filling + 1, at)
                break
        else:
            after, self._blocks = Position(position.epoch + 1), None
            if position.filling == 0 and not examples:
                raise ConfigError(
                    f"{self.files[0].name}: there is no row with a token to learn within "
                    f"max_length={self.encoding.max_length}"
                )
        self._at = after
        self._require_unchanged(read)
        packs = [[number] for number in range(len(examples))]
        if not isinstance(self.layout, Padded):
            packs = pack_rows([len(example.tokens) for example in examples], self.layout.length)
        order = np.random.default_rng([self.seed, position.epoch, position.filling]).permutation(len(packs))
        items = [
            (tuple(examples[row] for row in packs[number]), tuple(lines[row] for row in packs[number]))
            for number in order.tolist()
        ]
        return _BufferFill(items, after)

    def _require_unchanged(self, numbers: Iterable[int]) -> None:
        """Files that have just been read are those that were there when the stream was opened.

        Raises:
            ConfigError: naming one that was written to or replaced.
        """
        for number in numbers:
            file = self.files[number]
            if _facts_of(file) != self.seen[number]:
                raise ConfigError(
                    f"{file.name}: it was changed while it was streamed, so that a position in it says nothing any "
                    "more; put back what was there and go on, or start a new training"
                )

    def _require_usable(self, file: RowFile, before: int, block: EncodedBlock) -> None:
        if (broken := block.broken) is not None:
            raise ConfigError(f"{file.name}: {file.unit} {before + broken.place}: {broken.cause}")
        if not isinstance(self.asked.malformed, SkipRows):
            faults = [RowFault(fault.line + before, fault.cause) for fault in block.faults]
            refuse(file.name, faults, unit=file.unit)


def _facts_of(file: RowFile) -> object:
    """Size and time of change of a file: it may have been moved."""
    found = file.facts(ByStat())
    return found[1:3] if isinstance(found, list) else found
