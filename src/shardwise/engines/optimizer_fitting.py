"""Fits a state to the optimizers that are to take it, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import CoverageError, DisagreementError
from shardwise.execution.ranks.world import World
from shardwise.models.optimizers.optimizer_kind import by_parameter, entries_of, unlike
from shardwise.models.optimizers.optimizer_state import Given, labelled, set_group
from shardwise.models.optimizers.rebind import Bound, Key, Scalar, label, state_like
from shardwise.models.optimizers.reduced import keeps_reduced
from shardwise.models.torch_words import in_memory, to_torch
from shardwise.models.view import Held
from shardwise.planning.states.matching import (
    Brought,
    GroupMatch,
    Match,
    StateSlot,
    Tolerance,
    few,
    match,
    match_groups,
)
from shardwise.tensors import Box, DType


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
    groups: GroupMatch,
    told: Sequence[Mapping[str, Brought]],
    tolerance: Tolerance,
) -> Match:
    """The state that is set. Numbers need no match: only what is there now must not get lost."""
    unexpected, missing = set(groups.unexpected), {*groups.missing, *agreed.forgotten}
    unknown, lacking = _entries_of_others(ours, agreed, groups)
    known = [
        {name: item for name, item in found.items() if agreed.keys[name][0] not in unexpected} for found in told
    ]
    places = [
        StateSlot((name,), *_shape_and_dtype(ours, name, agreed.keys[name][0], item))
        for name, item in next((found for found in known if found), {}).items()
        if name not in unknown
    ]
    held = [name for name, key in ours.keys.items() if name not in agreed.keys and key.parameter not in missing]
    places += [StateSlot((name,), (), DType.OTHER) for name in dict.fromkeys([*held, *lacking])]
    number = Brought((), DType.OTHER, (Box.whole(()),))
    strange = {name: number for name in unknown if name in agreed.scalars}
    bringing = [bool(found) for found in known] if any(known) else [rank == 0 for rank in range(len(known))]
    known = [found | strange if is_one else found for found, is_one in zip(known, bringing, strict=True)]
    return match(places, known, tolerance)


def _entries_of_others(ours: Ours, agreed: _AgreedState, groups: GroupMatch) -> tuple[set[str], list[str]]:
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


def _shape_and_dtype(ours: Ours, name: str, parameter: str, item: Brought) -> tuple[tuple[int, ...], DType]:
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
    groups: GroupMatch
    matched: Match

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
    world: World, ours: Ours, given: Given, told: Sequence[Mapping[str, Brought]], tolerance: Tolerance
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
    groups = world.together(lambda: match_groups(ours.groups, agreed.groups, agreed.stateful, tolerance))
    matched = world.together(lambda: _match(ours, agreed, groups, told, tolerance))
    return Fitting(agreed, groups, matched)
