"""``load_trainer_checkpoint``: a folder ``checkpoint-N`` of the Hugging Face Trainer, to go on from."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines import model_states as models
from shardwise.engines.clock import Clock
from shardwise.engines.load_options import LoadOptions
from shardwise.errors import CoverageError, FormatError, StorageError
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import StateOptions, require_same_call
from shardwise.execution.states.stored_values import StoredValues
from shardwise.execution.writing.rank_files import load_plain
from shardwise.formats.accelerate_names import MODEL, OPTIMIZER, SavedKind
from shardwise.formats.checkpoint_index import open_checkpoint
from shardwise.models.optimizer_state import ByName, ParameterOrder
from shardwise.models.selection import AdapterOnly, Everything, has_adapters
from shardwise.models.view import without_compile
from shardwise.planning.loads.consent import Refuse
from shardwise.planning.loads.stored import stored_tensors
from shardwise.planning.states.matching import OnFault, Tolerance
from shardwise.report.load_report import LoadReport
from shardwise.report.state_report import StateReport
from shardwise.report.trainer_report import TrainerReport
from shardwise.storage.reading.local import LocalReader
from shardwise.verbs.accelerate_files import load_accelerate_model, load_accelerate_optimizer, with_read
from shardwise.verbs.load import load

STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILE = "optimizer.pt"
_SCHEDULER_FILE = "scheduler.pt"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_RANDOM = re.compile(r"rng_state(?:_(\d{1,9}))?\.pth")
_MAX_STATE_BYTES = 500_000_000

_NOT_READ = {
    "training_args.bin": "a pickle that runs code when it is read; give the arguments anew",
    "scaler.pt": "the gradient scaler's scale; it starts from its first value",
}


class Scheduler(Protocol):
    """A schedule of learning rates, as in ``torch.optim.lr_scheduler``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class RestoreRandom:
    """Python's, numpy's and torch's random numbers go on where this rank's were, on as many ranks as there were."""


@dataclass(frozen=True, slots=True)
class LeaveRandom:
    """They stay as they are."""


RandomNumbers: TypeAlias = RestoreRandom | LeaveRandom


@torch.no_grad()
def load_trainer_checkpoint(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    scheduler: Scheduler | None = None,
    random_numbers: RandomNumbers = RestoreRandom(),
    adapter: str = "default",
    order: ParameterOrder = ByName(),  # noqa: B008
    on_unexpected: OnFault = Refuse(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> TrainerReport:
    """Restore model, optimizer, schedule and random numbers from a ``checkpoint-N`` of the Trainer's.

    The model's weights are taken from ``pytorch_model_fsdp*`` where there are such, else from the files of
    ``save_pretrained``; those of a PEFT model are its adapter's. The optimizer is ``optimizer.bin``,
    ``optimizer_0/`` or files of ranks, as :func:`~shardwise.verbs.accelerate_files.load_accelerate_optimizer` reads
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
    folder = Path(checkpoint)
    with (
        World.current(options.process_group, options.patience, call="load_trainer_checkpoint") as world,
        torch.device("cpu"),
    ):
        require_same_call(world, os.fspath(checkpoint), adapter, order, on_unexpected, options=options)
        names, state = world.from_first(lambda: (_names_in(folder), _read_state(folder)))
        found = world.together(
            lambda: _TrainerFolder.of(folder, names, adapter=adapter, is_peft=has_adapters(model))
        )
        not_restored = {name: why for name, why in _NOT_READ.items() if name in names}
        schedule = world.together(lambda: _schedule(folder, names, scheduler, not_restored))
        numbers = world.together(lambda: _numbers(folder, names, world, random_numbers, not_restored))
        if optimizer is not None and found.optimizer is None:
            not_restored["optimizer"] = "the checkpoint has none (save_only_model)"
        elif optimizer is None and found.optimizer is not None:
            not_restored["optimizer"] = "it was not given"
    set_model = _set_model(model, folder, found, adapter, on_unexpected, options)
    restored = ["model"]
    set_optimizer = None
    if optimizer is not None and found.optimizer is not None:
        set_optimizer = load_accelerate_optimizer(model, optimizer, found.optimizer, order=order, options=options)
        restored.append("optimizer")
    if scheduler is not None and schedule is not None:
        scheduler.load_state_dict(schedule)
        restored.append("scheduler")
    if numbers is not None:
        numbers.set()
        restored.append("random numbers")
    not_restored["position in the data"] = f"the data are not the model's; go on after {_step(state)} steps"
    if found.adapter is not None or (has_adapters(model) and found.is_fsdp):
        not_restored["base weights"] = "only the adapter was saved; they are as they were"
    return TrainerReport(
        checkpoint=str(folder),
        step=_step(state),
        epoch=float(state.get("epoch") or 0.0),
        model=set_model,
        optimizer=set_optimizer,
        restored=tuple(restored),
        not_restored=not_restored,
        told={key: value for key, value in state.items() if isinstance(value, (int, float, str, bool))},
    )


@dataclass(frozen=True, slots=True)
class _TrainerFolder:
    """Where the model and the optimizer are.

    Attributes:
        is_fsdp: whether the model is in accelerate's files.
        adapter: else, for a PEFT model: the file of the adapter.
        optimizer: the path of what is there of one.
    """

    is_fsdp: bool
    adapter: Path | None
    optimizer: Path | None

    @classmethod
    def of(cls, folder: Path, names: list[str], *, adapter: str, is_peft: bool) -> _TrainerFolder:
        """Raises FormatError where there is no model."""
        is_fsdp = _has(MODEL, names)
        file = None
        if is_peft and not is_fsdp:
            home = folder if adapter == "default" else folder / adapter
            file = next((home / name for name in _ADAPTERS if (home / name).is_file()), None)
            if file is None:
                raise FormatError(
                    f"{home}: has neither {' nor '.join(_ADAPTERS)}, nor {MODEL.stem}* beside it, and the model "
                    "has adapters; check the path, and the adapter's name"
                )
        moments = folder if _has(OPTIMIZER, names) else None
        if moments is None and _OPTIMIZER_FILE in names:
            moments = folder / _OPTIMIZER_FILE
        return cls(is_fsdp, file, moments)


def _has(kind: SavedKind, names: list[str]) -> bool:
    return any(name in (kind.file(0), kind.folder(0)) or kind.rank_of(name, 0) is not None for name in names)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise StorageError(f"{folder}: listing it failed, {error.strerror}; check the path") from error


def _read_state(folder: Path) -> dict[str, Any]:
    """``trainer_state.json``.

    Raises:
        FormatError: there is none, or its step is no count.
    """
    what = f"{STATE_FILE} in {folder}"
    if not (folder / STATE_FILE).is_file():
        inner = sorted(place.name for place in folder.glob("checkpoint-*") if (place / STATE_FILE).is_file())
        hint = (
            f"pass one of {', '.join(inner[:8])} in it" if inner else "pass a folder checkpoint-N of the Trainer's"
        )
        raise FormatError(f"{folder}: has no {STATE_FILE}; {hint}")
    with LocalReader(folder) as reader:
        nbytes = reader.size(STATE_FILE)
        if nbytes > _MAX_STATE_BYTES:
            raise FormatError(f"{what}: it has {nbytes} bytes, {_MAX_STATE_BYTES} is the limit")
        content = reader.read(STATE_FILE, 0, nbytes)
    try:
        state = json.loads(content)  # the Trainer logs NaN, so this is not strict
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: is no JSON ({error}); the checkpoint is damaged: take another") from error
    if not isinstance(state, dict):
        raise FormatError(f"{what}: holds a {type(state).__name__}, not an object")
    step, epoch = state.get("global_step"), state.get("epoch") or 0
    if type(step) is not int or step < 0 or not isinstance(epoch, (int, float)) or not math.isfinite(epoch):
        raise FormatError(f"{what}: global_step {step!r} and epoch {epoch!r} are no place in a training")
    return state


def _step(state: Mapping[str, Any]) -> int:
    step: int = state["global_step"]
    return step


def _schedule(
    folder: Path, names: list[str], scheduler: Scheduler | None, not_restored: dict[str, str]
) -> dict[str, Any] | None:
    """The scheduler's state, if it is one of this kind of scheduler.

    Raises:
        CoverageError: it is of another.
        FormatError: it is no state.
    """
    if _SCHEDULER_FILE not in names:
        if scheduler is not None:
            not_restored["scheduler"] = f"the checkpoint has no {_SCHEDULER_FILE}"
        return None
    if scheduler is None:
        not_restored["scheduler"] = "it was not given"
        return None
    state = load_plain(folder / _SCHEDULER_FILE)
    if not isinstance(state, dict):
        raise FormatError(f"{folder / _SCHEDULER_FILE}: holds a {type(state).__name__}, not a scheduler's state")
    present = scheduler.state_dict()
    odd = sorted(map(str, state.keys() ^ present.keys()))
    if odd:
        raise CoverageError(
            f"{folder / _SCHEDULER_FILE}: is of another kind of scheduler than {type(scheduler).__name__}: "
            f"{', '.join(odd[:8])} are in one of them only; make the scheduler as it was made when it was saved"
        )
    return state


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The state of random number generators, checked."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    """By device; of one alone, that of the present one."""

    def set(self) -> None:
        """Let them go on from there."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.random.set_rng_state(self.cpu)
        if torch.cuda.is_available() and len(self.cuda) == 1:
            torch.cuda.set_rng_state(self.cuda[0])
        elif torch.cuda.is_available() and self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def _numbers(
    folder: Path, names: list[str], world: World, wanted: RandomNumbers, not_restored: dict[str, str]
) -> _Numbers | None:
    """This rank's random numbers, where they are restored.

    Raises:
        FormatError: the file is no state of random number generators.
    """
    what = "random numbers"
    files = [name for name in names if _RANDOM.fullmatch(name)]
    if isinstance(wanted, LeaveRandom):
        not_restored[what] = "LeaveRandom() was asked for"
        return None
    expected = [f"rng_state_{rank}.pth" for rank in range(world.size)] if world.size > 1 else ["rng_state.pth"]
    if not files:
        not_restored[what] = "the checkpoint has no rng_state*.pth"
        return None
    if sorted(files) != sorted(expected):
        not_restored[what] = f"there are those of {len(files)} ranks, and now there are {world.size}"
        return None
    file = folder / expected[world.rank]
    array = np.array([0], dtype=np.uint32)
    rebuild = array.__reduce__()[0]
    state = load_plain(file, also=[rebuild, np.ndarray, np.dtype, type(array.dtype)])
    try:
        cuda = state.get("cuda", ())
        found = _Numbers(
            state["python"],
            state["numpy"],
            state["cpu"].clone(),
            (cuda,) if isinstance(cuda, torch.Tensor) else tuple(cuda),
        )
        random.Random().setstate(found.python)
        np.random.RandomState().set_state(found.numpy)
        torch.Generator().set_state(found.cpu)
    except Exception as error:  # of whatever a stranger wrote there
        raise FormatError(
            f"{file}: holds no state of random number generators: {type(error).__name__}: {error}"
        ) from error
    return found


def _set_model(
    model: nn.Module,
    folder: Path,
    found: _TrainerFolder,
    adapter: str,
    on_unexpected: OnFault,
    options: StateOptions,
) -> StateReport | LoadReport:
    only = AdapterOnly(adapter) if has_adapters(model) else Everything()
    if found.is_fsdp:
        return load_accelerate_model(model, folder, only=only, on_unexpected=on_unexpected, options=options)
    if found.adapter is None:
        as_load = LoadOptions(process_group=options.process_group, patience=options.patience)
        return load(model, folder, on_unexpected=on_unexpected, options=as_load)
    clock = Clock()
    tolerance = Tolerance(unexpected=on_unexpected)
    folder, name = found.adapter.parent, found.adapter.name
    with (
        World.current(options.process_group, options.patience, call="load_trainer_checkpoint") as world,
        torch.device("cpu"),
        ExitStack() as stack,
    ):
        reader = stack.enter_context(world.together(lambda: LocalReader(folder)))
        index = world.from_first(lambda: open_checkpoint(reader, weights_name=name))
        values = StoredValues(reader, index, stored_tensors(index), options.budget_bytes)
        report, _ = models.set_values(
            world, model, values, only=only, tolerance=tolerance, options=options, clock=clock
        )
        return with_read(report, values)
