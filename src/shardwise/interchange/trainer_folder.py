"""A folder ``checkpoint-N`` of the Hugging Face Trainer: what of a training is in it, beside the model too."""

from __future__ import annotations

import json
import math
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from shardwise.errors import CoverageError, FormatError, StorageError
from shardwise.execution.committing import as_renamed
from shardwise.execution.torch_saves import load_plain
from shardwise.execution.world import World
from shardwise.formats.distributed import MODEL, OPTIMIZER, SavedKind
from shardwise.formats.peft_adapter import ADAPTER_WEIGHTS
from shardwise.models.optimizer_state import why_unlike
from shardwise.storage.reading import LocalReader

STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILE = "optimizer.pt"
_MAX_STATE_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class TrainerFolder:
    """What is in a folder, looked at once.

    Attributes:
        path: of the folder.
        names: what lies in it.
        state: ``trainer_state.json``, whose ``global_step`` is a count.
    """

    path: Path
    names: tuple[str, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> TrainerFolder:
        """Raises StorageError where it cannot be listed, FormatError where it is no such folder."""
        return cls(path, _names_in(path), _read_state(path))

    @property
    def step(self) -> int:
        """The optimizer's steps that have been taken."""
        return int(self.state["global_step"])

    @property
    def epoch(self) -> float:
        """How often the data have been gone through."""
        return float(self.state.get("epoch") or 0.0)

    @property
    def is_fsdp(self) -> bool:
        """Whether the model is in accelerate's files."""
        return _has(MODEL, self.names)

    @property
    def optimizer(self) -> Path | None:
        """Where what there is of an optimizer is: in accelerate's files, or in the Trainer's own."""
        if _has(OPTIMIZER, self.names):
            return self.path
        return self.path / _OPTIMIZER_FILE if _OPTIMIZER_FILE in self.names else None

    def weights_of(self, adapter: str) -> Path:
        """The file of a PEFT model's adapter.

        Raises:
            FormatError: there is none.
        """
        home = self.path if adapter == "default" else self.path / adapter
        file = next((home / name for name in ADAPTER_WEIGHTS if (home / name).is_file()), None)
        if file is None:
            raise FormatError(
                f"{home}: has neither {' nor '.join(ADAPTER_WEIGHTS)}, nor {MODEL.stem}* beside it, and the model "
                "has adapters; check the path, and the adapter's name"
            )
        return file


def _has(kind: SavedKind, names: tuple[str, ...]) -> bool:
    return any(name in (kind.file(0), kind.folder(0)) or kind.rank_of(name, 0) is not None for name in names)


def _names_in(folder: Path) -> tuple[str, ...]:
    try:
        with as_renamed(folder) as seen:
            return tuple(sorted(os.listdir(seen)))
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


_SCHEDULER_FILE = "scheduler.pt"
_RANDOM = re.compile(r"rng_state(?:_(\d{1,9}))?\.pth")


class Scheduler(Protocol):
    """A schedule of learning rates, as in ``torch.optim.lr_scheduler``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def schedule_in(
    folder: TrainerFolder, scheduler: Scheduler | None, not_restored: dict[str, str]
) -> dict[str, Any] | None:
    """The scheduler's state, if it is one of this kind of scheduler.

    Raises:
        CoverageError: it is of another.
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
    if why := why_unlike(scheduler.state_dict(), state):
        raise CoverageError(
            f"{file}: is of another kind of scheduler than {type(scheduler).__name__} ({why}); make the scheduler "
            "as it was made when it was saved"
        )
    return state


def restore_schedule(folder: TrainerFolder, scheduler: Scheduler, state: dict[str, Any]) -> None:
    """Put a state that has been looked at into a scheduler.

    Raises:
        CoverageError: the scheduler refuses it.
    """
    try:
        scheduler.load_state_dict(state)
    except Exception as error:  # of whatever kind of scheduler
        raise CoverageError(
            f"{folder.path / _SCHEDULER_FILE}: {type(scheduler).__name__} refuses it ({type(error).__name__}: "
            f"{error}); make the scheduler as it was made when it was saved"
        ) from error


@dataclass(frozen=True, slots=True)
class SavedNumbers:
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


def numbers_in(
    folder: TrainerFolder, world: World, not_restored: dict[str, str], *, wanted: bool
) -> SavedNumbers | None:
    """This rank's random numbers, where they are restored.

    Raises:
        FormatError: the file is no state of random number generators.
    """
    what = "random numbers"
    files = [name for name in folder.names if _RANDOM.fullmatch(name)]
    if not wanted:
        not_restored[what] = "load_rng_state=False was asked for"
        return None
    expected = [f"rng_state_{rank}.pth" for rank in range(world.size)] if world.size > 1 else ["rng_state.pth"]
    if not files:
        not_restored[what] = "the checkpoint has no rng_state*.pth"
        return None
    if sorted(files) != sorted(expected):
        not_restored[what] = f"there are those of {len(files)} ranks, and now there are {world.size}"
        return None
    file = folder.path / expected[world.rank]
    array = np.array([0], dtype=np.uint32)
    rebuild = array.__reduce__()[0]
    state = load_plain(file, also=[rebuild, np.ndarray, np.dtype, type(array.dtype)])
    try:
        cuda = state.get("cuda", ())
        found = SavedNumbers(
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
