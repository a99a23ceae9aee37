"""The loss of a batch in the precision of a training, and what ranks keep of gradients between micro-batches."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.execution.memory.free import available_memory
from shardwise.execution.processes.launched import this_device
from shardwise.execution.ranks.world import World
from shardwise.models.placement import computing_device, root_of
from shardwise.models.view import local_tensor
from shardwise.training.data.batches import Batch
from shardwise.training.optimizing.optimizer_memory import StateBytes
from shardwise.training.optimizing.optimizers import optimizers_of, parameters_by_part
from shardwise.training.options import Precision, TrainOptions
from shardwise.training.passes.losses import Loss, WholeLogits


@dataclass(frozen=True, slots=True)
class Forward:
    """A model, and how its loss is taken.

    Attributes:
        model: sharded or not.
        loss: see :func:`~shardwise.training.passes.losses.prepare_loss`.
        dtype: what is computed in.
    """

    model: nn.Module
    loss: Loss = field(default_factory=WholeLogits)
    dtype: Precision = "float32"

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return computing_device(next(self.model.parameters()))

    def summed(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch, summed. Collective: as the model is."""
        device = self.device
        with computing_in(self.model, device, self.dtype):
            return self.loss.summed(self.model, batch.to(device))


def computing_in(model: nn.Module, device: torch.device, dtype: Precision) -> AbstractContextManager[object]:
    """Mixed precision for a model that is not sharded; a sharded one has it in its FSDP2 policy."""
    if dtype == "float32" or root_of(model) is not None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


@dataclass(frozen=True, slots=True)
class WholeGradients:
    """Each rank adds up its own gradients, whole, and they are exchanged once for a step.

    Memory: between micro-batches a whole gradient of all that is trained on every rank, in the dtype in which ranks
    sum it. A step with one micro-batch takes none of it.
    """


@dataclass(frozen=True, slots=True)
class ShardedGradients:
    """Gradients are dealt to their shards after each micro-batch; over replicas they are exchanged once for a step.

    Memory: no more than a step with one micro-batch. Traffic: one reduce-scatter for every micro-batch.
    """


Accumulation: TypeAlias = WholeGradients | ShardedGradients


def exchange_gradients(model: nn.Module, accumulation: Accumulation, *, is_last: bool) -> None:
    """Tell FSDP2 what to do with the gradients of the backward pass that comes next."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            is_dealt = is_last or isinstance(accumulation, ShardedGradients)
            module.set_requires_gradient_sync(is_dealt, recurse=False)
            module.set_requires_all_reduce(is_last, recurse=False)


SHARDED_FOR_LACK_OF_MEMORY = (
    "gradients are dealt to their shards after each micro-batch: whole ones would not fit into memory beside the "
    "optimizer (training.accumulate=auto)"
)

_SHARE = 0.8
"""Of the memory that is free: the rest is for activations, and for what nobody has counted."""


def fitting_accumulation(model: nn.Module, options: TrainOptions, summed_in: torch.dtype) -> Accumulation:
    """Whole gradients where steps have one micro-batch, or there is memory for them; else sharded ones.

    Free memory is what there is before an optimizer has its state, and each element that a rank has its gradient.

    Collective: yes, over the default process group. Ranks of one machine share its memory.
    """
    world = World.current()
    if options.gradient_accumulation_steps == 1 or world.size == 1:
        return WholeGradients()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole_bytes = sum(parameter.numel() * summed_in.itemsize for parameter in trained)
    own_bytes = sum(4 * local_tensor(parameter).numel() for parameter in trained) + _state_bytes(model, options)
    device = this_device()
    free = available_memory(device)

    def tell() -> tuple[int | None, bool, str]:
        is_host = free.device_bytes is None
        return (free.host_bytes if is_host else free.device_bytes), is_host, platform.node()

    def conclude(told: list[tuple[int | None, bool, str]]) -> bool:
        return all(
            nbytes is None
            or fits_whole(whole_bytes, own_bytes, nbytes // (_neighbours(told, node) if is_host else 1))
            for nbytes, is_host, node in told
        )

    return WholeGradients() if world.all_reduce(tell, conclude) else ShardedGradients()


def _state_bytes(model: nn.Module, options: TrainOptions) -> int:
    """Of the state that optimizers of this name will have on this rank."""
    recipes = optimizers_of(options)
    dealt = parameters_by_part(model, recipes)
    return sum(StateBytes(recipes[name]).of(parameters.values()) for name, parameters in dealt.items())


def fits_whole(whole_bytes: int, own_bytes: int, free_bytes: int) -> bool:
    """Whether whole gradients fit into what is free, beside a rank's own gradients and the optimizer's state."""
    return whole_bytes + own_bytes <= _SHARE * free_bytes


def _neighbours(told: Sequence[tuple[int | None, bool, str]], node: str) -> int:
    """How many ranks are on this machine."""
    return sum(other == node for _, _, other in told)
