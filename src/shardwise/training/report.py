"""What a training did, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One optimizer step. All but ``memory_bytes`` is of all ranks together, and the same on each."""

    step: int
    """From 1."""
    loss: float
    """Mean cross entropy of the supervised tokens, in nats, before the step's update."""
    learning_rate: float
    grad_norm: float
    """Of the whole gradient, before it was clipped."""
    tokens: int
    """Without padding."""
    supervised_tokens: int
    """Those the loss is taken of."""
    seconds: float
    memory_bytes: int
    """The most this rank has needed so far: of its accelerator, else of its process."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The facts of one training, as seen by one rank."""

    rank: int
    world_size: int
    trained_parameters: int
    """Elements of all that was trained, whole parameters counted whole."""
    steps: tuple[StepFacts, ...]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        return [step.grad_norm for step in self.steps]

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def supervised_tokens(self) -> int:
        return sum(step.supervised_tokens for step in self.steps)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "trained_parameters": self.trained_parameters,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "steps": [dataclasses.asdict(step) for step in self.steps],
        }
