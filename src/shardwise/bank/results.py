"""What a bank tells of a call, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from shardwise.errors import TrainingError


@dataclass(frozen=True, slots=True)
class TenantLoss:
    """What a micro-batch was for one tenant."""

    loss: float
    """Of all ranks' rows: the mean over the tokens that are learned, or the sum with weights."""
    learned_tokens: int
    """On all ranks."""
    logprobs: list[torch.Tensor]
    """Of this rank's rows, one tensor (tokens - 1,) for each: of each label, given what stands before it."""


@dataclass(frozen=True, slots=True)
class FusedLosses:
    """What a call of ``forward_backward`` was."""

    tenants: dict[str, TenantLoss]
    """Of those whose micro-batch was taken."""
    passes: int
    """Through the base; tenants whose rows have one length share a pass."""
    backends: dict[str, int]
    """How adapters were computed and why, to how many layers were on this rank."""
    failures: dict[str, TrainingError] = field(default_factory=dict)
    """Of those whose rows break a pass off, also when they are alone, why; the same on every rank.

    Their gradients and windows are as before the call: other rows may be given in place of these.
    """


@dataclass(frozen=True, slots=True)
class TenantStep:
    """What a call of ``optim_step`` was, the same on every rank."""

    is_taken: bool
    """False where the gradient was not finite: matrices, moments and schedule are as before."""
    grad_norm: float
    """Before it was clipped."""
    learned_tokens: int
    learning_rate: float
    """That the step was taken with."""


@dataclass(frozen=True, slots=True)
class GoesOn:
    """A tenant was read with the state of its training."""

    steps: int
    windows: int
    """That are over, whether or not their step was taken."""
    micro_batches: int
    """In the window that is open."""
    learned_tokens: int
    """In it, on all ranks."""
    base: str = field(default="", compare=False)
    """How the base compares with the one it was trained on, in words."""


@dataclass(frozen=True, slots=True)
class BeginsAnew:
    """A tenant was read as matrices alone: its optimizer, schedule and counts begin."""

    why: str


TenantStart: TypeAlias = GoesOn | BeginsAnew
