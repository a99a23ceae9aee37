"""Averages the gradients of parameters that stay whole on every rank of a sharded model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.models import _torch_private


def average_replicated_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give whole parameters of a sharded model the mean gradient of all ranks, as sharded ones have it.

    To be called once the parameters are materialised (the hooks belong to the parameter objects); again does no
    harm. Afterwards every backward pass is a collective for each of them that is trained, except where FSDP2 has
    been told not to exchange gradients (``set_requires_gradient_sync(False)``): they add up on each rank then,
    until it does.
    """
    average = Averaging(mesh, _torch_private.exchanges_gradients(model))
    for parameter in model.parameters():
        is_alone = parameter.requires_grad and parameter.numel() and not isinstance(parameter, DTensor)
        if is_alone and not is_averaged(parameter):
            parameter.register_post_accumulate_grad_hook(average)


class Averaging:
    """A hook that averages a gradient over all ranks of a mesh.

    What an earlier pass has averaged is the same on every rank, and so is its mean: a gradient that is added to it
    may be averaged together with it.
    """

    def __init__(self, mesh: DeviceMesh, exchanges: Callable[[], bool]) -> None:
        self.mesh = mesh
        self.exchanges = exchanges

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and self.exchanges():
            for group in self.mesh.get_all_groups():
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(self.mesh.size())


def is_averaged(parameter: nn.Parameter) -> bool:
    """Whether :func:`average_replicated_gradients` takes care of a parameter's gradient."""
    return any(isinstance(hook, Averaging) for hook in _torch_private.gradient_hooks(parameter))
