"""Rows that are looked at, not learned: an evaluation, and rows that may be to blame."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch

from shardwise.execution.ranks.world import World
from shardwise.training.batches import Batch
from shardwise.training.clipping import reduced
from shardwise.training.forward import Forward
from shardwise.training.generation import evaluating
from shardwise.training.report import EvaluationFacts

_SHOWN_ROWS = 20


@dataclass(frozen=True, slots=True)
class NoEvaluation:
    """Nothing but the training data is looked at."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rows that are not learned, looked at every so many steps and after the last one.

    ``every`` None: only after the last one. ``on_best`` is called, on every rank, whenever the loss is lower than
    before.
    """

    batches: Iterable[Batch]
    every: int | None = None
    on_best: Callable[[EvaluationFacts], object] = lambda facts: None


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
