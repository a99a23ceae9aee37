"""Takes out and sets a model's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.engines.load_fill import give_value
from shardwise.execution.memory.materialize import home_among, managers_of, materialize
from shardwise.execution.moving.reshard import gather
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import StateOptions, Values, refuse_meta
from shardwise.execution.states.replicas import equal_on_all
from shardwise.execution.states.supply import require_alike_models
from shardwise.layout import TensorKind
from shardwise.models.initialize import Initialisers
from shardwise.models.placement import refuse_subclasses
from shardwise.models.selection import Everything, Selection, names_outside
from shardwise.models.torch_words import in_memory
from shardwise.models.view import Held, look_inside
from shardwise.planning.loads.load_plan import OnDiffering
from shardwise.planning.states.forms import FullState, StateForm
from shardwise.planning.states.matching import Brought, Match, StateSlot, Tolerance, match
from shardwise.report.state_report import StateReport


@dataclass(frozen=True)
class TakenModel:
    """What of a model is taken out, looked at on all ranks.

    Attributes:
        held: all that is in the model.
        names: those of the state, to canonical FQNs.
        tensors: by first name, tied ones once; of a buffer that differs, the first rank's values.
        differing: the buffers that do.
        home: where staging lies.
    """

    held: list[Held]
    names: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]
    differing: tuple[str, ...]
    home: torch.device

    def by_name(self, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is found by first names, under the names of the state: one object for all names of a tied tensor."""
        first_of = {name: item.fqn for item in self.held for name in item.names}
        return {name: found[first_of[fqn]] for name, fqn in self.names.items() if first_of[fqn] in found}

    def in_form(self, world: World, form: StateForm, options: StateOptions) -> dict[str, torch.Tensor]:
        """The state, gathered where that is asked for, empty on ranks that the form leaves out. Collective."""
        if not isinstance(form, FullState):
            return self.by_name({name: tensor.detach() for name, tensor in self.tensors.items()})
        budget = options.budget_bytes
        return self.by_name(gather(world, self.tensors, form, budget_bytes=budget, device=self.home))


def take_out(
    world: World, model: nn.Module, only: Selection, on_differing_buffers: OnDiffering, options: StateOptions
) -> TakenModel:
    """Look for the tensors of a state, and compare what several ranks hold. Collective: yes.

    Raises:
        ConfigError, PlacementError, DisagreementError: as of :func:`~shardwise.verbs.state.model_state`.
    """
    held = world.together(lambda: look_inside(model))
    require_alike_models(world, held, [])
    names = world.from_first(lambda: names_outside(model, held, only))
    wanted = set(names.values())
    chosen = {item.fqn: item.tensor for item in held if not wanted.isdisjoint(item.names)}
    world.together(lambda: refuse_meta(chosen, "the model"))
    home = home_among(held, chosen.values())
    buffers = {item.fqn for item in held if item.kind is not TensorKind.PARAMETER}
    budget = options.budget_bytes
    tensors, differing = equal_on_all(
        world, chosen, buffers, on_differing_buffers, budget_bytes=budget, device=home
    )
    return TakenModel(held, names, tensors, differing, home)


def set_values(
    world: World,
    model: nn.Module,
    values: Values,
    *,
    only: Selection,
    tolerance: Tolerance,
    options: StateOptions,
    clock: Clock,
) -> tuple[StateReport, list[dict[str, Brought]]]:
    """Give a model values from wherever they are; the report, and what there was of them.

    Collective: yes.
    Memory, errors: as of :func:`set_model_state`.
    """
    with clock.phase("agree"):
        agreed = _agree(world, model, values, only, tolerance)
    held, matched = agreed.held, agreed.matched
    with clock.phase("exchange"):
        home = home_among(held, [item.tensor for item in held])
        awaiting = [*agreed.taking.values(), *(item for item, _ in agreed.computed)]
        world.together(lambda: materialize(awaiting, managers_of(model), home)[1].touch_rest())
        targets = {name: item.tensor for name, item in agreed.taking.items()}
        traffic = values.bring(world, matched, targets, budget_bytes=options.budget_bytes, device=home)
        recomputed = world.together(lambda: _fill(agreed.initialisers, agreed.computed, home))
    report = StateReport(
        rank=world.rank,
        world_size=world.size,
        set_names=tuple(targets),
        missing=matched.missing,
        unexpected=matched.unexpected,
        mismatched=matched.mismatched,
        cast=matched.cast,
        on_meta=tuple(item.fqn for item in held if item.tensor.is_meta),
        sent_bytes=traffic.sent_bytes,
        received_bytes=traffic.received_bytes,
        kept_bytes=traffic.kept_bytes,
        seconds=clock.seconds,
        recomputed=recomputed,
    )
    return report, agreed.told


@dataclass(frozen=True)
class _AgreedValues:
    """What of a model takes which values.

    Attributes:
        held: all that is in the model.
        told: what there is of the state, by who brings it.
        matched: places that take a value, and what was let pass.
        taking: what is in these places, by their first names.
        initialisers: asked while all was on meta.
        computed: buffers on meta that no state has, with their values.
    """

    held: list[Held]
    told: list[dict[str, Brought]]
    matched: Match
    taking: Mapping[str, Held]
    initialisers: Initialisers
    computed: list[tuple[Held, torch.Tensor]]


def _agree(world: World, model: nn.Module, values: Values, only: Selection, tolerance: Tolerance) -> _AgreedValues:
    """Find out what goes where; nothing is changed. Collective: yes."""
    held = world.together(lambda: look_inside(model))
    require_alike_models(world, held, [])
    names = world.from_first(lambda: names_outside(model, held, only))
    told = values.told(world)
    places = _places(held, names)
    of = {place.names[0]: item for place, item in places}
    matched = world.together(lambda: match([place for place, _ in places], told, tolerance))
    taking = {item.place.names[0]: of[item.place.names[0]] for item in matched.taken}
    world.together(lambda: refuse_subclasses(list(taking.values())))
    # Asked of initialisers while all is on meta: a model that gets its values is as one that was loaded.
    initialisers = Initialisers(model, held)
    computed = world.together(lambda: _computed(initialisers, only))
    values.require_ties(world, [item.place.names for item in matched.taken])
    return _AgreedValues(held, told, matched, taking, initialisers, computed)


def _computed(initialisers: Initialisers, only: Selection) -> list[tuple[Held, torch.Tensor]]:
    """The buffers on meta that no state has, and that the model's initialisers compute, with their values."""
    waiting = [item for item in initialisers.held if item.kind is TensorKind.BUFFER and item.tensor.is_meta]
    if not waiting or not isinstance(only, Everything):
        return []
    found = initialisers.buffers({}, seed=0)
    return [(item, value) for item in waiting if (value := found[item.fqn].value) is not None]


def _fill(
    initialisers: Initialisers, computed: list[tuple[Held, torch.Tensor]], home: torch.device
) -> tuple[str, ...]:
    """Give buffers their values, and attributes that were left on meta; the names of both."""
    for item, value in computed:
        give_value(item, value)
    attributes = initialisers.compute_attributes(home) if computed else ()
    return (*(item.fqn for item, _ in computed), *attributes)


def _places(held: list[Held], names: Mapping[str, str]) -> list[tuple[StateSlot, Held]]:
    """Tensors that take values, tied ones once, with all their names outside."""
    outside: dict[str, list[str]] = {}
    for name, fqn in names.items():
        outside.setdefault(fqn, []).append(name)
    found: list[tuple[StateSlot, Held]] = []
    for item in held:
        own = tuple(name for fqn in item.names for name in outside.get(fqn, ()))
        if own:
            own = tuple(dict.fromkeys([*own, *item.names]))  # an adapter's, also by its names in the model
            found.append((StateSlot(own, tuple(item.tensor.shape), in_memory(item.tensor.dtype)), item))
    return found
