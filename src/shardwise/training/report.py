"""What a training did, as plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What one of several parts had in a step."""

    learning_rate: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One optimizer step. All but ``memory_bytes`` is of all ranks together, and the same on each."""

    step: int
    """From 1."""
    loss: float
    """Mean cross entropy of the supervised tokens, in nats, before the step's update; with the router's loss, where
    the config asks for one."""
    learning_rate: float
    """Of the first part."""
    grad_norm: float
    """Of the whole gradient, before it was clipped."""
    tokens: int
    """Without padding."""
    supervised_tokens: int
    """Those the loss is taken of."""
    seconds: float
    memory_bytes: int
    """The most this rank has needed so far: of its accelerator, else of its process."""
    epoch: float = 0.0
    """Passes over the data so far, this step included."""
    parts: Mapping[str, PartFacts] = field(default_factory=dict)
    """By name, where there are several; one is as the whole."""
    fullest_bytes: int = 0
    """The most that any rank had needed when the step began, as of ``memory_bytes``; 0 where nobody has asked."""

    @property
    def most_bytes(self) -> int:
        """The most that is known of any rank."""
        return max(self.memory_bytes, self.fullest_bytes)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class EvaluationFacts:
    """A look at rows that are not learned. Of all ranks together, and the same on each."""

    step: int
    """The one after which it was taken."""
    loss: float
    """Mean cross entropy of the supervised tokens, in nats."""
    supervised_tokens: int
    seconds: float
    is_best: bool
    """Whether no earlier one had so low a loss."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint was taken, or gone on from."""

    step: int
    seconds: float
    """The training was held up by it."""
    kind: Literal["saved", "restored"]
    told: str = ""
    """Of what was restored, and what was not, in words."""


@dataclass(frozen=True, slots=True)
class Remark:
    """Something worth knowing about how the training is done."""

    step: int
    text: str


Event: TypeAlias = StepFacts | EvaluationFacts | CheckpointFacts | Remark


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The facts of one training, as seen by one rank."""

    rank: int
    world_size: int
    trained_parameters: int
    """Elements of all that was trained, whole parameters counted whole."""
    steps: tuple[StepFacts, ...]
    """Those of this run; where it went on from a checkpoint, the earlier ones are not among them."""
    evaluations: tuple[EvaluationFacts, ...] = ()
    remarks: tuple[str, ...] = ()
    """What is worth knowing about how it was done: why the loss was taken from whole logits, say."""
    is_stopped: bool = False
    """Whether it was asked to stop before its end."""
    last_step: int = 0
    """Steps in all, those before a checkpoint that it went on from among them."""
    precision: str = "float32"
    """What was computed in."""

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
            "is_stopped": self.is_stopped,
            "last_step": self.last_step,
            "precision": self.precision,
            "remarks": list(self.remarks),
            "steps": [as_values(step) for step in self.steps],
            "evaluations": [as_values(found) for found in self.evaluations],
        }


def as_values(facts: Event) -> dict[str, Any]:
    """Facts as plain JSON values."""
    values = dataclasses.asdict(facts)
    if isinstance(facts, StepFacts) and not facts.parts:
        del values["parts"]
    if isinstance(facts, EvaluationFacts):
        values["perplexity"] = facts.perplexity
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    """Null for numbers that JSON has not: the norm of a step that float16 skipped, for one, is infinite."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
