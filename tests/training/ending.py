"""Trainings to which something happens in a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.faults.doomed import End, Seat
from tests.training import stepping, tiny

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.cli import train as command
from shardwise.errors import RankLostError
from shardwise.execution.ranks.line import Patience
from shardwise.training.checkpoints import Checkpoints, KeptInFolders
from shardwise.training.data.batches import Batch
from shardwise.training.data.loader import step_loader
from shardwise.training.data.read_once import read_data
from shardwise.training.loop import train
from shardwise.training.options import Steps, TrainOptions
from shardwise.training.step import StepWork

OPTIONS = TrainOptions(duration=Steps(6), batch_size=1)


def strike(kind: str) -> None:
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            torch.empty(1 << 60)
        case "memory of Python":
            raise MemoryError
        case "nothing":
            pass
        case "mistake":
            raise ValueError("not like this")


def struck(kind: str, rank: int, step: int, tell: Callable[[], None] = lambda: None) -> Any:
    """In the block this befalls one rank in the middle of a step."""
    original, calls = StepWork.gradient, 0

    def gradient(self: StepWork, batches: list[Batch], *more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step and self.world.rank == rank:
            tell()
            strike(kind)
        return original(self, batches, *more)

    return mock.patch.object(StepWork, "gradient", gradient)


def train_stuck(seat: Seat, folder: str) -> None:
    """Rank 1 is stopped in step 4. Nobody is patient here."""
    seat.leaves = True
    data = read_data(Path(folder, "chats.jsonl"), tiny.tokenizer(), max_length=64)
    model = stepping.sharded(tiny.model())

    def end(error: RankLostError) -> None:
        seat.pipe.send(("end", End(type(error).__name__, str(error), None, time.monotonic())))
        os._exit(2)

    quick = Patience(beat_s=0.1, silence_s=2.0, join_s=60.0)
    with (
        mock.patch("shardwise.execution.ranks.world.Patience", return_value=quick),
        mock.patch("shardwise.execution.ranks.collectives._STUCK_S", 0.5),
        struck("nothing", 1, 4, seat.wait_to_be_stopped),
    ):
        train(model, step_loader(data, OPTIONS), OPTIONS, when_stuck=end)


def train_until(seat: Seat, folder: str, kind: str, rank: int) -> None:
    """The blow falls in step 4; a checkpoint is kept every 2 steps. The process ends with the training."""
    seat.leaves = True
    data = read_data(Path(folder, "chats.jsonl"), tiny.tokenizer(), max_length=64)
    model = stepping.sharded(tiny.model())
    keeper = KeptInFolders(Checkpointer(Path(folder, "checkpoints")), None)
    with struck(kind, rank, 4, seat.tell):
        train(model, step_loader(data, OPTIONS), OPTIONS, checkpoints=Checkpoints(keeper, every=2))


def train_on_rank(request: Any) -> Any:
    """As of the command; rank 1 is killed in step 4."""
    with struck("kill", 1, 4):
        return original_train_on_rank(request)


original_train_on_rank = command.train_on_rank


def alone(kind: str, folder: str) -> None:
    assert not dist.is_initialized()
    data = read_data(Path(folder, "chats.jsonl"), tiny.tokenizer(), max_length=64)
    with struck(kind, 0, 2):
        train(tiny.model(), step_loader(data, OPTIONS), OPTIONS)
