"""What options ask for: everything that requires a gradient, trained by AdamW at the rates of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from shardwise.errors import ConfigError
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
    parts = (everything(model, recipe, total_steps),) if isinstance(recipe, TrainOptions) else tuple(recipe.parts)
    require_parts(model, parts)
    return parts


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def everything(model: nn.Module, options: TrainOptions, total_steps: int) -> TrainedPart:
    """All that requires a gradient, as one part.

    Raises:
        ConfigError: the schedule wants other options.
    """
    optimizer = make_optimizer(trained_parameters(model), options)
    schedule = make_schedule(optimizer, options, total_steps)

    def lengthen(_restored: RateSchedule, total_steps: int) -> RateSchedule:
        return schedule_from(schedule, optimizer, options, total_steps)

    return TrainedPart("everything", optimizer, schedule, options.max_grad_norm, lengthen=lengthen)


def parameter_groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters by what AdamW does to them: matrices decay, norms and biases do not.

    The groups are the same whatever is sharded, so that any number of ranks can go on with them.
    """
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.ndim >= 2, []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0} for decays, members in groups.items()
    ]


def make_optimizer(parameters: Sequence[nn.Parameter], options: TrainOptions) -> torch.optim.AdamW:
    """AdamW for these parameters. torch's loops over many tensors at once take no mixture of sharded and whole."""
    is_mixed = len({isinstance(parameter, DTensor) for parameter in parameters}) > 1
    return torch.optim.AdamW(
        parameter_groups(parameters, options.weight_decay),
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        foreach=False if is_mixed else None,
    )


def make_schedule(optimizer: torch.optim.Optimizer, options: TrainOptions, total_steps: int) -> LambdaLR:
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


def schedule_from(
    before: LambdaLR, optimizer: torch.optim.Optimizer, options: TrainOptions, total_steps: int
) -> LambdaLR:
    """A schedule of so many steps at the place of the one before; the optimizer has its learning rate.

    What a checkpoint brings along is the rate of a schedule of as many steps as there were to be then.
    """
    schedule = make_schedule(optimizer, options, total_steps)
    place, base_rates = before.last_epoch, before.base_lrs
    rates = [base * share(place) for base, share in zip(base_rates, schedule.lr_lambdas, strict=True)]
    schedule.load_state_dict({**before.state_dict(), "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return schedule
