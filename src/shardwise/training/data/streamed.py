"""Rows that are read, tokenised and shuffled while they are trained on, for data that does not fit anywhere.

How one data set is read is said in :mod:`shardwise.training.data.row_stream` ([Note: Fillings of a buffer]). Of
several with weights each has fillings of its own; the next row comes from the one that is most behind its share.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.training.data.batches import Batch, BatchLayout, batch_of
from shardwise.training.data.encoding import Encoding
from shardwise.training.data.read_once import RowsAsked
from shardwise.training.data.row_stream import PLACE_BITS, BufferedStream, Position, StreamItem
from shardwise.training.data.sources import AsItComes, DataName, each_shown, open_source
from shardwise.training.options import Steps, TrainOptions
from shardwise.training.texts.masking import Encoder, Example


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
            first = sum(self.facts.file_counts[:number]) << PLACE_BITS
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
            of_file.setdefault(line >> PLACE_BITS, []).append(line & (1 << PLACE_BITS) - 1)
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
