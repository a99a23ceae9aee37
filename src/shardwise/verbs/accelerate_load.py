"""``load_accelerate_model``, ``load_accelerate_optimizer``: what accelerate saved under FSDP, of either version."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines.arguments import world_of
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.states.agreed import StateOptions
from shardwise.interchange.accelerate_reading import FilesSource, read_model, read_optimizer
from shardwise.models.optimizers.optimizer_state import ByName, ParameterOrder
from shardwise.models.selection import Everything, Selection
from shardwise.models.view import without_compile
from shardwise.planning.loads.load_plan import Refuse
from shardwise.planning.states.matching import OnFault, Tolerance
from shardwise.report.state_report import StateReport


@torch.no_grad()
def load_accelerate_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    number: int = 0,
    only: Selection = Everything(),  # noqa: B008
    on_missing: OnFault = Refuse(),  # noqa: B008
    on_unexpected: OnFault = Refuse(),  # noqa: B008
    on_mismatched: OnFault = Refuse(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> StateReport:
    """Give a model the values that accelerate saved under FSDP, of version 1 or 2, in any of its forms.

    Every rank reads its own bytes, on as many ranks as there are, whoever saved; but files of ranks are read by as
    many ranks as wrote them. Values are cast as :func:`~shardwise.verbs.state.set_model_state` does. Nothing that a
    file says is run.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: ``options.budget_bytes``.

    Args:
        model: any module, sharded or not; what is on meta gets memory.
        path: the folder that holds models and optimizers, or the model's own file or folder in it.
        number: of the model among those in the folder.
        only: ``AdapterOnly()`` for an adapter of PEFT's, by PEFT's names or the model's.
        on_missing: ``Ignore(only=...)`` for tensors that may keep their values.
        on_unexpected: ``Ignore(only=...)`` for names that the model does not know.
        on_mismatched: ``Ignore(only=...)`` for tensors that may keep their values where the shape differs.
        options: budget, process group, patience.

    Raises:
        ConfigError: an argument cannot be honoured; the model is there in several forms.
        CoverageError: missing, unexpected or mismatched tensors, all at once.
        DisagreementError: ranks have different models, or files of ranks that do not fit together.
        FormatError: what is there is not accelerate's, was not completed, holds more than data, or is of a form
            that cannot be read (LOCAL_STATE_DICT of FSDP1).
        PlacementError: files of ranks are of another number of ranks.
        StorageError: bytes could not be read.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    model = without_compile(model)
    clock = Clock()
    source = FilesSource(Path(path), number, Tolerance(on_missing, on_unexpected, on_mismatched), options)
    with world_of(options, "load_accelerate_model") as world, torch.device("cpu"):
        with clock.phase("agree"):
            source.agree(world, only)
        return read_model(world, model, source, only, clock)


@torch.no_grad()
def load_accelerate_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    path: str | os.PathLike[str],
    *,
    number: int = 0,
    order: ParameterOrder = ByName(),  # noqa: B008
    on_missing: OnFault = Refuse(),  # noqa: B008
    on_unexpected: OnFault = Refuse(),  # noqa: B008
    on_mismatched: OnFault = Refuse(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> StateReport:
    """Give an optimizer what accelerate saved of one, in any of its forms, or a file of ``optimizer.state_dict()``.

    As :func:`~shardwise.verbs.optimizer_state.set_optimizer_state`, with the reading of
    :func:`load_accelerate_model`, whose errors it has, too.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: needs no state, and takes no step.
        path: the folder that holds models and optimizers, or the optimizer's own file or folder in it.
        number: of the optimizer among those in the folder.
        order: ``ByName()``; or ``ByPosition()`` for a state that has numbers for parameters and does not name them.
        on_missing: as of :func:`~shardwise.verbs.optimizer_state.set_optimizer_state`.
        on_unexpected: likewise.
        on_mismatched: likewise.
        options: budget, process group, patience.

    Raises:
        ConfigError: the state has numbers in place of names, and ``order`` does not say what they are.
    """
    model = without_compile(model)
    clock = Clock()
    source = FilesSource(Path(path), number, Tolerance(on_missing, on_unexpected, on_mismatched), options)
    with world_of(options, "load_accelerate_optimizer") as world, torch.device("cpu"):
        with clock.phase("agree"):
            source.agree(world, order)
        return read_optimizer(world, model, optimizer, source, order, clock)
