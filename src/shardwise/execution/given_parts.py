"""Decides what each rank gives of a model's tensors, each element once, and takes out its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import PlacementError
from shardwise.execution.moving import TensorFacts, facts_of, require_same_tensors
from shardwise.execution.replicas import Replicas, settle_replicas
from shardwise.execution.supply import require_alike_models
from shardwise.execution.world import World
from shardwise.layout import TensorKind, place_of
from shardwise.models.selection import Factors
from shardwise.models.view import Held, local_boxes, strided_view
from shardwise.planning.load_plan import OnDiffering
from shardwise.planning.moves import Boxes, in_common, shares_by_rank, shares_of_first
from shardwise.report.names import few_names
from shardwise.tensors import Box


@dataclass(frozen=True, slots=True)
class Shares:
    """What the ranks give. The same on every rank.

    Attributes:
        by_name: the boxes that each rank gives, by rank, of every saved tensor, under all of its names.
        differing: buffers whose values differ between ranks, by their first names: the first rank's are given.
    """

    by_name: dict[str, tuple[Boxes, ...]]
    differing: tuple[str, ...]


def agree_on_shares(world: World, held: Sequence[Held], on_differing_buffers: OnDiffering) -> Shares:
    """Find out what each rank gives, and that values that several ranks hold are equal.

    Every rank tells what it holds: a mesh that is a part of the world (the data-parallel axis, for what is not
    sharded by tensor parallelism) knows only the ranks that are in it. Of what several ranks hold each gives a
    part; but buffers come from the first rank that holds them, see [Note: Patchworks].

    Collective: yes.

    Raises:
        PlacementError: a tensor has no values, or a placement that holds none of its own; or the ranks together do
            not hold all of it.
        DisagreementError: the ranks hold different tensors, or different values of what they hold together.
    """
    require_alike_models(world, held, ())
    saved = [item for item in held if item.kind.is_saved]

    def look() -> dict[str, TensorFacts]:
        if absent := [item.fqn for item in saved if item.tensor.is_meta]:
            raise PlacementError(
                f"{few_names(absent)} on meta: without values, there is nothing to take out; load the model first"
            )
        return {item.fqn: facts_of(item.tensor, item.fqn) for item in saved}

    told = world.each(look)
    boxes = world.together(lambda: _boxes_by_rank(saved, told))
    shares = world.together(lambda: _dealt(saved, boxes))
    tensors = {item.fqn: item.tensor for item in saved}
    buffers = {item.fqn for item in saved if item.kind is not TensorKind.PARAMETER}
    replicas = world.together(lambda: Replicas.among(tensors, in_common(boxes, world.rank), buffers))
    return Shares(shares, settle_replicas(world, replicas, on_differing_buffers))


def _boxes_by_rank(
    saved: Sequence[Held], told: Sequence[Mapping[str, TensorFacts]]
) -> dict[str, tuple[Boxes, ...]]:
    """Return the boxes of each tensor by rank; one value for all tensors that lie alike."""
    require_same_tensors(told)
    made: dict[tuple[Boxes, ...], tuple[Boxes, ...]] = {}
    found: dict[str, tuple[Boxes, ...]] = {}
    for item in saved:
        boxes = tuple(tuple(box for box in facts[item.fqn].boxes if box.numel) for facts in told)
        found[item.fqn] = made.setdefault(boxes, boxes)
    return found


def _dealt(saved: Sequence[Held], held: Mapping[str, tuple[Boxes, ...]]) -> dict[str, tuple[Boxes, ...]]:
    made: dict[tuple[int, int, int], tuple[Boxes, ...]] = {}
    shares: dict[str, tuple[Boxes, ...]] = {}
    lacking: list[str] = []
    for number, item in enumerate(saved):
        boxes, turn, itemsize = held[item.fqn], number % len(held[item.fqn]), item.tensor.element_size()
        if item.kind is not TensorKind.PARAMETER:
            given = shares_of_first(boxes)
        else:
            key = id(boxes), turn, itemsize
            if key not in made:
                made[key] = shares_by_rank(boxes, turn, itemsize)
            given = made[key]
        if sum(box.numel for boxes in given for box in boxes) != item.tensor.numel():
            lacking.append(item.fqn)
        shares |= dict.fromkeys(item.names, given)
    if lacking:
        raise PlacementError(
            f"the ranks of this call do not hold all of {few_names(lacking)}; make it on all ranks of the mesh"
        )
    return shares


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a weight in four bits that this rank holds, and what they stand for.

    Attributes:
        weight: packed bytes.
        scales: of the same rows: bytes of float32, or codes.
        layer: the layer, which knows how.
    """

    weight: Held
    scales: Held
    layer: Any

    def numbers(self, box: Box) -> torch.Tensor:
        """The numbers of a box of the weight (out, in), rounded to the dtype that they had."""
        first = local_boxes(self.weight.tensor, self.weight.fqn)[0].box.offsets[0]
        start, count = box.offsets[0], box.sizes[0]
        rows = slice(start - first, start - first + count)
        scales = self.layer.scales_of(self.scales.local[rows].contiguous(), start)
        packing = self.layer.packing
        whole: torch.Tensor = packing.numbers(self.weight.local[rows].contiguous(), scales, packing.dtype)
        return whole[:, box.offsets[1] : box.offsets[1] + box.sizes[1]].contiguous()


NOTHING_PACKED: Mapping[str, PackedRows] = {}


def in_numbers(boxes: Boxes) -> Boxes:
    """Boxes of packed bytes as those of the numbers in them."""
    return tuple(Box((box.offsets[0], 2 * box.offsets[1]), (box.sizes[0], 2 * box.sizes[1])) for box in boxes)


class Giver:
    """This rank's shares of a model's tensors. Both ``held`` and ``shares`` are by name.

    ``packed`` are weights in four bits that are given as numbers, by name; their shares are boxes of numbers.
    """

    def __init__(
        self,
        held: Mapping[str, Held],
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
        """What a share is of its tensor."""
        return self.shares[name][self._rank][number]

    def share(self, name: str, number: int) -> torch.Tensor:
        """A share as a row-major tensor. The last one is kept: blocks ask for parts of it in turn.

        Memory: none where it lies like that in its tensor, else the share.
        """
        if self._last is None or self._last[0] != (name, number):
            self._last = None
            self._last = (name, number), self.values(name, self.box(name, number))
        return self._last[1]

    def values(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, as a row-major tensor."""
        if name in self._packed:
            return self._packed[name].numbers(box)
        item = self.held[name]
        return strided_view(item.local, place_of(box, local_boxes(item.tensor, item.fqn))).contiguous()


class MergingGiver(Giver):
    """Shares of the base's tensors, with what the adapter adds to them.

    Args:
        held: by name in the base.
        shares: by name in the base.
        rank: this rank.
        factors: by name in the base, of the weights that the adapter changes.
        matrices: all matrices of the adapter, whole, by FQN.
        packed: as of :class:`Giver`.

    Memory: beside ``matrices`` twice the largest share, and that in float32 where the adapter is.
    """

    def __init__(
        self,
        held: Mapping[str, Held],
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
