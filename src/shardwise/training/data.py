"""Rows as the batches of every step, the same on any number of ranks."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, assert_never, overload

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.training.masking import Example, encode, has_generation_marks
from shardwise.training.options import Epochs, TrainOptions
from shardwise.training.packing import pack_rows
from shardwise.training.rows import Chat, Row, RowError, RowFault, refuse
from shardwise.training.sources import DataName, RowSource, name_of, open_source

IGNORED = -100
"""The label of a token that is not learned; what torch's cross entropy passes over."""


@dataclass(frozen=True, slots=True)
class RefuseRows:
    """A row that cannot be used is an error, which names all of them."""


@dataclass(frozen=True, slots=True)
class SkipRows:
    """Rows that cannot be used are left out, and told."""


Malformed: TypeAlias = RefuseRows | SkipRows


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


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where rows begin and end in one long row, as flash attention wants to be told: (rows + 1,), int32."""

    cumulative: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length, padded at the end or packed; tensors are (rows, tokens) and int64."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    """None where rows are packed: the positions say where each begins."""
    labels: torch.Tensor
    """``input_ids`` where a token is learned, else -100. Not shifted, as transformers has it."""
    tokens: int
    """Those of rows: without padding, and none where there is no row."""
    position_ids: torch.Tensor | None = None
    """None where rows are not packed, and begin at 0 by themselves."""
    boundaries: Boundaries | None = None
    lines: tuple[int, ...] = ()
    """The places of its rows where they were read."""

    @property
    def supervised_tokens(self) -> int:
        return int((self.labels[:, 1:] != IGNORED).sum())

    def inputs(self) -> dict[str, Any]:
        """What a model of transformers is called with."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids
        if self.boundaries is not None:
            inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), self.boundaries.cumulative)
            inputs |= dict.fromkeys(("max_length_q", "max_length_k"), self.boundaries.longest)
        return inputs

    def to(self, device: torch.device) -> Batch:
        boundaries = self.boundaries
        return Batch(
            self.input_ids.to(device),
            None if self.attention_mask is None else self.attention_mask.to(device),
            self.labels.to(device),
            self.tokens,
            None if self.position_ids is None else self.position_ids.to(device),
            None if boundaries is None else Boundaries(boundaries.cumulative.to(device), boundaries.longest),
            self.lines,
        )


def read_data(
    data: str | os.PathLike[str] | DataName,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    malformed: Malformed = RefuseRows(),
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
    shares = world.each(lambda: _encode_share(source, world, tokenizer, max_length))
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


def _encode_share(
    source: RowSource, world: World, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> _RankRows:
    examples: list[Example] = []
    lines: list[int] = []
    faults: list[RowFault] = []
    cut_lines: list[int] = []
    skipped_lines: list[int] = []
    count = 0
    for row in source.share(world.rank, world.size):
        count += 1
        whole = row if isinstance(row, RowFault) else _encode(row, tokenizer)
        if isinstance(whole, RowFault):
            faults.append(whole)
            continue
        cut = whole.cut(max_length)
        if len(cut.tokens) < len(whole.tokens):
            cut_lines.append(row.line)
        if cut.supervised.any():
            examples.append(cut)
            lines.append(row.line)
        else:
            skipped_lines.append(row.line)
    return _RankRows(Examples.of(examples, lines), count, faults, cut_lines, skipped_lines)


def _encode(row: Row, tokenizer: PreTrainedTokenizerBase) -> Example | RowFault:
    if isinstance(row, Chat):
        has_generation_marks(tokenizer)  # refuses a tokenizer without a template, before any row is
    try:
        return encode(row, tokenizer)
    except RowError as error:
        return RowFault(row.line, str(error))


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows of a batch are padded to the longest of them."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows are put together to packs of up to ``length`` tokens, each a row of a batch. See [Note: Packed rows]."""

    length: int


@dataclass(frozen=True, slots=True)
class Flattened:
    """As :class:`Packed`, and the packs of a batch are put end to end, for flash attention."""

    length: int


BatchLayout: TypeAlias = Padded | Packed | Flattened


class StepSampler:
    """Which rows a rank takes: one item for each step, with the row numbers of each of its micro-batches.

    The rows are shuffled anew in every epoch, by ``seed`` and epoch alone. A step takes the next rows of that order
    and deals them to the ranks in turn, so which rows it takes depends on how many there are in all, not on how
    ranks and micro-batches share them. The last step of an epoch takes what is left. Every rank has the same number
    of steps, and the same number of micro-batches in each; where rows run out, a micro-batch is empty.

    It has a position, which is that of all ranks together: steps given, epoch, and rows taken of that. From the
    same position any number of ranks goes on with the same rows.
    """

    def __init__(self, row_count: int, options: TrainOptions, *, rank: int = 0, size: int = 1) -> None:
        self.row_count = row_count
        self.options = options
        self.rank = rank
        self.size = size
        self.step = 0
        self.epoch = 0
        self.taken = 0

    @property
    def rows_per_step(self) -> int:
        return self.options.rows_per_rank * self.size

    def __len__(self) -> int:
        """Steps in all, those before the position among them."""
        duration = self.options.duration
        if not isinstance(duration, Epochs):
            return duration.count
        of_epoch = -(-(self.row_count - self.taken) // self.rows_per_step)
        later = max(0, duration.count - self.epoch - 1) * -(-self.row_count // self.rows_per_step)
        return self.step + (of_epoch + later if self.epoch < duration.count else 0)

    def __iter__(self) -> Iterator[list[list[int]]]:
        """From the position on. The position is behind a step as soon as it is given."""
        order: list[int] = []
        total = len(self)
        while self.step < total:
            if self.taken == 0 or not order:
                order = np.random.default_rng([self.options.seed, self.epoch]).permutation(self.row_count).tolist()
            rows = order[self.taken : self.taken + self.rows_per_step]
            self.step += 1
            self.taken += len(rows)
            if self.taken == self.row_count:
                self.epoch, self.taken = self.epoch + 1, 0
            yield self._deal(rows)

    def _deal(self, rows: Sequence[int]) -> list[list[int]]:
        of_rank = rows[self.rank :: self.size]
        most = len(rows[:: self.size])
        return [
            list(of_rank[start : start + self.options.batch_size])
            for start in range(0, most, self.options.batch_size)
        ]


class StepLoader:
    """The micro-batches of every step of this rank, with a position that can be kept and taken up again."""

    def __init__(
        self, data: TrainData, options: TrainOptions, layout: BatchLayout, *, rank: int, size: int
    ) -> None:
        self.data = data
        self.batches = Batches(data, layout)
        self.sampler = StepSampler(len(self.batches), options, rank=rank, size=size)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[Batch]]:
        for step in self.sampler:
            yield [self.batches.make(rows) for rows in step]

    @property
    def epochs_done(self) -> float:
        return self.sampler.epoch + self.sampler.taken / self.sampler.row_count

    def name_rows(self, lines: Sequence[int]) -> str:
        """Rows by their places in the data."""
        word = self.data.unit if len(lines) == 1 else f"{self.data.unit}s"
        return f"{self.data.path}, {word} {', '.join(map(str, lines))}"

    def state_dict(self) -> dict[str, int]:
        """The position, the same on every rank, and what it is a position in."""
        sampler = self.sampler
        return {"step": sampler.step, "epoch": sampler.epoch, "taken": sampler.taken, **self._identity()}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from a position.

        Raises:
            ConfigError: it is one in other data, or in another order of them.
        """
        here = self._identity()
        others = [name for name in here if state_dict.get(name) != here[name]]
        if others:
            told = ", ".join(f"{name} {state_dict.get(name)} then and {here[name]} now" for name in others)
            raise ConfigError(
                f"{self.data.path}: the position is one in other data ({told}); resume with the same "
                "data, tokenizer, "
                "max_length, packing and seed, or begin anew in another output folder"
            )
        step, epoch, taken = (state_dict.get(name, -1) for name in ("step", "epoch", "taken"))
        if min(step, epoch, taken) < 0 or taken >= self.sampler.row_count:
            raise ConfigError(
                f"{self.data.path}: {dict(state_dict)} is no position in it; the checkpoint is damaged"
            )
        self.sampler.step, self.sampler.epoch, self.sampler.taken = step, epoch, taken

    def _identity(self) -> dict[str, int]:
        return {
            "rows": self.sampler.row_count,
            "digest": self.data.examples.digest,
            "seed": self.sampler.options.seed,
        }


class Batches:
    """Any rows, by their numbers, as a batch; where rows are packed, the numbers are those of packs."""

    def __init__(self, data: TrainData, layout: BatchLayout) -> None:
        self.data = data
        self.layout = layout
        if isinstance(layout, Padded):
            self.packs = None
        else:
            self.packs = pack_rows(data.examples.lengths, layout.length)

    def __len__(self) -> int:
        return len(self.data.examples) if self.packs is None else len(self.packs)

    def make(self, numbers: Sequence[int]) -> Batch:
        data = self.data
        packs = [[number] for number in numbers] if self.packs is None else [self.packs[n] for n in numbers]
        examples = [[data.examples[row] for row in pack] for pack in packs]
        lines = tuple(int(data.examples.lines[row]) for pack in packs for row in pack)
        match self.layout:
            case Padded():
                return pad([example for [example] in examples], data.pad_token_id, lines)
            case Packed():
                return pack(examples, data.pad_token_id, lines)
            case Flattened():
                return flatten([example for pack in examples for example in pack], data.pad_token_id, lines)
            case _:
                assert_never(self.layout)


def pad(examples: Sequence[Example], pad_token_id: int, lines: tuple[int, ...] = ()) -> Batch:
    """Examples as a batch. Of none, a batch of one token that teaches nothing: every rank takes part in a step."""
    length = max((len(example.tokens) for example in examples), default=1)
    shape = (max(len(examples), 1), length)
    input_ids = torch.full(shape, pad_token_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED)
    for row, example in enumerate(examples):
        tokens, wanted = _tensors(example)
        input_ids[row, : len(tokens)] = tokens
        attention_mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = wanted
    if not examples:
        attention_mask[:] = 1
    return Batch(input_ids, attention_mask, labels, sum(len(example.tokens) for example in examples), lines=lines)


def pack(packs: Sequence[Sequence[Example]], pad_token_id: int, lines: tuple[int, ...] = ()) -> Batch:
    """Packs of examples, each a row of the batch; padding counts as one more example. See [Note: Packed rows]."""
    tokens = [sum(len(example.tokens) for example in members) for members in packs]
    length = max(tokens, default=1)
    shape = (max(len(packs), 1), length)
    input_ids = torch.full(shape, pad_token_id)
    labels = torch.full(shape, IGNORED)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    for row, members in enumerate(packs):
        start = 0
        for example in members:
            end = start + len(example.tokens)
            input_ids[row, start:end], labels[row, start:end] = _tensors(example)
            position_ids[row, start:end] = torch.arange(end - start)
            start = end
        position_ids[row, start:] = torch.arange(length - start)
    return Batch(input_ids, None, labels, sum(tokens), position_ids, lines=lines)


def flatten(examples: Sequence[Example], pad_token_id: int, lines: tuple[int, ...] = ()) -> Batch:
    """Examples end to end in one row, without padding, and where each begins. See [Note: Packed rows]."""
    whole = pack([examples] if examples else [], pad_token_id, lines)
    lengths = [len(example.tokens) for example in examples] or [1]
    cumulative = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    return Batch(
        whole.input_ids,
        None,
        whole.labels,
        whole.tokens,
        whole.position_ids,
        Boundaries(cumulative, max(lengths)),
        lines,
    )


def _tensors(example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels."""
    tokens = torch.from_numpy(example.tokens).long()
    return tokens, tokens.masked_fill(~torch.from_numpy(example.supervised), IGNORED)


def step_loader(data: TrainData, options: TrainOptions, layout: BatchLayout = Padded()) -> StepLoader:
    """The micro-batches of every step of this rank. Collective: no; the ranks are those of the default group."""
    world = World.current()
    return StepLoader(data, options, layout, rank=world.rank, size=world.size)


class EvaluationBatches:
    """This rank's part of all rows, in their order, in as many batches on every rank; made when asked for."""

    def __init__(self, data: TrainData, layout: BatchLayout, batch_size: int, *, rank: int, size: int) -> None:
        self.batches = Batches(data, layout)
        self.batch_size = batch_size
        self.rank = rank
        self.size = size

    def __len__(self) -> int:
        return -(-len(self.batches) // (self.batch_size * self.size))

    def __iter__(self) -> Iterator[Batch]:
        rows = range(self.rank, len(self.batches), self.size)
        for number in range(len(self)):
            yield self.batches.make(rows[number * self.batch_size : (number + 1) * self.batch_size])


def evaluation_batches(data: TrainData, layout: BatchLayout, batch_size: int) -> EvaluationBatches:
    """The rows of data that is only looked at. Collective: no; the ranks are those of the default group."""
    world = World.current()
    return EvaluationBatches(data, layout, batch_size, rank=world.rank, size=world.size)
