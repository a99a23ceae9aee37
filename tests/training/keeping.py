"""A keeper of states in memory: what a checkpointer does, without files."""

from __future__ import annotations

import copy
from typing import Any

from shardwise.checkpoints.state import TrainState
from shardwise.training.checkpoints import Restored


class MemoryKeeper:
    """Keeps the states of one process; those of models, optimizers, schedules and positions as deep copies."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, Any]] = {}
        self.waited = 0

    def save(self, step: int, state: TrainState) -> None:
        parts = (state.model, state.optimizers, state.schedulers, state.data)
        self.kept[step] = copy.deepcopy({"parts": [part.state_dict() for part in parts], "user": state.user})

    def restore(self, state: TrainState) -> Restored | None:
        if not self.kept:
            return None
        found = copy.deepcopy(self.kept[max(self.kept)])
        parts = (state.model, state.optimizers, state.schedulers, state.data)
        for part, values in zip(parts, found["parts"], strict=True):
            part.load_state_dict(values)
        return Restored(found["user"])

    def wait(self) -> None:
        self.waited += 1

    def newest(self) -> int | None:
        return max(self.kept, default=None)
