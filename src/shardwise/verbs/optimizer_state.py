"""``optimizer_state``, ``set_optimizer_state``: what optimizers hold, by the names of the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines.arguments import world_of
from shardwise.engines.optimizer_states import brought, set_values, take_out
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.states.agreed import StateOptions, require_same_call
from shardwise.models.view import without_compile
from shardwise.planning.loads.load_plan import Refuse
from shardwise.planning.states.forms import FullState, StateForm, require_form
from shardwise.planning.states.matching import OnFault, Tolerance
from shardwise.report.state_report import StateReport


@torch.no_grad()
def optimizer_state(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    form: StateForm = FullState(),  # noqa: B008 - frozen
    *,
    options: StateOptions = StateOptions(),  # noqa: B008
) -> dict[str, Any]:
    """The state of a model's optimizers, by the names of the plain model's parameters.

    ``{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}``, as
    ``torch.distributed.checkpoint.state_dict`` has it. A tied parameter has its first name. Parameters that have
    not been stepped have no state: no step is taken here.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: for ``FullState``, ``options.budget_bytes``, and on the ranks that get the tensors these, on the
    CPU. For ``ShardedState`` none: the tensors are the optimizers' own.

    Args:
        model: whose parameters the optimizers hold.
        optimizers: one, or several in the same order on every rank.
        form: ``FullState(on=FirstRank())``, ``FullState(on=EveryRank())``, or ``ShardedState()``.
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
    on_missing: OnFault = Refuse(),  # noqa: B008
    on_unexpected: OnFault = Refuse(),  # noqa: B008
    on_mismatched: OnFault = Refuse(),  # noqa: B008
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
    tolerance = Tolerance(on_missing, on_unexpected, on_mismatched)
    with world_of(options, "set_optimizer_state") as world, torch.device("cpu"):
        with clock.phase("agree"):
            require_same_call(world, tolerance, options=options)
        apart = brought(world, state)
        return set_values(world, model, optimizers, apart, tolerance=tolerance, options=options, clock=clock)
