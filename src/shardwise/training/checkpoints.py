"""What a training keeps of itself, so that it can go on: after steps, and when it is asked to stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn


class Stateful(Protocol):
    """What can say where it is, and be put there; torch's word for it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


@dataclass(frozen=True)
class TrainState:
    """All that a step changes. ``user`` is what the loop itself wants to know again, as plain JSON values."""

    model: nn.Module
    optimizers: torch.optim.Optimizer
    schedulers: Stateful
    data: Stateful
    user: Mapping[str, Any]


class Keeper(Protocol):
    """Where states are kept."""

    def save(self, step: int, state: TrainState) -> object:
        """Keep the state after ``step`` steps. Collective: yes."""
        ...

    def restore(self, state: TrainState) -> Mapping[str, Any] | None:
        """Put everything where it was; what was the user's then. None where there is nothing to go on from.

        Collective: yes.
        """
        ...

    def wait(self) -> object:
        """Return when what was saved counts. Collective: yes."""
        ...


@dataclass(frozen=True, slots=True)
class NoCheckpoints:
    """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """States are kept every so many steps, at the end, and when the training is asked to stop.

    ``every`` None: only when it is asked to stop.
    """

    keeper: Keeper
    every: int | None = None


Checkpointing: TypeAlias = NoCheckpoints | Checkpoints
