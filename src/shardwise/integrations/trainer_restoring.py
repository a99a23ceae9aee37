"""Reads the model and the step of a folder ``checkpoint-N`` of the Hugging Face Trainer."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoints.trainer_folders import STATE_FILE, STATE_FOLDER
from shardwise.core.consents import Consent
from shardwise.core.errors import FormatError, StorageError
from shardwise.core.reports import LoadReport, StateReport
from shardwise.core.save_reports import TrainerReport
from shardwise.files.accelerate_saves import MODEL, OPTIMIZER, SavedKind
from shardwise.files.local_reader import LocalReader
from shardwise.files.peft_adapter import ADAPTER_WEIGHTS
from shardwise.files.storage import read_limited
from shardwise.fsdp.named_tensors import unwrap
from shardwise.integrations.accelerate_reading import FilesSource, read_model
from shardwise.loading.load import load_checkpoint
from shardwise.loading.prepare import LoadOptions, LoadRequest
from shardwise.models.selection import AdapterOnly, has_adapters
from shardwise.ranks.call_arguments import get_world
from shardwise.ranks.world import Clock
from shardwise.saving.rename_journal import link_as_renamed
from shardwise.state.model_states import open_stored_values, set_model_values, swap_stored_experts
from shardwise.state.state_values import StateOptions, Values, agree_on_arguments
from shardwise.transfer.matching import OnFault

_NOT_READ = {
    "training_args.bin": "a pickle that runs code when it is read. Pass the arguments again",
    "scaler.pt": "the gradient scaler's scale; it starts from its first value",
    "scheduler.pt": "call scheduler.load_state_dict(torch.load(...)) with this file",
}


@torch.no_grad()
def load_trainer_checkpoint(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    adapter: str = "default",
    on_unexpected: OnFault = "error",
    options: StateOptions = StateOptions(),  # noqa: B008
) -> TrainerReport:
    """Set a model to the weights in a ``checkpoint-N`` of the Hugging Face Trainer, and return its step.

    The weights are read from ``pytorch_model_fsdp*`` if it exists, otherwise from the files of ``save_pretrained``.
    For a PEFT model, those are the files of its adapter. Every rank reads its own bytes, on any number of ranks
    (files of ranks need the same number). If the optimizer's state has the names of parameters,
    :func:`~shardwise.load_accelerate_optimizer` restores it from this folder, or from its file ``optimizer.pt``.

    Everything is checked before anything is changed.

    Collective: yes, over ``options.process_group`` (default: all ranks). Memory: ``options.budget_bytes``. For
    files of ``save_pretrained``, that of a load.

    Args:
        model: any module, sharded or not. Tensors on meta get memory.
        checkpoint: the folder.
        adapter: of a PEFT model, which one.
        on_unexpected: ``Ignore(only=...)`` for tensors of the checkpoint that the model does not have.
        options: budget, process group, timeouts.

    Returns:
        The step to resume from, and the components that are not restored, with reasons.

    Raises:
        ConfigError, KeyMismatchError, FormatError, StorageError and others: as in
            :func:`~shardwise.load_accelerate_model` and :func:`~shardwise.load`, or for a folder without
            ``trainer_state.json``.

    Every error is the same on every rank.
    """
    model = unwrap(model)
    with get_world(options, "load_trainer_checkpoint") as world:
        arguments = {"on_unexpected": on_unexpected}
        compared = {"checkpoint": os.fspath(checkpoint), "adapter": adapter}
        agree_on_arguments(world, load_trainer_checkpoint, arguments, options, **compared)
        with torch.device("cpu"):
            with world.broadcast("open the folder") as exchange:
                if world.rank == 0:
                    exchange.local = TrainerFolder.open(Path(os.path.expanduser(checkpoint)))
            folder: TrainerFolder = exchange.result
            # save_pretrained of a PEFT model has written its adapter alone, into files of its own.
            is_adapter = has_adapters(model) and not folder.has_accelerate_model
            with world.collective("find the adapter"):
                file = folder.adapter_file(adapter) if is_adapter else None
        only = AdapterOnly(adapter) if has_adapters(model) else None
        consent, clock = Consent(unexpected=on_unexpected), Clock()
        report: StateReport | LoadReport
        # Files of save_pretrained, of a whole model: a load like any other.
        if file is None and not folder.has_accelerate_model:
            as_load = LoadOptions(process_group=options.process_group, timeouts=options.timeouts)
            request = LoadRequest(consent=consent, options=as_load)
            report = load_checkpoint(world, model, folder.path, request, clock)
        # accelerate's files.
        elif file is None:
            with torch.device("cpu"):
                report = read_model(world, model, FilesSource(folder.path, 0, consent, options), only, clock)
        # Files of save_pretrained, of an adapter.
        else:
            with torch.device("cpu"), ExitStack() as stack:
                with clock.phase("agree"):
                    values: Values = open_stored_values(world, str(file.parent), file.name, options, stack)
                    values = swap_stored_experts(world, model, values, adapter, str(file.parent))
                report = set_model_values(
                    world, model, values, only=only, consent=consent, options=options, clock=clock
                )
    return TrainerReport(
        checkpoint=str(folder.path),
        step=folder.step,
        epoch=folder.epoch,
        model=report,
        not_restored=_not_restored(folder, model),
        trainer_state={key: value for key, value in folder.state.items() if isinstance(value, int | float | str)},
    )


def _not_restored(folder: TrainerFolder, model: nn.Module) -> dict[str, str]:
    """Return the components of a training run that are not restored, with reasons."""
    reasons = {name: why for name, why in _NOT_READ.items() if name in folder.names}
    if (reason := folder.optimizer_reason) is not None:
        reasons["optimizer"] = reason
    reasons["position in the data"] = f"the data are not the model's. Skip the batches of {folder.step} steps"
    if any(name.startswith("rng_state") for name in folder.names):
        reasons["random numbers"] = "they belong to the Trainer's order of data and number of ranks. Seed the ranks"
    if has_adapters(model):
        reasons["base weights"] = "only the adapter was saved; they are as they were"
    return reasons


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
    def has_accelerate_model(self) -> bool:
        """True if the model is in accelerate's files."""
        return _has(MODEL, self.names)

    @property
    def optimizer_reason(self) -> str | None:
        """The reason why the optimizer's state is not restored, or None if there is none."""
        call = "call shardwise.load_accelerate_optimizer(model, optimizer, ...) with"
        if _has(OPTIMIZER, self.names):
            return f"{call} this folder"
        if _OPTIMIZER_FILE in self.names:
            return f"{call} its file {_OPTIMIZER_FILE}, if it was made of named parameters"
        if STATE_FOLDER in self.names:
            state = str(self.path / STATE_FOLDER)
            return f"ShardwiseTrainer resumes it, or call shardwise.Checkpointer({state!r}).restore(...)"
        if any(name.startswith("global_step") for name in self.names):
            return "only DeepSpeed reads its files; it starts from the beginning"
        return None

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
    # accelerate's three forms: a file, a folder, or a file for each rank.
    return any(name in (kind.file(0), kind.folder(0)) or kind.parse_rank(name, 0) is not None for name in names)


def _names_in(folder: Path) -> tuple[str, ...]:
    try:
        with link_as_renamed(folder) as seen:
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
        hint = "Pass a folder checkpoint-N of the Trainer's"
        if inner:
            hint = f"Pass one of {', '.join(inner[:8])} in it"
        raise FormatError(f"{folder}: has no {STATE_FILE}. {hint}")
    with LocalReader(folder) as reader:
        content = read_limited(reader, STATE_FILE, _MAX_STATE_BYTES)
    try:
        state = json.loads(content)  # the Trainer logs NaN, so this is not strict
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: is not JSON ({error}). The checkpoint is damaged. Pass another one") from error
    if not isinstance(state, dict):
        raise FormatError(f"{what}: holds a {type(state).__name__}, not an object")
    # A NaN fails the last comparison, as infinity does.
    step, epoch = state.get("global_step"), state.get("epoch") or 0
    if type(step) is not int or step < 0 or not isinstance(epoch, (int, float)) or not abs(epoch) < _MAX_EPOCH:
        raise FormatError(f"{what}: global_step {step!r} and epoch {epoch!r} are no place in a training")
    return state
