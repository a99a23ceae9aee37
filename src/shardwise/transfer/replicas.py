"""Compares the values of replicas before a model is saved or gathered, and chooses the shares that ranks send.

[Note: Patchworks] Each holder of replicated data sends a part of it (:mod:`shardwise.transfer.move_plan`). If the
replicas differ, the assembled tensor exists on no rank. Parameters and their optimizer state are equal if gradients
are averaged. If they are not, that is an error. Buffers may differ for good reasons, as the running statistics of
BatchNorm do: all of them are taken from the first rank that holds them, so that they belong together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

import torch

from shardwise.core.errors import RankMismatchError, ShardingError
from shardwise.core.formatting import few_names, format_ranks
from shardwise.core.layout import TensorKind
from shardwise.core.tensors import Box
from shardwise.fsdp.named_tensors import TensorRef
from shardwise.fsdp.rebind import Bound
from shardwise.ranks.world import World, repr_digest
from shardwise.transfer.checksums import checksums
from shardwise.transfer.move import LocalTensor, Transfer, transfer
from shardwise.transfer.move_plan import Boxes, SharedBoxes, find_shared_boxes, first_holder_shares, shares_in_turn
from shardwise.transfer.tensor_metadata import (
    TensorMetadata,
    describing_tensors,
    get_boxes,
    metadata_by_name,
    require_same_tensors,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Ranks that hold the same elements (number, and digest of their ranks), of buffers or of other tensors."""

    size: int
    has_buffers: bool
    holders: bytes


@dataclass(frozen=True)
class Replicas:
    """Tensors that this rank holds together with other ranks, by group and name, on their device."""

    by_group: Mapping[ReplicaGroup, Mapping[str, Sequence[torch.Tensor]]]

    @classmethod
    def among(
        cls, tensors: Mapping[str, torch.Tensor], common: Mapping[str, SharedBoxes], buffers: Collection[str]
    ) -> Replicas:
        """Return the replicated tensors among these, in one order on all ranks.

        ``common`` has the boxes that this rank holds together with others, by name.
        """
        by_group: dict[ReplicaGroup, dict[str, list[torch.Tensor]]] = {}
        # In the order of the names, which is that of the tensors on all ranks: digests depend on it.
        for name, boxes in common.items():
            # Two boxes of one tensor may be shared with different ranks, so they belong to different groups.
            local = LocalTensor.from_tensor(tensors[name], name)
            for box, holders in boxes:
                group = ReplicaGroup(len(holders), name in buffers, repr_digest(holders))
                by_group.setdefault(group, {}).setdefault(name, []).append(local.view(box))
        return cls(by_group)

    def digests(self) -> dict[ReplicaGroup, bytes]:
        """Return a digest for each group, equal on its ranks if the values are."""
        digests: dict[ReplicaGroup, bytes] = {}
        for group, tensors in self.by_group.items():
            views = _stack_numbers(view for views in tensors.values() for view in views)
            digests[group] = repr_digest(checksums(views))
        return digests

    def checksums(self, groups: Collection[ReplicaGroup]) -> dict[ReplicaGroup, dict[str, list[int]]]:
        """Return the checksums of each tensor of these groups."""
        sums: dict[ReplicaGroup, dict[str, list[int]]] = {}
        for group, tensors in self.by_group.items():
            if group in groups:
                sums[group] = {name: checksums(views) for name, views in tensors.items()}
        return sums


def _stack_numbers(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors, with those without dimensions (counts of steps) stacked, so that they take one kernel."""
    numbers: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    others: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.ndim:
            others.append(tensor)
        else:
            numbers.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [*others, *map(torch.stack, numbers.values())]


def compare_replicas(
    world: World,
    replicas: Replicas,
    mismatched: Collection[ReplicaGroup] | None = None,
) -> tuple[str, ...]:
    """Compare replicas. Return the names of differing buffers, for which the first rank's values are used.

    ``mismatched`` has the groups that differ, if all ranks know them.

    Collective: yes. The checksums of single tensors are exchanged only if something differs. Memory: that of
    :func:`~shardwise.transfer.checksums.checksums`.

    Raises:
        RankMismatchError: parameters or optimizer state differ. The message names them.
    """
    if mismatched is None:
        with world.all_reduce("compute digests", find_mismatched_groups) as exchange:
            exchange.local = replicas.digests()
        mismatched = exchange.result
    # All ranks have the same result, so all of them leave here or none does.
    if not mismatched:
        return ()
    with world.all_reduce("compute checksums", partial(_find_differing_buffers, world)) as exchange:
        exchange.local = replicas.checksums(mismatched)
    differing: tuple[str, ...] = exchange.result
    return differing


def find_mismatched_groups(gathered: Sequence[Mapping[ReplicaGroup, bytes]]) -> frozenset[ReplicaGroup]:
    """Return the groups whose ranks have different values, from the digests of all ranks."""
    mismatched: set[ReplicaGroup] = set()
    for group, by_rank in _by_group(gathered).items():
        # Fewer ranks than the group has: on the others, the tensors are of another kind.
        if len(by_rank) != group.size or len(set(by_rank.values())) > 1:
            mismatched.add(group)
    return frozenset(mismatched)


def _by_group(gathered: Sequence[Mapping[ReplicaGroup, T]]) -> dict[ReplicaGroup, dict[int, T]]:
    """Return the values of each group by rank."""
    groups: dict[ReplicaGroup, dict[int, T]] = {}
    for rank, values in enumerate(gathered):
        for group, value in values.items():
            groups.setdefault(group, {})[rank] = value
    return groups


def _find_differing_buffers(
    world: World,
    gathered: Sequence[Mapping[ReplicaGroup, Mapping[str, list[int]]]],
) -> tuple[str, ...]:
    """Return the names of buffers with differing checksums. Raises :class:`RankMismatchError` for other tensors."""
    parameters: dict[str, set[int]] = {}
    buffers: dict[str, set[int]] = {}
    for group, by_rank in sorted(_by_group(gathered).items(), key=lambda item: sorted(item[1])):
        # All ranks are compared with the lowest one that holds the group.
        first, *others = sorted(by_rank)
        by_name = buffers if group.has_buffers else parameters
        for name in dict.fromkeys(name for sums in by_rank.values() for name in sums):
            if differing := {rank for rank in others if by_rank[rank].get(name) != by_rank[first].get(name)}:
                by_name.setdefault(name, set()).update(differing)
    if parameters:
        raise RankMismatchError(
            f"{_describe_differing(world, parameters)}, so a save would mix them. Replicas stay equal if every "
            "rank starts with the same values and gradients are averaged. FSDP2 does not average the gradients of "
            "modules added after fully_shard: add adapters before it (tuning=...), or broadcast their values and "
            "all-reduce their gradients. If replicas have drifted apart, resume from the last checkpoint"
        )
    return tuple(buffers)


def _describe_differing(world: World, differing: Mapping[str, set[int]]) -> str:
    names, ranks = few_names(differing), format_ranks([*set().union(*differing.values())], world.global_ranks)
    count = f"{len(differing)} tensors have" if len(differing) > 1 else "one tensor has"
    return f"{count} other values on rank {ranks} than on the first rank with a replica: {names}"


def equal_on_all(
    world: World,
    tensors: Mapping[str, torch.Tensor],
    buffers: Collection[str],
    *,
    budget_bytes: int,
    device: torch.device,
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the tensors, with copies of the first rank's for differing buffers, and the names of these.

    Collective: yes.
    Memory: the copies, and ``budget_bytes`` for staging, on ``device``.

    Raises:
        RankMismatchError: as in :func:`compare_replicas`, or ranks have different tensors.
    """
    with describing_tensors(world) as exchange:
        exchange.local = metadata_by_name(tensors)
    boxes = exchange.result
    differing = _compare_shared(world, tensors, boxes, buffers)
    # Parameters that differ have raised by now. Only buffers are left to be copied.
    copies: dict[str, torch.Tensor] = {}
    if differing:
        with world.collective("plan the copies"):
            transfers: list[Transfer] = []
            for name in differing:
                tensor, shares = tensors[name], first_holder_shares(boxes[name])
                copies[name] = torch.empty_like(tensor)
                source, target = (LocalTensor.from_tensor(item, name) for item in (tensor, copies[name]))
                transfers.append(Transfer(name, tensor.shape, tensor.dtype, shares, boxes[name], source, target))
        transfer(world, transfers, budget_bytes=budget_bytes, device=device)
    return {**tensors, **copies}, differing


def _compare_shared(
    world: World,
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, tuple[Boxes, ...]],
    buffers: Collection[str],
) -> tuple[str, ...]:
    """Compare what several ranks hold, from the boxes by name and rank. Return the names of differing buffers.

    Collective: yes.
    """
    with world.collective("find the replicas"):
        replicas = Replicas.among(tensors, find_shared_boxes(boxes, world.rank), buffers)
    return compare_replicas(world, replicas)


def require_alike_models(world: World, refs: Sequence[TensorRef], bounds: Sequence[Bound]) -> None:
    """Check that models and optimizers are the same on all ranks, but for their values. Collective: yes.

    Raises:
        RankMismatchError: naming tensors that differ.
    """
    metadata = {item.fqn: TensorMetadata.from_ref(item) for item in refs}
    # Digests first: the descriptions of a large model are sent only if one of them differs.
    if len(set(world.all_gather_object(repr_digest(metadata)))) > 1:
        by_rank = world.all_gather_object(metadata)
        with world.collective("compare replicas"):
            require_same_tensors(by_rank, world.global_ranks)
    setup = [bound.description() for bound in bounds]
    world.require_equal(setup, "the setup of the optimizers (their classes, groups and settings)")


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the ranks. The same on every rank.

    Attributes:
        by_name: the boxes that each rank sends, by rank, of every saved tensor, under all of its names.
        differing: buffers whose values differ between ranks, by their first names: the first rank's are sent.
    """

    by_name: dict[str, tuple[Boxes, ...]]
    differing: tuple[str, ...]


def agree_on_shares(world: World, refs: Sequence[TensorRef]) -> Shares:
    """Determine the part that each rank sends, and check that replicas are equal.

    Every rank reports the tensors that it holds, because a mesh that is a part of the world (the data-parallel
    axis, for tensors that are not sharded by tensor parallelism) has only its own ranks. Each holder of replicated
    data sends a part of it, but buffers come from the first rank that holds them, see [Note: Patchworks].

    Collective: yes.

    Raises:
        ShardingError: a tensor has no values, an unsupported placement, or elements that no rank holds.
        RankMismatchError: the ranks hold different tensors, or different values of replicas.
    """
    saved = [item for item in refs if item.kind.is_saved]
    tensors = {item.fqn: item.tensor for item in saved}
    buffers = {item.fqn for item in saved if item.kind is not TensorKind.PARAMETER}
    with describing_tensors(world) as exchange:
        # Within the phase, because one rank alone may have tensors on meta.
        if on_meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise ShardingError(
                f"{few_names(on_meta)} on meta: without values, there is nothing to save. Load the model first"
            )
        local: dict[str, TensorMetadata] = {}
        # One object for equal tensors, which a message has once.
        described: dict[tuple[TensorMetadata, Boxes], TensorMetadata] = {}
        for item in saved:
            item_boxes = get_boxes(item.tensor, item.fqn)
            metadata = TensorMetadata.from_ref(item, str(item.tensor.dtype), item_boxes)
            local[item.fqn] = described.setdefault((metadata, item_boxes), metadata)
        exchange.local = local
    boxes = exchange.result
    differing = _compare_shared(world, tensors, boxes, buffers)
    return Shares(_shares_by_name(saved, boxes), differing)


def _shares_by_name(
    saved: Sequence[TensorRef], boxes_by_name: Mapping[str, tuple[Boxes, ...]]
) -> dict[str, tuple[Boxes, ...]]:
    """Return the shares of each tensor, one value for all tensors with equal ones."""
    buffer_shares = cache(first_holder_shares)
    in_turn = shares_in_turn((boxes_by_name[item.fqn], item.tensor.element_size()) for item in saved)
    shares: dict[str, tuple[Boxes, ...]] = {}
    for item, parameter_shares in zip(saved, in_turn, strict=True):
        is_parameter = item.kind is TensorKind.PARAMETER
        item_shares = parameter_shares if is_parameter else buffer_shares(boxes_by_name[item.fqn])
        shares |= dict.fromkeys(item.names, item_shares)
    return shares


@dataclass
class ShardSender:
    """Source of this rank's shares of a model's tensors. ``refs`` and ``shares`` (of all ranks) are by name."""

    refs: Mapping[str, TensorRef]
    shares: Mapping[str, Sequence[Boxes]]
    rank: int
    _last: tuple[tuple[str, int], torch.Tensor] | None = field(default=None, init=False)

    def share(self, name: str, number: int) -> torch.Tensor:
        """Return a share, row-major. The last one is cached, because consecutive blocks are parts of it.

        Memory: none if it is a view of its tensor, otherwise the share.
        """
        if self._last is None or self._last[0] != (name, number):
            self._last = None  # freed before the next is allocated
            self._last = (name, number), self.values(name, self.shares[name][self.rank][number])
        return self._last[1]

    def values(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, row-major."""
        item = self.refs[name]
        return LocalTensor.from_tensor(item.tensor, item.fqn).view(box).contiguous()
