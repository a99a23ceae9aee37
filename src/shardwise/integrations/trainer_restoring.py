"""Restores a training from a folder ``checkpoint-N`` of the Hugging Face Trainer."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.core.consents import Consent
from shardwise.core.errors import FormatError, KeyMismatchError, StorageError
from shardwise.core.reports import LoadReport, StateReport
from shardwise.core.save_reports import TrainerReport
from shardwise.files.accelerate_saves import MODEL, OPTIMIZER, SavedKind
from shardwise.files.local_reader import LocalReader
from shardwise.files.peft_adapter import ADAPTER_WEIGHTS
from shardwise.fsdp.named_tensors import without_compile
from shardwise.fsdp.optimizer_states_by_name import ParameterOrder, scheduler_mismatch
from shardwise.integrations.accelerate_reading import FilesSource, read_model, read_optimizer
from shardwise.loading.load import load_checkpoint
from shardwise.loading.prepare import LoadOptions, LoadRequest
from shardwise.models.selection import AdapterOnly, has_adapters
from shardwise.ranks.call_arguments import check_options, get_hints, get_world
from shardwise.ranks.world import Clock, World
from shardwise.saving.rename_journal import as_renamed
from shardwise.saving.torch_saves import load_plain
from shardwise.state.model_states import exchange_stored_experts, open_stored_values, set_model_values
from shardwise.state.state_values import StateOptions, Values, require_same_call
from shardwise.transfer.matching import OnFault

_NOT_READ = {
    "training_args.bin": "a pickle that runs code when it is read. Pass the arguments again",
    "scaler.pt": "the gradient scaler's scale; it starts from its first value",
}


@torch.no_grad()
def load_trainer_checkpoint(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    adapter: str = "default",
    order: ParameterOrder = "name",
    on_unexpected: OnFault = "error",
    options: StateOptions = StateOptions(),  # noqa: B008
) -> TrainerReport:
    """Restore model, optimizer and schedule from a ``checkpoint-N`` of the Hugging Face Trainer.

    The model's weights are read from ``pytorch_model_fsdp*`` if it exists, otherwise from the files of
    ``save_pretrained``. Those of a PEFT model are its adapter's. The optimizer is ``optimizer.bin``,
    ``optimizer_0/`` or files of ranks, as
    :func:`~shardwise.integrations.accelerate_reading.load_accelerate_optimizer` reads them, or ``optimizer.pt``,
    which has indices for parameters: see ``order``. Every rank reads its own bytes, on any number of ranks (files
    of ranks need the same number).

    Everything but the tensors of the optimizer is checked before anything is changed.

    Collective: yes, over ``options.process_group`` (default: all ranks). Memory: ``options.budget_bytes``. For
    files of ``save_pretrained``, that of a load.

    Args:
        model: any module, sharded or not. Tensors on meta get memory.
        checkpoint: the folder.
        optimizer: to restore, created as when it was saved. It needs no state.
        scheduler: to be restored, after the optimizer.
        adapter: of a PEFT model, which one.
        order: ``"position"`` if ``optimizer.pt`` does not name parameters, and the optimizer was made in the
            same way.
        on_unexpected: ``Ignore(only=...)`` for tensors of the checkpoint that the model does not have.
        options: budget, process group, timeouts.

    Returns:
        The step to resume from, the restored components, and the others with reasons.

    Raises:
        ConfigError, KeyMismatchError, FormatError, StorageError and others: as in the functions named above, for a
            schedule of another class, or for a folder without ``trainer_state.json``.

    Every error is the same on every rank.
    """
    model = without_compile(model)
    restored, set_optimizer = ["model"], None
    with get_world(options, "load_trainer_checkpoint") as world:
        with world.collective("check the options"):
            check_options(get_hints(load_trainer_checkpoint), {"on_unexpected": on_unexpected})
        require_same_call(world, os.fspath(checkpoint), adapter, order, on_unexpected, options=options)
        with torch.device("cpu"):
            with world.broadcast("open the file") as exchange:
                if world.rank == 0:
                    exchange.local = TrainerFolder.open(Path(checkpoint))
            folder: TrainerFolder = exchange.result
            is_adapter = has_adapters(model) and not folder.is_fsdp
            with world.collective("parse the schedule"):
                file = folder.adapter_file(adapter) if is_adapter else None
            left_out = _never_restored(folder, model)
            with world.collective("read the schedule"):
                schedule = schedule_in(folder, scheduler, left_out)
        set_model = _set_model(world, model, folder, file, adapter, on_unexpected, options)
        if optimizer is None and folder.optimizer is not None:
            left_out["optimizer"] = "it was not given"
        elif optimizer is not None and folder.optimizer is None:
            left_out["optimizer"] = "the checkpoint has none (save_only_model)"
        elif optimizer is not None and folder.optimizer is not None:
            files = FilesSource(folder.optimizer, 0, Consent(), options)
            with torch.device("cpu"):
                set_optimizer = read_optimizer(world, model, optimizer, files, order, Clock())
            restored.append("optimizer")
        if scheduler is not None and schedule is not None:
            with world.collective("restore the schedule"):
                restore_schedule(folder, scheduler, schedule)
            restored.append("scheduler")
    return TrainerReport(
        checkpoint=str(folder.path),
        step=folder.step,
        epoch=folder.epoch,
        model=set_model,
        optimizer=set_optimizer,
        restored=tuple(restored),
        not_restored=left_out,
        trainer_state={key: value for key, value in folder.state.items() if isinstance(value, int | float | str)},
    )


def _never_restored(folder: TrainerFolder, model: nn.Module) -> dict[str, str]:
    """Return the components that are never restored, with reasons."""
    found = {name: why for name, why in _NOT_READ.items() if name in folder.names}
    found["position in the data"] = f"the data are not the model's. Skip the batches of {folder.step} steps"
    if any(name.startswith("rng_state") for name in folder.names):
        found["random numbers"] = "they belong to the Trainer's order of data and number of ranks. Seed the ranks"
    if has_adapters(model):
        found["base weights"] = "only the adapter was saved; they are as they were"
    return found


def _set_model(
    world: World,
    model: nn.Module,
    folder: TrainerFolder,
    file: Path | None,
    adapter: str,
    on_unexpected: OnFault,
    options: StateOptions,
) -> StateReport | LoadReport:
    """Set a model's weights, or of a PEFT model its adapter's in ``file``. Collective: yes."""
    if file is None and not folder.is_fsdp:
        as_load = LoadOptions(process_group=options.process_group, timeouts=options.timeouts)
        request = LoadRequest(consent=Consent(unexpected=on_unexpected), options=as_load)
        return load_checkpoint(world, model, folder.path, request, Clock())
    only = AdapterOnly(adapter) if has_adapters(model) else None
    consent, clock = Consent(unexpected=on_unexpected), Clock()
    with torch.device("cpu"), ExitStack() as stack:
        if file is None:
            return read_model(world, model, FilesSource(folder.path, 0, consent, options), only, clock)
        with clock.phase("agree"):
            values: Values = open_stored_values(world, str(file.parent), file.name, options, stack)
            values = exchange_stored_experts(world, model, values, adapter, str(file.parent))
        return set_model_values(world, model, values, only=only, consent=consent, options=options, clock=clock)


STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILE = "optimizer.pt"
_MAX_STATE_BYTES = 500_000_000
_MAX_EPOCH = 1e18


@dataclass(frozen=True, slots=True)
class TrainerFolder:
    """Content of a Trainer's checkpoint folder, read once.

    Attributes:
        path: of the folder.
        names: names of the files in it.
        state: ``trainer_state.json``, whose ``global_step`` is a count.
    """

    path: Path
    names: tuple[str, ...]
    state: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> TrainerFolder:
        """Raises StorageError if it cannot be listed, FormatError if it is not such a folder."""
        return cls(path, _names_in(path), _read_state(path))

    @property
    def step(self) -> int:
        """The optimizer's steps that have been taken."""
        return int(self.state["global_step"])

    @property
    def epoch(self) -> float:
        """Number of completed epochs."""
        return float(self.state.get("epoch") or 0.0)

    @property
    def is_fsdp(self) -> bool:
        """True if the model is in accelerate's files."""
        return _has(MODEL, self.names)

    @property
    def optimizer(self) -> Path | None:
        """Path of the optimizer's state: in accelerate's files or in the Trainer's own."""
        if _has(OPTIMIZER, self.names):
            return self.path
        return self.path / _OPTIMIZER_FILE if _OPTIMIZER_FILE in self.names else None

    def adapter_file(self, adapter: str) -> Path:
        """The file of a PEFT model's adapter.

        Raises:
            FormatError: there is none.
        """
        folder = self.path if adapter == "default" else self.path / adapter
        file = next((folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
        if file is None:
            raise FormatError(
                f"{folder}: has neither {' nor '.join(ADAPTER_WEIGHTS)}, nor {MODEL.stem}* beside it, and the "
                "model has adapters. Check the path, and the adapter's name"
            )
        return file


def _has(kind: SavedKind, names: tuple[str, ...]) -> bool:
    return any(name in (kind.file(0), kind.folder(0)) or kind.parse_rank(name, 0) is not None for name in names)


def _names_in(folder: Path) -> tuple[str, ...]:
    try:
        with as_renamed(folder) as seen:
            return tuple(sorted(os.listdir(seen)))
    except OSError as error:
        raise StorageError(f"{folder}: listing it failed, {error.strerror}. Check the path") from error


def _read_state(folder: Path) -> dict[str, Any]:
    """``trainer_state.json``.

    Raises:
        FormatError: there is none, or its step is no count.
    """
    what = f"{STATE_FILE} in {folder}"
    if not (folder / STATE_FILE).is_file():
        inner = sorted(place.name for place in folder.glob("checkpoint-*") if (place / STATE_FILE).is_file())
        hint = (
            f"Pass one of {', '.join(inner[:8])} in it" if inner else "Pass a folder checkpoint-N of the Trainer's"
        )
        raise FormatError(f"{folder}: has no {STATE_FILE}. {hint}")
    with LocalReader(folder) as reader:
        nbytes = reader.size(STATE_FILE)
        if nbytes > _MAX_STATE_BYTES:
            raise FormatError(f"{what}: it has {nbytes} bytes, {_MAX_STATE_BYTES} is the limit")
        content = reader.read(STATE_FILE, 0, nbytes)
    try:
        state = json.loads(content)  # the Trainer logs NaN, so this is not strict
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: is not JSON ({error}). The checkpoint is damaged. Pass another one") from error
    if not isinstance(state, dict):
        raise FormatError(f"{what}: holds a {type(state).__name__}, not an object")
    step, epoch = state.get("global_step"), state.get("epoch") or 0
    if type(step) is not int or step < 0 or not isinstance(epoch, (int, float)) or not abs(epoch) < _MAX_EPOCH:
        raise FormatError(f"{what}: global_step {step!r} and epoch {epoch!r} are no place in a training")
    return state


_SCHEDULER_FILE = "scheduler.pt"


def schedule_in(
    folder: TrainerFolder, scheduler: LRScheduler | None, not_restored: dict[str, str]
) -> dict[str, Any] | None:
    """Return the scheduler's state, or None if it is not restored.

    Raises:
        KeyMismatchError: it is of another.
        FormatError: it is no state.
    """
    if _SCHEDULER_FILE not in folder.names:
        if scheduler is not None:
            not_restored["scheduler"] = f"the checkpoint has no {_SCHEDULER_FILE}"
        return None
    if scheduler is None:
        not_restored["scheduler"] = "it was not given"
        return None
    file = folder.path / _SCHEDULER_FILE
    state = load_plain(file)
    if not isinstance(state, dict):
        raise FormatError(f"{file}: holds a {type(state).__name__}, not a scheduler's state")
    if why := scheduler_mismatch(scheduler.state_dict(), state):
        raise KeyMismatchError(
            f"{file}: is of another kind of scheduler than {type(scheduler).__name__} ({why}). Make the scheduler "
            "as it was made when it was saved"
        )
    return state


def restore_schedule(folder: TrainerFolder, scheduler: LRScheduler, state: dict[str, Any]) -> None:
    """Set the checked state of a scheduler.

    Raises:
        KeyMismatchError: the scheduler refuses it.
    """
    try:
        scheduler.load_state_dict(state)
    except Exception as error:  # of whatever kind of scheduler
        raise KeyMismatchError(
            f"{folder.path / _SCHEDULER_FILE}: {type(scheduler).__name__} refuses it ({type(error).__name__}: "
            f"{error}). Make the scheduler as it was made when it was saved"
        ) from error
