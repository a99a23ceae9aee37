"""Takes out and sets the state of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines.arguments import world_of
from shardwise.errors import CoverageError, DisagreementError, PlacementError
from shardwise.execution.memory import home_among
from shardwise.execution.moving import gather
from shardwise.execution.replicas import as_bytes, equal_on_all, require_alike_models
from shardwise.execution.supply import (
    BroughtValues,
    StateOptions,
    StoredValues,
    Values,
    refuse_meta,
    require_same_call,
)
from shardwise.execution.world import Clock, World
from shardwise.models.optimizer_state import (
    Given,
    by_parameter,
    class_name,
    copied,
    entries_of,
    labelled,
    read,
    set_group,
    unlike,
    written_out,
)
from shardwise.models.rebind import Bound, Key, Scalar, keeps_reduced, label, look_at, state_like
from shardwise.models.torch_words import in_memory, to_torch
from shardwise.models.view import Held, look_inside, without_compile
from shardwise.planning import matching
from shardwise.planning.matching import digest, require_form
from shardwise.planning.moves import StateForm, receivers
from shardwise.report.names import few
from shardwise.report.reports import StateReport
from shardwise.tensors import Box, DType

KEEP_IT_APART = "keep what the optimizer's own state_dict() has, rank by rank, or use a Checkpointer"


@dataclass(frozen=True, slots=True)
class Ours:
    """What there is to be set, on this rank."""

    bounds: list[Bound]
    parameters: dict[str, nn.Parameter]
    first_names: dict[str, str]
    keys: dict[str, Key]
    """What the optimizers hold now, by label."""

    @classmethod
    def of(cls, held: Sequence[Held], bounds: list[Bound]) -> Ours:
        return cls(
            bounds,
            {item.fqn: item.tensor for item in held if isinstance(item.tensor, nn.Parameter)},
            {name: item.fqn for item in held for name in item.names},
            labelled(bounds),
        )

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.parameters.items()}

    @property
    def groups(self) -> list[list[str]]:
        """Of all optimizers, one after the other."""
        return [names for bound in self.bounds for names in bound.groups]

    @property
    def optimizer_of(self) -> dict[str, int]:
        return {name: bound.index for bound in self.bounds for names in bound.groups for name in names}

    def tensor(self, name: str) -> torch.Tensor | None:
        """What an optimizer holds under this label, if it is a tensor with shards."""
        key = self.keys.get(name)
        return None if key is None else self.bounds[key.optimizer].tensors.get(key)


@dataclass(frozen=True, slots=True)
class _AgreedState:
    """What the ranks that bring a state have alike: all but the tensors, of which each has its own."""

    groups: list[list[str]]
    settings: list[dict[str, Any]]
    scalars: dict[str, Scalar]
    keys: dict[str, tuple[str, str]]
    brought_by: tuple[int, ...]

    @property
    def forgotten(self) -> set[str]:
        """Parameters that have no state afterwards: all of its groups', of a state before the first step."""
        return set() if self.keys else {name for names in self.groups for name in names}

    @property
    def stateful(self) -> list[str]:
        return list(dict.fromkeys(parameter for parameter, _ in self.keys.values()))


def _agreed(world: World, given: Given) -> _AgreedState:
    """The first bringing rank's groups and numbers. Collective: yes.

    Raises:
        DisagreementError: ranks bring state of other parameters, or other groups.
    """
    told = world.gather((given.groups, given.settings, given.scalars, given.keys))
    bringing = [rank for rank, (groups, _, _, keys) in enumerate(told) if groups or keys]
    if not bringing:
        return _AgreedState([], [], {}, {}, ())
    groups, settings, scalars, keys = told[bringing[0]]
    for rank in bringing[1:]:
        its_groups, _, its_scalars, its_keys = told[rank]
        if (groups, keys, set(scalars)) != (its_groups, its_keys, set(its_scalars)):
            names = [name for name in dict.fromkeys([*keys, *its_keys]) if (name in keys) != (name in its_keys)]
            what = ", ".join(few(names)) or "the parameter groups differ"
            raise DisagreementError(
                f"ranks {bringing[0]} and {rank} bring different states of optimizers: {what}; bring the same on "
                "every rank, or all of it on some and nothing on the others"
            )
    return _AgreedState(groups, settings, scalars, keys, tuple(bringing))


def _require_same_kind(ours: Ours, agreed: _AgreedState) -> None:
    """Raises :class:`CoverageError` for the state of other optimizers, as far as their settings tell."""
    stored = {
        name: ("", settings)
        for names, settings in zip(agreed.groups, agreed.settings, strict=True)
        for name in names
    }
    if found := unlike(by_parameter(ours.bounds), stored):
        shown = "\n  ".join(few(found))
        raise CoverageError(
            f"the state is of other optimizers than these:\n  {shown}\nMake the optimizers as they were made when "
            "it was saved."
        )


def _match(
    ours: Ours,
    agreed: _AgreedState,
    groups: matching.GroupMatch,
    told: Sequence[Mapping[str, matching.Brought]],
    tolerance: matching.Tolerance,
) -> matching.Match:
    """The state that is set. Numbers need no match: only what is there now must not get lost."""
    unexpected, missing = set(groups.unexpected), {*groups.missing, *agreed.forgotten}
    unknown, lacking = _entries_of_others(ours, agreed, groups)
    known = [
        {name: item for name, item in found.items() if agreed.keys[name][0] not in unexpected} for found in told
    ]
    places = [
        matching.StateSlot((name,), *_shape_and_dtype(ours, name, agreed.keys[name][0], item))
        for name, item in next((found for found in known if found), {}).items()
        if name not in unknown
    ]
    held = [name for name, key in ours.keys.items() if name not in agreed.keys and key.parameter not in missing]
    places += [matching.StateSlot((name,), (), DType.OTHER) for name in dict.fromkeys([*held, *lacking])]
    number = matching.Brought((), DType.OTHER, (Box.whole(()),))
    strange = {name: number for name in unknown if name in agreed.scalars}
    bringing = [bool(found) for found in known] if any(known) else [rank == 0 for rank in range(len(known))]
    known = [found | strange if is_one else found for found, is_one in zip(known, bringing, strict=True)]
    return matching.match(places, known, tolerance)


def _entries_of_others(ours: Ours, agreed: _AgreedState, groups: matching.GroupMatch) -> tuple[set[str], list[str]]:
    """Labels of state that optimizers of these classes do not keep, and of what they do and the state lacks."""
    given: dict[str, set[str]] = {}
    for parameter, entry in agreed.keys.values():
        given.setdefault(parameter, set()).add(entry)
    held: dict[str, set[str]] = {}
    for key in ours.keys.values():
        held.setdefault(key.parameter, set()).add(key.entry)
    present = [
        (bound.optimizer, names, group)
        for bound in ours.bounds
        for names, group in zip(bound.groups, bound.optimizer.param_groups, strict=True)
    ]
    unknown: set[str] = set()
    lacking: list[str] = []
    for (optimizer, names, group), giver in zip(present, groups.giver_of, strict=True):
        settings = {**group, **(agreed.settings[giver] if giver is not None else {})}
        for name in names:
            if name not in given or keeps_reduced(optimizer):
                continue
            wanted = entries_of(optimizer, settings, ours.parameters[name].ndim)
            kept = held.get(name) if wanted is None else wanted
            if kept is not None:
                unknown |= {label(name, entry) for entry in given[name] - kept}
            lacking += [label(name, entry) for entry in sorted((wanted or set()) - given[name])]
    return unknown, lacking


def _shape_and_dtype(
    ours: Ours, name: str, parameter: str, item: matching.Brought
) -> tuple[tuple[int, ...], DType]:
    present = ours.tensor(name)
    if present is not None:
        return tuple(present.shape), in_memory(present.dtype)
    own = ours.parameters[parameter]
    shape = tuple(own.shape)
    if item.dtype is DType.OTHER or item.dtype.kind != "float" or item.dtype.bits < 16:
        return shape, item.dtype
    wider = torch.promote_types(to_torch(item.dtype), own.dtype)
    return shape, in_memory(wider) if wider.is_floating_point else item.dtype


@dataclass(frozen=True, slots=True)
class Fitting:
    """A state and the optimizers that take it, all that is decided before anything is changed."""

    agreed: _AgreedState
    groups: matching.GroupMatch
    matched: matching.Match

    @property
    def missing(self) -> tuple[str, ...]:
        return self.groups.missing + self.matched.missing

    @property
    def unexpected(self) -> tuple[str, ...]:
        return self.groups.unexpected + self.matched.unexpected

    def targets(self, ours: Ours) -> dict[Key, torch.Tensor]:
        """Where the state arrives: what the optimizers have already, else new memory."""
        optimizer_of = ours.optimizer_of
        targets: dict[Key, torch.Tensor] = {}
        for item in self.matched.taken:
            parameter, entry = self.agreed.keys[item.name]
            own, dtype = ours.parameters[parameter], to_torch(item.place.dtype)
            target = ours.tensor(item.name)
            if target is None:
                target = state_like(own, dtype)
            targets[Key(optimizer_of[parameter], parameter, entry)] = target
        return targets

    def bind(self, ours: Ours, targets: Mapping[Key, torch.Tensor]) -> list[str]:
        """Give the optimizers their settings and state; the trained parameters that have no state then."""
        optimizer_of = ours.optimizer_of
        scalars = {
            Key(optimizer_of[parameter], parameter, entry): self.agreed.scalars[name]
            for name, (parameter, entry) in self.agreed.keys.items()
            if name in self.agreed.scalars and parameter in optimizer_of and name not in self.matched.unexpected
        }
        present = [group for bound in ours.bounds for group in bound.optimizer.param_groups]
        for group, giver in zip(present, self.groups.giver_of, strict=True):
            if giver is not None:
                set_group(group, self.agreed.settings[giver])
        for bound in ours.bounds:
            bound.rebind(ours.parameters, targets, scalars)
            for name in self.agreed.forgotten & ours.parameters.keys():
                bound.optimizer.state.pop(ours.parameters[name], None)
        kept = {key.parameter for key in ours.keys.values()} - self.agreed.forgotten
        stepped = {key.parameter for key in [*targets, *scalars]} | kept
        return [name for name in optimizer_of if name not in stepped and ours.parameters[name].requires_grad]


def fit(
    world: World,
    ours: Ours,
    given: Given,
    told: Sequence[Mapping[str, matching.Brought]],
    tolerance: matching.Tolerance,
) -> Fitting:
    """Find what of a state belongs to what of the optimizers. ``told`` is what each rank has of its tensors.

    Collective: yes.

    Raises:
        CoverageError: the state is of other optimizers; what is missing, unexpected or mismatched; groups of which
            the state has none alike.
        DisagreementError: ranks bring different states.
    """
    agreed = _agreed(world, given)
    world.together(lambda: _require_same_kind(ours, agreed))
    groups = world.together(lambda: matching.match_groups(ours.groups, agreed.groups, agreed.stateful, tolerance))
    matched = world.together(lambda: _match(ours, agreed, groups, told, tolerance))
    return Fitting(agreed, groups, matched)


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
        if form == "sharded":
            return self.written()
        budget = options.budget_bytes
        found = gather(world, self.tensors, form, budget_bytes=budget, device=self.home)
        if world.rank not in receivers(form, world.size):
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
            :func:`~shardwise.engines.optimizer_states.optimizer_state`.
    """
    held, bounds = _looked_at(world, model, optimizers)
    tensors, scalars = _held_by(world, bounds)
    world.together(lambda: refuse_meta(tensors, what))
    home = home_among(held, tensors.values())
    numbers = {
        name: value if isinstance(value, torch.Tensor) else as_bytes(value) for name, value in scalars.items()
    }
    both = {**tensors, **numbers}
    equal_on_all(world, both, (), "error", budget_bytes=options.budget_bytes, device=home)
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
    tolerance: matching.Tolerance,
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
        brought_by=() if isinstance(values, StoredValues) else fitting.agreed.brought_by,
        read_bytes=getattr(values, "read_bytes", 0),
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


@torch.no_grad()
def optimizer_state(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    form: StateForm = "full",
    *,
    options: StateOptions = StateOptions(),  # noqa: B008
) -> dict[str, Any]:
    """The state of a model's optimizers, by the names of the plain model's parameters.

    ``{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}``, as
    ``torch.distributed.checkpoint.state_dict`` has it. A tied parameter has its first name. Parameters that have
    not been stepped have no state: no step is taken here.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: for whole tensors, ``options.budget_bytes``, and on the ranks that get the tensors these, on the
    CPU. For ``"sharded"`` none: the tensors are the optimizers' own.

    Args:
        model: whose parameters the optimizers hold.
        optimizers: one, or several in the same order on every rank.
        form: ``"full"``, ``"full_on_all_ranks"``, or ``"sharded"``.
        options: budget, process group, patience.

    Returns:
        The state; an empty dict on a rank that ``form`` leaves out.

    Raises:
        ConfigError: an argument cannot be honoured.
        PlacementError: parameters are not the model's or are in two groups; state is neither of the parameter's
            shape, nor a DTensor, nor a number.
        DisagreementError: ranks have different models or optimizers, or different values of what several hold.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    model = without_compile(model)
    with world_of(options, "optimizer_state") as world, torch.device("cpu"):
        world.together(lambda: require_form(form))
        require_same_call(world, form, options=options)
        return take_out(world, model, optimizers, "the optimizers", options).in_form(world, form, options)


@torch.no_grad()
def set_optimizer_state(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    state: Mapping[str, Any] | None,
    *,
    on_missing: matching.OnFault = "error",
    on_unexpected: matching.OnFault = "error",
    on_mismatched: matching.OnFault = "error",
    options: StateOptions = StateOptions(),  # noqa: B008
) -> StateReport:
    """Give a model's optimizers the settings and the state that they had, by the names of parameters.

    The layout is that of :func:`optimizer_state`, with whole tensors or DTensors of any sharding, on every rank, or
    on some and ``None`` (or nothing) on the others. A parameter may have any of its names. Groups are told by the
    parameters in them, whatever their order, and get all settings that the state has, learning rates included.

    State is made where there is none, without a step, sharded as its parameter is, in the dtype given or in the
    parameter's if that is wider; where there is some, it keeps its dtype. Parameters that neither the state nor the
    optimizer has any of start afresh (``report.afresh``); so do all of a state without values, from
    before the first step.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: the new state, and ``options.budget_bytes``.

    Args:
        model: whose parameters the optimizers hold.
        optimizers: one, or several in the same order on every rank.
        state: as above.
        on_missing: ``Ignore(only=...)`` for parameters that no group of the state has, and for state that the
            optimizer has and the given lacks (as in ``"layer.weight: exp_avg"``): they stay as they are.
        on_unexpected: ``Ignore(only=...)`` for parameters in the state that the optimizers do not hold, and for
            state that optimizers of these classes do not keep (as in ``"layer.weight: max_exp_avg_sq"``).
        on_mismatched: ``Ignore(only=...)`` for state of another shape, which is left out.
        options: budget, process group, patience.

    Raises:
        ConfigError: an argument cannot be honoured.
        CoverageError: the state is of other optimizers; what is missing, unexpected or mismatched; groups of which
            the state has none alike.
        DisagreementError: ranks have different models or optimizers, or bring different states.
        PlacementError: as of :func:`optimizer_state`; the state has tensors on meta.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. All but the last come before anything is changed.
    """
    model = without_compile(model)
    clock = Clock()
    tolerance = matching.Tolerance(on_missing, on_unexpected, on_mismatched)
    with world_of(options, "set_optimizer_state") as world, torch.device("cpu"):
        with clock.phase("agree"):
            require_same_call(world, tolerance, options=options)
        apart = brought(world, state)
        return set_values(world, model, optimizers, apart, tolerance=tolerance, options=options, clock=clock)
