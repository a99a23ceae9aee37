"""Rows that are looked at, not learned: an evaluation, and rows that may be to blame."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import torch

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.training.data.batches import Batch
from shardwise.training.generation import evaluating
from shardwise.training.optimizing.gradients import reduced
from shardwise.training.options import Every
from shardwise.training.passes.forward import Forward
from shardwise.training.report import EvaluationFacts

_SHOWN_ROWS = 20


@dataclass(frozen=True, slots=True)
class NoEvaluation:
    """Nothing but the training data is looked at."""


@dataclass(frozen=True, slots=True)
class ToItsEnd:
    """Evaluations do not end a training."""


@dataclass(frozen=True, slots=True)
class EndEarly:
    """A training ends after so many evaluations in a row of which none was better, by more than ``min_delta``.

    The loss is one of all ranks together, so that all come to the same verdict; what it goes by is kept in
    checkpoints.
    """

    patience: int
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1 or not 0 <= self.min_delta < math.inf:
            raise ConfigError(
                f"patience={self.patience}, min_delta={self.min_delta}: an early end has a patience of at least 1 "
                "and a min_delta of 0 or more"
            )


TrainingEnd: TypeAlias = ToItsEnd | EndEarly


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rows that are not learned, looked at every so many steps or each epoch, and after the last one.

    ``every`` None: only after the last one. ``on_best`` is called, on every rank, whenever the loss is lower than
    before. ``ending`` says whether they end the training.
    """

    batches: Iterable[Batch]
    every: Every = None
    on_best: Callable[[EvaluationFacts], object] = lambda facts: None
    ending: TrainingEnd = field(default_factory=ToItsEnd)


Evaluating: TypeAlias = NoEvaluation | Evaluation


def evaluate(world: World, forward: Forward, batches: Iterable[Batch]) -> tuple[float, int]:
    """The mean loss of all ranks' batches, and how many supervised tokens these have.

    Collective: yes; every rank has as many batches.
    """
    device = forward.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    counted = tokens = 0
    with evaluating(forward.model):
        for batch in batches:
            loss += forward.summed(batch)
            counted += forward.loss.count(batch)
            tokens += batch.supervised_tokens
    own = torch.stack([loss, *torch.tensor([counted, tokens], dtype=torch.float64, device=device)])
    total, count, supervised_tokens = reduced(own, 2.0, world.group).tolist()
    return total / max(count, 1), int(supervised_tokens)


def rows_to_blame(
    world: World, forward: Forward, batches: Sequence[Batch], name_rows: Callable[[Sequence[int]], str]
) -> str:
    """The rows of the micro-batches whose loss is no number, looked at once more; else all of the step.

    Collective: yes; every rank has as many micro-batches.
    """
    with evaluating(forward.model):
        losses = [float(forward.summed(batch)) for batch in batches]
    found = [batch.lines for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
    everywhere = world.gather((found, [batch.lines for batch in batches]))
    is_found = any(guilty for guilty, _ in everywhere)
    named = []
    for rank, (guilty, every) in enumerate(everywhere):
        lines = sorted(chain.from_iterable(guilty if is_found else every))
        if lines:
            more = ", ..." if len(lines) > _SHOWN_ROWS else ""
            named.append(f"rank {rank}: {name_rows(lines[:_SHOWN_ROWS])}{more}")
    what = "The rows where it is" if is_found else "The rows of the step"
    return f"{what} ({'; '.join(named)})"
