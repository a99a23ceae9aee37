"""Gives meta tensors memory, at every place where a model registers them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.execution.memory.host_memory import HostMemory
from shardwise.models import torch_words
from shardwise.models.torch_words import take_after
from shardwise.models.view import Held, local_tensor
from shardwise.planning.loads.pages import MeasuredPages, Pages


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


def home_among(held: Sequence[Held], tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where staging lies: on the mesh's device, else where the tensors are that have values."""
    live = next((tensor for tensor in tensors if not tensor.is_meta), None)
    return home_of(held, None if live is None else local_tensor(live).device)


Managers: TypeAlias = Mapping[nn.Parameter, Any]
"""FSDP2's own object for each parameter that it shards."""


def managers_of(model: nn.Module) -> Managers:
    """What FSDP2 manages of a model. It stays true for what is on meta until it is materialised."""
    return torch_words.fsdp_params(model)


def devices_of(held: Sequence[Held], managers: Managers, home: torch.device) -> dict[str, torch.device]:
    """By FQN, the device that each tensor is on, or will be on once it is materialised."""
    return {
        item.fqn: _WantedMemory.of(item, managers, home).device
        if item.tensor.is_meta
        else local_tensor(item.tensor).device
        for item in held
    }


def materialize(
    held: Sequence[Held],
    managers: Managers,
    home: torch.device,
    pages: Pages = MeasuredPages(),  # noqa: B008 - frozen
) -> tuple[dict[str, torch.Tensor], HostMemory]:
    """Give every meta tensor uninitialised memory for this rank's shard; tensors that are real stay.

    ``managers`` are of the model that holds them; a parameter that is not among them is in no group of FSDP2's.
    Returns this rank's own tensors, by FQN, and the memory they have on the host, to be touched in ``pages`` before
    it is written to. Parameters become new objects, shared ones one object everywhere, with
    their ``requires_grad`` and attributes.
    Memory: this rank's shards.
    """
    found = {item.fqn: local_tensor(item.tensor) for item in held if not item.tensor.is_meta}
    wanted = [_WantedMemory.of(item, managers, home) for item in held if item.tensor.is_meta]
    memory = HostMemory([item.nbytes for item in wanted if item.is_on_host], pages)
    return found | {item.item.fqn: item.fulfil(memory) for item in wanted}, memory


@dataclass(frozen=True, slots=True)
class _WantedMemory:
    """A tensor on meta, and the memory it is to have: ``size`` is padded where FSDP2 wants it so."""

    item: Held
    manager: Any
    size: tuple[int, ...]
    device: torch.device
    is_pinned: bool

    @classmethod
    def of(cls, item: Held, managers: Managers, home: torch.device) -> _WantedMemory:
        tensor = item.tensor
        manager = managers.get(tensor) if isinstance(tensor, nn.Parameter) else None
        if manager is None:
            return cls(item, None, tuple(local_tensor(tensor).shape), home, is_pinned=False)
        device = torch.device("cpu") if torch_words.is_offloaded(manager) else home
        pins = torch_words.pins_memory(manager)
        return cls(item, manager, torch_words.padded_size(manager), device, is_pinned=pins)

    @property
    def is_on_host(self) -> bool:
        if self.device.type != "cpu" or self.is_pinned:
            return False
        return self.manager is not None or local_tensor(self.item.tensor).is_contiguous()

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.item.tensor.element_size()

    def fulfil(self, memory: HostMemory) -> torch.Tensor:
        """Install a tensor with memory; this rank's own part of it."""
        tensor = self.item.tensor
        if self.is_on_host:
            fresh = memory.take(self.size, tensor.dtype)
        elif self.manager is not None:
            fresh = torch.empty(self.size, dtype=tensor.dtype, device=self.device, pin_memory=self.is_pinned)
        else:
            fresh = torch.empty_like(local_tensor(tensor), device=self.device)
        if self.manager is not None:
            fresh = torch_words.without_padding(self.manager, fresh)
        made = torch_words.sharded_as(tensor, fresh) if isinstance(tensor, DTensor) else fresh
        if not isinstance(tensor, nn.Parameter):
            self.item.install(made)
            return fresh
        parameter = (
            made if isinstance(made, nn.Parameter) else nn.Parameter(made, requires_grad=tensor.requires_grad)
        )
        take_after(parameter, tensor)
        self.item.install(parameter)
        if self.manager is not None:
            torch_words.adopt_sharded(self.manager, parameter)
        return fresh


def offloads_shards(managers: Managers) -> bool:
    """Whether sharded parameters live on the CPU although the mesh is of another device."""
    return any(torch_words.is_offloaded(manager) for manager in managers.values())
