"""What options ask for: everything that requires a gradient, trained by a named optimizer at a schedule's rates."""

from __future__ import annotations

from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from shardwise.errors import ConfigError
from shardwise.models.optimizers.optimizer_state import set_group
from shardwise.training.optimizing.optimizers import optimizers_of, parameters_by_part
from shardwise.training.options import TrainOptions
from shardwise.training.parts import OwnParts, RateSchedule, TrainedPart, require_parts

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
