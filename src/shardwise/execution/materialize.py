"""Memory for tensors that are on meta, at every place a model registers them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.models import _torch_private
from shardwise.models.view import Held


def home_of(held: Sequence[Held], default: torch.device | None) -> torch.device:
    """Where a model computes: the device of the mesh it is sharded on, else ``default``, else the CPU.

    What is not sharded (buffers, whole parameters) belongs there too.
    """
    for item in held:
        if isinstance(item.tensor, DTensor):
            kind = item.tensor.device_mesh.device_type
            if kind == "cpu":
                return torch.device("cpu")
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return default or torch.device("cpu")


def materialize(model: nn.Module, held: Sequence[Held], home: torch.device) -> None:
    """Give every meta tensor uninitialised memory for this rank's shard; tensors that are real stay.

    Parameters become new objects, shared ones one object everywhere, with their ``requires_grad`` and attributes.
    Memory: this rank's shards.
    """
    managers = _torch_private.fsdp_params(model)
    for item in held:
        tensor = item.tensor
        if not tensor.is_meta:
            continue
        if not isinstance(tensor, nn.Parameter):
            item.install(_real(tensor, home))
            continue
        manager = managers.get(tensor)
        if manager is None:
            fresh = _real(tensor, home)
        else:
            device = torch.device("cpu") if _torch_private.is_offloaded(manager) else home
            fresh = _sharded_like(tensor, _torch_private.padded_local(manager, tensor.dtype, device))
        parameter = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        vars(parameter).update(vars(tensor))
        item.install(parameter)
        if manager is not None:
            _torch_private.adopt_sharded(manager, parameter)


def _real(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return _sharded_like(tensor, torch.empty_like(tensor.to_local(), device=device))
    return torch.empty_like(tensor, device=device)


def _sharded_like(tensor: torch.Tensor, local: torch.Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def offloads_shards(model: nn.Module) -> bool:
    """Whether sharded parameters live on the CPU although the mesh is of another device."""
    return any(_torch_private.is_offloaded(manager) for manager in _torch_private.fsdp_params(model).values())
