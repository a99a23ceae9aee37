"""Chooses the source rank of each tensor of a model that is being sharded, and receives the values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import RankMismatchError
from shardwise.execution import moving
from shardwise.execution.checksums import checksum
from shardwise.execution.memory import fsdp_param_groups_of, home_of, materialize
from shardwise.execution.world import World
from shardwise.layout import TensorKind
from shardwise.models import torch_api, wrap
from shardwise.models.gradients import average_replicated_gradients
from shardwise.models.rebind import Bound, Key, Scalar, state_like
from shardwise.models.view import TensorRef, boxes_of_ranks, collect_tensors
from shardwise.models.wrap import Sharding
from shardwise.planning import matching
from shardwise.tensors import Box


@dataclass(frozen=True)
class SourceTable:
    """The ranks whose values every tensor gets, and its dtype, by name.

    Attributes:
        keys: names of optimizers' tensors, which follow the model's in ``source_of``.
        live: this rank's values, which are removed as they are sent.
        source_of: by rank, the rank that gives it the values.
        dtypes: on which the ranks have settled.
        cast: ("dtype before", "dtype then") of tensors whose dtype changes.
        differed: the rank whose values are taken although others have different ones.
        scalars: counts of steps and the like.
    """

    keys: dict[str, Key]
    live: dict[str, torch.Tensor]
    source_of: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    cast: dict[str, tuple[str, str]]
    differed: dict[str, int]
    scalars: dict[Key, Scalar]


def agree_on_sources(
    world: World,
    held: Sequence[TensorRef],
    bounds: Sequence[Bound],
    values_from: matching.ValuesFrom,
    trained_dtype: wrap.TrainedDtype,
) -> SourceTable:
    """Determine the ranks that have values of each tensor, compare replicas, and choose sources. Collective: yes.

    Raises:
        RankMismatchError: ranks that ``values_from`` relies on have no values, values differ that it takes to be
            equal, or dtypes cannot be settled.
    """
    keys = _state_keys(world, bounds)
    tensors = {item.fqn: item.tensor for item in held} | {
        str(key): tensor for bound in bounds for key, tensor in bound.tensors.items()
    }
    live = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
    names = [*(item.fqn for item in held), *keys]
    has = [list(map(bool, told)) for told in world.all_gather_object(bytes(name in live for name in names))]
    chosen = world.run_all(matching.choose_sources, names, has, values_from)
    own = [_name_of(tensors[name].dtype) if name in tensors else "" for name in names]
    stored = _filled(world.all_gather_object(own), chosen)
    agreed = world.run_all(matching.choose_dtypes, names, chosen, stored)
    several = [
        name
        for name, source_of in zip(names, chosen, strict=True)
        if len(set(source_of)) > 1 and source_of[world.rank] == world.rank
    ]
    sums = world.all_gather(lambda: {name: checksum(live[name]) for name in several})
    most = list(map(sum, has))
    settled, differed = world.run_all(matching.resolve_differences, names, chosen, sums, most, values_from)
    scalars = _scalars(world, bounds, most, values_from, differed)
    before = {
        name: [stored[rank][index] for rank in (*settled[index], *range(world.size))]
        for index, name in enumerate(names)
    }
    dtypes = {name: getattr(torch, dtype) for name, dtype in zip(names, agreed, strict=True)}
    for item in held:
        if item.kind is TensorKind.PARAMETER:
            dtypes[item.fqn] = wrap.trained_dtype_of(trained_dtype, dtypes[item.fqn], item.tensor.requires_grad)
    for name, key in keys.items():  # state in the parameter's dtype goes along, as when torch loads it
        if before[name][0] == before[key.parameter][0]:
            dtypes[name] = dtypes[key.parameter]
    cast = {
        name: (other[0], _name_of(dtypes[name]))
        for name in names
        if (other := [dtype for dtype in before[name] if dtype != _name_of(dtypes[name])])
    }
    return SourceTable(keys, live, dict(zip(names, settled, strict=True)), dtypes, cast, differed, scalars)


def _scalars(
    world: World,
    bounds: Sequence[Bound],
    most: Sequence[int],
    values_from: matching.ValuesFrom,
    differed: dict[str, int],
) -> dict[Key, Scalar]:
    """Return step counts and other scalars of the optimizers, from the chosen rank. Collective: yes."""
    mine: dict[Key, Scalar] = {}
    for bound in bounds:
        for key, value in bound.scalars.items():
            mine[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    if len(set(world.all_gather_object(matching.digest(list(mine.items()))))) == 1:
        return mine
    told = world.all_gather_object(mine)
    chosen: dict[Key, Scalar] = {}
    for key in dict.fromkeys(key for values in told for key in values):
        having = [rank for rank, values in enumerate(told) if key in values]
        rank = 0 if values_from == "first_rank" else matching.leading(having, most)
        if rank not in having:
            raise RankMismatchError(f"{values_from} relies on values that rank 0 does not have: {key}")
        chosen[key] = told[rank][key]
        if values_from == "first_rank" or len({repr(told[other][key]) for other in having}) == 1:
            continue
        differed[str(key)] = rank
        if values_from != "any":
            raise RankMismatchError(
                f"{key} is {told[rank][key]} on rank {rank}, and not so on others. Pass values_from='first_rank' "
                "for those of rank 0"
            )
    return chosen


def _state_keys(world: World, bounds: Sequence[Bound]) -> dict[str, Key]:
    """The optimizers' tensors on any rank, in the same order everywhere. Collective: yes."""
    mine = [key for bound in bounds for key, tensor in bound.tensors.items() if not tensor.is_meta]
    single = [key for bound in bounds for key in bound.scalars]
    told = world.all_gather_object((mine, single))
    keys = {str(key): key for tensors, _ in told for key in tensors}
    confused = [str(key) for _, scalars in told for key in scalars if str(key) in keys]
    if confused:
        raise RankMismatchError(f"{confused[0]} has the parameter's shape on some ranks, and another on others")
    return keys


def _filled(dtypes_by_rank: Sequence[Sequence[str]], chosen: Sequence[tuple[int, ...]]) -> list[list[str]]:
    """Ranks without an optimizer's state have no dtype for it, so the source's is used."""
    return [
        [
            dtype or (dtypes_by_rank[source_of[rank]][index] if source_of else "")
            for index, (dtype, source_of) in enumerate(zip(dtypes, chosen, strict=True))
        ]
        for rank, dtypes in enumerate(dtypes_by_rank)
    ]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wrap_without_values(
    model: nn.Module, held: Sequence[TensorRef], bounds: Sequence[Bound], sharding: Sharding, supply: SourceTable
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
            torch_api.take_after(parameter, item.tensor)
            item.install(parameter)
    wrap.prepare_blocks(model, sharding)
    groups = wrap.wrap(model, sharding) if sharding.mesh is not None else ()
    for item in collect_tensors(model):
        vars(item.tensor).update(attributes.get(item.fqn, {}))
    return groups


class IncomingShards:
    """Receiving side of a resharding on this rank.

    The tensors of the wrapped model and the state of its optimizers.
    """

    def __init__(self, model: nn.Module, supply: SourceTable) -> None:
        self.model = model
        self.supply = supply
        self.managers = fsdp_param_groups_of(model)
        self.held = {item.fqn: item for item in collect_tensors(model)}
        live = next(iter(supply.live.values()), None)
        self.home = home_of(list(self.held.values()), None if live is None else live.device)
        self.state: dict[Key, torch.Tensor] = {}

    def handovers(self, world: World) -> list[moving.Handover]:
        """List the values to transfer, without buffers that every rank already has."""
        supply = self.supply
        ranks = list(range(1)) if world.size == 1 else dist.get_process_group_ranks(world.group)
        handovers: list[moving.Handover] = []
        for name, source_of in supply.source_of.items():
            live = supply.live.pop(name, None)
            is_buffer = name in self.held and self.held[name].kind is not TensorKind.PARAMETER
            if source_of != matching.NOBODY and not (is_buffer and source_of == tuple(range(world.size))):
                key = supply.keys.get(name)
                tensor = self.held[key.parameter if key is not None else name].tensor
                boxes = boxes_of_ranks(tensor, name, ranks)
                whole = Box.whole(tensor.shape)
                held = tuple((whole,) if source == rank else () for rank, source in enumerate(source_of))
                mine = moving.LocalTensor.whole(live) if live is not None and held[world.rank] else None
                dtype = supply.dtypes[name]
                handovers.append(moving.Handover(name, tensor.shape, dtype, held, boxes, mine, None))
        return handovers

    def prepare(self, names: Sequence[str]) -> dict[str, moving.LocalTensor]:
        """Memory for tensors that are about to arrive."""
        keys = self.supply.keys
        parameters = [self.held[keys[name].parameter if name in keys else name] for name in names]
        wanted = [item for item in parameters if item.kind is TensorKind.PARAMETER]
        materialize(wanted, self.managers, self.home)
        staging_buffers: dict[str, moving.LocalTensor] = {}
        for name in names:
            if name in keys:
                target = self._new_state(keys[name])
            else:
                item = self.held[name]
                if item.kind is not TensorKind.PARAMETER:
                    shape, dtype = item.tensor.shape, self.supply.dtypes[name]
                    item.install(torch.empty(shape, dtype=dtype, device=self.home))
                target = item.tensor
            staging_buffers[name] = moving.LocalTensor.of(target, name)
        return staging_buffers

    def _new_state(self, key: Key) -> torch.Tensor:
        self.state[key] = state_like(self.held[key.parameter].tensor, self.supply.dtypes[str(key)])
        return self.state[key]

    def finish(self, bounds: Sequence[Bound], sharding: Sharding) -> list[str]:
        """Bind the optimizers, and others that need the final parameters.

        Return the names of tensors without values.
        """
        bound_names = {name for bound in bounds for names in bound.groups for name in names}
        awaiting = [
            item
            for item in self.held.values()
            if item.kind is TensorKind.PARAMETER
            and item.tensor.is_meta
            and (item.fqn in bound_names or _is_averaged(item.tensor, sharding))
        ]
        materialize(awaiting, self.managers, self.home)
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
