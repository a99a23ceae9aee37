"""Whether a model and its optimizers are still what they were, object for object.

What a model holds is found out by a walk over its modules and some calls into torch for every tensor: tenths of a
second where an adapter has a thousand small ones. A step changes values, and replaces nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

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
        self._objects = [list(objects) for objects in self._all(model, optimizers)]  # kept, so that ids are theirs
        self._ids = [_ids(objects) for objects in self._objects]
        self._tensors = [(tensor, local_address(tensor), tensor.requires_grad) for tensor in tensors]

    def shows(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
        """Whether a snapshot of these would be the same."""
        found = 0
        for objects, ids in zip(self._all(model, optimizers), self._ids, strict=False):
            if _ids(objects) != ids:
                return False
            found += 1
        return found == len(self._ids) and all(
            local_address(tensor) == address and tensor.requires_grad == requires_grad
            for tensor, address, requires_grad in self._tensors
        )

    def _all(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Iterable[object]]:
        """Everything, in an order in which what is different shows before it is gone into."""
        yield (model, *optimizers)
        for registry in self._registries:
            yield registry.values()
        for optimizer in optimizers:
            yield optimizer.param_groups
            for group in optimizer.param_groups:
                yield group["params"]
            yield optimizer.state
            for entries in optimizer.state.values():
                yield entries.values()


def _ids(objects: Iterable[object]) -> list[int]:
    return list(map(id, objects))
