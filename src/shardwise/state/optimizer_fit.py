"""Matches a state of optimizers with the optimizers that it is set to: parameter groups, settings, entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
from shardwise.fsdp.torch_private import in_memory, to_torch
from shardwise.ranks.world import World
from shardwise.transfer import matching


@dataclass(frozen=True, slots=True)
class OptimizerTargets:
    """Optimizers of this rank whose state is to be set, and the tensors of their model.

    ``keys`` are the values that the optimizers have now, by label.
    """

    model_tensors: Sequence[TensorRef]
    bounds: list[Bound]
    parameters: dict[str, nn.Parameter]
    first_names: dict[str, str]
    keys: dict[str, Key]

    @classmethod
    def from_optimizers(cls, model_tensors: Sequence[TensorRef], bounds: list[Bound]) -> OptimizerTargets:
        return cls(
            model_tensors,
            bounds,
            {item.fqn: item.tensor for item in model_tensors if isinstance(item.tensor, nn.Parameter)},
            {name: item.fqn for item in model_tensors for name in item.names},
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
    """Return the groups and scalars of the first rank with a state, and the ranks that have one. Collective: yes.

    Raises:
        RankMismatchError: ranks provide state of different parameters, or different groups.
    """
    # Without the tensors, which stay on the ranks that provide them until their values are moved.
    states = world.all_gather_object(replace(state, tensors={}))
    providers = [rank for rank, provided in enumerate(states) if provided]
    if not providers:
        return ParsedState(), ()
    first = states[providers[0]]
    for rank in providers[1:]:
        other = states[rank]
        if (first.groups, first.keys, set(first.scalars)) != (other.groups, other.keys, set(other.scalars)):
            differing = abbreviate(sorted(first.keys.keys() ^ other.keys.keys()))
            what = ", ".join(differing) or "the parameter groups differ"
            raise RankMismatchError(
                f"ranks {world.global_ranks[providers[0]]} and {world.global_ranks[rank]} provide different states "
                f"of optimizers: {what}. Pass the same on every rank, or all of it on some and None on the others"
            )
    return first, tuple(providers)


def _require_same_kind(targets: OptimizerTargets, agreed: ParsedState) -> None:
    """Require that the state is of the same optimizer classes, judging by their settings.

    Raises:
        KeyMismatchError: naming the settings that differ.
    """
    stored = {
        name: ("", settings)
        for names, settings in zip(agreed.groups, agreed.settings, strict=True)
        for name in names
    }
    if differences := list_differences(by_parameter(targets.bounds), stored):
        shown = "\n  ".join(abbreviate(differences))
        raise KeyMismatchError(
            f"the state is of other optimizers than these:\n  {shown}\nMake the optimizers as they were made when "
            "it was saved"
        )


def _match(
    targets: OptimizerTargets,
    agreed: ParsedState,
    groups: matching.GroupMatch,
    provided_by_rank: Sequence[Mapping[str, matching.SourceTensor]],
    consent: Consent,
    global_ranks: Sequence[int],
) -> matching.Match:
    """Match the tensors of a state with slots for them, by label.

    Scalars of the state need no slots. Entries that the optimizers have and the state has not are missing.
    """
    unexpected, missing = set(groups.unexpected), {*groups.missing, *_find_stateless(agreed)}
    provided_by_rank = [
        {name: item for name, item in provided.items() if agreed.keys[name][0] not in unexpected}
        for provided in provided_by_rank
    ]
    provided = next((provided for provided in provided_by_rank if provided), {})
    slots: list[matching.StateSlot] = []
    for name, item in provided.items():
        shape, dtype = _choose_shape_and_dtype(targets, name, agreed.keys[name][0], item)
        slots.append(matching.StateSlot((name,), shape, dtype))
    # Slots that nothing fits, so that the consent decides about them. Parameters without state in agreed have none.
    for name, key in targets.keys.items():
        if name not in agreed.keys and key.parameter not in missing:
            slots.append(matching.StateSlot((name,), (), DType.OTHER))
    return matching.match(slots, provided_by_rank, consent, global_ranks)


def _find_stateless(agreed: ParsedState) -> set[str]:
    """Return the parameters that lose their state: all of them, if the state is from before the first step."""
    return set() if agreed.keys else {name for names in agreed.groups for name in names}


def _choose_shape_and_dtype(
    targets: OptimizerTargets, name: str, parameter: str, item: matching.SourceTensor
) -> tuple[tuple[int, ...], DType]:
    """Return the shape and dtype of an entry of the optimizers.

    An entry that exists keeps both. A new one has the parameter's shape, and the wider of the two dtypes.
    """
    present = targets.tensor(name)
    if present is not None:
        return tuple(present.shape), in_memory(present.dtype)
    target = targets.parameters[parameter]
    shape = tuple(target.shape)
    # Other dtypes (integers, 8-bit floats) have no wider one: the state's is kept.
    if item.dtype is DType.OTHER or item.dtype.kind != "float" or item.dtype.bits < 16:
        return shape, item.dtype
    wider = torch.promote_types(to_torch(item.dtype), target.dtype)
    return shape, in_memory(wider) if wider.is_floating_point else item.dtype


@dataclass(frozen=True, slots=True)
class OptimizerMatch:
    """All that is decided about a state before any optimizer is changed.

    Attributes:
        agreed: groups, settings and scalars of the state, equal on all ranks.
        provided_by: the ranks that provide the state.
        groups: the group of the state for each group of the optimizers.
        matched: the tensors of the state, with the slots that they fill.
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
        """Return the target tensors: those that the optimizers already have, otherwise new memory."""
        optimizer_indices = targets.optimizer_indices
        tensors: dict[Key, torch.Tensor] = {}
        for item in self.matched.tensors:
            parameter, entry = self.agreed.keys[item.name]
            tensor = targets.tensor(item.name)
            if tensor is None:
                tensor = state_like(targets.parameters[parameter], to_torch(item.slot.dtype))
            tensors[Key(optimizer_indices[parameter], parameter, entry)] = tensor
        return tensors

    def bind(self, targets: OptimizerTargets, tensors: Mapping[Key, torch.Tensor]) -> list[str]:
        """Set the optimizers' settings and state. Return the trained parameters that then have no state."""
        optimizer_indices, stateless = targets.optimizer_indices, _find_stateless(self.agreed)
        scalars = {
            Key(optimizer_indices[parameter], parameter, entry): self.agreed.scalars[name]
            for name, (parameter, entry) in self.agreed.keys.items()
            if name in self.agreed.scalars and parameter in optimizer_indices
        }
        present = [group for bound in targets.bounds for group in bound.optimizer.param_groups]
        for group, source in zip(present, self.groups.source_groups, strict=True):
            if source is not None:
                set_group(group, self.agreed.settings[source])
        for bound in targets.bounds:
            bound.rebind(targets.parameters, tensors, scalars)
            for name in stateless & targets.parameters.keys():
                bound.optimizer.state.pop(targets.parameters[name], None)
        unchanged = {key.parameter for key in targets.keys.values()} - stateless
        stateful = {key.parameter for key in [*tensors, *scalars]} | unchanged
        return [
            name for name in optimizer_indices if name not in stateful and targets.parameters[name].requires_grad
        ]


def match_optimizer_state(
    world: World,
    targets: OptimizerTargets,
    state: ParsedState,
    provided_by_rank: Sequence[Mapping[str, matching.SourceTensor]],
    consent: Consent,
) -> OptimizerMatch:
    """Match entries of a state, described by ``provided_by_rank``, with entries of the optimizers.

    Collective: yes.

    Raises:
        KeyMismatchError: the state belongs to other optimizers, entries are missing, unexpected or mismatched, or a
            group has no counterpart in the state.
        RankMismatchError: ranks provide different states.
    """
    agreed, provided_by = _agree_on_state(world, state)
    with world.collective("match optimizer states"):
        return _match_all(targets, agreed, provided_by, provided_by_rank, consent, world.global_ranks)


def _match_all(
    targets: OptimizerTargets,
    agreed: ParsedState,
    provided_by: tuple[int, ...],
    provided_by_rank: Sequence[Mapping[str, matching.SourceTensor]],
    consent: Consent,
    global_ranks: Sequence[int],
) -> OptimizerMatch:
    _require_same_kind(targets, agreed)
    stateful = list(dict.fromkeys(parameter for parameter, _ in agreed.keys.values()))
    groups = matching.match_groups(targets.groups, agreed.groups, stateful, consent)
    matched = _match(targets, agreed, groups, provided_by_rank, consent, global_ranks)
    return OptimizerMatch(agreed, provided_by, groups, matched)
