"""The loop: steps, a schedule, and what is told about them."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn
from transformers import get_scheduler

from shardwise.errors import ConfigError
from shardwise.execution.world import World
from shardwise.training.data import Batch
from shardwise.training.options import TrainOptions
from shardwise.training.report import StepFacts, TrainReport
from shardwise.training.step import StepWork, parameter_groups, require_finite
from shardwise.training.synchronised import require_synchronised


class StepSource(Protocol):
    """The micro-batches of each step, and how many steps there are; a loader of torch's is one, and a list."""

    def __iter__(self) -> Iterator[Sequence[Batch]]: ...

    def __len__(self) -> int: ...


def train(
    model: nn.Module,
    steps: StepSource,
    options: TrainOptions,
    on_step: Callable[[StepFacts], None] = lambda facts: None,
) -> TrainReport:
    """Train all parameters that require a gradient, by AdamW.

    The loss of a step is the cross entropy of its supervised tokens divided by their number on all ranks and in all
    micro-batches, so that the numbers of ranks and of micro-batches do not change the result.

    Collective: yes, over the default process group, which must be the ranks of the model's mesh.
    Memory: gradients and two moments for each trained parameter, sharded as it is. With several micro-batches on
    several ranks also one unsharded gradient of the model until the last of them, which spares the ranks an
    exchange for each of the others.

    Args:
        model: a causal language model, sharded or not; returned to the mode (train, eval) it came in.
        steps: as of :func:`~shardwise.training.data.step_loader`; as many on every rank.
        options: what they say about data is of no concern here.
        on_step: told about each step, on every rank, after the update.

    Raises:
        TrainingError: the loss or the gradient is not finite; the parameters are those before that step.
        ConfigError: nothing requires a gradient, or what does is neither sharded nor averaged.
    """
    world = World.current()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(f"no parameter of {type(model).__name__} requires a gradient, so none can be trained")
    require_synchronised(model, world)
    device = parameters[0].device
    work = StepWork(world=world, model=model, parameters=parameters, options=options)
    optimizer = torch.optim.AdamW(parameter_groups(parameters, options.weight_decay), lr=options.learning_rate)
    schedule = get_scheduler(
        "constant_with_warmup" if options.schedule == "constant" else options.schedule,
        optimizer,
        num_warmup_steps=options.warmup_steps(len(steps)),
        num_training_steps=len(steps),
    )
    mode = model.training
    model.train()
    done: list[StepFacts] = []
    for number, batches in enumerate(steps, start=1):
        start = time.perf_counter()
        gradient = work.gradient(batches)
        require_finite(number, gradient.loss, gradient.grad_norm)
        learning_rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        done.append(
            StepFacts(
                step=number,
                loss=gradient.loss,
                learning_rate=float(learning_rate),
                grad_norm=gradient.grad_norm,
                tokens=gradient.tokens,
                supervised_tokens=gradient.supervised_tokens,
                seconds=time.perf_counter() - start,
                memory_bytes=peak_memory(device),
            )
        )
        on_step(done[-1])
    model.train(mode)
    return TrainReport(world.rank, world.size, sum(parameter.numel() for parameter in parameters), tuple(done))


def peak_memory(device: torch.device) -> int:
    """Bytes: the most allocated on a CUDA device so far, else the most this process has had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
