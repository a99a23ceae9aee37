"""Gets and sets the state of optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.consents import Consent
from shardwise.core.errors import ShardingError
from shardwise.core.reports import StateReport
from shardwise.fsdp.named_tensors import TensorRef, collect_tensors, unwrap
from shardwise.fsdp.optimizer_states_by_name import ParsedState, build_state_dict, class_name, copy_value, read
from shardwise.fsdp.rebind import Bound, Scalar, bind_optimizers, has_rank_local_state
from shardwise.ranks.call_arguments import get_world
from shardwise.ranks.world import Clock, World, repr_digest
from shardwise.state.model_states import make_state_report
from shardwise.state.optimizer_fit import KEEP_IT_APART, OptimizerTargets, match_optimizer_state
from shardwise.state.state_values import ProvidedValues, StateOptions, Values, agree_on_arguments, require_values
from shardwise.transfer import matching
from shardwise.transfer.checksums import as_bytes
from shardwise.transfer.memory import staging_device
from shardwise.transfer.move import gather
from shardwise.transfer.move_plan import StateForm, receivers
from shardwise.transfer.replicas import equal_on_all, require_alike_models


@dataclass(frozen=True)
class CollectedOptimizers:
    """State of optimizers by label, equal on all ranks. ``device`` is the device of staging buffers."""

    bounds: list[Bound]
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Scalar]
    device: torch.device

    def state_dict(self) -> dict[str, Any]:
        """Return the state by the names of parameters, sharing the optimizers' tensors."""
        tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
        return build_state_dict(self.bounds, {**tensors, **self.scalars})


def collect_optimizers(
    world: World, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], what: str, options: StateOptions
) -> CollectedOptimizers:
    """Collect the state of optimizers, and compare replicas between ranks. Collective: yes.

    ``what`` names them in messages.

    Raises:
        ConfigError, ShardingError, RankMismatchError: as in
            :func:`~shardwise.state.optimizer_states.get_optimizer_state_dict`.
    """
    refs, bounds = _bind(world, model, optimizers)
    tensors, scalars = _state_by_label(world, bounds)
    with world.collective("check for values"):
        require_values(tensors, what)
    device = staging_device(refs, tensors.values())
    # Numbers are compared as tensors of their bytes: every rank has them, as replicas.
    compared = dict(tensors)
    for name, value in scalars.items():
        compared[name] = value if isinstance(value, torch.Tensor) else as_bytes(value)
    # Only the comparison is used: optimizers have no buffers, of which it would return copies.
    equal_on_all(world, compared, (), budget_bytes=options.budget_bytes, device=device)
    return CollectedOptimizers(bounds, tensors, scalars, device)


def collect_optimizer_targets(
    world: World, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> OptimizerTargets:
    """Return optimizers whose state is to be set. Collective: yes.

    Raises:
        ConfigError, ShardingError, RankMismatchError: as in :func:`set_optimizer_state_dict`.
    """
    return OptimizerTargets.from_optimizers(*_bind(world, model, optimizers))


def set_optimizer_values(
    world: World,
    targets: OptimizerTargets,
    state: ParsedState,
    values: Values,
    *,
    consent: Consent,
    options: StateOptions,
    clock: Clock,
) -> StateReport:
    """Set the state of optimizers: this rank's part of a state, with the values of its tensors.

    Collective: yes.
    Memory, errors: as in :func:`set_optimizer_state_dict`.
    """
    # The last check: nothing has been changed so far.
    with clock.phase("agree"):
        fitting = match_optimizer_state(world, targets, state, values.describe(world), consent)
        matched = fitting.matched
    with clock.phase("exchange"):
        # Existing tensors are written in place. Missing ones get memory here, and are bound at the end.
        with world.collective("find the tensors to restore"):
            tensors = fitting.allocate_targets(targets)
        by_label = {key.label: tensor for key, tensor in tensors.items()}
        device = staging_device(targets.refs, tensors.values())
        traffic = values.copy_into(world, matched, by_label, budget_bytes=options.budget_bytes, device=device)
    with clock.phase("finish"), world.collective("bind the optimizer"):
        without_state = fitting.bind(targets, tensors)
    return make_state_report(
        world,
        values,
        traffic,
        clock,
        set_names=tuple(by_label),
        missing=fitting.missing,
        unexpected=fitting.unexpected,
        mismatched=matched.mismatched,
        cast=matched.cast,
        without_state=tuple(without_state),
        provided_by=fitting.provided_by,
    )


def _bind(
    world: World, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> tuple[list[TensorRef], list[Bound]]:
    """Return the tensors of a model and its optimizers, after a comparison between ranks. Collective: yes."""
    if isinstance(optimizers, Optimizer):
        optimizers = (optimizers,)
    with world.collective("collect the tensors"):
        refs = collect_tensors(model)
        bounds = bind_optimizers(optimizers, refs, KEEP_IT_APART)
        for bound in bounds:
            if has_rank_local_state(bound.optimizer):
                raise ShardingError(
                    f"{class_name(bound.optimizer)}: its state is rank-local (8-bit, 4-bit or factored). "
                    "Save and restore it with a Checkpointer, on the same number of ranks"
                )
    require_alike_models(world, refs, bounds)
    return refs, bounds


def _state_by_label(world: World, bounds: Sequence[Bound]) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
    """Return optimizer state by label: tensors, and other values, sorted. Collective: yes.

    The order of the optimizer's own dicts may differ between ranks: torch's ``set_optimizer_state_dict`` leaves
    another order on the first rank.

    Raises:
        RankMismatchError: ranks hold state of other names.
    """
    tensors = {key.label: tensor for bound in bounds for key, tensor in bound.tensors.items()}
    scalars = {key.label: value for bound in bounds for key, value in bound.scalars.items()}
    # Sorted, because gathers and comparisons pair the entries of ranks by their order.
    tensors, scalars = dict(sorted(tensors.items())), dict(sorted(scalars.items()))
    world.require_equal(repr_digest([*tensors, *scalars]), "the list of optimizer state")
    return tensors, scalars


@torch.no_grad()
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    form: StateForm = "full",
    *,
    options: StateOptions = StateOptions(),  # noqa: B008
) -> dict[str, Any]:
    """Return the state of a model's optimizers, by the names of the plain model's parameters.

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
        options: budget, process group, timeouts.

    Returns:
        The state. An empty dict on a rank that ``form`` excludes.

    Raises:
        ConfigError: an argument cannot be honored.
        ShardingError: parameters are not the model's or are in two groups, or a state value has not the
            parameter's shape and is neither a DTensor nor a number.
        RankMismatchError: ranks have different models or optimizers, or different values of replicas.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    model = unwrap(model)
    with get_world(options, "get_optimizer_state_dict") as world, torch.device("cpu"):
        agree_on_arguments(world, get_optimizer_state_dict, {"form": form}, options)
        collected = collect_optimizers(world, model, optimizers, "the optimizers", options)
        if form == "sharded":
            return collected.state_dict()
        tensors = gather(world, collected.tensors, form, budget_bytes=options.budget_bytes, device=collected.device)
        # After the gather, in which every rank takes part.
        if world.rank not in receivers(form, world.size):
            return {}
        scalars = {name: copy_value(value) for name, value in collected.scalars.items()}
        return build_state_dict(collected.bounds, {**tensors, **scalars})


@torch.no_grad()
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    state: Mapping[str, Any] | None,
    *,
    on_missing: matching.OnFault = "error",
    on_unexpected: matching.OnFault = "error",
    on_mismatched: matching.OnFault = "error",
    options: StateOptions = StateOptions(),  # noqa: B008
) -> StateReport:
    """Set the settings and the state of a model's optimizers, by the names of parameters.

    The layout is that of :func:`get_optimizer_state_dict`, with whole tensors or DTensors of any sharding, on every
    rank, or on some and ``None`` (or nothing) on the others. A parameter may have any of its names. Groups are
    identified by their parameters in any order, and get all settings of the state, learning rates included.

    Missing state is created without a step, sharded like its parameter, in the given dtype or in the parameter's if
    that is wider. Existing state keeps its dtype. Parameters without state in either have none
    afterwards (``report.without_state``), as do all parameters if the state is from before the first step.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: the new state, and ``options.budget_bytes``.

    Args:
        model: whose parameters the optimizers hold.
        optimizers: one, or several in the same order on every rank.
        state: a state in this layout.
        on_missing: ``Ignore(only=...)`` for parameters that no group of the state has, and for state that the
            optimizer has and the given state does not (as in ``"layer.weight: exp_avg"``): these are unchanged.
        on_unexpected: ``Ignore(only=...)`` for parameters in the state that the optimizers do not hold.
        on_mismatched: ``Ignore(only=...)`` for state of another shape, which is left out.
        options: budget, process group, timeouts.

    Raises:
        ConfigError: an argument cannot be honored.
        KeyMismatchError: the state belongs to other optimizers, entries are missing, unexpected or mismatched, or a
            group has no counterpart in the state.
        RankMismatchError: ranks have different models or optimizers, or provide different states.
        ShardingError: as in :func:`get_optimizer_state_dict`, or the state has tensors on meta.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. All but the last come before anything is changed.
    """
    model = unwrap(model)
    clock = Clock()
    consent = Consent(on_missing, on_mismatched, on_unexpected)
    with get_world(options, "set_optimizer_state_dict") as world, torch.device("cpu"):
        with clock.phase("agree"):
            arguments = {"on_missing": on_missing, "on_unexpected": on_unexpected, "on_mismatched": on_mismatched}
            agree_on_arguments(world, set_optimizer_state_dict, arguments, options)
            targets = collect_optimizer_targets(world, model, optimizers)
            with world.collective("parse the state"):
                parsed = read(state, targets.first_names, targets.shapes)
        values = ProvidedValues(parsed.tensors)
        return set_optimizer_values(world, targets, parsed, values, consent=consent, options=options, clock=clock)
