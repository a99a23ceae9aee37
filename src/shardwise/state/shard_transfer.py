"""Chooses the source rank of each tensor of a model that is being sharded, and receives the values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.errors import RankMismatchError
from shardwise.core.layout import TensorKind
from shardwise.core.tensors import Box
from shardwise.fsdp import torch_private, wrap
from shardwise.fsdp.gradients import average_replicated_gradients
from shardwise.fsdp.named_tensors import TensorRef, boxes_by_rank, collect_tensors
from shardwise.fsdp.rebind import Bound, Key, Scalar, state_like
from shardwise.fsdp.wrap import Sharding
from shardwise.ranks.world import World, repr_digest
from shardwise.transfer import matching, move
from shardwise.transfer.checksums import checksums
from shardwise.transfer.memory import compute_device, materialize
from shardwise.transfer.staging import upload_buffer


@dataclass(frozen=True)
class SourceTable:
    """The source ranks of every tensor, and its dtype, by name.

    Attributes:
        keys: the optimizers' tensors, which follow the model's in ``source_ranks``.
        live: this rank's values, which are removed as they are sent.
        source_ranks: by rank, the rank that sends it the values.
        dtypes: those that the ranks have agreed on.
        cast: (old dtype, new dtype) of tensors whose dtype changes.
        differed: the rank whose values are used although others have different ones.
        scalars: step counts and other scalars of the optimizers.
    """

    keys: dict[str, Key]
    live: dict[str, torch.Tensor]
    source_ranks: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    cast: dict[str, tuple[str, str]]
    differed: dict[str, int]
    scalars: dict[Key, Scalar]


def agree_on_sources(
    world: World,
    held: Sequence[TensorRef],
    bounds: Sequence[Bound],
    trained_dtype: wrap.TrainedDtype,
) -> SourceTable:
    """Determine the ranks that have values of each tensor, compare replicas, and choose sources. Collective: yes.

    Raises:
        RankMismatchError: there is no common choice of dtypes.
    """
    keys = _state_keys(world, bounds)
    tensors = {item.fqn: item.tensor for item in held} | {
        str(key): tensor for bound in bounds for key, tensor in bound.tensors.items()
    }
    live = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
    names = [*(item.fqn for item in held), *keys]
    own = [(_dtype_name(tensors[name].dtype) if name in tensors else "", name in live) for name in names]
    gathered = world.all_gather_object(own)
    is_live = [[found for _, found in facts] for facts in gathered]
    with world.collective("select sources"):
        chosen = matching.select_sources(is_live)
    stored = _with_source_dtypes([[dtype for dtype, _ in facts] for facts in gathered], chosen)
    with world.collective("select dtypes"):
        agreed = matching.select_dtypes(names, chosen, stored, world.global_ranks)
    replicated = {
        name: live[name]
        for name, source_ranks in zip(names, chosen, strict=True)
        if len(set(source_ranks)) > 1 and source_ranks[world.rank] == world.rank
    }
    with world.all_gather("describe tensors") as exchange:
        exchange.local = dict(zip(replicated, checksums(list(replicated.values())), strict=True))
    sums = exchange.result
    counts = list(map(sum, is_live))
    with world.collective("compare dtypes"):
        sources, differed = matching.resolve_differences(names, chosen, sums, counts)
    scalars = _scalars(world, bounds, counts, differed)
    before = {
        name: [stored[rank][index] for rank in (*sources[index], *range(world.size))]
        for index, name in enumerate(names)
    }
    dtypes = {name: getattr(torch, dtype) for name, dtype in zip(names, agreed, strict=True)}
    for item in held:
        if item.kind is TensorKind.PARAMETER:
            dtypes[item.fqn] = wrap.get_trained_dtype(trained_dtype, dtypes[item.fqn], item.tensor.requires_grad)
    for name, key in keys.items():  # state in the parameter's dtype is cast with it, as when torch loads it
        if before[name][0] == before[key.parameter][0]:
            dtypes[name] = dtypes[key.parameter]
    cast = {
        name: (other[0], _dtype_name(dtypes[name]))
        for name in names
        if (other := [dtype for dtype in before[name] if dtype != _dtype_name(dtypes[name])])
    }
    return SourceTable(keys, live, dict(zip(names, sources, strict=True)), dtypes, cast, differed, scalars)


def _scalars(
    world: World,
    bounds: Sequence[Bound],
    counts: Sequence[int],
    differed: dict[str, int],
) -> dict[Key, Scalar]:
    """Return step counts and other scalars of the optimizers, from the chosen rank. Collective: yes.

    ``counts`` are the tensors with values on each rank. Keys whose values differ are added to ``differed``.
    """
    own: dict[Key, Scalar] = {}
    for bound in bounds:
        for key, value in bound.scalars.items():
            own[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    if len(set(world.all_gather_object(repr_digest(list(own.items()))))) == 1:
        return own
    gathered = world.all_gather_object(own)
    chosen: dict[Key, Scalar] = {}
    for key in dict.fromkeys(key for values in gathered for key in values):
        ranks = [rank for rank, values in enumerate(gathered) if key in values]
        rank = matching.select_leader(ranks, counts)
        chosen[key] = gathered[rank][key]
        if len({repr(gathered[other][key]) for other in ranks}) > 1:
            differed[str(key)] = rank
    return chosen


def _state_keys(world: World, bounds: Sequence[Bound]) -> dict[str, Key]:
    """Return the optimizers' tensors on any rank, in the same order on every rank. Collective: yes."""
    tensors = [key for bound in bounds for key, tensor in bound.tensors.items() if not tensor.is_meta]
    scalars = [key for bound in bounds for key in bound.scalars]
    gathered = world.all_gather_object((tensors, scalars))
    keys = {str(key): key for found, _ in gathered for key in found}
    if both := [str(key) for _, found in gathered for key in found if str(key) in keys]:
        raise RankMismatchError(f"{both[0]} has the parameter's shape on some ranks, and another on others")
    return keys


def _with_source_dtypes(
    dtypes_by_rank: Sequence[Sequence[str]], chosen: Sequence[tuple[int, ...]]
) -> list[list[str]]:
    """Return the dtypes, with that of the source on ranks that do not have an optimizer's state."""
    return [
        [
            dtype or (dtypes_by_rank[source_ranks[rank]][index] if source_ranks else "")
            for index, (dtype, source_ranks) in enumerate(zip(dtypes, chosen, strict=True))
        ]
        for rank, dtypes in enumerate(dtypes_by_rank)
    ]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wrap_without_values(
    model: nn.Module, held: Sequence[TensorRef], bounds: Sequence[Bound], sharding: Sharding, supply: SourceTable
) -> tuple[str, ...]:
    """Replace all parameters by ones on meta, and shard these. Return the names of the groups."""
    attributes: dict[str, dict[str, object]] = {}
    for bound in bounds:
        bound.unbind()
    for item in held:
        if isinstance(item.tensor, nn.Parameter):
            attributes[item.fqn] = dict(vars(item.tensor))
            empty = torch.empty(item.tensor.shape, dtype=supply.dtypes[item.fqn], device="meta")
            parameter = nn.Parameter(empty, requires_grad=item.tensor.requires_grad)
            torch_private.copy_attributes(parameter, item.tensor)
            item.install(parameter)
    wrap.prepare_blocks(model, sharding)
    groups = wrap.wrap(model, sharding) if sharding.mesh is not None else ()
    for item in collect_tensors(model):
        vars(item.tensor).update(attributes.get(item.fqn, {}))
    return groups


class IncomingShards:
    """Receiving side of a resharding on this rank: the wrapped model's tensors and its optimizers' state."""

    def __init__(self, model: nn.Module, supply: SourceTable) -> None:
        self.model = model
        self.supply = supply
        self.fsdp_params = torch_private.fsdp_params(model)
        self.held = {item.fqn: item for item in collect_tensors(model)}
        live = next(iter(supply.live.values()), None)
        self.device = compute_device(list(self.held.values()), None if live is None else live.device)
        self.state: dict[Key, torch.Tensor] = {}

    def transfers(self, world: World) -> list[move.Transfer]:
        """List the values to transfer, without buffers that every rank already has."""
        supply = self.supply
        ranks = [0] if world.size == 1 else dist.get_process_group_ranks(world.group)
        transfers: list[move.Transfer] = []
        for name, source_ranks in supply.source_ranks.items():
            live = supply.live.pop(name, None)
            is_buffer = name in self.held and self.held[name].kind is not TensorKind.PARAMETER
            if source_ranks != matching.NO_SOURCES and not (is_buffer and source_ranks == tuple(range(world.size))):
                key = supply.keys.get(name)
                tensor = self.held[key.parameter if key is not None else name].tensor
                boxes = boxes_by_rank(tensor, name, ranks)
                whole = Box.whole(tensor.shape)
                held = tuple((whole,) if sender == rank else () for rank, sender in enumerate(source_ranks))
                source = move.LocalTensor.full(live) if live is not None and held[world.rank] else None
                dtype = supply.dtypes[name]
                transfers.append(move.Transfer(name, tensor.shape, dtype, held, boxes, source, None))
        return transfers

    def prepare(self, names: Sequence[str]) -> dict[str, move.LocalTensor]:
        """Allocate memory for tensors that are about to be received."""
        keys = self.supply.keys
        parameters = [self.held[keys[name].parameter if name in keys else name] for name in names]
        wanted = [item for item in parameters if item.kind is TensorKind.PARAMETER]
        materialize(wanted, self.fsdp_params, self.device)
        targets: dict[str, move.LocalTensor] = {}
        for name in names:
            if name in keys:
                key = keys[name]
                target = self.state[key] = state_like(self.held[key.parameter].tensor, self.supply.dtypes[name])
            else:
                item = self.held[name]
                if item.kind is not TensorKind.PARAMETER:
                    shape, dtype = item.tensor.shape, self.supply.dtypes[name]
                    item.install(torch.empty(shape, dtype=dtype, device=self.device))
                target = item.tensor
            targets[name] = move.LocalTensor.from_tensor(target, name)
        return targets

    def finish(self, bounds: Sequence[Bound], sharding: Sharding, budget_bytes: int) -> list[str]:
        """Bind the optimizers to the final parameters, and average gradients of replicated ones.

        Return the names of parameters without values, for which memory has been allocated.
        """
        bound_names = {name for bound in bounds for names in bound.groups for name in names}
        awaiting = [
            item
            for item in self.held.values()
            if item.kind is TensorKind.PARAMETER
            and item.tensor.is_meta
            and (item.fqn in bound_names or _is_averaged(item.tensor, sharding))
        ]
        materialize(awaiting, self.fsdp_params, self.device)
        for item in awaiting:
            if item.tensor.dtype.is_floating_point and item.tensor.dtype.itemsize > 1:
                item.local.fill_(float("nan"))
        staging = upload_buffer(self.device, budget_bytes)
        for item in self.held.values():
            if (
                item.kind is not TensorKind.PARAMETER
                and not item.tensor.is_meta
                and item.tensor.device != self.device
            ):
                values = item.tensor
                item.install(torch.empty_like(values, device=self.device))
                staging.copy(values, item.tensor)
        parameters = {item.fqn: item.tensor for item in self.held.values() if isinstance(item.tensor, nn.Parameter)}
        for bound in bounds:
            bound.rebind(parameters, self.state, self.supply.scalars)
        if sharding.mesh is not None:
            average_replicated_gradients(self.model, sharding.mesh)
        return [item.fqn for item in awaiting]


def _is_averaged(tensor: torch.Tensor, sharding: Sharding) -> bool:
    return sharding.mesh is not None and tensor.requires_grad and not isinstance(tensor, DTensor)
