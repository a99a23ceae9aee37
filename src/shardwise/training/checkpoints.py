"""What a training keeps of itself, so that it can go on: after steps, and when it is asked to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

from torch import nn

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.checkpoints.folder import steps_in
from shardwise.checkpoints.state import Stateful, TrainState
from shardwise.errors import ConfigError
from shardwise.training.parts import TrainedPart


class StateKeeper(Protocol):
    """Where states are kept; of :class:`KeptInFolders` but for tests."""

    def save(self, step: int, state: TrainState) -> object:
        """Keep the state after ``step`` steps. Collective: yes."""
        ...

    def restore(self, state: TrainState) -> Restored | None:
        """Put everything where it was. None where there is nothing to go on from. Collective: yes."""
        ...

    def wait(self) -> object:
        """Return when what was saved counts. Collective: yes."""
        ...

    def newest(self) -> int | None:
        """The newest step that can be gone on from, as far as this rank sees. Collective: no."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far a training has come, as it is kept with its state.

    ``evaluated_step`` is the step of the last evaluation (0: there was none), ``best_loss`` the lowest loss of all.
    """

    step: int = 0
    evaluated_step: int = 0
    best_loss: float = math.inf

    def to_dict(self) -> dict[str, Any]:
        """As JSON, which has no infinite numbers."""
        return {**asdict(self), "best_loss": self.best_loss if self.best_loss < math.inf else None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainingProgress:
        """What was kept, as it was told.

        Raises:
            ConfigError: it was kept by something else.
        """
        step, evaluated_step, best_loss = (values.get(name) for name in ("step", "evaluated_step", "best_loss"))
        best_loss = math.inf if best_loss is None and "best_loss" in values else best_loss
        if not (type(step) is int and type(evaluated_step) is int and type(best_loss) is float):
            raise ConfigError(
                "the checkpoint was not kept by this training loop: its user state does not say how far the "
                "training had come (step, evaluated_step, best_loss); load the model from it, and begin anew"
            )
        return cls(step, evaluated_step, best_loss)


@dataclass(frozen=True, slots=True)
class Restored:
    """What the loop had told of itself when the state was kept, and what was restored, in words."""

    user: Mapping[str, Any]
    told: str = ""


@dataclass(frozen=True, slots=True)
class KeptInFolders:
    """States are kept by a checkpointer, and restored by the same or, of another training, by another.

    ``source`` is None where there is nothing to go on from.
    """

    checkpointer: Checkpointer
    source: Checkpointer | None

    def save(self, step: int, state: TrainState) -> object:
        return self.checkpointer.save(step, state)

    def restore(self, state: TrainState) -> Restored | None:
        if self.source is None:
            return None
        report = self.source.restore(state)
        return Restored(report.user, str(report))

    def wait(self) -> object:
        return self.checkpointer.wait()

    def newest(self) -> int | None:
        return max(steps_in(self.checkpointer.directory), default=None)


@dataclass(frozen=True, slots=True)
class NoCheckpoints:
    """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """States are kept every so many steps, at the end, and when the training is asked to stop.

    ``every`` None: only when it is asked to stop.
    """

    keeper: StateKeeper
    every: int | None = None


Checkpointing: TypeAlias = NoCheckpoints | Checkpoints


@dataclass(frozen=True, slots=True)
class ScheduleOfPart:
    """A part's schedule as it is kept beside others: with the part's name, by which another's is refused."""

    part: TrainedPart

    @property
    def _prefix(self) -> str:
        return f"{self.part.name}: "

    def state_dict(self) -> dict[str, Any]:
        return {f"{self._prefix}{key}": value for key, value in self.part.schedule.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.part.schedule.load_state_dict(
            {key.removeprefix(self._prefix): value for key, value in state_dict.items()}
        )


def state_of(
    model: nn.Module,
    parts: Sequence[TrainedPart],
    steps: Stateful,
    scaler: Stateful | None,
    progress: TrainingProgress,
) -> TrainState:
    """All of a training that is kept. Optimizers are kept by parameters, schedules by parts; of one part, as is."""
    if len(parts) == 1:
        return TrainState(model, parts[0].optimizer, parts[0].schedule, steps, scaler, progress.to_dict())
    by_name = sorted(parts, key=lambda part: part.name)
    optimizers = tuple(part.optimizer for part in by_name)
    return TrainState(model, optimizers, tuple(map(ScheduleOfPart, by_name)), steps, scaler, progress.to_dict())


GroupSettings: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
"""What optimizers have for each of their groups, by part."""


def settings_of(parts: Sequence[TrainedPart]) -> GroupSettings:
    """Copies of what they have now."""
    return {part.name: [dict(group) for group in part.optimizer.param_groups] for part in parts}


def keep_way_of_computing(parts: Sequence[TrainedPart], asked: GroupSettings) -> None:
    """How an optimizer computes depends on these ranks, not on those that saved it."""
    for part in parts:
        for group, before in zip(part.optimizer.param_groups, asked[part.name], strict=True):
            if "foreach" in before:
                group["foreach"] = before["foreach"]


_SETTINGS = {"initial_lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
"""Of an optimizer's groups, what is asked for by these names."""


def overruled(part: TrainedPart, asked: GroupSettings) -> str:
    """What a checkpoint's optimizer goes on with although something else is asked for now; "" for nothing."""
    differing = {
        f"{name} {_shown(after[key])} (asked for now: {_shown(before[key])})": None
        for before, after in zip(asked[part.name], part.optimizer.param_groups, strict=True)
        for key, name in _SETTINGS.items()
        if key in before and key in after and _shown(before[key]) != _shown(after[key])
    }
    if not differing:
        return ""
    whose = "the optimizer" if len(asked) == 1 else f"the optimizer of {part.name!r}"
    return f"{whose} goes on with the checkpoint's {', '.join(differing)}; a new run begins with new settings"


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)
