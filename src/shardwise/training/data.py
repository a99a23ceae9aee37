"""Rows as the batches of every step, the same on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from shardwise.errors import ConfigError
from shardwise.execution.world import World
from shardwise.training.masking import Example, encode, has_generation_marks
from shardwise.training.options import Epochs, TrainOptions
from shardwise.training.rows import Chat, Row, RowError, RowFault, read_rows, refuse

IGNORED = -100
"""The label of a token that is not learned; what torch's cross entropy passes over."""


@dataclass(frozen=True, slots=True)
class TrainData:
    """The examples of a file, and what became of its rows."""

    path: str
    examples: tuple[Example, ...]
    pad_token_id: int
    cut_lines: tuple[int, ...]
    """Rows longer than ``max_length``, of which the end was cut off."""
    skipped_lines: tuple[int, ...]
    """Rows that had nothing left to learn within ``max_length``."""

    @property
    def tokens(self) -> int:
        return sum(len(example.tokens) for example in self.examples)

    @property
    def supervised_tokens(self) -> int:
        return sum(int(example.supervised.sum()) for example in self.examples)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded at the end to the longest of them; all tensors are (rows, tokens) and int64."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    """``input_ids`` where a token is learned, else -100. Not shifted, as transformers has it."""
    tokens: int
    """Those of rows: without padding, and none where there is no row."""

    @property
    def supervised_tokens(self) -> int:
        return int((self.labels[:, 1:] != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(self.input_ids.to(device), self.attention_mask.to(device), self.labels.to(device), self.tokens)


def read_data(path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> TrainData:
    """Read and tokenise a JSON lines file. Every rank tokenises its share of the rows, and has all in the end.

    Collective: yes, over the default process group.
    Memory: 5 bytes for a token.

    Raises:
        ConfigError: the file cannot be read, the tokenizer has no chat template, or rows are malformed; all of
            them by line (up to 20), and the same error on every rank.
    """
    world = World.current()
    rows = world.together(lambda: _readable_rows(path, tokenizer))
    share = world.together(lambda: _encode_all(rows[world.rank :: world.size], tokenizer))
    shares = world.gather(share)
    refuse(path, [fault for _, faults in shares for fault in faults])
    encoded = [shares[index % world.size][0][index // world.size] for index in range(len(rows))]
    kept = [(row.line, whole, whole.cut(max_length)) for row, whole in zip(rows, encoded, strict=True)]
    examples = tuple(example for _, _, example in kept if example.supervised.any())
    if not examples:
        raise ConfigError(
            f"{os.fspath(path)}: in none of its {len(rows)} rows is there a token to learn within "
            f"max_length={max_length}; raise it, or look at what the chat template makes of the rows"
        )
    return TrainData(
        path=os.fspath(Path(path)),
        examples=examples,
        pad_token_id=next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None),
        cut_lines=tuple(line for line, whole, cut in kept if len(cut.tokens) < len(whole.tokens)),
        skipped_lines=tuple(line for line, _, cut in kept if not cut.supervised.any()),
    )


def _readable_rows(path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    rows = read_rows(path)
    if any(isinstance(row, Chat) for row in rows):
        has_generation_marks(tokenizer)  # refuses a tokenizer without a template, before any row is
    return rows


def _encode_all(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> tuple[list[Example], list[RowFault]]:
    examples: list[Example] = []
    faults: list[RowFault] = []
    for row in rows:
        try:
            examples.append(encode(row, tokenizer))
        except RowError as error:
            faults.append(RowFault(row.line, str(error)))
    return examples, faults


class StepSampler(Sampler[list[list[int]]]):
    """Which rows a rank takes: one item for each step, with the row numbers of each of its micro-batches.

    The rows are shuffled anew in every epoch, by ``seed`` and epoch alone. A step takes the next rows of that order
    and deals them to the ranks in turn, so which rows it takes depends on how many there are in all, not on how
    ranks and micro-batches share them. The last step of an epoch takes what is left. Every rank has the same number
    of steps, and the same number of micro-batches in each; where rows run out, a micro-batch is empty.
    """

    def __init__(self, row_count: int, options: TrainOptions, *, rank: int = 0, size: int = 1) -> None:
        self.row_count = row_count
        self.options = options
        self.rank = rank
        self.size = size
        self.steps_per_epoch = -(-row_count // (options.rows_per_rank * size))

    def __len__(self) -> int:
        duration = self.options.duration
        return duration.count * self.steps_per_epoch if isinstance(duration, Epochs) else duration.count

    def __iter__(self) -> Iterator[list[list[int]]]:
        order: list[int] = []
        for step in range(len(self)):
            epoch, place = divmod(step, self.steps_per_epoch)
            if place == 0:
                order = np.random.default_rng([self.options.seed, epoch]).permutation(self.row_count).tolist()
            rows_per_step = self.options.rows_per_rank * self.size
            yield self._deal(order[place * rows_per_step : (place + 1) * rows_per_step])

    def _deal(self, rows: Sequence[int]) -> list[list[int]]:
        of_rank = rows[self.rank :: self.size]
        most = len(rows[:: self.size])
        return [
            list(of_rank[start : start + self.options.batch_size])
            for start in range(0, most, self.options.batch_size)
        ]


class MicroBatches(Dataset[Batch]):
    """Examples by any list of their numbers, padded to a batch."""

    def __init__(self, data: TrainData) -> None:
        self.data = data

    def __getitem__(self, rows: list[int]) -> Batch:
        return pad([self.data.examples[row] for row in rows], self.data.pad_token_id)


def pad(examples: Sequence[Example], pad_token_id: int) -> Batch:
    """Examples as a batch. Of none, a batch of one token that teaches nothing: every rank takes part in a step."""
    length = max((len(example.tokens) for example in examples), default=1)
    shape = (max(len(examples), 1), length)
    input_ids = torch.full(shape, pad_token_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED)
    for row, example in enumerate(examples):
        tokens = torch.from_numpy(example.tokens).long()
        supervised = torch.from_numpy(example.supervised)
        input_ids[row, : len(tokens)] = tokens
        attention_mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = tokens.masked_fill(~supervised, IGNORED)
    if not examples:
        attention_mask[:] = 1
    return Batch(input_ids, attention_mask, labels, sum(len(example.tokens) for example in examples))


def step_loader(data: TrainData, options: TrainOptions) -> DataLoader[list[Batch]]:
    """The micro-batches of every step of this rank. Collective: no; the ranks are those of the default group."""
    world = World.current()
    sampler = StepSampler(len(data.examples), options, rank=world.rank, size=world.size)
    # The sampler's items are lists of lists: the loader fetches a micro-batch for each, and hands on their list.
    return DataLoader(MicroBatches(data), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
