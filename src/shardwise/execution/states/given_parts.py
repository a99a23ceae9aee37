"""Decides what each rank gives of a model's tensors, each element once, and takes out its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import DisagreementError, PlacementError
from shardwise.execution.ranks.world import World
from shardwise.execution.states.replicas import Replicas, settle_replicas
from shardwise.execution.states.supply import require_alike_models
from shardwise.layout import TensorKind, place_of
from shardwise.models.lora_weights import Factors
from shardwise.models.view import Held, local_boxes, strided_view
from shardwise.planning.loads.load_plan import OnDiffering
from shardwise.planning.moves.assembly import Boxes, in_common, shares_by_rank, shares_of_first
from shardwise.planning.moves.parcels import Parcel
from shardwise.report.names import collapse
from shardwise.tensors import Box

_SHOWN = 6


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
    told = world.each(lambda: _HoldingWords.by_this_rank(saved))
    boxes = world.together(lambda: _by_rank(saved, told))
    shares = world.together(lambda: _dealt(saved, boxes))
    tensors = {item.fqn: item.tensor for item in saved}
    buffers = {item.fqn for item in saved if item.kind is not TensorKind.PARAMETER}
    replicas = world.together(lambda: Replicas.among(tensors, in_common(boxes, world.rank), buffers))
    return Shares(shares, settle_replicas(world, replicas, on_differing_buffers))


@dataclass(frozen=True, slots=True)
class _HoldingWords:
    """What a rank holds: the dtypes of tensors, and their boxes, as numbers of the few ways in which they lie."""

    dtypes: tuple[str, ...]
    ways: tuple[Boxes, ...]
    way_of: tuple[int, ...]

    @classmethod
    def by_this_rank(cls, saved: Sequence[Held]) -> _HoldingWords:
        absent = [item.fqn for item in saved if item.tensor.is_meta]
        if absent:
            raise PlacementError(
                f"{_shown(absent)} on meta: without values, so there is nothing to take out; load the model first"
            )
        ways: dict[Boxes, int] = {}
        way_of: list[int] = []
        for item in saved:
            boxes = tuple(part.box for part in local_boxes(item.tensor, item.fqn) if part.box.numel)
            way_of.append(ways.setdefault(boxes, len(ways)))
        return cls(tuple(str(item.tensor.dtype) for item in saved), tuple(ways), tuple(way_of))


def _by_rank(saved: Sequence[Held], told: Sequence[_HoldingWords]) -> dict[str, tuple[Boxes, ...]]:
    """The boxes that each rank holds of every tensor, by rank; one value for all tensors that lie alike."""
    made: dict[tuple[int, ...], tuple[Boxes, ...]] = {}
    found: dict[str, tuple[Boxes, ...]] = {}
    for number, item in enumerate(saved):
        dtypes = {rank.dtypes[number] for rank in told}
        if len(dtypes) > 1:
            raise DisagreementError(
                f"{item.fqn} is {' on some ranks, '.join(sorted(dtypes))} on others; bring every rank's model to "
                "one dtype"
            )
        ways = tuple(rank.way_of[number] for rank in told)
        if ways not in made:
            made[ways] = tuple(rank.ways[way] for rank, way in zip(told, ways, strict=True))
        found[item.fqn] = made[ways]
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
            f"the ranks of this call do not hold all of {_shown(lacking)}; make it on all ranks of the mesh"
        )
    return shares


def _shown(names: Sequence[str]) -> str:
    patterns = [pattern for pattern, _ in collapse(names)]
    more = f" and {len(patterns) - _SHOWN} more" if len(patterns) > _SHOWN else ""
    return f"{', '.join(patterns[:_SHOWN])}{more}"


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
        self._shares = shares
        self._rank = rank
        self._places: dict[tuple[str, int], torch.Tensor] = {}
        self._in_numbers: tuple[tuple[str, int], torch.Tensor] | None = None

    def give(self, parcel: Parcel) -> Iterator[torch.Tensor]:
        """The values of a parcel, piece by piece."""
        for piece in parcel.pieces:
            yield strided_view(self.share(parcel.leaves[piece.leaf], piece.share), piece.source)

    def box(self, name: str, number: int) -> Box:
        """What a share is of its tensor."""
        return self._shares[name][self._rank][number]

    def share(self, name: str, number: int) -> torch.Tensor:
        """A share as a row-major tensor. Memory: none where it lies like that in its tensor, else the share."""
        if name in self._packed:
            return self._numbers(name, number)
        found = self._places.get((name, number))
        if found is None:
            item = self.held[name]
            place = place_of(self.box(name, number), local_boxes(item.tensor, item.fqn))
            found = self._places[name, number] = strided_view(item.local, place)
        return found.contiguous()

    def _numbers(self, name: str, number: int) -> torch.Tensor:
        """The last one is kept: blocks ask for parts of it in turn."""
        if self._in_numbers is None or self._in_numbers[0] != (name, number):
            self._in_numbers = None
            self._in_numbers = (name, number), self._packed[name].numbers(self.box(name, number))
        return self._in_numbers[1]


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
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None

    def share(self, name: str, number: int) -> torch.Tensor:
        """As of :class:`Giver`. The last one that was computed is kept: blocks ask for parts of it in turn."""
        values = super().share(name, number)
        if name not in self._factors:
            return values
        if self._last is None or self._last[0] != (name, number):
            self._last = None
            self._last = (name, number), self._merged(name, number, values)
        return self._last[1]

    def _merged(self, name: str, number: int, values: torch.Tensor) -> torch.Tensor:
        box, factors = self.box(name, number), self._factors[name]
        lora_A, lora_B = self._matrices[factors.lora_A], self._matrices[factors.lora_B]
        rows, columns = (slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        delta = factors.delta(lora_A[:, columns], lora_B[rows])
        return values.add(delta.to(values.device)).to(values.dtype)
