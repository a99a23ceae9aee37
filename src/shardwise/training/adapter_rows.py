"""Rows of adapters: tokenized, shuffled, and dealt to steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer import sft_trainer

from shardwise.bank.compose import pad_length
from shardwise.bank.rows import IGNORED, RowTensors
from shardwise.core.errors import ConfigError
from shardwise.training import trl_objects
from shardwise.training.arguments import TrainMethod
from shardwise.training.dataset_loading import AnyDataset
from shardwise.training.dataset_preparation import (
    find_image_column,
    get_tokenizer,
    preparing_together,
    require_trainable_rows,
)
from shardwise.training.preference_pairs import tokenize_pairs


class TokenizedRows:
    """Tokenized rows, or pairs of them.

    Attributes:
        rows: with ``input_ids`` and ``labels``.
        size: 2 for pairs, which are adjacent rows, otherwise 1.
        longest: tokens of the longest row.
        num_terms: number of terms of the mean loss: pairs, or labels that are not ignored.
    """

    def __init__(self, rows: AnyDataset, method: TrainMethod) -> None:
        assert isinstance(rows, datasets.Dataset)  # adapters have no dataset_streaming
        self.rows = rows
        self.size = 2 if method == "dpo" else 1
        self.longest = max(map(len, rows["input_ids"]))
        self.num_terms = len(self) if method == "dpo" else _count_supervised(rows)

    def __len__(self) -> int:
        return len(self.rows) // self.size

    def take(self, indices: Sequence[int]) -> list[RowTensors]:
        """Return rows, or the rows of pairs, without padding."""
        # Position i of ``targets`` is the token that position i predicts: the labels, moved by one. Nothing follows
        # the last token.
        tensors: list[RowTensors] = []
        # All at once: each access to a dataset costs about as much as reading several rows.
        columns = self.rows[[index * self.size + n for index in indices for n in range(self.size)]]
        for input_ids, labels in zip(columns["input_ids"], columns["labels"], strict=True):
            targets = [*labels[1:], IGNORED]
            tensors.append({"input_ids": torch.tensor(input_ids), "targets": torch.tensor(targets)})
        return tensors


def tokenize(
    data: tuple[AnyDataset, AnyDataset | None], arguments: trl_objects.TrlArguments, processor: Any, local_rank: int
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Tokenize an adapter's rows for training and evaluation as TRL's trainer does. Collective: yes.

    Raises:
        ConfigError: a row cannot be used, or there is none to train on.
    """
    args, method = arguments.training, arguments.own.method
    if column := find_image_column(data[0]):
        raise ConfigError(f"{column}: many LoRAs train on rows of text. Remove the column, or train one LoRA")
    tokenize_rows = tokenize_pairs if method == "dpo" else _tokenize
    tokenized: list[datasets.Dataset | None] = []
    with preparing_together(trl_objects.trl_class(method, "Trainer"), local_rank, data, method, args):
        for rows in data:
            if rows is not None:
                rows = tokenize_rows(rows, args, processor)
            tokenized.append(rows)
    splits = (arguments.script.dataset_train_split, arguments.script.dataset_test_split)
    for dataset, split in zip(tokenized, splits, strict=True):
        if dataset is not None:
            # If no row has a label (all answers were cut off), there is none to train on. Without rows there may be
            # no column of labels.
            if len(dataset) == 0 or _count_supervised(dataset) == 0:
                dataset = dataset.select([])
            require_trainable_rows(dataset, split, args.max_length)
    train, test = tokenized
    assert train is not None
    return train, test


def _tokenize(rows: AnyDataset, args: Any, processor: Any) -> datasets.Dataset:
    """Return rows with ``input_ids`` and ``labels``, without rows of one token, from which nothing is predicted."""
    completion_only = args.completion_only_loss
    if completion_only is None:
        completion_only = {"prompt", "completion"} <= set(rows.column_names or ())
    template = processor.chat_template
    needs_template = args.assistant_only_loss and not (template and has_generation_markers(template))
    # SFTTrainer sets these attributes in its constructor, which needs a model.
    trainer: Any = SimpleNamespace(
        _tokenizer=get_tokenizer(processor),
        completion_only_loss=completion_only,
        chat_template=get_training_chat_template(processor) if needs_template else None,
    )
    prepared = sft_trainer.SFTTrainer._prepare_dataset(trainer, rows, processor, args, False, None, "adapter")
    prepared = prepared.select_columns(["input_ids", "labels"])
    return prepared.select([index for index, ids in enumerate(prepared["input_ids"]) if len(ids) > 1])


def _count_supervised(rows: datasets.Dataset) -> int:
    """Return the number of labels that are predicted: the first token of a row is not."""
    return sum(len(labels) - 1 - labels[1:].count(-100) for labels in rows["labels"])


def require_rows_fit(rows: TokenizedRows, longest: int, tokens_per_pass: int) -> None:
    """Check that the longest row fits into a pass, or two of them if rows are pairs.

    Raises:
        ConfigError: it does not.
    """
    # The two rows of a pair are padded to one length, and share a pass.
    padded = rows.size * pad_length(rows.longest, longest=longest)
    if rows.longest > longest or padded > tokens_per_pass:
        raise ConfigError(
            f"a row has {rows.longest} tokens ({padded} with padding{', in a pair' * (rows.size - 1)}), more than "
            f"the model ({longest}) or a pass ({tokens_per_pass}) takes. Set max_length or tokens_per_pass"
        )


@dataclass
class StepOrder:
    """The rows of each step, in the order of accelerate's ``SeedableRandomSampler``, which the Trainer uses.

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
    # An epoch and its order. Copies of this object share the list, which is replaced and never changed.
    _of_epoch: tuple[int, list[int]] = field(default=(-1, []))

    def take_step(self) -> list[int]:
        """Return the rows of the next step. The last step of an epoch may have fewer."""
        # The order of an epoch depends on its seed only, so a checkpoint has the position and not the order.
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
        # 10 rows, 4 in a step, are 3 steps. At row 4 of the second of 3 epochs, 2 + 3 steps are left.
        per_epoch = math.ceil(self.count / self.rows_per_step)
        in_this_epoch = math.ceil((self.count - self.offset) / self.rows_per_step)
        return max(in_this_epoch + math.ceil(epochs * per_epoch) - (self.epoch + 1) * per_epoch, 0)
