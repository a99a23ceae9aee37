"""What ranks carry out in a turn, and its outcomes. Picklable: the first rank sends them to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from shardwise.bank.rows import IGNORED, RowTensors
from shardwise.bank.sampling import Sample


@dataclass(frozen=True)
class Pass:
    """Rows of a model, with a loss, or to be scored. ``model`` is an adapter's name, or None for the base.

    One that ``is_refused`` stands for any request of a model that failed before its turn, and has no rows. With
    ``backward``, ranks note that the batch of its model lacks a part.
    """

    request_id: str
    model: str | None
    rows: tuple[RowTensors, ...]
    seq_id: int = 0
    loss: str = "cross_entropy"
    config: Mapping[str, float] = field(default_factory=dict)
    backward: bool = False
    is_refused: bool = False

    @cached_property
    def num_tokens(self) -> int:
        """Counted once, and not in each turn for which the pass waits."""
        return sum(len(row["input_ids"]) for row in self.rows)

    def count_trained(self) -> int:
        """Return the number of positions that are trained: with a target whose weight and advantage are not 0."""
        total = 0
        for row in self.rows:
            is_trained = row["targets"] != IGNORED  # (tokens,) or (tokens, K)
            for name in ("weights", "advantages"):
                if name in row:
                    is_trained = is_trained & (row[name] != 0)
            total += int(is_trained.view(len(is_trained), -1).any(1).sum())
        return total


@dataclass(frozen=True, slots=True)
class OptimStep:
    """An optimizer step."""

    request_id: str
    model: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CreateModel:
    """A new model."""

    request_id: str
    model: str
    rank: int
    seed: int
    parts: frozenset[str]


@dataclass(frozen=True, slots=True)
class LoadModel:
    """A model from a folder: a new one, or an existing one whose values are replaced."""

    request_id: str
    model: str
    folder: str
    training_state: bool


@dataclass(frozen=True, slots=True)
class SaveModel:
    """A save of a model to a folder."""

    request_id: str
    model: str
    folder: str
    training_state: bool


@dataclass(frozen=True, slots=True)
class CopyModel:
    """A copy of a model to sample from."""

    request_id: str
    model: str
    new: str


@dataclass(frozen=True, slots=True)
class ForgetModels:
    """Models, copies and loaded checkpoints that are no longer needed."""

    request_id: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OffloadModels:
    """Models that have been idle: their values go to host memory."""

    request_id: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Generate:
    """A prompt to go on from. With a ``folder``, the adapter is loaded from it unless it is there.

    ``save_id`` is of the checkpoint in the folder that is meant. ``stops`` are texts, of which vLLM alone knows:
    the bank has no tokenizer.
    """

    request_id: str
    sample: Sample
    folder: str | None = None
    save_id: str = ""
    stops: tuple[str, ...] = ()


LaterOperation: TypeAlias = CreateModel | LoadModel | SaveModel | CopyModel | ForgetModels | OffloadModels
TurnOperation: TypeAlias = Pass | OptimStep | LaterOperation | Generate


@dataclass(frozen=True, slots=True)
class Turn:
    """Operations. Ranks carry them out part by part; the order counts within a part.

    A turn without any keeps ranks from waiting too long.
    """

    operations: tuple[TurnOperation, ...] = ()
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """The outcome of an operation that failed. ``is_users`` tells whether the request was at fault."""

    text: str
    is_users: bool = True


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """The loss, summed over rows, and the log probabilities of each row, of the shape of its targets."""

    loss: float
    logprobs: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """What the client wants to know of a sample, and texts that end it."""

    num_samples: int
    prompt_logprobs: bool
    last_n: int | None = None
    stops: tuple[str, ...] = ()
