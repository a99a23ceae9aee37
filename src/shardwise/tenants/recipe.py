"""Makes a tenant's optimizer and schedule, as a training alone would have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise.training.checkpoints import GroupSettings, settings_of, take_asked
from shardwise.training.optimizing.optimizers import EVERYTHING, MATRICES, optimizers_of
from shardwise.training.options import TrainOptions
from shardwise.training.parts import TrainedPart, make_schedule, schedule_from


class ScheduleOfLength:
    """transformers' schedule of so many steps, which takes up the place of one of any other length."""

    def __init__(self, optimizer: Optimizer, options: TrainOptions, total_steps: int) -> None:
        self._optimizer = optimizer
        self._options = options
        self._total_steps = total_steps
        self._inner: LambdaLR = make_schedule(optimizer, options, total_steps)

    def step(self) -> None:
        self._inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)
        self.begin_again()

    def begin_again(self) -> None:
        """Have the rate that belongs to its place, of the base rates that it has."""
        self._inner = schedule_from(self._inner, self._optimizer, self._options, self._total_steps)

    @property
    def inner(self) -> LambdaLR:
        """transformers' schedule."""
        return self._inner


class OwnOptimizer:
    """What a bank makes a tenant's optimizer and schedule by: all matrices of a LoRA decay."""

    def __init__(self, name: str, options: TrainOptions, total_steps: int) -> None:
        self._name = name
        self._options = options
        self._total_steps = total_steps
        self._optimizer: Optimizer | None = None
        self._schedule: ScheduleOfLength | None = None
        self.asked: GroupSettings = {}
        """What the optimizer was made with, which a state that it goes on from may overrule."""

    def optimizer_of(self, parameters: list[nn.Parameter]) -> Optimizer:
        recipes = optimizers_of(self._options)
        recipe = recipes[MATRICES if MATRICES in recipes else EVERYTHING]  # a LoRA has matrices alone
        self._optimizer = recipe.of_one_group(parameters)
        return self._optimizer

    def schedule_of(self, optimizer: Optimizer) -> ScheduleOfLength:
        self._schedule = ScheduleOfLength(optimizer, self._options, self._total_steps)
        self.asked = settings_of([self.part])  # with the rate that it begins at
        return self._schedule

    def take_asked(self) -> None:
        """Have the settings that are asked for, in place of those of a state that it went on from."""
        assert self._schedule is not None
        take_asked(replace(self.part, schedule=self._schedule.inner), self.asked)
        self._schedule.begin_again()

    @property
    def part(self) -> TrainedPart:
        """What was made, as what tells about parts takes it."""
        assert self._optimizer is not None
        return TrainedPart(self._name, self._optimizer)
