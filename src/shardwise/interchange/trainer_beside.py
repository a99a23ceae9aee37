"""What the Trainer saves beside the model: the schedule's state, and the random numbers of each rank."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from shardwise.errors import CoverageError, FormatError
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.torch_states import load_plain
from shardwise.interchange.trainer_folder import TrainerFolder
from shardwise.models.optimizers.schedules import why_unlike

_SCHEDULER_FILE = "scheduler.pt"
_RANDOM = re.compile(r"rng_state(?:_(\d{1,9}))?\.pth")


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
    folder: TrainerFolder, world: World, wanted: RandomNumbers, not_restored: dict[str, str]
) -> SavedNumbers | None:
    """This rank's random numbers, where they are restored.

    Raises:
        FormatError: the file is no state of random number generators.
    """
    what = "random numbers"
    files = [name for name in folder.names if _RANDOM.fullmatch(name)]
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
