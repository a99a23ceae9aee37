"""Rows that are read, tokenised and shuffled while they are trained on, for data that does not fit anywhere.

[Note: Fillings of a buffer] The first rank reads files block by block, with the processes that tokenise, until it
has as many examples as the buffer is to hold: a filling. It is shuffled by seed, epoch and its number, and dealt
out from its beginning to its end, while the next one is made. So what a step takes follows from the files, the
seed, the size of the buffer, and a position of a few numbers: the block a filling begins with, and how much of it
is taken. Ranks have no part in it, and any number of them goes on from such a position with the same rows. A
filling ends with the files, which are then begun anew.

Of several data sets with weights each has fillings of its own; the next row comes from the one that is most behind
its share.
"""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.workers import Ahead
from shardwise.training.data.batches import Batch, BatchLayout, Padded, batch_of, pack_rows
from shardwise.training.data.encoding import EncodedBlock, Encoding
from shardwise.training.data.read_once import RowsAsked, SkipRows
from shardwise.training.data.row_files import ByStat, RowFile
from shardwise.training.data.sources import AsItComes, DataName, each_shown, open_source
from shardwise.training.data.tokenising import BlockStart, encoded_blocks, usable_processors
from shardwise.training.options import Steps, TrainOptions
from shardwise.training.texts.masking import Encoder, Example
from shardwise.training.texts.rows import RowFault, refuse

_PLACE_BITS = 40
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
                lines.append(number << _PLACE_BITS | at.place + place)
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


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What every rank knows of a stream."""

    files: tuple[tuple[str, str], ...]
    """Name and unit of each, one data set after the other."""
    file_counts: tuple[int, ...]
    """Of each data set."""
    identity: int


class StreamLoader:
    """The micro-batches of every step of this rank, of rows that are read meanwhile.

    See [Note: Fillings of a buffer]. As :class:`~shardwise.training.data.loader.StepLoader`; steps are always full.
    """

    def __init__(
        self,
        world: World,
        names: Sequence[DataName],
        facts: StreamFacts,
        streams: Sequence[BufferedStream],
        options: TrainOptions,
        layout: BatchLayout,
        pad_token_id: int,
    ) -> None:
        self.world = world
        self.names = names
        self.facts = facts
        self.streams = streams
        self.options = options
        self.layout = layout
        self.pad_token_id = pad_token_id
        self.vocabulary: int | None = None
        """How many tokens the model knows; None where nobody has said."""
        self.step = 0
        self.taken = [0] * len(facts.file_counts)
        self.positions = [Position() for _ in facts.file_counts]
        self.weights = [1.0 if name.weight is None else name.weight for name in names][: len(self.taken)]

    @property
    def path(self) -> str:
        """What is read, for messages."""
        return each_shown(self.names)

    def __len__(self) -> int:
        assert isinstance(self.options.duration, Steps)
        return self.options.duration.count

    def __iter__(self) -> Iterator[list[Batch]]:
        """From the position on. Collective: yes, in each step."""
        for stream, position in zip(self.streams, self.positions, strict=False):
            stream.go_to(position)
        try:
            while self.step < len(self):
                items, taken, positions = self.world.from_first(self._next_step)
                self.step += 1
                self.taken, self.positions = taken, positions
                yield self._deal(items)
        finally:
            for stream in self.streams:
                stream.close()

    def _next_step(self) -> tuple[list[StreamItem], list[int], list[Position]]:
        """The rows of a step of all ranks, and where each data set is then; on the first rank."""
        taken = list(self.taken)
        items: list[StreamItem] = []
        for _ in range(self.options.rows_per_rank * self.world.size):
            owed, total = sum(taken) + 1, sum(self.weights)
            behind = [weight / total * owed - own for weight, own in zip(self.weights, taken, strict=True)]
            number = int(np.argmax(behind))
            examples, lines = self.streams[number].take(self.world)
            self._require_known(examples)
            first = sum(self.facts.file_counts[:number]) << _PLACE_BITS
            items.append((examples, tuple(line + first for line in lines)))
            taken[number] += 1
        return items, taken, [stream.position for stream in self.streams]

    def _require_known(self, examples: Sequence[Example]) -> None:
        greatest = max(int(example.tokens.max()) for example in examples)
        if self.vocabulary is not None and greatest >= self.vocabulary:
            raise ConfigError(
                f"{self.path}: the tokenizer makes the token {greatest} of it, but the model has embeddings for "
                f"the tokens 0 to {self.vocabulary - 1} only; the tokenizer is another model's, or was extended"
            )

    def _deal(self, items: Sequence[StreamItem]) -> list[Batch]:
        own, size = items[self.world.rank :: self.world.size], self.options.batch_size
        batches = []
        for start in range(0, self.options.rows_per_rank, size):
            part = own[start : start + size]
            lines = tuple(line for _, places in part for line in places)
            batches.append(batch_of([examples for examples, _ in part], self.layout, self.pad_token_id, lines))
        return batches

    @property
    def epochs_done(self) -> float:
        """Of the data set that has come farthest, whole epochs alone: how long one is nobody knows."""
        return float(max(position.epoch for position in self.positions))

    def name_rows(self, lines: Sequence[int]) -> str:
        """Rows by their files, and their places in these."""
        of_file: dict[int, list[int]] = {}
        for line in lines:
            of_file.setdefault(line >> _PLACE_BITS, []).append(line & (1 << _PLACE_BITS) - 1)
        return "; ".join(
            f"{self.facts.files[number][0]}, {self.facts.files[number][1]}{'' if len(places) == 1 else 's'} "
            f"{', '.join(map(str, places))}"
            for number, places in of_file.items()
        )

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank, and what it is a position in."""
        return {
            "step": self.step,
            "stream": self.facts.identity,
            "taken": list(self.taken),
            "positions": [position.to_list() for position in self.positions],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a position.

        Raises:
            ConfigError: it is one in other data, or none.
        """
        if state_dict.get("stream") != self.facts.identity:
            raise ConfigError(
                f"{self.path}: the position is one in other data; resume with the same data, tokenizer, weights, "
                "max_length, packing, shuffle_buffer and seed, or begin anew in another output folder"
            )
        try:
            step, taken = int(state_dict["step"]), [int(count) for count in state_dict["taken"]]
            positions = [Position.of([int(value) for value in values]) for values in state_dict["positions"]]
            numbers = [step, *taken, *(value for position in positions for value in position.to_list())]
            if min(numbers) < 0 or not len(taken) == len(positions) == len(self.positions):
                raise ValueError("numbers that no position has")
            if any(p.start.file >= n for p, n in zip(positions, self.facts.file_counts, strict=True)):
                raise ValueError("a file that is not there")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{self.path}: the position is none ({error}); the checkpoint is damaged") from error
        self.step, self.taken, self.positions = step, taken, positions


def stream_loader(
    names: Sequence[DataName], asked: RowsAsked, options: TrainOptions, layout: BatchLayout, *, buffer_rows: int
) -> StreamLoader:
    """The micro-batches of every step of this rank, of rows that are read meanwhile.

    Collective: yes, over the default process group, as every step of it is.
    Memory: on the first rank 5 bytes for a token of two fillings of ``buffer_rows``.

    Raises:
        ConfigError: there is no such data; or the training's duration is not a number of steps.
    """
    world = World.current()
    if not isinstance(options.duration, Steps):
        raise ConfigError("data.streaming: give training.max_steps, since nobody knows how long an epoch is")
    streams: list[BufferedStream] = []

    def begin() -> StreamFacts:
        encoder = Encoder(asked.tokenizer, asked.chats)
        groups = [[name] for name in names] if names[0].weight is not None else [list(names)]
        seen: list[object] = []
        for group in groups:
            words = {json.dumps(name.words.facts(), sort_keys=True) for name in group}
            if len(words) > 1:
                raise ConfigError(
                    f"{each_shown(group)}: data sets of other layouts or columns are streamed together only with "
                    "weights; give each a weight"
                )
            files = [file for name in group for file in open_source(name, AsItComes())]
            encoding = Encoding(encoder, group[0].words, asked.max_length)
            stream = BufferedStream(files, encoding, asked, layout, rows=buffer_rows, seed=options.seed)
            streams.append(stream)
            seen.append([[file.name, facts] for file, facts in zip(files, stream.seen, strict=True)])
        decides = [seen, encoder.facts(), [name.words.facts() for name in names], [name.weight for name in names]]
        effort = asked.options.effort
        whole = [decides, asked.max_length, repr(layout), buffer_rows, options.seed, effort.block_bytes]
        digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).digest()
        return StreamFacts(
            tuple((file.name, file.unit) for stream in streams for file in stream.files),
            tuple(len(stream.files) for stream in streams),
            zlib.crc32(digest),
        )

    facts = world.from_first(begin)
    pads = (asked.tokenizer.pad_token_id, asked.tokenizer.eos_token_id, 0)
    pad_token_id = next(number for number in pads if number is not None)
    return StreamLoader(world, names, facts, streams, options, layout, pad_token_id)


def _facts_of(file: RowFile) -> object:
    """Size and time of change of a file: it may have been moved."""
    found = file.facts(ByStat())
    return found[1:3] if isinstance(found, list) else found
