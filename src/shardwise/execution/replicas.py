"""Compares the values of replicas before anything is taken out of a model.

[Note: Patchworks] Each holder of replicated data sends a part of it (:mod:`shardwise.planning.moves`). If the
replicas differ, the assembled tensor exists on no rank. Parameters and their optimizer state are equal if gradients
are averaged. If they are not, that is an error. Buffers may differ for good reasons, as the running statistics of
BatchNorm do: those of the first rank that holds them count, all of them, so that they belong together.

Then decides which part of a model's tensors each rank gives, each element once, and takes out its values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from shardwise.errors import ConfigError, RankMismatchError, ShardingError
from shardwise.execution.checksums import checksums
from shardwise.execution.moving import Handover, LocalTensor, hand_over
from shardwise.execution.tensor_facts import TensorFacts, facts_of, held_by_rank
from shardwise.execution.world import World, digest_of
from shardwise.layout import TensorKind, place_of
from shardwise.models.rebind import Bound
from shardwise.models.selection import Factors
from shardwise.models.torch_api import sets_grad_dtype
from shardwise.models.view import TensorRef, local_boxes, local_tensor, strided_view
from shardwise.planning.load_plan import OnDiffering
from shardwise.planning.matching import Item, digest, require_alike
from shardwise.planning.moves import Boxes, Common, in_common, shares_by_rank, shares_of_first
from shardwise.report.names import few_names, shown_ranks
from shardwise.tensors import Box

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Ranks that hold the same elements (number, and digest of their ranks), of buffers or of other tensors."""

    size: int
    has_buffers: bool
    holders: bytes


@dataclass(frozen=True)
class Replicas:
    """Tensors that this rank holds together with other ranks, by name, on their device."""

    circles: Mapping[ReplicaGroup, Mapping[str, Sequence[torch.Tensor]]]

    @classmethod
    def among(
        cls, tensors: Mapping[str, torch.Tensor], common: Mapping[str, Common], buffers: Collection[str]
    ) -> Replicas:
        """Return the replicated tensors among these, in one order on all ranks.

        ``common`` has the tensors that this rank shares with others.
        """
        found: dict[ReplicaGroup, dict[str, list[torch.Tensor]]] = {}
        for name, boxes in common.items():
            local, places = local_tensor(tensors[name]), local_boxes(tensors[name], name)
            for box, holders in boxes:
                circle = ReplicaGroup(len(holders), name in buffers, digest_of(holders))
                part = strided_view(local, place_of(box, places))
                found.setdefault(circle, {}).setdefault(name, []).append(part)
        return cls(found)

    def digests(self) -> dict[ReplicaGroup, bytes]:
        """Return a digest for each circle, equal on its ranks if the values are."""
        return {
            circle: digest_of(checksums([part for parts in of.values() for part in parts]))
            for circle, of in self.circles.items()
        }

    def details(self, circles: Collection[ReplicaGroup]) -> dict[ReplicaGroup, dict[str, list[int]]]:
        """Return numbers for each tensor of these circles."""
        return {
            circle: {name: checksums(parts) for name, parts in of.items()}
            for circle, of in self.circles.items()
            if circle in circles
        }


DigestWords: TypeAlias = tuple[str, dict[ReplicaGroup, bytes]]
"""What a rank is asked for, and its digests."""

OddCircles: TypeAlias = frozenset[ReplicaGroup]
"""The ranks that hold the same, and have different values."""


def compare_replicas(world: World, replicas: Replicas, on_differing_buffers: OnDiffering) -> tuple[str, ...]:
    """Compare replicas. Return the names of differing buffers, for which the first rank's values are used.

    Collective: yes. At most two meetings. The second only if something differs. Memory: that of
    :func:`~shardwise.execution.checksums.checksums`.

    Raises:
        ConfigError: ``on_differing_buffers`` is no such mode.
        RankMismatchError: parameters or optimizer state differ, or buffers that must not. The message names them.
    """
    odd = world.map_reduce(tell, mismatched_groups, replicas, on_differing_buffers)
    return compare_mismatched(world, replicas, odd, on_differing_buffers)


def mismatched_groups(asked: Sequence[DigestWords]) -> OddCircles:
    """Return the circles with differing values, after all ranks have sent the results of :func:`tell`.

    Raises:
        RankMismatchError: ``on_differing_buffers`` is not the same on all ranks.
    """
    if len({mode for mode, _ in asked}) > 1:
        raise RankMismatchError("on_differing_buffers is not the same on all ranks. Pass one value on every rank")
    return frozenset(
        circle
        for circle, found in _by_circle([digests for _, digests in asked]).items()
        if len(found) != circle.size or any(digests != found[min(found)] for digests in found.values())
    )


def _by_circle(told: Sequence[Mapping[ReplicaGroup, T]]) -> dict[ReplicaGroup, dict[int, T]]:
    """Group the digests of replicas by rank."""
    circles: dict[ReplicaGroup, dict[int, T]] = {}
    for rank, found in enumerate(told):
        for circle, value in found.items():
            circles.setdefault(circle, {})[rank] = value
    return circles


def compare_mismatched(
    world: World, replicas: Replicas, odd: OddCircles, on_differing_buffers: OnDiffering
) -> tuple[str, ...]:
    """The same as :func:`compare_replicas`, if the circles with differing values are known.

    Collective: yes, if there are any.
    """
    if not odd:
        return ()
    return world.map_reduce(replicas.details, lambda told: _settled(told, on_differing_buffers), odd)


def _settled(
    details: Sequence[Mapping[ReplicaGroup, Mapping[str, list[int]]]], on_differing_buffers: OnDiffering
) -> tuple[str, ...]:
    faults: dict[str, set[int]] = {}
    buffers: dict[str, set[int]] = {}
    for circle, found in sorted(_by_circle(details).items(), key=lambda item: sorted(item[1])):
        first, *others = sorted(found)
        for name in dict.fromkeys(name for numbers in found.values() for name in numbers):
            if differing := {rank for rank in others if found[rank].get(name) != found[first].get(name)}:
                (buffers if circle.has_buffers else faults).setdefault(name, set()).update(differing)
    if faults:
        raise RankMismatchError(
            f"{_told(faults)}, and a save would mix them. Parameters "
            "stay equal if every rank begins with the same values and gradients are averaged. An adapter or a "
            "module that was added after sharding is not averaged: add it before (tuning=..., or before "
            "fully_shard), or give all ranks one rank's values (torch.distributed.broadcast) and average its "
            "gradients. If replicas have drifted apart, resume from the last checkpoint"
        )
    if buffers and on_differing_buffers == "error":
        raise RankMismatchError(
            f"{_told(buffers)}. These are buffers, such as running statistics: average them over the ranks, "
            "or pass on_differing_buffers='first_rank' for those of the first rank"
        )
    return tuple(buffers)


def require_mode(on_differing_buffers: object) -> None:
    """Raises ConfigError for an invalid value."""
    if on_differing_buffers not in ("first_rank", "error"):
        raise ConfigError(f"on_differing_buffers={on_differing_buffers!r}: pass 'first_rank' or 'error'")


def tell(replicas: Replicas, on_differing_buffers: OnDiffering) -> DigestWords:
    """Return the digests of this rank's replicas.

    Raises:
        ConfigError: ``on_differing_buffers`` is no such mode.
    """
    require_mode(on_differing_buffers)
    return repr(on_differing_buffers), replicas.digests()


def _told(differing: Mapping[str, set[int]]) -> str:
    names, who = few_names(differing), shown_ranks(sorted(set().union(*differing.values())))
    count = f"{len(differing)} tensors have" if len(differing) > 1 else "one tensor has"
    return f"{count} other values on rank {who} than on the first rank that holds the same: {names}"


def equal_on_all(
    world: World,
    tensors: Mapping[str, torch.Tensor],
    buffers: Collection[str],
    on_differing_buffers: OnDiffering,
    *,
    budget_bytes: int,
    device: torch.device,
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the tensors, with copies of the first rank's for differing buffers, and their names.

    Collective: yes.
    Memory: the copies, and ``budget_bytes`` for staging, on ``device``.

    Raises:
        RankMismatchError: as in :func:`compare_replicas`, or ranks have different tensors.
    """
    told = world.all_gather(lambda: {name: facts_of(tensor, name).boxes for name, tensor in tensors.items()})
    held = {name: tuple(found.get(name, ()) for found in told) for name in tensors}
    replicas = world.run_all(Replicas.among, tensors, in_common(held, world.rank), buffers)
    differing = compare_replicas(world, replicas, on_differing_buffers)
    copies = {name: torch.empty_like(tensors[name]) for name in differing}

    def begin() -> list[Handover]:
        return [
            Handover(
                name,
                tensors[name].shape,
                tensors[name].dtype,
                shares_of_first(held[name]),
                held[name],
                LocalTensor.of(tensors[name], name),
                LocalTensor.of(copy, name),
            )
            for name, copy in copies.items()
        ]

    if differing:
        hand_over(world, world.run_all(begin), budget_bytes=budget_bytes, device=device)
    return {**tensors, **copies}, differing


def require_alike_models(world: World, held: Sequence[TensorRef], bounds: Sequence[Bound]) -> None:
    """Models and optimizers are the same on all ranks, but for their values. Collective: yes.

    Raises:
        RankMismatchError: naming tensors that differ.
    """
    items = [_item(item) for item in held]
    if len(set(world.all_gather_object(digest(items)))) > 1:
        gathered = world.all_gather_object(items)
        world.run_all(require_alike, gathered)
    setup = [bound.description() for bound in bounds]
    world.require_equal(setup, "the setup of the optimizers (their classes, groups and settings)")


def _item(item: TensorRef) -> Item:
    tensor = item.tensor
    grad_dtype = ""
    if isinstance(tensor, nn.Parameter) and sets_grad_dtype(tensor):
        grad_dtype = str(tensor.grad_dtype or "any dtype")
    return Item(item.names, item.kind.value, tuple(tensor.shape), tensor.requires_grad, grad_dtype)


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the ranks. The same on every rank.

    Attributes:
        by_name: the boxes that each rank gives, by rank, of every saved tensor, under all of its names.
        differing: buffers whose values differ between ranks, by their first names: the first rank's are given.
    """

    by_name: dict[str, tuple[Boxes, ...]]
    differing: tuple[str, ...]


def agree_on_shares(world: World, held: Sequence[TensorRef], on_differing_buffers: OnDiffering) -> Shares:
    """Determine the part that each rank sends, and check that replicas are equal.

    Every rank reports the tensors that it holds, because a mesh that is a part of the world (the data-parallel
    axis, for tensors that are not sharded by tensor parallelism) has only its own ranks. Each holder of replicated
    data sends a part of it, but buffers come from the first rank that holds them, see [Note: Patchworks].

    Collective: yes.

    Raises:
        ShardingError: a tensor has no values, an unsupported placement, or elements that no rank holds.
        RankMismatchError: the ranks hold different tensors, or different values of replicas.
    """
    require_alike_models(world, held, ())
    saved = [item for item in held if item.kind.is_saved]

    def look() -> dict[str, TensorFacts]:
        if absent := [item.fqn for item in saved if item.tensor.is_meta]:
            raise ShardingError(
                f"{few_names(absent)} on meta: without values, there is nothing to take out. Load the model first"
            )
        return {item.fqn: facts_of(item.tensor, item.fqn) for item in saved}

    told = world.all_gather(look)
    boxes = world.run_all(held_by_rank, told)
    shares = world.run_all(_dealt, saved, boxes)
    tensors = {item.fqn: item.tensor for item in saved}
    buffers = {item.fqn for item in saved if item.kind is not TensorKind.PARAMETER}
    replicas = world.run_all(Replicas.among, tensors, in_common(boxes, world.rank), buffers)
    return Shares(shares, compare_replicas(world, replicas, on_differing_buffers))


def _dealt(saved: Sequence[TensorRef], held: Mapping[str, tuple[Boxes, ...]]) -> dict[str, tuple[Boxes, ...]]:
    made: dict[tuple[int, int, int], tuple[Boxes, ...]] = {}
    shares: dict[str, tuple[Boxes, ...]] = {}
    for number, item in enumerate(saved):
        boxes, turn, itemsize = held[item.fqn], number % len(held[item.fqn]), item.tensor.element_size()
        if item.kind is not TensorKind.PARAMETER:
            turn = -1
        key = id(boxes), turn, itemsize
        if key not in made:
            made[key] = shares_of_first(boxes) if turn < 0 else shares_by_rank(boxes, turn, itemsize)
        shares |= dict.fromkeys(item.names, made[key])
    return shares


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a 4-bit weight on this rank, and their dequantization.

    Attributes:
        weight: packed bytes.
        scales: of the same rows: bytes of float32, or codes.
        layer: the layer that dequantizes.
    """

    weight: TensorRef
    scales: TensorRef
    layer: Any

    def dequantize(self, box: Box) -> torch.Tensor:
        """The numbers of a box of the weight (out, in), rounded to the dtype that they had."""
        first = local_boxes(self.weight.tensor, self.weight.fqn)[0].box.offsets[0]
        start, count = box.offsets[0], box.sizes[0]
        rows = slice(start - first, start - first + count)
        scales = self.layer.scales_of(self.scales.local[rows].contiguous(), start)
        packing = self.layer.packing
        whole: torch.Tensor = packing.dequantize(self.weight.local[rows].contiguous(), scales, packing.dtype)
        return whole[:, box.offsets[1] : box.offsets[1] + box.sizes[1]].contiguous()


NOTHING_PACKED: Mapping[str, PackedRows] = {}


def logical_boxes(boxes: Boxes) -> Boxes:
    """Boxes of packed bytes as those of the numbers in them."""
    return tuple(Box((box.offsets[0], 2 * box.offsets[1]), (box.sizes[0], 2 * box.sizes[1])) for box in boxes)


class ShardSender:
    """This rank's shares of a model's tensors. Both ``held`` and ``shares`` are by name.

    ``packed`` are 4-bit weights that are sent dequantized, by name. Their shares are boxes of dequantized values.
    """

    def __init__(
        self,
        held: Mapping[str, TensorRef],
        shares: Mapping[str, Sequence[Boxes]],
        rank: int,
        packed: Mapping[str, PackedRows] = NOTHING_PACKED,
    ) -> None:
        self.held = held
        self._packed = packed
        self.shares = shares
        self._rank = rank
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None

    def box(self, name: str, number: int) -> Box:
        """Return the box of a share in its tensor."""
        return self.shares[name][self._rank][number]

    def share(self, name: str, number: int) -> torch.Tensor:
        """A share as a row-major tensor. The last one is kept, because consecutive blocks are parts of it.

        Memory: none if it is a view of its tensor, otherwise the share.
        """
        if self._last is None or self._last[0] != (name, number):
            self._last = None
            self._last = (name, number), self.values(name, self.box(name, number))
        return self._last[1]

    def values(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, as a row-major tensor."""
        if name in self._packed:
            return self._packed[name].dequantize(box)
        item = self.held[name]
        return strided_view(item.local, place_of(box, local_boxes(item.tensor, item.fqn))).contiguous()


class MergingShardSender(ShardSender):
    """Shares of the base's tensors plus the adapter's delta.

    Args:
        held: by name in the base.
        shares: by name in the base.
        rank: this rank.
        factors: by name in the base, of the weights that the adapter changes.
        matrices: all matrices of the adapter, whole, by FQN.
        packed: as of :class:`ShardSender`.

    Memory: ``matrices`` and twice the largest share, in float32 for adapted weights.
    """

    def __init__(
        self,
        held: Mapping[str, TensorRef],
        shares: Mapping[str, Sequence[Boxes]],
        rank: int,
        factors: Mapping[str, Factors],
        matrices: Mapping[str, torch.Tensor],
        packed: Mapping[str, PackedRows] = NOTHING_PACKED,
    ) -> None:
        super().__init__(held, shares, rank, packed)
        self._factors = factors
        self._matrices = matrices

    def values(self, name: str, box: Box) -> torch.Tensor:
        values = super().values(name, box)
        if name not in self._factors:
            return values
        factors = self._factors[name]
        lora_A, lora_B = self._matrices[factors.lora_A], self._matrices[factors.lora_B]
        rows, columns = (slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        delta = factors.delta(lora_A[:, columns], lora_B[rows])
        return values.add(delta.to(values.device)).to(values.dtype)
