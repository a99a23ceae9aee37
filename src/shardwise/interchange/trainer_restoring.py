"""A training of the Trainer's to go on from: looked at as a whole, then restored part by part."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines.arguments import hints_of, require_meant, world_of
from shardwise.engines.load_plan import LoadOptions
from shardwise.engines.loading import load_checkpoint
from shardwise.engines.model_states import set_values, stored_values
from shardwise.execution.supply import StateOptions, require_same_call
from shardwise.execution.world import Clock, World
from shardwise.interchange.accelerate_reading import FilesSource, read_model, read_optimizer
from shardwise.interchange.trainer_folder import (
    SavedNumbers,
    Scheduler,
    TrainerFolder,
    numbers_in,
    restore_schedule,
    schedule_in,
)
from shardwise.models.optimizer_state import ParameterOrder
from shardwise.models.selection import AdapterOnly, has_adapters
from shardwise.models.view import without_compile
from shardwise.planning.load_plan import Consent
from shardwise.planning.matching import OnFault, Tolerance
from shardwise.report.reports import LoadReport, StateReport
from shardwise.report.save_reports import TrainerReport

_NOT_READ = {
    "training_args.bin": "a pickle that runs code when it is read; give the arguments anew",
    "scaler.pt": "the gradient scaler's scale; it starts from its first value",
}


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """The arguments of :func:`load_trainer_checkpoint`, beside the model."""

    checkpoint: Path
    optimizer: Optimizer | None
    scheduler: Scheduler | None
    load_rng_state: bool
    adapter: str
    order: ParameterOrder
    on_unexpected: OnFault
    options: StateOptions


@dataclass
class FoundTraining:
    """What there is to be restored, all of it looked at, before anything is changed.

    Attributes:
        folder: where it lies.
        adapter: of a PEFT model that is not in accelerate's files: the file of its adapter.
        schedule: the state of the schedule that was given.
        numbers: this rank's random numbers.
        not_restored: what is left out, and why.
    """

    folder: TrainerFolder
    adapter: Path | None
    schedule: dict[str, Any] | None = None
    numbers: SavedNumbers | None = None
    not_restored: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def load_trainer_checkpoint(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    scheduler: Scheduler | None = None,
    load_rng_state: bool = True,
    adapter: str = "default",
    order: ParameterOrder = "name",
    on_unexpected: OnFault = "error",
    options: StateOptions = StateOptions(),  # noqa: B008
) -> TrainerReport:
    """Restore model, optimizer, schedule and random numbers from a ``checkpoint-N`` of the Trainer's.

    The model's weights are taken from ``pytorch_model_fsdp*`` where there are such, else from the files of
    ``save_pretrained``; those of a PEFT model are its adapter's. The optimizer is ``optimizer.bin``,
    ``optimizer_0/`` or files of ranks, as
    :func:`~shardwise.interchange.accelerate_reading.load_accelerate_optimizer` reads them, or ``optimizer.pt``,
    which has numbers for parameters: see ``order``. Every rank reads its own bytes, on any number of ranks but for
    files of ranks.

    Whether everything is there and sound is looked at before anything is changed, but for the tensors of the
    optimizer.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: ``options.budget_bytes``; reading files of ``save_pretrained``, that of a load.

    Args:
        model: any module, sharded or not; what is on meta gets memory.
        checkpoint: the folder.
        optimizer: to be restored; made as when it was saved, needs no state.
        scheduler: to be restored, after the optimizer.
        load_rng_state: restore the state of this rank's generators of random numbers, on as many ranks as there
            were.
        adapter: of a PEFT model, which one.
        order: ``"position"`` where ``optimizer.pt`` does not name parameters, and the optimizer was made alike.
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
        Path(checkpoint), optimizer, scheduler, load_rng_state, adapter, order, on_unexpected, options
    )
    with world_of(options, "load_trainer_checkpoint") as world:
        world.together(lambda: require_meant(hints_of(load_trainer_checkpoint), {"on_unexpected": on_unexpected}))
        same = os.fspath(checkpoint), adapter, order, on_unexpected
        require_same_call(world, *same, options=options)
        with torch.device("cpu"):
            found = look(world, model, call)
        return restore(world, model, found, call)


def look(world: World, model: nn.Module, call: TrainerCall) -> FoundTraining:
    """Find out whether everything is there and sound, but for the tensors. Collective: yes.

    Raises:
        FormatError, StorageError, CoverageError: it is not.
    """
    folder = world.from_first(lambda: TrainerFolder.of(call.checkpoint))

    def find() -> FoundTraining:
        adapter = folder.weights_of(call.adapter) if has_adapters(model) and not folder.is_fsdp else None
        return FoundTraining(folder, adapter)

    found = world.together(find)
    left_out = found.not_restored
    left_out |= {name: why for name, why in _NOT_READ.items() if name in folder.names}
    found.schedule = world.together(lambda: schedule_in(folder, call.scheduler, left_out))
    found.numbers = world.together(lambda: numbers_in(folder, world, left_out, wanted=call.load_rng_state))
    if call.optimizer is not None and folder.optimizer is None:
        left_out["optimizer"] = "the checkpoint has none (save_only_model)"
    elif call.optimizer is None and folder.optimizer is not None:
        left_out["optimizer"] = "it was not given"
    left_out["position in the data"] = f"the data are not the model's; go on after {folder.step} steps"
    if has_adapters(model):
        left_out["base weights"] = "only the adapter was saved; they are as they were"
    return found


def restore(world: World, model: nn.Module, found: FoundTraining, call: TrainerCall) -> TrainerReport:
    """Restore what was found. Collective: yes.

    Memory, errors: as of :func:`load_trainer_checkpoint`.
    """
    folder = found.folder
    set_model = _set_model(world, model, found, call)
    restored = ["model"]
    set_optimizer = None
    if call.optimizer is not None and folder.optimizer is not None:
        source = FilesSource(folder.optimizer, 0, Tolerance(), call.options)
        with torch.device("cpu"):
            set_optimizer = read_optimizer(world, model, call.optimizer, source, call.order, Clock())
        restored.append("optimizer")
    scheduler, schedule = call.scheduler, found.schedule
    if scheduler is not None and schedule is not None:
        world.together(lambda: restore_schedule(folder, scheduler, schedule))
        restored.append("scheduler")
    if found.numbers is not None:
        found.numbers.set()
        restored.append("random numbers")
    return TrainerReport(
        checkpoint=str(folder.path),
        step=folder.step,
        epoch=folder.epoch,
        model=set_model,
        optimizer=set_optimizer,
        restored=tuple(restored),
        not_restored=found.not_restored,
        told={key: value for key, value in folder.state.items() if isinstance(value, (int, float, str, bool))},
    )


def _set_model(world: World, model: nn.Module, found: FoundTraining, call: TrainerCall) -> StateReport | LoadReport:
    options, folder = call.options, found.folder
    if found.adapter is None and not folder.is_fsdp:
        as_load = LoadOptions(process_group=options.process_group, patience=options.patience)
        consent = Consent(unexpected=call.on_unexpected)
        return load_checkpoint(world, model, folder.path, consent, as_load, Clock())
    only = AdapterOnly(call.adapter) if has_adapters(model) else None
    tolerance, clock = Tolerance(unexpected=call.on_unexpected), Clock()
    with torch.device("cpu"), ExitStack() as stack:
        if found.adapter is None:
            return read_model(world, model, FilesSource(folder.path, 0, tolerance, options), only, clock)
        home, file = str(found.adapter.parent), found.adapter.name
        with clock.phase("agree"):
            values = stored_values(world, home, file, options, stack)
        return set_values(world, model, values, only=only, tolerance=tolerance, options=options, clock=clock)
