"""Rows of tenants: tokenized, shuffled, and batched within a budget of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer import sft_trainer

from shardwise.bank.rows import RowTensors
from shardwise.errors import ConfigError
from shardwise.training import setup as trl_setup
from shardwise.training.dataset_loading import preparing_together


@dataclass(frozen=True)
class TokenizedRows:
    """Tokenized rows.

    Attributes:
        rows: with ``input_ids`` and ``labels``.
        lengths: of the rows in tokens.
        num_supervised_tokens: supervised labels of all rows.
    """

    rows: datasets.Dataset
    lengths: Sequence[int]
    num_supervised_tokens: int

    def __len__(self) -> int:
        return len(self.lengths)

    def tensors(self, indices: Sequence[int]) -> RowTensors:
        """Collate rows, padded on the right. No rows give tensors of shape (0, 1)."""
        if not indices:
            return {"input_ids": torch.zeros((0, 1), dtype=torch.int64)}
        collate = sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0)
        collated: RowTensors = collate([self.rows[index] for index in indices])
        return collated


def tokenized(
    arguments: trl_setup.TrlArguments, processor: Any, local_rank: int
) -> tuple[TokenizedRows, TokenizedRows | None]:
    """Load a tenant's rows for training and evaluation, prepared as by ``SFTTrainer``. Collective: yes.

    Raises:
        ConfigError: a dataset or a row cannot be used.
    """
    train, test = trl_setup.load_data(arguments, "sft", processor, local_rank)
    field = arguments.training.dataset_text_field
    with preparing_together(sft_trainer.SFTTrainer, local_rank, (train, test), field):
        return _prepared(train, arguments, processor), test and _prepared(test, arguments, processor)


def _prepared(rows: Any, arguments: trl_setup.TrlArguments, processor: Any) -> TokenizedRows:
    args = arguments.training
    tokenizer = getattr(processor, "tokenizer", processor)
    template = processor.chat_template
    is_marked = template is not None and has_generation_markers(template)
    completion_only = args.completion_only_loss
    if completion_only is None:
        completion_only = {"prompt", "completion"} <= set(rows.column_names)
    needs_template = args.assistant_only_loss and not is_marked
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer,
        completion_only_loss=completion_only,
        chat_template=get_training_chat_template(processor) if needs_template else None,
    )
    found = sft_trainer.SFTTrainer._prepare_dataset(trainer, rows, processor, args, False, None, "tenant")
    found = found.select_columns(["input_ids", "labels"])
    found = found.select([number for number, ids in enumerate(found["input_ids"]) if len(ids) > 1])
    supervised = sum(len(labels) - 1 - labels[1:].count(-100) for labels in found["labels"])
    if not supervised:
        raise ConfigError("the dataset has no row to train on. Check its rows and max_length")
    return TokenizedRows(found, [len(ids) for ids in found["input_ids"]], supervised)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch.

    Attributes:
        rows: indices of the rows, by rank.
        tokens: padded length of a row.
    """

    rows: tuple[tuple[int, ...], ...]
    tokens: int

    @property
    def cost(self) -> int:
        """Tokens, with padding, on the rank with the most rows."""
        return max(map(len, self.rows)) * self.tokens


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Limits of a pass through the base on one rank.

    Attributes:
        tokens: maximum number of tokens, with padding.
        pad_to: rows are padded to a multiple of it.
        longest: maximum number of tokens in a row.
    """

    tokens: int
    pad_to: int
    longest: int

    def padded(self, tokens: int) -> int:
        """Round the length of a row up."""
        return min(-(-tokens // self.pad_to) * self.pad_to, self.longest)

    def rows_at_once(self, rows: TokenizedRows) -> int:
        """Return the number of rows of the maximum length that fit into a pass.

        Raises:
            ConfigError: none fits.
        """
        most = max(rows.lengths)
        if most > self.longest or self.padded(most) > self.tokens:
            raise ConfigError(
                f"a row has {most} tokens, {self.padded(most)} with padding. The model takes {self.longest} and a "
                f"pass {self.tokens}: set max_length or tokens_per_pass"
            )
        return self.tokens // self.padded(most)

    def micro_batches(
        self, rows: TokenizedRows, order: Sequence[int], at_once: int, ranks: int
    ) -> Iterator[MicroBatch]:
        """Distribute rows to ranks, ``at_once`` consecutive rows to each."""
        for start in range(0, len(order), at_once * ranks):
            dealt = tuple(
                tuple(order[first : first + at_once]) for first in range(start, start + at_once * ranks, at_once)
            )
            yield MicroBatch(dealt, self.padded(max(rows.lengths[number] for own in dealt for number in own)))


@dataclass
class StepOrder:
    """The rows of each step, in the order of the Trainer's seedable sampler.

    Attributes:
        count: number of rows.
        rows_per_step: rows of a step on all ranks.
        seed: seed of the first epoch. That of each later epoch is one more.
        epoch: completed epochs.
        offset: completed rows of this epoch.
    """

    count: int
    rows_per_step: int
    seed: int
    epoch: int = 0
    offset: int = 0
    _of_epoch: tuple[int, list[int]] = field(default=(-1, []))

    def take_step(self) -> list[int]:
        """Return the rows of the next step. The last step of an epoch may have fewer."""
        if self._of_epoch[0] != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            self._of_epoch = self.epoch, torch.randperm(self.count, generator=generator).tolist()
        rows = self._of_epoch[1][self.offset : self.offset + self.rows_per_step]
        self.offset += len(rows)
        if self.offset == self.count:
            self.epoch, self.offset = self.epoch + 1, 0
        return rows

    @property
    def epochs(self) -> float:
        """Completed epochs, with the fraction of this one."""
        return self.epoch + self.offset / self.count

    def steps_left(self, epochs: float) -> int:
        """Return the number of steps until ``epochs`` are completed."""
        per_epoch = math.ceil(self.count / self.rows_per_step)
        of_this = math.ceil((self.count - self.offset) / self.rows_per_step)
        return max(of_this + math.ceil((epochs - self.epoch - 1) * per_epoch), 0)
