"""Matches optimizers with a state: groups, settings, entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.core.consents import Consent
from shardwise.core.errors import KeyMismatchError, RankMismatchError
from shardwise.core.formatting import abbreviate
from shardwise.core.tensors import DType
from shardwise.fsdp.named_tensors import TensorRef
from shardwise.fsdp.optimizer_states_by_name import (
    ParsedState,
    by_parameter,
    keys_by_label,
    list_differences,
    set_group,
)
from shardwise.fsdp.rebind import Bound, Key, state_like
from shardwise.fsdp.torch_private import from_torch_or_other, to_torch
from shardwise.ranks.world import World
from shardwise.transfer import matching

KEEP_IT_APART = "save the optimizer's own state_dict() rank by rank, or use a Checkpointer"


@dataclass(frozen=True, slots=True)
class OptimizerTargets:
    """Optimizers of this rank whose state is to be set, and the tensors of their model.

    Attributes:
        refs: tensors of the model.
        bounds: the optimizers.
        parameters: parameters of the model by FQN.
        first_names: FQNs by all names of a tensor.
        keys: keys of the values that the optimizers have now, by label ("layer.weight: exp_avg").
    """

    refs: Sequence[TensorRef]
    bounds: list[Bound]
    parameters: dict[str, nn.Parameter]
    first_names: dict[str, str]
    keys: dict[str, Key]

    @classmethod
    def from_optimizers(cls, refs: Sequence[TensorRef], bounds: list[Bound]) -> OptimizerTargets:
        return cls(
            refs,
            bounds,
            {item.fqn: item.tensor for item in refs if isinstance(item.tensor, nn.Parameter)},
            {name: item.fqn for item in refs for name in item.names},
            keys_by_label(bounds),
        )

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.parameters.items()}

    @property
    def groups(self) -> list[list[str]]:
        """Parameter groups of all optimizers, in order."""
        return [names for bound in self.bounds for names in bound.groups]

    @property
    def optimizer_indices(self) -> dict[str, int]:
        return {name: bound.index for bound in self.bounds for names in bound.groups for name in names}

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return the optimizer's value under this label, if it is a sharded tensor."""
        key = self.keys.get(name)
        return None if key is None else self.bounds[key.optimizer].tensors.get(key)


def _agree_on_state(world: World, state: ParsedState) -> tuple[ParsedState, tuple[int, ...]]:
    """Return the groups and numbers of the first rank with a state, and the ranks that have one. Collective: yes.

    Raises:
        RankMismatchError: ranks provide state of other parameters, or other groups.
    """
    states = world.all_gather_object(replace(state, tensors={}))  # tensors are matched by their descriptions
    providers = [rank for rank, provided in enumerate(states) if provided]
    if not providers:
        return ParsedState(), ()
    # Groups and numbers are taken from one rank, so the others must provide the same.
    first = states[providers[0]]
    for rank in providers[1:]:
        other = states[rank]
        if (first.groups, first.keys, set(first.scalars)) != (other.groups, other.keys, set(other.scalars)):
            only_one_has = abbreviate(sorted(first.keys.keys() ^ other.keys.keys()))
            what = ", ".join(only_one_has) or "the parameter groups differ"
            raise RankMismatchError(
                f"ranks {world.global_ranks[providers[0]]} and {world.global_ranks[rank]} provide different states "
                f"of optimizers: {what}. Pass the same on every rank, or all of it on some and None on the others"
            )
    return first, tuple(providers)


def _require_same_kind(targets: OptimizerTargets, agreed: ParsedState) -> None:
    """Raise :class:`KeyMismatchError` for the state of another optimizer class, judging by its settings."""
    stored: dict[str, tuple[str, Any]] = {}  # by parameter. The class is not part of a state dict.
    for names, settings in zip(agreed.groups, agreed.settings, strict=True):
        stored.update(dict.fromkeys(names, ("", settings)))
    if differences := list_differences(by_parameter(targets.bounds), stored):
        shown = "\n  ".join(abbreviate(differences))
        raise KeyMismatchError(
            f"the state belongs to other optimizers:\n  {shown}\nCreate the optimizers with the classes and groups "
            "of the training that saved it"
        )


def _match(
    targets: OptimizerTargets,
    agreed: ParsedState,
    groups: matching.GroupMatch,
    provided: Mapping[str, matching.SourceTensors],
    consent: Consent,
    global_ranks: Sequence[int],
) -> matching.Match:
    """Match tensors. Numbers need no match: only the present state must not get lost."""
    # Parameters that one side lacks are reported with the groups. Their entries are not reported again.
    unexpected, missing = set(groups.unexpected), {*groups.missing, *_stateless(agreed)}
    expected = {name: item for name, item in provided.items() if agreed.keys[name][0] not in unexpected}
    # Slots for what the state has, whether or not the optimizers have it yet. Every rank that provides the state
    # has the same names (_agree_on_state), so the first one tells them.
    slots: list[matching.StateSlot] = []
    for name, tensors in expected.items():
        item = next(tensor for tensor in tensors if tensor)
        slots.append(matching.StateSlot((name,), *_shape_and_dtype(targets, name, agreed.keys[name][0], item)))
    # Slots without a counterpart, so that the match reports state of the optimizers that the given state lacks.
    for name, key in targets.keys.items():
        if name not in agreed.keys and key.parameter not in missing:
            slots.append(matching.StateSlot((name,), (), DType.OTHER))
    return matching.match(slots, expected, consent, global_ranks)


def _stateless(agreed: ParsedState) -> set[str]:
    """Return parameters that have no state afterwards: all of a state from before the first step."""
    if agreed.keys:
        return set()
    return {name for names in agreed.groups for name in names}


def _shape_and_dtype(
    targets: OptimizerTargets, name: str, parameter: str, item: matching.SourceTensor
) -> tuple[tuple[int, ...], DType]:
    present = targets.tensor(name)
    if present is not None:
        return tuple(present.shape), from_torch_or_other(present.dtype)
    local = targets.parameters[parameter]
    shape = tuple(local.shape)
    # Counts and quantized state keep their dtype. Floating-point state is at least as wide as its parameter.
    if item.dtype is DType.OTHER or item.dtype.kind != "float" or item.dtype.bits < 16:
        return shape, item.dtype
    wider = torch.promote_types(to_torch(item.dtype), local.dtype)
    if not wider.is_floating_point:
        return shape, item.dtype
    return shape, from_torch_or_other(wider)


@dataclass(frozen=True, slots=True)
class OptimizerMatch:
    """How a state matches optimizers, decided before anything is changed.

    Attributes:
        agreed: groups, settings and scalars of the state, the same on all ranks.
        provided_by: ranks that have the state.
        groups: matched groups.
        matched: matched tensors.
    """

    agreed: ParsedState
    provided_by: tuple[int, ...]
    groups: matching.GroupMatch
    matched: matching.Match

    @property
    def missing(self) -> tuple[str, ...]:
        return self.groups.missing + self.matched.missing

    @property
    def unexpected(self) -> tuple[str, ...]:
        return self.groups.unexpected + self.matched.unexpected

    def allocate_targets(self, targets: OptimizerTargets) -> dict[Key, torch.Tensor]:
        """Return the target tensors: the tensors that the optimizers already have, otherwise new memory."""
        optimizer_indices = targets.optimizer_indices
        tensors: dict[Key, torch.Tensor] = {}
        for item in self.matched.tensors:
            parameter, entry = self.agreed.keys[item.name]
            target = targets.tensor(item.name)
            # On meta: of an optimizer that was made for parameters on meta, with state (Adagrad).
            if target is None or target.is_meta:
                target = state_like(targets.parameters[parameter], to_torch(item.slot.dtype))
            tensors[Key(optimizer_indices[parameter], parameter, entry)] = target
        return tensors

    def bind(self, targets: OptimizerTargets, tensors: Mapping[Key, torch.Tensor]) -> list[str]:
        """Set the optimizers' settings and state. Return the trained parameters that then have no state."""
        optimizer_indices, stateless = targets.optimizer_indices, _stateless(self.agreed)
        scalars: dict[Key, Any] = {}
        for name, (parameter, entry) in self.agreed.keys.items():
            if name in self.agreed.scalars and parameter in optimizer_indices:
                scalars[Key(optimizer_indices[parameter], parameter, entry)] = self.agreed.scalars[name]
        # In the order of OptimizerTargets.groups, which have been matched.
        present = [group for bound in targets.bounds for group in bound.optimizer.param_groups]
        for group, source in zip(present, self.groups.source_groups, strict=True):
            if source is not None:
                set_group(group, self.agreed.settings[source])
        for bound in targets.bounds:
            bound.rebind(targets.parameters, tensors, scalars)
            # After rebind, which keeps the present state of parameters that get none.
            for name in stateless & targets.parameters.keys():
                bound.optimizer.state.pop(targets.parameters[name], None)
        # With state: what was set, and what had state before and was not cleared.
        unchanged = {key.parameter for key in targets.keys.values()} - stateless
        stepped = {key.parameter for key in [*tensors, *scalars]} | unchanged
        return [
            name for name in optimizer_indices if name not in stepped and targets.parameters[name].requires_grad
        ]


def match_optimizer_state(
    world: World,
    targets: OptimizerTargets,
    state: ParsedState,
    provided: Mapping[str, matching.SourceTensors],
    consent: Consent,
) -> OptimizerMatch:
    """Match entries of a state, described by ``provided``, with entries of the optimizers.

    Collective: yes.

    Raises:
        KeyMismatchError: the state belongs to other optimizers, entries are missing, unexpected or mismatched, or a
            group has no counterpart in the state.
        RankMismatchError: ranks provide different states.
    """
    agreed, provided_by = _agree_on_state(world, state)
    with world.collective("match optimizer states"):
        # First: entries of another class of optimizer would all be missing and unexpected.
        _require_same_kind(targets, agreed)
        # Also parameters with state in no group, which are unexpected.
        stateful = list(dict.fromkeys(parameter for parameter, _ in agreed.keys.values()))
        groups = matching.match_groups(targets.groups, agreed.groups, stateful, consent)
        matched = _match(targets, agreed, groups, provided, consent, world.global_ranks)
        return OptimizerMatch(agreed, provided_by, groups, matched)
