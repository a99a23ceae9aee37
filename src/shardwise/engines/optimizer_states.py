"""Takes out and sets the state of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines.optimizer_fitting import Ours, fit
from shardwise.errors import PlacementError
from shardwise.execution.memory.materialize import home_among
from shardwise.execution.moving.reshard import gather
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import BroughtValues, StateOptions, Values, refuse_meta
from shardwise.execution.states.replicas import as_bytes, equal_on_all
from shardwise.execution.states.supply import require_alike_models
from shardwise.models.optimizers.optimizer_kind import class_name
from shardwise.models.optimizers.optimizer_state import Given, copied, read, written_out
from shardwise.models.optimizers.rebind import Bound, Scalar, look_at
from shardwise.models.optimizers.reduced import keeps_reduced
from shardwise.models.view import Held, look_inside
from shardwise.planning.loads.load_plan import Refuse
from shardwise.planning.states.forms import FullState, StateForm
from shardwise.planning.states.matching import Tolerance
from shardwise.planning.states.sources import digest
from shardwise.report.state_report import StateReport

KEEP_IT_APART = "keep what the optimizer's own state_dict() has, rank by rank, or use a Checkpointer"


@dataclass(frozen=True)
class TakenOptimizers:
    """What optimizers hold of parameters, by label, equal on all ranks; ``home`` is where staging lies."""

    bounds: list[Bound]
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Scalar]
    home: torch.device

    def written(self) -> dict[str, Any]:
        """The state with tensors as they are, by the names of parameters."""
        own = {name: tensor.detach() for name, tensor in self.tensors.items()}
        return written_out(self.bounds, {**own, **self.scalars})

    def in_form(self, world: World, form: StateForm, options: StateOptions) -> dict[str, Any]:
        """The state, gathered where that is asked for, empty on ranks that the form leaves out. Collective."""
        if not isinstance(form, FullState):
            return self.written()
        budget = options.budget_bytes
        found = gather(world, self.tensors, form, budget_bytes=budget, device=self.home)
        if world.rank not in form.receivers(world.size):
            return {}
        return written_out(self.bounds, {**found, **{name: copied(value) for name, value in self.scalars.items()}})


def take_out(
    world: World,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    what: str,
    options: StateOptions,
) -> TakenOptimizers:
    """Look at what optimizers hold, and compare what several ranks do. Collective: yes.

    ``what`` is what these are called.

    Raises:
        ConfigError, PlacementError, DisagreementError: as of
            :func:`~shardwise.verbs.optimizer_state.optimizer_state`.
    """
    held, bounds = _looked_at(world, model, optimizers)
    tensors, scalars = _held_by(world, bounds)
    world.together(lambda: refuse_meta(tensors, what))
    home = home_among(held, tensors.values())
    numbers = {
        name: value if isinstance(value, torch.Tensor) else as_bytes(value) for name, value in scalars.items()
    }
    both = {**tensors, **numbers}
    equal_on_all(world, both, (), Refuse(), budget_bytes=options.budget_bytes, device=home)
    return TakenOptimizers(bounds, tensors, scalars, home)


TakeApart: TypeAlias = Callable[[Ours], tuple[Given, Values]]
"""Asked, on every rank, for this rank's part of a state, and for the values of its tensors."""


def brought(world: World, state: Mapping[str, Any] | None) -> TakeApart:
    """A state that ranks have, on this rank this."""

    def take_apart(ours: Ours) -> tuple[Given, Values]:
        given = world.together(lambda: read(state, ours.first_names, ours.shapes))
        return given, BroughtValues(given.tensors)

    return take_apart


def set_values(
    world: World,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    take_apart: TakeApart,
    *,
    tolerance: Tolerance,
    options: StateOptions,
    clock: Clock,
) -> StateReport:
    """Give optimizers a state from wherever its tensors are.

    Collective: yes.
    Memory, errors: as of :func:`set_optimizer_state`.
    """
    with clock.phase("agree"):
        held, bounds = _looked_at(world, model, optimizers)
        ours = Ours.of(held, bounds)
        given, values = take_apart(ours)
        told = values.told(world)
        fitting = fit(world, ours, given, told, tolerance)
        matched = fitting.matched
    with clock.phase("exchange"):
        targets = world.together(lambda: fitting.targets(ours))
        by_label = {key.label: target for key, target in targets.items()}
        home = home_among(held, targets.values())
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


def _looked_at(
    world: World,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
) -> tuple[list[Held], list[Bound]]:
    """The model and its optimizers, which are the same on all ranks. Collective: yes."""
    several = (optimizers,) if isinstance(optimizers, Optimizer) else optimizers
    held = world.together(lambda: look_inside(model))
    bounds = world.together(lambda: look_at(several, held, KEEP_IT_APART))
    world.together(lambda: _refuse_reduced(bounds))
    require_alike_models(world, held, bounds)
    return held, bounds


def _refuse_reduced(bounds: Sequence[Bound]) -> None:
    """Raises :class:`PlacementError` for optimizers whose state would not be their own if it were set."""
    for bound in bounds:
        if keeps_reduced(bound.optimizer):
            raise PlacementError(
                f"{class_name(bound.optimizer)}: its state is reduced (8-bit, 4-bit or factored) and belongs "
                "to each rank. Save and restore it with a Checkpointer, on as many ranks."
            )


def _held_by(world: World, bounds: Sequence[Bound]) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
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
