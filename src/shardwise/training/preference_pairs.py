"""Pairs of a preference: their tokens as in TRL's ``DPOTrainer``, the loss of a pair, and its rewards."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from trl.trainer.dpo_trainer import DPOTrainer

from shardwise.bank.rows import IGNORED, RowTensors
from shardwise.training.dataset_loading import AnyDataset
from shardwise.training.dataset_preparation import get_tokenizer


def tokenize_pairs(rows: AnyDataset, args: Any, processor: Any) -> datasets.Dataset:
    """Return rows with ``input_ids`` and ``labels``, the chosen and the rejected one of each pair in turn.

    As in ``DPOTrainer``, with ``keep_start``, pairs whose prompt alone has ``max_length`` tokens are left out.
    Other rows are cut.
    """
    # DPOTrainer sets this attribute in its constructor, which needs a model.
    trainer: Any = SimpleNamespace(_tokenizer=get_tokenizer(processor))
    prepared = DPOTrainer._prepare_dataset(trainer, rows, processor, args, "adapter")
    # Prompt and answer are cut together, at the end of the answer or at the beginning of the prompt.
    window = slice(args.max_length)
    if args.max_length is not None and args.truncation_mode == "keep_end":
        window = slice(-args.max_length, None)

    def split(batch: Mapping[str, Any]) -> dict[str, list[list[int]]]:
        ids, labels = [], []
        for prompt, *answers in zip(batch["prompt_ids"], batch["chosen_ids"], batch["rejected_ids"], strict=True):
            for answer in answers:
                ids.append((prompt + answer)[window])
                labels.append(([IGNORED] * len(prompt) + answer)[window])
        return {"input_ids": ids, "labels": labels}

    return prepared.map(split, batched=True, remove_columns=prepared.column_names)


def compute_margins(
    logprobs: Sequence[torch.Tensor], references: Sequence[torch.Tensor], beta: float
) -> Iterator[torch.Tensor]:
    """Yield the reward of the chosen row less that of the rejected one, for each pair.

    The reward of a row is beta times the difference of its log probability and that of the reference.

    Args:
        logprobs: by row, log probabilities of its tokens, 0 for those of the prompt.
        references: the same of the base without the adapter.
        beta: see ``DPOConfig``.
    """
    # A scalar for each row. Rows 2k and 2k + 1 are the chosen and the rejected answer of pair k.
    rewards: list[torch.Tensor] = []
    for tuned, base in zip(logprobs, references, strict=True):  # each (tokens,)
        rewards.append(beta * (tuned.sum() - base.sum()))
    for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True):
        yield chosen - rejected


def compute_dpo_loss(
    logprobs: list[torch.Tensor], rows: list[RowTensors], config: Mapping[str, float]
) -> torch.Tensor:
    """Return -log sigmoid(margin) of a pair, divided by the number of pairs of the step.

    (Rafailov et al., 2023, arXiv 2305.18290, equation 7.)
    """
    # ``num_pairs`` counts those of all ranks, so the sum over them is the mean of the step.
    [margin] = compute_margins(logprobs, [row["logprobs"] for row in rows], config["beta"])
    return -torch.nn.functional.logsigmoid(margin) / config["num_pairs"]
