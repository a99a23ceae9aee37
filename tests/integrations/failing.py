"""Trainings of the Hugging Face Trainer in which one rank fails alone."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.integrations.runs import Run, launched, made, rank
from tests.support.world import attempt

from shardwise.integrations.agreed_events import raise_together
from shardwise.ranks import collective_errors
from shardwise.ranks.world import World


@dataclass(frozen=True)
class Ended:
    """How a training has ended on a rank.

    Attributes:
        error: its error, as text.
        step: the steps that were taken.
    """

    error: str
    step: int


def fail_alone(run: Run, place: str) -> Ended:
    """The second rank's data loader ("batches"), loss ("loss") or model ("model") raises in the second step.

    Or its metrics do, in a training ("metrics") or outside of one ("evaluate").
    """
    torch.manual_seed(0)
    collective_errors._STUCK_S = 0.5
    with launched():
        trainer = made(run)
        if place in ("metrics", "evaluate"):  # on all ranks: without metrics the Trainer gathers losses alone
            trainer.compute_metrics = lambda _: {}
        if rank() == 1:
            _fail(trainer, place)
        try:
            trainer.evaluate() if place == "evaluate" else trainer.train()
        except Exception as error:
            first_end = Path(run.arguments["output_dir"], "first rank has ended")
            if rank() == 0:
                first_end.touch()
            while not first_end.exists():  # it lives on
                time.sleep(0.05)
            return Ended(f"{type(error).__name__}: {error}", trainer.state.global_step)
        finally:
            left = [name for name in ("get_batch_samples", "compute_loss") if name in vars(trainer)]
            assert left == (["compute_loss"] if rank() == 1 and place == "loss" else [])
    raise AssertionError("it has come to its end")


def share_memory_error() -> tuple[str, str]:
    """A callback of the second rank has run out of memory."""
    world = World.current(call="training")

    def step() -> None:
        with collective_errors.translate_collective_errors(world, lambda: "in step 2"):
            raise_together(world, MemoryError() if world.rank else None)

    return attempt(step)


def _fail(trainer: Any, place: str) -> None:
    calls = 0

    def failing(own: Any) -> Any:
        def call(*positional: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            done = own(*positional, **keywords)
            if calls == (1 if place in ("metrics", "evaluate") else 4):
                raise ValueError("row 7 is odd")
            return done

        return call

    if place == "batches":
        trainer.data_collator = failing(trainer.data_collator)
    elif place in ("metrics", "evaluate"):
        trainer.compute_metrics = failing(trainer.compute_metrics)
    elif place == "loss":
        trainer.compute_loss = failing(trainer.compute_loss)
    else:
        layer = trainer.model.model.layers[1]
        layer.forward = failing(layer.forward)
