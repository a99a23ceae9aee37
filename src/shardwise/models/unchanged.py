"""Whether a model and its optimizers are still what they were, object for object.

What a model holds is found out by a walk over its modules and some calls into torch for every tensor: tenths of a
second where an adapter has a thousand small ones. A step changes values, and replaces nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.models._torch_private import local_address, registries_of


class Snapshot:
    """Which objects a model and its optimizers are made of, and where these tensors lie on this rank.

    Groups of FSDP2 that are gathered show other parameters than those that are not, and so another model.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], tensors: Collection[torch.Tensor]
    ) -> None:
        self._registries = [registry for module in model.modules() for registry in registries_of(module)]
        found = self._all(model, optimizers)
        self._objects = [item for objects in found for item in objects]  # kept, so that ids stay theirs
        self._ids, self._counts = _ids(found)
        self._tensors = [(tensor, local_address(tensor), tensor.requires_grad) for tensor in tensors]

    def shows(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
        """Whether a snapshot of these would be the same."""
        return _ids(self._all(model, optimizers)) == (self._ids, self._counts) and all(
            local_address(tensor) == address and tensor.requires_grad == requires_grad
            for tensor, address, requires_grad in self._tensors
        )

    def _all(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Collection[object]]:
        found: list[Collection[object]] = [(model, *optimizers)]
        found += [registry.values() for registry in self._registries]
        for optimizer in optimizers:
            found += [optimizer.param_groups, *(group["params"] for group in optimizer.param_groups)]
            found += [optimizer.state, *(entries.values() for entries in optimizer.state.values())]
        return found


def _ids(found: Sequence[Collection[object]]) -> tuple[list[int], list[int]]:
    """Who they are, and how many there are in each."""
    return [id(item) for objects in found for item in objects], [len(objects) for objects in found]
