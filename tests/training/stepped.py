"""Trainings by named optimizers, for the tests of these: in one process, or as a rank."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tests.quiet import quieten
from tests.training import stepping, tiny
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.errors import ShardwiseError
from shardwise.execution.ranks.world import World
from shardwise.planning.forecasts.own_forecast import Available
from shardwise.training.checkpoints import Checkpoints, KeptInFolders
from shardwise.training.data.batches import Padded, evaluation_batches
from shardwise.training.data.loader import step_loader
from shardwise.training.data.read_once import read_data
from shardwise.training.evaluation_rows import EndEarly, Evaluation
from shardwise.training.loop import train
from shardwise.training.optimizing.optimizer_trial import require_optimizer
from shardwise.training.optimizing.optimizers import SHORT_NAMES
from shardwise.training.options import NamedOptimizer, Steps, TrainOptions
from shardwise.training.passes.forward import Accumulation, fitting_accumulation
from shardwise.training.report import TrainReport
from shardwise.training.stopping import StopRequest

NAMED = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "nadam": {},
    "torch.optim.Adagrad": {"lr_decay": 0.01},
    "muon": {"ns_steps": 4},
}
"""Those that are trained with, and further arguments of each."""


class Blind(SGD):
    """An optimizer that takes a rank's shard for the whole: it divides by the norm of that."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                own = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                own.div_(own.norm())
        super().step(closure)


class Hoarding(SGD):
    """An optimizer that keeps what has no shards."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = torch.zeros(3)


class FailsAlone(SGD):
    """An optimizer of which one rank fails, or goes without, where the others have a collective of DTensor's."""

    fails = True
    taken = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.taken += 1
        sharded = [p for group in self.param_groups for p in group["params"] if isinstance(p, DTensor)]
        if not sharded or self.taken == 1:
            return
        dist.all_reduce(torch.zeros(1))
        if dist.get_rank() == 0:
            sharded[0].full_tensor()
        elif self.fails:
            raise OSError("no such kernel here")


class GoesWithout(FailsAlone):
    fails = False


NO_OPTIMIZER = nn.Linear


def options(name: str, steps: int = 4, **more: Any) -> TrainOptions:
    """Two rows of each step, however many ranks there are."""
    batch = 2 // World.current().size
    return TrainOptions(
        learning_rate=1e-2,
        duration=Steps(steps),
        batch_size=batch,
        optimizer=NamedOptimizer(name, NAMED.get(name, {}), **more),
    )


def steps_of(file: str, chosen: TrainOptions) -> Any:
    return step_loader(read_data(Path(file), tiny.tokenizer(), max_length=64), chosen)


def trained(file: str, chosen: TrainOptions, **more: Any) -> TrainReport:
    return train(stepping.sharded(tiny.model()), steps_of(file, chosen), chosen, **more)


def said(name: str, **more: Any) -> str:
    """What is said of an optimizer before a training; nothing where it can be."""
    return said_of(options(name, **more))


def said_of(chosen: TrainOptions) -> str:
    try:
        require_optimizer(chosen)
    except ShardwiseError as error:
        return str(error)
    return ""


def of_transformers() -> TrainOptions:
    """Its Adafactor, at a rate that is given."""
    settings = {"relative_step": False, "scale_parameter": False}
    return replace(options("adamw"), optimizer=NamedOptimizer("transformers.optimization.Adafactor", settings))


def first_step(file: str, folder: str, name: str) -> list[float]:
    """A training that is stopped in its first step."""
    stop = StopRequest()
    stop.number = signal.SIGTERM
    keeper = KeptInFolders(Checkpointer(Path(folder, name)), None)
    return trained(file, options(name), checkpoints=Checkpoints(keeper), stop=stop).losses


def the_rest(file: str, folder: str, name: str) -> list[float]:
    """The rest of it, on whatever ranks."""
    source = Checkpointer(Path(folder, name))
    return trained(file, options(name), checkpoints=Checkpoints(KeptInFolders(source, source))).losses


def ended(file: str) -> tuple[int, list[str]]:
    """A training of which no evaluation after the first is better by enough."""
    data = read_data(Path(file), tiny.tokenizer(), max_length=64)
    evaluation = Evaluation(evaluation_batches(data, Padded(), 4), 1, ending=EndEarly(2, min_delta=100.0))
    report = trained(file, options("adamw", 9), evaluation=evaluation)
    return report.last_step, list(report.remarks)


def on_rank(file: str, folder: str) -> dict[str, Any]:
    quieten()
    model = stepping.sharded(tiny.model())
    accumulating = TrainOptions(gradient_accumulation_steps=2)
    return {
        "said": {name: said(name) for name in (*SHORT_NAMES, "torch.optim.LBFGS", "torch.optim.SparseAdam")},
        "of transformers": said_of(of_transformers()),
        "blind": said("tests.training.stepped.Blind", may_import=True),
        "alone": [
            said(f"tests.training.stepped.{name}", may_import=True) for name in ("FailsAlone", "GoesWithout")
        ],
        "losses": {name: trained(file, options(name)).losses for name in NAMED},
        "begun": {name: first_step(file, folder, name) for name in ("sgd", "muon")},
        "ended": ended(file),
        "accumulation": fitting_accumulation(model, accumulating, torch.float32),
        "for want of memory": with_little_memory(model, accumulating),
    }


def with_little_memory(model: nn.Module, chosen: TrainOptions) -> Accumulation:
    """Rank 1 has little."""
    free = Available(None, 1 << 14 if World.current().rank else 1 << 40)
    with mock.patch("shardwise.training.passes.forward.available_memory", return_value=free):
        return fitting_accumulation(model, chosen, torch.float32)


def adapted() -> nn.Module:
    """The tiny model with a LoRA."""
    torch.manual_seed(1)
    made: nn.Module = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return made


def rates_of(optimizer: Optimizer) -> list[tuple[float, int]]:
    """Of each group: the rate, and how many parameters have it."""
    return [(group["initial_lr"], len(group["params"])) for group in optimizer.param_groups]
