"""``load_trainer_checkpoint``: a folder ``checkpoint-N`` of the Hugging Face Trainer, to go on from."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines.arguments import hints_of, require_meant, world_of
from shardwise.execution.states.agreed import StateOptions
from shardwise.interchange.trainer_folder import RandomNumbers, RestoreRandom, Scheduler
from shardwise.interchange.trainer_restoring import TrainerCall, look, restore
from shardwise.models.optimizers.optimizer_state import ByName, ParameterOrder
from shardwise.models.view import without_compile
from shardwise.planning.loads.load_plan import Refuse
from shardwise.planning.states.matching import OnFault
from shardwise.report.checkpoint_report import TrainerReport


@torch.no_grad()
def load_trainer_checkpoint(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    scheduler: Scheduler | None = None,
    random_numbers: RandomNumbers = RestoreRandom(),  # noqa: B008
    adapter: str = "default",
    order: ParameterOrder = ByName(),  # noqa: B008
    on_unexpected: OnFault = Refuse(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> TrainerReport:
    """Restore model, optimizer, schedule and random numbers from a ``checkpoint-N`` of the Trainer's.

    The model's weights are taken from ``pytorch_model_fsdp*`` where there are such, else from the files of
    ``save_pretrained``; those of a PEFT model are its adapter's. The optimizer is ``optimizer.bin``,
    ``optimizer_0/`` or files of ranks, as :func:`~shardwise.verbs.accelerate_load.load_accelerate_optimizer` reads
    them, or ``optimizer.pt``, which has numbers for parameters: see ``order``. Every rank reads its own bytes, on
    any number of ranks but for files of ranks.

    Whether everything is there and sound is looked at before anything is changed, but for the tensors of the
    optimizer.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: ``options.budget_bytes``; reading files of ``save_pretrained``, that of a load.

    Args:
        model: any module, sharded or not; what is on meta gets memory.
        checkpoint: the folder.
        optimizer: to be restored; made as when it was saved, needs no state.
        scheduler: to be restored, after the optimizer.
        random_numbers: ``RestoreRandom()`` or ``LeaveRandom()``.
        adapter: of a PEFT model, which one.
        order: ``ByPosition()`` where ``optimizer.pt`` does not name parameters, and the optimizer was made alike.
        on_unexpected: ``Ignore(only=...)`` for tensors of the checkpoint that the model does not know.
        options: budget, process group, patience.

    Returns:
        The step to go on from, what was restored, and what was not, with the reasons.

    Raises:
        ConfigError, CoverageError, FormatError, StorageError and others: as of the functions named above; a
            schedule of another kind; a folder without ``trainer_state.json``.

    Every error is the same on every rank.
    """
    model = without_compile(model)
    call = TrainerCall(
        Path(checkpoint), optimizer, scheduler, random_numbers, adapter, order, on_unexpected, options
    )
    with world_of(options, "load_trainer_checkpoint") as world:
        world.together(lambda: require_meant(hints_of(load_trainer_checkpoint), {"on_unexpected": on_unexpected}))
        call.agree(world)
        with torch.device("cpu"):
            found = look(world, model, call)
        return restore(world, model, found, call)
