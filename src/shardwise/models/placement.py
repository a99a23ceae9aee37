"""Tells whether a model is sharded already, where it computes, and what of it cannot be sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import PlacementError
from shardwise.layout import TensorKind
from shardwise.models._torch_private import modules_in, padded_numel, walk
from shardwise.models.view import Held, canonical
from shardwise.report.names import collapse

_SHOWN = 8


def is_sharded(model: nn.Module, held: Sequence[Held]) -> bool:
    """Whether ``fully_shard`` has been applied to all of a model (True), or to nothing of it (False).

    A root that is sharded, or the model inside of PEFT's, has taken what it was meant to; without one that holds
    all parameters, every parameter has to be in some group.

    Raises:
        PlacementError: naming the modules, when it has been applied to some of them; or the parameters, when they
            are distributed, but not by ``fully_shard``.
    """
    groups = [canonical(name) for name, module in walk(model) if isinstance(module, FSDPModule)]
    parameters = [item for item in held if item.kind is TensorKind.PARAMETER]
    distributed = [item.fqn for item in parameters if isinstance(item.tensor, DTensor)]
    outside = [item.fqn for item in parameters if not isinstance(item.tensor, DTensor)]
    root: Any = root_of(model)
    taken = () if root is None else {id(parameter) for parameter in root.parameters()}
    if groups and (not outside or all(id(item.tensor) in taken for item in parameters)):
        return True
    if groups:
        raise PlacementError(
            f"the model is sharded in part: fully_shard was applied to {_few(groups)}, and not to what holds "
            f"{_few(outside)}; apply it to the root as well, or to nothing"
        )
    if distributed:
        raise PlacementError(
            f"parameters are distributed, but not by fully_shard: {_few(distributed)}; a model under tensor "
            "parallelism is sharded by fully_shard itself"
        )
    return False


def root_of(model: nn.Module) -> FSDPModule | None:
    """The outermost module that ``fully_shard`` has been applied to; None where it has been to none.

    That is the model, or the model of transformers inside of PEFT's.
    """
    return next((module for module in modules_in(model) if isinstance(module, FSDPModule)), None)


def computing_device(parameter: torch.Tensor) -> torch.device:
    """Where is computed with a parameter; it may be offloaded to the host meanwhile."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != parameter.device.type:
        kind = parameter.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return parameter.device


def refuse_unmovable(held: Sequence[Held]) -> None:
    """Raise for parameters whose values cannot be handed over as they are.

    Raises:
        PlacementError: naming parameters of subclasses, whose values are not all in the tensor; with gradients,
            which would be lost; or that share memory without being one parameter, and would be one no more.
    """
    parameters = [item for item in held if item.kind is TensorKind.PARAMETER]
    faults = [
        f"{item.fqn} is a {type(item.tensor).__name__}: shard the model before it is quantised or wrapped"
        for item in parameters
        if type(item.tensor) is not nn.Parameter
    ]
    with_gradient = [item.fqn for item in parameters if item.tensor.grad is not None]
    if with_gradient:
        faults.append(f"{_few(with_gradient)}: a gradient would be lost; take the step, or call zero_grad()")
    at: dict[object, str] = {}
    for item in parameters:
        if type(item.tensor) is nn.Parameter and not item.tensor.is_meta and item.tensor.numel():
            other = at.setdefault(_memory(item.tensor), item.fqn)
            if other != item.fqn:
                faults.append(
                    f"{item.fqn} and {other} are two parameters that share memory, and would each become its own; "
                    "make them one parameter, by assigning it to both modules"
                )
    if faults:
        raise PlacementError("the model cannot be sharded as it is:\n  " + "\n  ".join(faults[:20]))


def refuse_subclasses(held: Sequence[Held]) -> None:
    """Raise for tensors on meta that are of a subclass: what gets memory is a plain tensor, without its hooks.

    Raises:
        PlacementError: naming them.
    """
    faults = [
        (item.fqn, kind.__name__)
        for item in held
        if item.tensor.is_meta and (kind := type(item.local)) not in (torch.Tensor, nn.Parameter)
    ]
    if faults:
        raise PlacementError(
            f"{_few([name for name, _ in faults])}: on meta, and a {faults[0][1]}, a subclass of Tensor whose "
            "behaviour (FSDP2's all-gather hooks, say) would be lost when it gets memory; load plain parameters, "
            "and convert the model afterwards"
        )


def _memory(tensor: torch.Tensor) -> object:
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )


def _few(names: Sequence[str]) -> str:
    groups = collapse(name or "the root" for name in names)
    more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    return ", ".join(pattern for pattern, _ in groups[:_SHOWN]) + more


def padded_numels(held: Sequence[Held], managers: Mapping[nn.Parameter, Any]) -> dict[str, int]:
    """Elements of memory that this rank has for each sharded parameter of a sharded model, padding included.

    ``managers`` are FSDP2's own objects, by parameter.
    """
    return {
        item.fqn: padded_numel(managers[item.tensor])
        for item in held
        if isinstance(item.tensor, nn.Parameter) and item.tensor in managers
    }
