"""What a training keeps of itself, so that it can go on: after steps, and when it is asked to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.checkpoints.folder import steps_in
from shardwise.checkpoints.state import Stateful, TrainState
from shardwise.errors import ConfigError
from shardwise.models.optimizers.optimizer_state import set_group
from shardwise.planning.loads.load_plan import Refuse
from shardwise.planning.states.matching import OnFault
from shardwise.training.options import Every
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
    ``reached_loss`` is that of the last evaluation that was better by enough, and ``waited`` how many there have
    been since.
    """

    step: int = 0
    evaluated_step: int = 0
    best_loss: float = math.inf
    reached_loss: float = math.inf
    waited: int = 0

    def evaluated(self, loss: float, min_delta: float = 0.0) -> TrainingProgress:
        """After an evaluation at this step; ``min_delta`` is by how much it is to be better to count as such."""
        is_better = loss < self.reached_loss - min_delta
        return replace(
            self,
            evaluated_step=self.step,
            best_loss=min(loss, self.best_loss),
            reached_loss=loss if is_better else self.reached_loss,
            waited=0 if is_better else self.waited + 1,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON, which has no infinite numbers."""
        losses = {"best_loss": self.best_loss, "reached_loss": self.reached_loss}
        return {**asdict(self), **{name: loss if loss < math.inf else None for name, loss in losses.items()}}

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
        # What earlier versions did not keep: since when there has been no better loss.
        reached_loss, waited = values.get("reached_loss", best_loss), values.get("waited", 0)
        reached_loss = math.inf if reached_loss is None else reached_loss
        is_told = type(reached_loss) is float and type(waited) is int
        return cls(step, evaluated_step, best_loss, *((reached_loss, waited) if is_told else (best_loss, 0)))


def ended_early(progress: TrainingProgress, total: int) -> str:
    """In words, why a training has ended before its last step."""
    many = "evaluation has" if progress.waited == 1 else "evaluations have"
    return (
        f"the last {progress.waited} {many} not been better than {progress.reached_loss:.4f}: the training ends "
        f"after step {progress.step} of {total} (evaluation.patience)"
    )


@dataclass(frozen=True, slots=True)
class Restored:
    """What the loop had told of itself when the state was kept, and what was restored, in words."""

    user: Mapping[str, Any]
    told: str = ""


@dataclass(frozen=True, slots=True)
class KeptInFolders:
    """States are kept by a checkpointer, and restored by the same or, of another training, by another.

    ``source`` is None where there is nothing to go on from. ``about`` is kept beside the loop's own, for whoever
    looks before there is a model. ``on_other_base`` is as of :meth:`Checkpointer.restore`.
    """

    checkpointer: Checkpointer
    source: Checkpointer | None
    about: Mapping[str, Any] = field(default_factory=dict)
    on_other_base: OnFault = field(default_factory=Refuse)

    def save(self, step: int, state: TrainState) -> object:
        return self.checkpointer.save(step, replace(state, user={**(state.user or {}), **self.about}))

    def restore(self, state: TrainState) -> Restored | None:
        if self.source is None:
            return None
        report = self.source.restore(state, on_other_base=self.on_other_base)
        return Restored(report.user, str(report))

    def wait(self) -> object:
        return self.checkpointer.wait()

    def newest(self) -> int | None:
        return max(steps_in(self.checkpointer.directory), default=None)


@dataclass(frozen=True, slots=True)
class NoCheckpoints:
    """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class SettingsOfCheckpoint:
    """A training that goes on has the learning rate, decay and betas of the checkpoint."""


@dataclass(frozen=True, slots=True)
class SettingsAsked:
    """A training that goes on has those that are asked for now; of the checkpoint it has the optimizer's state."""


OptimizerSettings: TypeAlias = SettingsOfCheckpoint | SettingsAsked


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """States are kept every so many steps or each epoch, at the end, and when the training is asked to stop.

    ``every`` None: only when it is asked to stop. ``settings`` says whose an optimizer's are once it goes on.
    """

    keeper: StateKeeper
    every: Every = None
    settings: OptimizerSettings = field(default_factory=SettingsOfCheckpoint)


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
    return {part.name: [_copy(group) for group in part.optimizer.param_groups] for part in parts}


def _copy(group: Mapping[str, Any]) -> dict[str, Any]:
    """A rate may be a tensor, which schedules and restores write into."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}


def keep_way_of_computing(parts: Sequence[TrainedPart], asked: GroupSettings) -> None:
    """How an optimizer computes depends on these ranks, not on those that saved it."""
    for part in parts:
        for group, before in zip(part.optimizer.param_groups, asked[part.name], strict=True):
            if "foreach" in before:
                group["foreach"] = before["foreach"]


def take_asked(part: TrainedPart, asked: GroupSettings) -> None:
    """Give an optimizer that was restored the settings that are asked for, at its place in the schedule.

    The rate is as large a share of the asked one as it was of the checkpoint's; what makes a schedule of another
    length (:meth:`TrainedPart.of_length`) finds it anew.
    """
    for group, before in zip(part.optimizer.param_groups, asked[part.name], strict=True):
        rate, earlier = group.get("lr"), group.get("initial_lr", group.get("lr"))
        settings = {key: value for key, value in before.items() if key not in ("params", "lr")}
        if rate is not None:
            settings["lr"] = before.get("initial_lr", before["lr"]) * (rate / earlier if earlier else 1.0)
        set_group(group, settings)
    schedule: Any = part.schedule
    if hasattr(schedule, "base_lrs"):
        schedule.base_lrs = [group["initial_lr"] for group in part.optimizer.param_groups]


_SETTINGS = {
    "initial_lr": "learning_rate",
    "betas": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
"""Of an optimizer's groups, what is asked for by these names."""


def overruled(part: TrainedPart, asked: GroupSettings) -> str:
    """What a checkpoint's optimizer goes on with although something else is asked for now; "" for nothing."""
    differing = _differing(part.optimizer.param_groups, asked[part.name], "asked for now")
    if not differing:
        return ""
    return (
        f"{_whose(part, asked)} goes on with the checkpoint's {', '.join(differing)}; a new run begins with new "
        "settings, and so does this one with checkpoints.optimizer_settings=config"
    )


def changed(part: TrainedPart, kept: GroupSettings) -> str:
    """What an optimizer goes on with in place of what the checkpoint had; "" for nothing."""
    differing = _differing(part.optimizer.param_groups, kept[part.name], "the checkpoint's")
    return f"{_whose(part, kept)} goes on with {', '.join(differing)}, as is asked for now" if differing else ""


def _differing(here: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]], whose: str) -> list[str]:
    found = {
        f"{name} {_shown(own[key])} ({whose}: {_shown(other[key])})": None
        for own, other in zip(here, there, strict=True)
        for key, name in _SETTINGS.items()
        if key in own and key in other and _shown(own[key]) != _shown(other[key])
    }
    return list(found)


def _whose(part: TrainedPart, settings: GroupSettings) -> str:
    return "the optimizer" if len(settings) == 1 else f"the optimizer of {part.name!r}"


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, torch.Tensor):
        return _shown(value.item())
    return f"{value:g}" if isinstance(value, float) else str(value)
