"""Checks that a model and its optimizers are still what they were, object for object.

What a model holds is found out by a walk over its modules and some calls into torch for every tensor: tenths of a
second where an adapter has a thousand small ones. A step changes values, and replaces nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.models._torch_private import local_address, modules_in, registries_of


class Snapshot:
    """Which objects a model and its optimizers are made of, and where these tensors lie on this rank.

    Groups of FSDP2 that are gathered show other parameters than those that are not, and so another model.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], tensors: Collection[torch.Tensor]
    ) -> None:
        self._registries = [registry for module in modules_in(model) for registry in registries_of(module)]
        self._sizes = list(map(len, self._registries))
        self._filled = [registry for registry in self._registries if registry]
        self._objects = self._all(model, optimizers)  # kept, so that ids stay theirs
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._places = list(map(local_address, self._tensors))
        self._trained = [tensor.requires_grad for tensor in self._tensors]

    def shows(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
        """Whether a snapshot of these would be the same."""
        return (
            list(map(len, self._registries)) == self._sizes
            and _are_same(self._all(model, optimizers), self._objects)
            and list(map(local_address, self._tensors)) == self._places
            and [tensor.requires_grad for tensor in self._tensors] == self._trained
        )

    def _all(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[object]:
        found: list[object] = [model, *optimizers]
        for registry in self._filled:
            found += registry.values()
        for optimizer in optimizers:
            found += optimizer.param_groups
            for group in optimizer.param_groups:
                found += group["params"]
                found.append(_END)
            for parameter, entries in optimizer.state.items():
                found.append(parameter)
                found += entries.values()
            found.append(_END)
        return found


_END = object()
"""Stands between lists, so that what goes from one to the next is noticed."""


def _are_same(objects: Sequence[object], others: Sequence[object]) -> bool:
    return len(objects) == len(others) and all(map(is_, objects, others))
