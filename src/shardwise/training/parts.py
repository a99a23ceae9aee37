"""What is trained by an optimizer of its own, beside others: as given, or of what options ask for.

[Note: A step] A step has a model, a loss, micro-batches, and *parts*. A part is an optimizer with its parameters, a
schedule and a clip. One forward and backward pass makes the gradients of all parts, and each part's is clipped by
its own norm. What they are is a value, :class:`~shardwise.training.step.StepGradient`; the only effect so far is in
``.grad``. Then the step is taken, or not: optimizers and schedules, in the order of the parts. The loop around it
has the order of steps, their end, evaluations, checkpoints and what is told, and drives no optimizer. A training
of everything by one optimizer has one part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, get_args

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import get_scheduler

from shardwise.errors import ConfigError
from shardwise.models.optimizers.optimizer_state import set_group
from shardwise.models.view import canonical
from shardwise.training.optimizing.optimizer_trial import few
from shardwise.training.optimizing.optimizers import optimizers_of, parameters_by_part
from shardwise.training.options import Precision, TrainOptions


class RateSchedule(Protocol):
    """What becomes of an optimizer's learning rate; torch's schedulers are such."""

    def step(self) -> object:
        """The optimizer has taken a step."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class Unchanging:
    """The learning rate stays as the optimizer has it."""

    def step(self) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to go on with."""


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """Parameters that are trained together: those of an optimizer.

    Attributes:
        name: by which it is told of, and known again in a checkpoint.
        optimizer: of parameters of the model as it is sharded.
        schedule: of this optimizer.
        max_grad_norm: the norm to which a greater one of its gradient is scaled down; infinity for no limit.
        norm_type: of that norm: 2, or infinity for the greatest absolute value.
        lengthen: makes, of a schedule that a checkpoint has restored, one for so many steps in all. As it is, the
            schedule goes on as it was.

    Raises:
        ConfigError: the norm is none, or has no name.
    """

    name: str
    optimizer: Optimizer
    schedule: RateSchedule = field(default_factory=Unchanging)
    max_grad_norm: float = math.inf
    norm_type: float = 2.0
    lengthen: Callable[[RateSchedule, int], RateSchedule] = lambda schedule, total_steps: schedule

    def __post_init__(self) -> None:
        if not (self.name and self.max_grad_norm > 0 and self.norm_type in (2.0, math.inf)):
            raise ConfigError(
                f"name={self.name!r}, max_grad_norm={self.max_grad_norm}, norm_type={self.norm_type}: a part has a "
                "name, a greatest norm above 0, and that is of type 2 or infinity"
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """As its optimizer has them."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def parameters_in(self, model: nn.Module) -> list[nn.Parameter]:
        """In the order of the model."""
        place = {parameter: number for number, parameter in enumerate(model.parameters())}
        return sorted(self.parameters, key=lambda parameter: place.get(parameter, len(place)))

    def description(self, model: nn.Module) -> tuple[str, str, float, float, str]:
        """What must be the same on every rank: name, class, clip, and a digest of the names of its parameters."""
        names = {parameter: canonical(name) for name, parameter in model.named_parameters()}
        own = [[names.get(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        return self.name, type(self.optimizer).__name__, self.max_grad_norm, self.norm_type, digest

    @property
    def learning_rate(self) -> float:
        """Of the first group, now."""
        return float(self.optimizer.param_groups[0].get("lr", math.nan))

    def of_length(self, total_steps: int) -> TrainedPart:
        """With a schedule of so many steps in all."""
        return replace(self, schedule=self.lengthen(self.schedule, total_steps))


@dataclass(frozen=True, slots=True)
class OwnParts:
    """What is trained, by optimizers and schedules of one's own; in place of :class:`TrainOptions`.

    Every parameter that requires a gradient is in one part. ``dtype`` is what is computed in.

    Raises:
        ConfigError: there is no such dtype.
    """

    parts: Sequence[TrainedPart]
    dtype: Precision = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Precision):
            raise ConfigError(f"dtype={self.dtype!r}: it must be one of {', '.join(get_args(Precision))}")


def require_parts(model: nn.Module, parts: Sequence[TrainedPart]) -> None:
    """Refuse parts that are not what of a model is trained, each parameter once. Collective: no.

    Raises:
        ConfigError: naming everything that is wrong.
    """
    names = [part.name for part in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    faults = [] if parts else ["there is none"]
    faults += [f"{name!r} is the name of two" for name in twice]
    faults += [fault for part in parts for fault in _of_schedule(part)]
    faults += _of_parameters(model, parts)
    if faults:
        raise ConfigError("the parts cannot be trained so\n  " + "\n  ".join(faults))


def _of_schedule(part: TrainedPart) -> Iterator[str]:
    schedule: object = part.schedule
    kind = type(schedule).__name__
    if isinstance(schedule, ReduceLROnPlateau):
        yield f"{part.name!r}: {kind} asks for a loss at each step; take a schedule that counts steps"
    elif getattr(schedule, "optimizer", part.optimizer) is not part.optimizer:
        yield f"{part.name!r}: its {kind} is of another optimizer than its own"


def _of_parameters(model: nn.Module, parts: Sequence[TrainedPart]) -> Iterator[str]:
    trained = {
        parameter: canonical(name) for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    known = set(model.parameters())
    seen: dict[nn.Parameter, str] = {}
    for part in parts:
        own = part.parameters
        if strangers := sum(parameter not in known for parameter in own):
            yield (
                f"{part.name!r}: {strangers} of the {len(own)} parameters of its optimizer are not the model's; "
                "make it of model.parameters() once the model is sharded"
            )
        elif not any(parameter in trained for parameter in own):
            yield f"{part.name!r}: none of its {len(own)} parameters requires a gradient"
        if both := [trained[parameter] for parameter in own if parameter in trained and parameter in seen]:
            other = next(seen[parameter] for parameter in own if parameter in trained and parameter in seen)
            yield f"{part.name!r} and {other!r} both have {few(both)}"
        seen |= dict.fromkeys(own, part.name)
    if left := [name for parameter, name in trained.items() if parameter not in seen]:
        yield f"no part has {few(left)}, though a gradient is required; give it to one, or freeze it"


Recipe: TypeAlias = TrainOptions | OwnParts
"""What is trained, and how."""


def parts_of(recipe: Recipe, model: nn.Module, total_steps: int) -> tuple[TrainedPart, ...]:
    """What is trained of a model. Collective: no.

    Raises:
        ConfigError: nothing requires a gradient, or the schedule cannot be made, or parts do not fit the model.
    """
    if not trained_parameters(model):
        raise ConfigError(f"no parameter of {type(model).__name__} requires a gradient, so none can be trained")
    parts = named_parts(model, recipe, total_steps) if isinstance(recipe, TrainOptions) else tuple(recipe.parts)
    require_parts(model, parts)
    return parts


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def named_parts(model: nn.Module, options: TrainOptions, total_steps: int) -> tuple[TrainedPart, ...]:
    """All that requires a gradient, by the optimizer of this name: one part, or two (Muon, and AdamW for the rest).

    Raises:
        ConfigError: the optimizer cannot be made, or the schedule wants other options.
    """
    recipes = optimizers_of(options)
    dealt = parameters_by_part(model, recipes)
    return tuple(
        _part(name, recipes[name].of(parameters), options, total_steps) for name, parameters in dealt.items()
    )


def _part(name: str, optimizer: Optimizer, options: TrainOptions, total_steps: int) -> TrainedPart:
    schedule = make_schedule(optimizer, options, total_steps)

    def lengthen(_restored: RateSchedule, total_steps: int) -> RateSchedule:
        return schedule_from(schedule, optimizer, options, total_steps)

    return TrainedPart(name, optimizer, schedule, options.max_grad_norm, lengthen=lengthen)


def make_schedule(optimizer: Optimizer, options: TrainOptions, total_steps: int) -> LambdaLR:
    """transformers' schedule of this name.

    Raises:
        ConfigError: it wants other options.
    """
    try:
        schedule: LambdaLR = get_scheduler(
            "constant_with_warmup" if options.schedule == "constant" else options.schedule,
            optimizer,
            num_warmup_steps=options.warmup_steps(total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(options.schedule_options),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the schedule {options.schedule!r} cannot be made with the options "
            f"{dict(options.schedule_options)} ({error})"
        ) from error
    return schedule


def schedule_from(before: LambdaLR, optimizer: Optimizer, options: TrainOptions, total_steps: int) -> LambdaLR:
    """A schedule of so many steps at the place of the one before; the optimizer has its learning rate.

    What a checkpoint brings along is the rate of a schedule of as many steps as there were to be then.
    """
    schedule = make_schedule(optimizer, options, total_steps)
    place, base_rates = before.last_epoch, before.base_lrs
    rates = [base * share(place) for base, share in zip(base_rates, schedule.lr_lambdas, strict=True)]
    schedule.load_state_dict({**before.state_dict(), "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_group(group, {"lr": rate})
    return schedule
