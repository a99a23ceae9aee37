"""Recognizes a state whose tensors are still those that were collected, without collecting them.

A training step changes values and replaces nothing. To collect the tensors of an adapter with a thousand matrices
takes several times as long as to compare their identity.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Self

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoints.base_identity import select_base
from shardwise.checkpoints.state import CollectedState, TrainState
from shardwise.models.torch_api import registries
from shardwise.models.view import without_compile


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The objects of a model and its optimizers at one time, and the memory of their tensors on this rank.

    Attributes:
        registries: the model's modules, parameters and buffers, module by module. They are changed in place.
        objects: content of the registries, and parameters and state of the optimizers. As long as they are
            referenced here, no other object has their identity.
        tensors: those of the checkpoint and of its base.
        memory: of these tensors: result of :func:`find_memory`.
        trained: ``requires_grad`` of each tensor of the model.
    """

    registries: Sequence[Collection[object]]
    objects: Sequence[object]
    tensors: Sequence[torch.Tensor]
    memory: Sequence[Sequence[object]]
    trained: Sequence[bool]

    @classmethod
    def take(cls, state: TrainState, collected: CollectedState) -> Self:
        """Take a snapshot of a state, which has just been collected."""
        found = [registry for module in collected.model.modules() for registry in registries(module)]
        tensors = compared_tensors(collected)
        objects = _find_objects(found, state.all_optimizers)
        return cls(found, objects, tensors, find_memory(tensors), _find_trained(collected))

    def is_current(self, state: TrainState, collected: CollectedState) -> bool:
        """Return whether a state has the same objects, in the same memory, as when it was collected.

        If FSDP2 groups are gathered, it has not, because their modules have other parameters.
        """
        if without_compile(state.model) is not collected.model:
            return False
        objects = _find_objects(self.registries, state.all_optimizers)
        return (
            len(objects) == len(self.objects)
            and all(map(is_, objects, self.objects))
            and find_memory(self.tensors) == self.memory
            and _find_trained(collected) == self.trained
        )


def _find_objects(registries: Sequence[Collection[object]], optimizers: Sequence[Optimizer]) -> list[object]:
    """Return all objects, those of a registry, group or parameter after it."""
    found: list[object] = []
    for registry in registries:
        if registry:
            found.append(registry)
            if isinstance(registry, dict):
                found += registry
                found += registry.values()
            elif isinstance(registry, set):
                found += registry
            else:
                found.append(object())  # of TorchScript, which makes its objects anew: never current
    for optimizer in optimizers:
        found.append(optimizer)
        for group in optimizer.param_groups:
            found.append(group)
            found += group["params"]
        for parameter, entries in optimizer.state.items():
            found.append(entries)
            found.append(parameter)
            if isinstance(entries, dict):
                found += entries
                found += entries.values()
    return found


def _find_trained(collected: CollectedState) -> list[bool]:
    """Return ``requires_grad`` of each tensor of the model."""
    return [item.tensor.requires_grad for item in collected.held]


def compared_tensors(collected: CollectedState) -> list[torch.Tensor]:
    """Return the tensors of a checkpoint, and of its base, of which it has samples."""
    base = select_base(collected.held, collected.stored)
    return [*collected.tensors.values(), *(item.tensor for item in base)]


def find_memory(tensors: Sequence[torch.Tensor]) -> list[list[object]]:
    """Return where each tensor is on this rank. Equal at a later step if they are still in the same memory."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [
        [id(tensor) for tensor in tensors],
        [own.data_ptr() for own in local],
        [own.shape for own in local],
        [own.stride() for own in local],
        [own.dtype for own in local],
    ]
