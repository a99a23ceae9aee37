"""What a training may be asked for beside what is trained, and by whom its micro-batches are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from shardwise.errors import RankLostError
from shardwise.training.checkpoints import Checkpointing, NoCheckpoints
from shardwise.training.data.batches import Batch
from shardwise.training.evaluation_rows import Evaluating, NoEvaluation
from shardwise.training.passes.forward import Accumulation, WholeGradients
from shardwise.training.passes.losses import LossChoice, WholeLogits
from shardwise.training.stopping import StopRequest


class StepSource(Protocol):
    """The micro-batches of each step, from a position on, as ``StepLoader`` has them."""

    def __iter__(self) -> Iterator[Sequence[Batch]]: ...

    def __len__(self) -> int:
        """Steps in all, those before the position among them."""
        ...

    @property
    def epochs_done(self) -> float: ...

    def name_rows(self, lines: Sequence[int]) -> str:
        """Rows by their places, as a reader finds them."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


class TrainKeywords(TypedDict, total=False):
    """What else a training may be asked for.

    Attributes:
        loss: how it is taken: ``WholeLogits()`` (the default), ``ChunkedLogits()``, or one of one's own; see
            :class:`~shardwise.training.passes.losses.Loss`.
        accumulation: what is kept of gradients between micro-batches.
        when_ready: called on every rank once the model has its weights, after what may be refused here has been
            looked at, and before the first step.
        evaluation: what else is looked at, and when.
        checkpoints: what is kept, and gone on from.
        stop: asked on any rank, it lets all ranks finish the same step, keep it, and return.
        remarks: what is worth knowing about how the training has been set up, told as it begins.
        when_stuck: called on another thread where a rank was lost and this one waits for it in a collective, which
            nothing can call back: there is no more to do than to say so and to end the process.
    """

    loss: LossChoice
    accumulation: Accumulation
    when_ready: Callable[[], object]
    evaluation: Evaluating
    checkpoints: Checkpointing
    stop: StopRequest | None
    remarks: Sequence[str]
    when_stuck: Callable[[RankLostError], object]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The same, with defaults."""

    loss: LossChoice = field(default_factory=WholeLogits)
    accumulation: Accumulation = field(default_factory=WholeGradients)
    when_ready: Callable[[], object] = lambda: None
    evaluation: Evaluating = field(default_factory=NoEvaluation)
    checkpoints: Checkpointing = field(default_factory=NoCheckpoints)
    stop: StopRequest | None = None
    remarks: Sequence[str] = ()
    when_stuck: Callable[[RankLostError], object] = lambda error: None
