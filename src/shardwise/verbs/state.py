"""``model_state``, ``set_model_state``: a model's tensors handed out, whole or as shards, and taken in again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from shardwise.engines.arguments import world_of
from shardwise.engines.model_states import set_values, take_out
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.states.agreed import BroughtValues, StateOptions, by_canonical_names, require_same_call
from shardwise.models.selection import Everything, Selection
from shardwise.models.view import without_compile
from shardwise.planning.loads.load_plan import OnDiffering, Refuse, TakeFirst
from shardwise.planning.states.forms import FullState, StateForm, require_form
from shardwise.planning.states.matching import OnFault, Tolerance
from shardwise.report.state_report import StateReport


@torch.no_grad()
def model_state(
    model: nn.Module,
    form: StateForm = FullState(),  # noqa: B008 - frozen
    *,
    only: Selection = Everything(),  # noqa: B008
    on_differing_buffers: OnDiffering = TakeFirst(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a model, by the names of the plain model.

    They are those of ``model.state_dict()`` before the model was compiled, checkpoint-wrapped or sharded, in this
    order. Tied parameters are there under each of their names, as one tensor.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: for ``FullState``, ``options.budget_bytes``, and on the ranks that get the tensors these, on the
    CPU. For ``ShardedState`` none: the tensors share the memory of the model, but for buffers that differ.

    Args:
        model: any module, sharded or not; FSDP2 groups that are gathered are resharded.
        form: ``FullState(on=FirstRank())``, ``FullState(on=EveryRank())``, or ``ShardedState()``.
        only: ``Everything()``, or ``AdapterOnly()`` for an adapter of PEFT's, under the names of PEFT's files.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are the first rank's in every form, ``TakeFirst()``, or an error, ``Refuse()``.
        options: budget, process group, patience.

    Returns:
        The tensors, without autograd; nothing on a rank that ``form`` leaves out.

    Raises:
        ConfigError: an argument cannot be honoured.
        PlacementError: tensors are on meta, or are placed neither as shards nor as replicas.
        DisagreementError: ranks have different models, or different values of parameters that several hold.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    model = without_compile(model)
    with world_of(options, "model_state") as world, torch.device("cpu"):
        world.together(lambda: require_form(form))
        require_same_call(world, form, only, on_differing_buffers, options=options)
        return take_out(world, model, only, on_differing_buffers, options).in_form(world, form, options)


@torch.no_grad()
def set_model_state(
    model: nn.Module,
    state: Mapping[str, torch.Tensor] | None,
    *,
    only: Selection = Everything(),  # noqa: B008
    on_missing: OnFault = Refuse(),  # noqa: B008
    on_unexpected: OnFault = Refuse(),  # noqa: B008
    on_mismatched: OnFault = Refuse(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> StateReport:
    """Give the parameters and persistent buffers of a model the values of a state, in place.

    A state is whole tensors or DTensors of any sharding, on every rank, or on some and ``None`` (or nothing) on the
    others. Who has whole tensors takes its own slices of them, and nothing is compared; the others get their shards
    sent, and no more. Values are cast to the dtype of the model's tensor (``report.cast``); integers, and numbers
    of 8 bits, are not. Of tied parameters one name is enough. Tensors on meta get memory; the buffers that no state
    has are then computed by the model's initialisers, as :func:`~shardwise.verbs.load.load` has it
    (``report.recomputed``), and what nothing computes stays on meta (``report.on_meta``).

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: ``options.budget_bytes``.

    Args:
        model: any module, sharded or not.
        state: by names with or without those of wrappers; with ``AdapterOnly``, the names of PEFT's files, or
            those of the model.
        only: what the state is of.
        on_missing: ``Refuse()``, or ``Ignore(only=...)`` for tensors that may keep their values.
        on_unexpected: ``Ignore(only=...)`` for names in the state that the model does not know.
        on_mismatched: ``Ignore(only=...)`` for tensors that may keep their values where the shape differs.
        options: budget, process group, patience.

    Raises:
        ConfigError: an argument cannot be honoured.
        CoverageError: missing, unexpected or mismatched tensors, all at once; ties that come with two values.
        DisagreementError: ranks have different models, or bring different states.
        PlacementError: the state has tensors on meta.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. All but the last come before anything is changed.
    """
    model = without_compile(model)
    clock = Clock()
    tolerance = Tolerance(on_missing, on_unexpected, on_mismatched)
    with world_of(options, "set_model_state") as world, torch.device("cpu"):
        with clock.phase("agree"):
            require_same_call(world, only, tolerance, options=options)
            given = world.together(lambda: by_canonical_names(state, "state"))
        report, told = set_values(
            world, model, BroughtValues(given), only=only, tolerance=tolerance, options=options, clock=clock
        )
        return replace(report, brought_by=tuple(rank for rank, found in enumerate(told) if found))
