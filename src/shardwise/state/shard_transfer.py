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
from shardwise.transfer.memory import get_model_device, materialize
from shardwise.transfer.staging import upload_buffer


@dataclass(frozen=True)
class SourceTable:
    """Source ranks and dtype of every tensor, by name.

    Attributes:
        keys: tensors of the optimizers, which follow the model's in ``source_ranks``.
        live: this rank's values. A tensor is removed when its transfer is planned, so that it is freed once sent.
        source_ranks: for each rank, the rank whose values it gets.
        dtypes: dtypes on all ranks after the transfer.
        cast: (old dtype, new dtype) of tensors whose dtype changes.
        differed: the rank whose values are used, for tensors of which other ranks have different values.
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
    refs: Sequence[TensorRef],
    bounds: Sequence[Bound],
    trained_dtype: wrap.TrainedDtype,
) -> SourceTable:
    """Determine the ranks that have values of each tensor, compare replicas, and choose sources. Collective: yes.

    Raises:
        RankMismatchError: there is no common choice of dtypes.
    """
    keys = _state_keys(world, bounds)
    tensors = {item.fqn: item.tensor for item in refs}
    for bound in bounds:
        tensors.update({str(key): tensor for key, tensor in bound.tensors.items()})
    live = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
    # In one order on all ranks, which exchange facts by position.
    names = [*(item.fqn for item in refs), *keys]
    # "" for state of an optimizer that this rank has not.
    local_dtypes = [_dtype_name(tensors[name].dtype) if name in tensors else "" for name in names]
    gathered = world.all_gather_object((local_dtypes, [name in live for name in names]))
    dtypes_by_rank = [dtype_names for dtype_names, _ in gathered]
    is_live = [flags for _, flags in gathered]  # (ranks, tensors)
    # For each tensor the source of each rank: (0, 0, 0, 3) if ranks 0 and 3 of four have values.
    chosen = matching.select_sources(is_live)
    stored = _with_source_dtypes(dtypes_by_rank, chosen)
    with world.collective("select dtypes"):
        agreed = matching.select_dtypes(names, chosen, stored, world.global_ranks)
    # Checksums only of tensors that several ranks would use as sources: one source cannot differ.
    replicated: dict[str, torch.Tensor] = {}
    for name, source_ranks in zip(names, chosen, strict=True):
        if len(set(source_ranks)) > 1 and source_ranks[world.rank] == world.rank:
            replicated[name] = live[name]
    with world.all_gather("describe tensors") as exchange:
        exchange.local = dict(zip(replicated, checksums(list(replicated.values())), strict=True))
    sums = exchange.result
    # By rank: how many tensors have values there. If values differ, the rank with the most is the source.
    counts = list(map(sum, is_live))
    sources, differed = matching.resolve_differences(names, chosen, sums, counts)
    scalars = _scalars(world, bounds, counts, differed)
    # By name: the dtypes on the sources, and then on all ranks.
    before: dict[str, list[str]] = {}
    for index, name in enumerate(names):
        before[name] = [stored[rank][index] for rank in (*sources[index], *range(world.size))]
    # The dtypes after the transfer: those that ranks agree on, then the one that is trained, then state after its
    # parameter.
    dtypes = {name: getattr(torch, dtype) for name, dtype in zip(names, agreed, strict=True)}
    for item in refs:
        if item.kind is TensorKind.PARAMETER:
            dtypes[item.fqn] = wrap.get_trained_dtype(trained_dtype, dtypes[item.fqn], item.tensor.requires_grad)
    for name, key in keys.items():  # state in the parameter's dtype is cast with it, as when torch loads it
        if before[name][0] == before[key.parameter][0]:
            dtypes[name] = dtypes[key.parameter]
    cast: dict[str, tuple[str, str]] = {}
    for name in names:
        final = _dtype_name(dtypes[name])
        others = [dtype for dtype in before[name] if dtype != final]
        if others:
            cast[name] = (others[0], final)
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
    local: dict[Key, Scalar] = {}
    for bound in bounds:
        for key, value in bound.scalars.items():
            local[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    # Digests first: the values are exchanged only if they differ.
    exact = [(key, _exact(value)) for key, value in local.items()]
    if len(set(world.all_gather_object(repr_digest(exact)))) == 1:
        return local
    gathered = world.all_gather_object(local)
    chosen: dict[Key, Scalar] = {}
    for key in dict.fromkeys(key for values in gathered for key in values):
        ranks = [rank for rank, values in enumerate(gathered) if key in values]
        rank = matching.select_leader(ranks, counts)
        chosen[key] = gathered[rank][key]
        # By repr: it distinguishes 1, 1.0 and True, and NaN equals itself.
        if len({repr(_exact(gathered[other][key])) for other in ranks}) > 1:
            differed[str(key)] = rank
    return chosen


def _exact(value: Scalar) -> object:
    """Return a scalar as a value whose ``repr`` has all of its digits, which that of a tensor has not."""
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def _state_keys(world: World, bounds: Sequence[Bound]) -> dict[str, Key]:
    """Return the optimizers' tensors on any rank, in the same order on every rank. Collective: yes."""
    tensors = [key for bound in bounds for key, tensor in bound.tensors.items() if not tensor.is_meta]
    scalars = [key for bound in bounds for key in bound.scalars]
    gathered = world.all_gather_object((tensors, scalars))
    # A rank without a step has no keys. The union of all, in the order of the ranks, is equal on every rank.
    keys = {str(key): key for tensor_keys, _ in gathered for key in tensor_keys}
    for _, scalar_keys in gathered:
        for key in scalar_keys:
            if str(key) in keys:
                raise RankMismatchError(
                    f"{key}: has the shape of its parameter on some ranks, and another shape on others. Make the "
                    "optimizers on all ranks alike"
                )
    return keys


def _with_source_dtypes(
    dtypes_by_rank: Sequence[Sequence[str]], chosen: Sequence[tuple[int, ...]]
) -> list[list[str]]:
    """Return the dtypes, with the source's dtype on ranks that do not have this state of an optimizer."""
    # A rank that will get the state of rank 0 in float32 counts as if it had float32.
    filled: list[list[str]] = []
    for rank, dtypes in enumerate(dtypes_by_rank):
        filled.append(list(dtypes))
        for index, source_ranks in enumerate(chosen):
            if not dtypes[index] and source_ranks:
                filled[rank][index] = dtypes_by_rank[source_ranks[rank]][index]
    return filled


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wrap_without_values(
    model: nn.Module, refs: Sequence[TensorRef], bounds: Sequence[Bound], sharding: Sharding, sources: SourceTable
) -> tuple[str, ...]:
    """Replace all parameters by parameters on meta, and shard those. Return the names of the groups."""
    attributes: dict[str, dict[str, object]] = {}
    # Optimizers let go of the full parameters, which would otherwise stay in memory beside the shards.
    for bound in bounds:
        bound.unbind()
    for item in refs:
        if isinstance(item.tensor, nn.Parameter):
            attributes[item.fqn] = dict(vars(item.tensor))
            # On meta, so that fully_shard allocates nothing: shards get memory when they are received.
            empty = torch.empty(item.tensor.shape, dtype=sources.dtypes[item.fqn], device="meta")
            parameter = nn.Parameter(empty, requires_grad=item.tensor.requires_grad)
            torch_private.copy_attributes(parameter, item.tensor)
            item.install(parameter)
    wrap.prepare_blocks(model, sharding)
    groups: tuple[str, ...] = ()
    if sharding.mesh is not None:
        groups = wrap.wrap(model, sharding)
    else:
        wrap.warn_of_unused_dtypes(model, sharding.mp_policy)
    # fully_shard makes new parameters without the Python attributes of the old ones.
    for item in collect_tensors(model):
        vars(item.tensor).update(attributes.get(item.fqn, {}))
    return groups


class IncomingShards:
    """Receiving side of a resharding on this rank: the wrapped model's tensors and its optimizers' state."""

    def __init__(self, model: nn.Module, sources: SourceTable) -> None:
        self.model = model
        self.sources = sources
        self.fsdp_params = torch_private.fsdp_params(model)
        self.refs = {item.fqn: item for item in collect_tensors(model)}
        live = next(iter(sources.live.values()), None)
        self.device = get_model_device(list(self.refs.values()), None if live is None else live.device)
        self.state: dict[Key, torch.Tensor] = {}

    def transfers(self, world: World) -> list[move.Transfer]:
        """List the values to transfer, without buffers that every rank already has."""
        sources = self.sources
        ranks = [0] if world.size == 1 else dist.get_process_group_ranks(world.group)
        transfers: list[move.Transfer] = []
        for name, source_ranks in sources.source_ranks.items():
            # The table lets go of it, and the transfer holds it until it has been sent.
            live = sources.live.pop(name, None)
            if source_ranks == matching.NO_SOURCES:
                continue
            is_buffer = name in self.refs and self.refs[name].kind is not TensorKind.PARAMETER
            # Buffers are full on every rank. Where each rank has its own equal values, nothing is sent.
            if is_buffer and source_ranks == tuple(range(world.size)):
                continue
            # The state of an optimizer is sharded like its parameter.
            key = sources.keys.get(name)
            tensor = self.refs[key.parameter if key is not None else name].tensor
            boxes = boxes_by_rank(tensor, name, ranks)
            # A rank that is its own source has the full tensor. The others have nothing of it.
            full = Box.whole(tensor.shape)
            sent = tuple((full,) if source == rank else () for rank, source in enumerate(source_ranks))
            local = move.LocalTensor.full(live) if live is not None and sent[world.rank] else None
            transfers.append(move.Transfer(name, tensor.shape, sources.dtypes[name], sent, boxes, local, None))
        return transfers

    def prepare(self, names: Sequence[str]) -> dict[str, move.LocalTensor]:
        """Allocate memory for tensors that are about to be received."""
        # The tensors of one round. Sources have released those of earlier rounds.
        keys = self.sources.keys
        # State takes the memory format of its parameter, which needs memory first.
        refs = [self.refs[keys[name].parameter if name in keys else name] for name in names]
        parameters = [item for item in refs if item.kind is TensorKind.PARAMETER]
        materialize(parameters, self.fsdp_params, self.device)
        targets: dict[str, move.LocalTensor] = {}
        for name in names:
            if name in keys:
                key = keys[name]
                target = self.state[key] = state_like(self.refs[key.parameter].tensor, self.sources.dtypes[name])
            else:
                item = self.refs[name]
                if item.kind is not TensorKind.PARAMETER:
                    shape, dtype = item.tensor.shape, self.sources.dtypes[name]
                    item.install(torch.empty(shape, dtype=dtype, device=self.device))
                target = item.tensor
            targets[name] = move.LocalTensor.from_tensor(target, name)
        return targets

    def finish(self, bounds: Sequence[Bound], sharding: Sharding, budget_bytes: int) -> list[str]:
        """Bind the optimizers to the final parameters, and average gradients of replicated ones.

        Return the names of parameters without values, for which memory has been allocated.
        """
        bound_names = {name for bound in bounds for names in bound.groups for name in names}
        # An optimizer, or a hook that averages gradients, needs the final parameter: a later load then fills it in
        # place. NaN shows where it did not.
        awaiting_load: list[TensorRef] = []
        for item in self.refs.values():
            is_needed = item.fqn in bound_names or _is_averaged(item.tensor, sharding)
            if item.kind is TensorKind.PARAMETER and item.tensor.is_meta and is_needed:
                awaiting_load.append(item)
        materialize(awaiting_load, self.fsdp_params, self.device)
        for item in awaiting_load:
            if item.tensor.dtype.is_floating_point and item.tensor.dtype.itemsize > 1:
                item.local.fill_(float("nan"))
        # Buffers that every rank had are not transferred, only moved to the mesh's device.
        staging = upload_buffer(self.device, budget_bytes)
        for item in self.refs.values():
            is_elsewhere = not item.tensor.is_meta and item.tensor.device != self.device
            if item.kind is not TensorKind.PARAMETER and is_elsewhere:
                values = item.tensor
                item.install(torch.empty_like(values, device=self.device))
                staging.copy(values, item.tensor)
        # Last, when all parameters are final: an optimizer keeps these objects.
        parameters = {item.fqn: item.tensor for item in self.refs.values() if isinstance(item.tensor, nn.Parameter)}
        for bound in bounds:
            bound.rebind(parameters, self.state, self.sources.scalars)
        if sharding.mesh is not None:
            average_replicated_gradients(self.model, sharding.mesh)
        return [item.fqn for item in awaiting_load]


def _is_averaged(tensor: torch.Tensor, sharding: Sharding) -> bool:
    return sharding.mesh is not None and tensor.requires_grad and not isinstance(tensor, DTensor)
