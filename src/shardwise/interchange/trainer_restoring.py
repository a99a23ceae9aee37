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

from shardwise.engines.load_options import LoadOptions
from shardwise.engines.loading import LoadCall, load_checkpoint
from shardwise.engines.model_files import set_from_files, stored_values
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import StateOptions, require_same_call
from shardwise.interchange.accelerate_reading import FilesSource, read_model, read_optimizer
from shardwise.interchange.trainer_folder import (
    RandomNumbers,
    SavedNumbers,
    Scheduler,
    TrainerFolder,
    numbers_in,
    restore_schedule,
    schedule_in,
)
from shardwise.models.optimizers.optimizer_state import ParameterOrder
from shardwise.models.selection import AdapterOnly, Everything, has_adapters
from shardwise.planning.loads.load_plan import Consent
from shardwise.planning.states.matching import OnFault, Tolerance
from shardwise.report.checkpoint_report import TrainerReport
from shardwise.report.load_report import LoadReport
from shardwise.report.state_report import StateReport

_NOT_READ = {
    "training_args.bin": "a pickle that runs code when it is read; give the arguments anew",
    "scaler.pt": "the gradient scaler's scale; it starts from its first value",
}


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """What :func:`~shardwise.verbs.trainer_checkpoint.load_trainer_checkpoint` is asked for, beside the model."""

    checkpoint: Path
    optimizer: Optimizer | None
    scheduler: Scheduler | None
    random_numbers: RandomNumbers
    adapter: str
    order: ParameterOrder
    on_unexpected: OnFault
    options: StateOptions

    def agree(self, world: World) -> None:
        """Raise when ranks ask for different things. Collective: yes.

        Raises:
            DisagreementError: naming the ranks.
        """
        same = os.fspath(self.checkpoint), self.adapter, self.order, self.on_unexpected
        require_same_call(world, *same, options=self.options)


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
    found.numbers = world.together(lambda: numbers_in(folder, world, call.random_numbers, left_out))
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

    Memory, errors: as of :func:`~shardwise.verbs.trainer_checkpoint.load_trainer_checkpoint`.
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
        return load_checkpoint(world, model, LoadCall(folder.path, consent, options=as_load), Clock())
    only = AdapterOnly(call.adapter) if has_adapters(model) else Everything()
    tolerance, clock = Tolerance(unexpected=call.on_unexpected), Clock()
    with torch.device("cpu"), ExitStack() as stack:
        if found.adapter is None:
            return read_model(world, model, FilesSource(folder.path, 0, tolerance, options), only, clock)
        home, file = str(found.adapter.parent), found.adapter.name
        with clock.phase("agree"):
            values = stored_values(world, home, file, options, stack)
        return set_from_files(world, model, values, only, tolerance, options, clock)
