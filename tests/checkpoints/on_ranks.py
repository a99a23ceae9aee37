"""What the ranks do in tests of checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from tests.checkpoints import tiny
from tests.checkpoints.tiny import Training

from shardwise import Asynchronous, Checkpointer, Synchronous

MODES = {"sync": Synchronous(), "async": Asynchronous()}


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train_and_save(folder: str, steps: int, mode: str = "sync", way: str = "flat", more: int = 0) -> Any:
    """Train, save, and train on; what the state was as it was saved, and the losses after."""
    training = Training(way=way)
    training.step(steps)
    seed_all(100 + tiny.rank())
    with Checkpointer(folder, mode=MODES[mode]) as checkpointer:
        saved = training.taken()
        report = checkpointer.save(steps, training.state)
        numbers = tiny.draws()
        before = len(training.losses)
        training.step(more)
    return saved, training.losses[before:], numbers, report.to_dict()


def restore_and_train(folder: str, more: int = 0, way: str = "flat", save_at: int = 0) -> Any:
    training = Training(seed=1, way=way)
    training.step(1)  # there is state that has to give way
    with Checkpointer(folder) as checkpointer:
        report = checkpointer.restore(training.state)
        numbers = tiny.draws()
        found = training.taken()
        training.losses.clear()
        training.step(more)
        if save_at:
            checkpointer.save(save_at, training.state)
    return found, training.losses, numbers, report.to_dict()
