"""The state of optimizers, set from whatever has its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines.clock import Clock
from shardwise.engines.optimizer_fitting import Ours, fit
from shardwise.execution.memory.materialize import home_of
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import StateOptions, Values
from shardwise.execution.states.replicas import as_bytes, equal_on_all
from shardwise.execution.states.supply import require_alike_models
from shardwise.models.optimizer_state import Given
from shardwise.models.rebind import Bound, Scalar, look_at
from shardwise.models.view import Held, local_tensor, look_inside
from shardwise.planning.loads.consent import Refuse
from shardwise.planning.states.matching import Tolerance
from shardwise.planning.states.sources import digest
from shardwise.report.state_report import StateReport


def set_values(
    world: World,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    take_apart: Callable[[Ours], tuple[Given, Values]],
    *,
    tolerance: Tolerance,
    options: StateOptions,
    clock: Clock,
) -> StateReport:
    """Give optimizers a state from wherever its tensors are.

    ``take_apart`` is asked, on every rank, for this rank's part of the state, and for the values of its tensors.

    Collective: yes.
    Memory, errors: as of :func:`set_optimizer_state`.
    """
    with clock.phase("agree"):
        held, bounds = looked_at(world, model, optimizers)
        ours = Ours.of(held, bounds)
        given, values = take_apart(ours)
        told = values.told(world)
        fitting = fit(world, ours, given, told, tolerance)
        matched = fitting.matched
    with clock.phase("exchange"):
        targets = world.together(lambda: fitting.targets(ours))
        by_label = {key.label: target for key, target in targets.items()}
        home = home_among(held, list(targets.values()))
        traffic = values.bring(world, matched, by_label, budget_bytes=options.budget_bytes, device=home)
    with clock.phase("finish"):
        afresh = world.together(lambda: fitting.bind(ours, targets))
    return StateReport(
        rank=world.rank,
        world_size=world.size,
        set_names=tuple(by_label),
        missing=fitting.missing,
        unexpected=fitting.unexpected,
        mismatched=matched.mismatched,
        cast=matched.cast,
        afresh=tuple(afresh),
        brought_by=fitting.agreed.brought_by,
        sent_bytes=traffic.sent_bytes,
        received_bytes=traffic.received_bytes,
        kept_bytes=traffic.kept_bytes,
        seconds=clock.seconds,
    )


def looked_at(
    world: World, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> tuple[list[Held], list[Bound]]:
    """The model and its optimizers, which are the same on all ranks. Collective: yes."""
    several = (optimizers,) if isinstance(optimizers, Optimizer) else optimizers
    held = world.together(lambda: look_inside(model))
    names = {item.tensor: item.fqn for item in held if isinstance(item.tensor, nn.Parameter)}
    bounds = world.together(lambda: look_at(several, names, _KEEP_IT_APART))
    require_alike_models(world, held, bounds)
    return held, bounds


def held_by(world: World, bounds: Sequence[Bound]) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
    """What optimizers hold of parameters, by label: tensors, and the rest, in one order on all ranks.

    (Their own order is not: torch's ``set_optimizer_state_dict`` leaves another one on the first rank.)

    Collective: yes.

    Raises:
        DisagreementError: ranks hold something else.
    """
    tensors = {key.label: tensor for bound in bounds for key, tensor in bound.tensors.items()}
    scalars = {key.label: value for bound in bounds for key, value in bound.scalars.items()}
    tensors, scalars = dict(sorted(tensors.items())), dict(sorted(scalars.items()))
    world.require_equal(digest([*tensors, *scalars]), "what the optimizers hold of parameters")
    return tensors, scalars


def require_equal_state(
    world: World,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Scalar],
    options: StateOptions,
    device: torch.device,
) -> None:
    """Raise when what several ranks hold has different values on them. Collective: yes.

    Raises:
        DisagreementError: naming it.
    """
    numbers = {
        name: value if isinstance(value, torch.Tensor) else as_bytes(value) for name, value in scalars.items()
    }
    both = {**tensors, **numbers}
    equal_on_all(world, both, (), Refuse(), budget_bytes=options.budget_bytes, device=device)


_KEEP_IT_APART = "keep what the optimizer's own state_dict() has, rank by rank"


def home_among(held: list[Held], tensors: Sequence[torch.Tensor]) -> torch.device:
    """Where staging lies: on the mesh's device, else where the state is."""
    return home_of(held, local_tensor(tensors[0]).device if tensors else None)
