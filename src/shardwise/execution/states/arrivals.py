"""Turns a model of whole tensors into one of shards, with its optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.execution.memory.materialize import home_of, managers_of, materialize
from shardwise.execution.moving.distribute import LocalTensor, Shipment
from shardwise.execution.ranks.world import World
from shardwise.execution.states.supply import Supply
from shardwise.layout import TensorKind
from shardwise.models.optimizers.rebind import Bound, Key, state_like
from shardwise.models.replicated import average_replicated_gradients
from shardwise.models.torch_words import take_after
from shardwise.models.view import Held, boxes_at, local_boxes, local_tensor, look_inside
from shardwise.models.wrapping import wrap
from shardwise.models.wrapping.wrap import Sharding
from shardwise.planning.states.sources import NOBODY
from shardwise.tensors import Box, contiguous_strides


def wrap_without_values(
    model: nn.Module, held: Sequence[Held], bounds: Sequence[Bound], sharding: Sharding, supply: Supply
) -> tuple[str, ...]:
    """Put parameters without values in place of all, and shard these: the same steps for every state of a model."""
    attributes: dict[str, dict[str, object]] = {}
    for bound in bounds:
        bound.unbind()
    for item in held:
        if isinstance(item.tensor, nn.Parameter):
            attributes[item.fqn] = dict(vars(item.tensor))
            empty = torch.empty(item.tensor.shape, dtype=supply.dtypes[item.fqn], device="meta")
            parameter = nn.Parameter(empty, requires_grad=item.tensor.requires_grad)
            take_after(parameter, item.tensor)
            item.install(parameter)
    wrap.prepare_blocks(model, sharding)
    groups = wrap.wrap(model, sharding) if sharding.mesh is not None else ()
    for item in look_inside(model):
        vars(item.tensor).update(attributes.get(item.fqn, {}))
    return groups


class Arrivals:
    """Where values arrive on this rank: the wrapped model's tensors, and the state of its optimizers."""

    def __init__(self, model: nn.Module, supply: Supply) -> None:
        self.model = model
        self.supply = supply
        self.managers = managers_of(model)
        self.held = {item.fqn: item for item in look_inside(model)}
        live = next(iter(supply.survey.live.values()), None)
        self.home = home_of(list(self.held.values()), None if live is None else live.device)
        self.state: dict[Key, torch.Tensor] = {}

    def shipments(self, world: World) -> list[Shipment]:
        """What has to be handed over: all values, but those of buffers that every rank has already."""
        survey = self.supply.survey
        coordinates = self._coordinates(world)
        shipments: list[Shipment] = []
        for name in survey.names:
            source_of = self.supply.source_of[name]
            live = survey.live.pop(name, None)
            is_buffer = name in self.held and self.held[name].kind is not TensorKind.PARAMETER
            if source_of != NOBODY and not (is_buffer and source_of == tuple(range(world.size))):
                boxes = self._boxes(name, coordinates)
                shipments.append(Shipment(name, self.supply.dtypes[name], boxes, source_of, live))
        return shipments

    def _coordinates(self, world: World) -> list[tuple[int, ...]]:
        """Where each rank of the group is in the mesh."""
        tensors = [item.tensor for item in self.held.values()]
        mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
        if mesh is None:
            return [()] * world.size
        members = dist.get_process_group_ranks(world.group)
        return [tuple((mesh.mesh == member).nonzero()[0].tolist()) for member in members]

    def _boxes(self, name: str, coordinates: Sequence[tuple[int, ...]]) -> tuple[tuple[Box, ...], ...]:
        """What each rank is to have of a tensor, given where each is in the mesh."""
        key = self.supply.survey.keys.get(name)
        tensor = self.held[key.parameter if key is not None else name].tensor
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return ((Box.whole(shape),),) * len(coordinates)
        strides = contiguous_strides(shape)
        return tuple(
            tuple(
                item.box
                for item in boxes_at(
                    shape, tensor.placements, tuple(tensor.device_mesh.shape), coordinate, strides, name
                )
            )
            for coordinate in coordinates
        )

    def prepare(self, names: Sequence[str]) -> dict[str, LocalTensor]:
        """Memory for tensors that are about to arrive."""
        keys = self.supply.survey.keys
        parameters = [self.held[keys[name].parameter if name in keys else name] for name in names]
        wanted = [item for item in parameters if item.kind is TensorKind.PARAMETER]
        _, memory = materialize(wanted, self.managers, self.home)
        memory.touch_rest()
        landings: dict[str, LocalTensor] = {}
        for name in names:
            if name in keys:
                target = self._new_state(keys[name])
            else:
                item = self.held[name]
                if item.kind is not TensorKind.PARAMETER:
                    shape, dtype = item.tensor.shape, self.supply.dtypes[name]
                    item.install(torch.empty(shape, dtype=dtype, device=self.home))
                target = item.tensor
            landings[name] = LocalTensor(local_tensor(target), local_boxes(target, name))
        return landings

    def _new_state(self, key: Key) -> torch.Tensor:
        self.state[key] = state_like(self.held[key.parameter].tensor, self.supply.dtypes[str(key)])
        return self.state[key]

    def finish(self, bounds: Sequence[Bound], sharding: Sharding) -> list[str]:
        """Bind the optimizers, and what else needs parameters that stay; names of those without values yet."""
        bound_names = {name for bound in bounds for names in bound.groups for name in names}
        awaiting = [
            item
            for item in self.held.values()
            if item.kind is TensorKind.PARAMETER
            and item.tensor.is_meta
            and (item.fqn in bound_names or _is_averaged(item.tensor, sharding))
        ]
        _, memory = materialize(awaiting, self.managers, self.home)
        memory.touch_rest()
        for item in awaiting:
            if item.tensor.dtype.is_floating_point and item.tensor.dtype.itemsize > 1:
                item.local.fill_(float("nan"))
        for item in self.held.values():
            if (
                item.kind is not TensorKind.PARAMETER
                and not item.tensor.is_meta
                and item.tensor.device != self.home
            ):
                item.install(item.tensor.to(self.home))
        parameters = {item.fqn: item.tensor for item in self.held.values() if isinstance(item.tensor, nn.Parameter)}
        for bound in bounds:
            bound.rebind(parameters, self.state, self.supply.scalars)
        if sharding.mesh is not None:
            average_replicated_gradients(self.model, sharding.mesh)
        return [item.fqn for item in awaiting]


def _is_averaged(tensor: torch.Tensor, sharding: Sharding) -> bool:
    return sharding.mesh is not None and tensor.requires_grad and not isinstance(tensor, DTensor)
