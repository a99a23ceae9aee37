"""Whose rows go through the base next, and how a tenant's rows are dealt to ranks and to passes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardwise.bank.rows import RowTensors
from shardwise.errors import ConfigError
from shardwise.training.data.batches import IGNORED, Batches, Padded
from shardwise.training.data.loader import StepLoader
from shardwise.training.data.read_once import TrainData
from shardwise.training.options import TrainOptions


@dataclass(frozen=True, slots=True)
class Waiting:
    """A tenant in the queue, and its next portion; the same value on every rank.

    ``rows`` are those of the rank with the most, ``tokens`` what each is padded to; 0 of a portion without rows.
    """

    name: str
    rows: int
    tokens: int

    @property
    def cost(self) -> int:
        """Tokens that a rank takes through the base for it, padding included."""
        return self.rows * self.tokens


def next_pass(queue: Sequence[Waiting], tokens_per_pass: int) -> list[str]:
    """Who goes through the base together: the first in the queue, and whoever behind it fits.

    They have rows of one padded length, and cost no more than the budget together; the first goes in any case.
    Portions without rows cost nothing, and go along.
    """
    leader = next((each for each in queue if each.cost), None)
    taken, left = [], tokens_per_pass
    for each in queue:
        if not each.cost:
            taken.append(each.name)
        elif leader is not None and each.tokens == leader.tokens and (each is leader or each.cost <= left):
            taken.append(each.name)
            left -= each.cost
    return taken


def queue_after(queue: Sequence[str], taken: Sequence[str]) -> list[str]:
    """The queue once some have had their turn: they go to its end, in their order."""
    gone = set(taken)
    return [name for name in queue if name not in gone] + [name for name in queue if name in gone]


_SHORTEST = 2
"""Tokens of a row from which something is learned: one, and one to predict from it."""


@dataclass(frozen=True, slots=True)
class PassBudget:
    """What ranks take through the base at once.

    Attributes:
        tokens: the most of a rank, padding included.
        pad_to: the multiple that rows are padded to.
        longest: the most tokens that the base takes in a row.
    """

    tokens: int
    pad_to: int
    longest: int

    def padded(self, tokens: int) -> int:
        """What a row of so many tokens is padded to."""
        return min(-(-tokens // self.pad_to) * self.pad_to, self.longest)


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows of one tenant that go through the base at once; the same value on every rank.

    Attributes:
        rows: the numbers of each rank's.
        tokens: of each row, padded; 0 where there is none.
        own_tokens: of all ranks' rows, without padding.
    """

    rows: tuple[tuple[int, ...], ...]
    tokens: int
    own_tokens: int

    @property
    def most_rows(self) -> int:
        """Of any rank."""
        return max(map(len, self.rows))


class OwnSteps:
    """The steps of a tenant as portions, from a position on: the same on every rank, whoever else is trained.

    Which rows a step takes is as of a training alone (:class:`~shardwise.training.data.loader.StepSampler`): as
    many as it would take on so many ranks. Each rank's part of them is cut into as many portions in every step,
    each of so few rows that the longest of all would fit into a pass; a portion may be empty.

    Raises:
        ConfigError: a row does not fit into a pass, or is longer than the base takes.
    """

    def __init__(self, data: TrainData, options: TrainOptions, *, ranks: int, budget: PassBudget) -> None:
        self.data = data
        self.ranks = ranks
        self.budget = budget
        self.rows_at_once = min(options.batch_size, rows_that_fit(data, budget))
        self.portions_per_step = math.ceil(options.rows_per_rank / self.rows_at_once)
        of_all = replace(options, batch_size=options.rows_per_rank * ranks, gradient_accumulation_steps=1)
        self._loader = StepLoader(data, of_all, Padded(), rank=0, size=1)

    def __len__(self) -> int:
        """Steps in all, those before the position among them."""
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Portion]]:
        """From the position on. The position is behind a step as soon as it is given."""
        for [rows] in self._loader.sampler:
            yield [
                portion_of(
                    self.data,
                    [own[start : start + self.rows_at_once] for own in dealt(rows, self.ranks)],
                    self.budget,
                )
                for start in range(0, self.portions_per_step * self.rows_at_once, self.rows_at_once)
            ]

    @property
    def epochs_done(self) -> float:
        return self._loader.epochs_done

    def name_rows(self, numbers: Sequence[int]) -> str:
        """Rows by their places in the data."""
        return self._loader.name_rows(sorted(int(self.data.examples.lines[number]) for number in numbers))

    def state_dict(self) -> dict[str, int]:
        """The position, the same on every rank, and what it is a position in."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from a position.

        Raises:
            ConfigError: it is one in other data, or in another order of them.
        """
        self._loader.load_state_dict(state_dict)


def rows_that_fit(data: TrainData, budget: PassBudget) -> int:
    """How many rows, each as long as the longest, a rank can take through the base at once.

    Raises:
        ConfigError: none.
    """
    lengths = data.examples.lengths
    row = int(np.argmax(lengths))
    place = f"{data.path}, {data.unit} {int(data.examples.lines[row])}"
    tokens = int(lengths[row])
    if tokens > budget.longest:
        raise ConfigError(
            f"{place}: a row of {tokens} tokens, and the model takes {budget.longest}; lower data.max_length"
        )
    if budget.padded(tokens) > budget.tokens:
        raise ConfigError(
            f"{place}: a row of {tokens} tokens, padded to {budget.padded(tokens)}, does not fit into "
            f"bank.tokens_per_pass={budget.tokens}; raise that, or lower data.max_length or bank.pad_to"
        )
    return budget.tokens // budget.padded(tokens)


def dealt(rows: Sequence[int], ranks: int) -> list[Sequence[int]]:
    """Rows to ranks, one after the other."""
    return [rows[rank::ranks] for rank in range(ranks)]


def portion_of(data: TrainData, rows: Sequence[Sequence[int]], budget: PassBudget) -> Portion:
    """A portion of these rows of each rank. What is too short to learn from is left out."""
    lengths = data.examples.lengths
    kept = tuple(tuple(number for number in own if lengths[number] >= _SHORTEST) for own in rows)
    own = [int(lengths[number]) for each in kept for number in each]
    return Portion(kept, budget.padded(max(own)) if own else 0, sum(own))


def evaluation_portions(data: TrainData, batch_size: int, *, ranks: int, budget: PassBudget) -> list[Portion]:
    """All rows, in their order."""
    at_once = min(batch_size, rows_that_fit(data, budget)) * ranks
    count = len(data.examples)
    return [
        portion_of(data, dealt(range(start, min(start + at_once, count)), ranks), budget)
        for start in range(0, count, at_once)
    ]


def tensors_of(data: TrainData, numbers: Sequence[int]) -> RowTensors:
    """Rows as a bank takes them; none, too."""
    if not numbers:
        return {"input_ids": torch.zeros((0, 1), dtype=torch.int64)}
    batch = Batches(data, Padded()).make(numbers)
    assert batch.attention_mask is not None
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


def learned_in(rows: RowTensors) -> int:
    """How many tokens of rows are learned."""
    return int((rows["labels"][:, 1:] != IGNORED).sum()) if len(rows["input_ids"]) else 0
