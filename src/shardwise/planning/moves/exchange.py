"""Plans an exchange between ranks: who sends which box to whom, and in which rounds.

A tensor lies on the ranks in boxes (:class:`WantedBoxes`). Where its values come from is one of three questions:
from ranks that have it whole (:func:`from_sources`), from ranks that hold it in other boxes (:func:`from_holders`),
or from ranks that fetch it, each a part of what a group of ranks needs (:func:`dealt`). All answer with parcels.
:func:`rounds` then cuts these into rounds, none of which takes more staging memory on any rank than it may. All of
it is the same on every rank.

[Note: Spreading] Where several ranks want the same box from one source, sending it to each would cost the source
as many times the bytes. Instead it deals them even parts, once in all, and they hand them to each other: twice the
way, but at the rate of all of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.planning.moves.parcels import ALIGNMENT_BYTES, Parcel, Round
from shardwise.tensors import Box, numel

SMALL_BYTES = 1 << 16
"""What is not larger is fetched whole by one rank."""


@dataclass(frozen=True, slots=True)
class WantedBoxes:
    """A tensor, and the boxes of it that each rank is to have; a rank's boxes do not overlap."""

    tensor: str
    itemsize: int
    boxes: tuple[tuple[Box, ...], ...]
    """By rank; none for an empty shard."""


@dataclass(frozen=True, slots=True)
class SpreadParcels:
    """Parcels from the sources, and those that ranks then hand to each other. See [Note: Spreading]."""

    first: tuple[Parcel, ...]
    then: tuple[Parcel, ...]


def from_sources(wanted: Sequence[WantedBoxes], sources: Sequence[Sequence[int]]) -> SpreadParcels:
    """Every rank's boxes from a rank that has the tensor whole: ``sources[tensor][rank]``, perhaps the rank itself.

    Who is a source is its own source.
    """
    first: list[Parcel] = []
    then: list[Parcel] = []
    load: dict[int, int] = {}
    for item, source_of in zip(wanted, sources, strict=True):
        holders: dict[tuple[int, Box], list[int]] = {}
        for rank, boxes in enumerate(item.boxes):
            for box in boxes:
                if box.numel:
                    holders.setdefault((source_of[rank], box), []).append(rank)
        for (source, box), ranks in holders.items():
            if source in ranks:
                first.append(Parcel(item.tensor, source, (source,), box, item.itemsize))
            others = [rank for rank in ranks if rank != source]
            for given, onward in _spread(item, source, box, others, load):
                first.append(given)
                then += onward
    return SpreadParcels(tuple(first), tuple(then))


def _spread(
    item: WantedBoxes, source: int, box: Box, others: Sequence[int], load: dict[int, int]
) -> Iterator[tuple[Parcel, list[Parcel]]]:
    """What the source gives to each of the others, and what that one then hands on. See [Note: Spreading]."""
    for reader, share in _shares(box, item.itemsize, others, load):
        rest = tuple(rank for rank in others if rank != reader)
        onward = [Parcel(item.tensor, reader, rest, share, item.itemsize)] if rest else []
        yield Parcel(item.tensor, source, (reader,), share, item.itemsize), onward


def from_holders(wanted: Sequence[WantedBoxes], held: Sequence[Sequence[Sequence[Box]]]) -> SpreadParcels:
    """Every rank's boxes from ranks that hold them: ``held[tensor][rank]`` are boxes, which cover the tensor.

    Boxes that ranks hold are equal or have nothing in common. What a rank holds it takes from itself; of several
    holders, the one gives that has given least. What all of the tensor's holders have whole is spread (see
    [Note: Spreading]); where each has a part, all of them give at once, and straight.
    """
    first: list[Parcel] = []
    then: list[Parcel] = []
    load: dict[int, int] = {}
    given: dict[int, int] = {}
    for item, by_rank in zip(wanted, held, strict=True):
        holders, takers = _ranks_of(by_rank), _ranks_of(item.boxes)
        for box, ranks in takers.items():
            for whole, part in _parts(box, holders):
                having = holders[whole]
                others = [rank for rank in ranks if rank not in having]
                for rank in ranks:
                    if rank in having:
                        first.append(Parcel(item.tensor, rank, (rank,), part, item.itemsize))
                if not others:
                    continue
                source = min(having, key=lambda rank: (given.get(rank, 0), rank))
                given[source] = given.get(source, 0) + part.numel * item.itemsize
                if len(holders) > 1:
                    first.append(Parcel(item.tensor, source, tuple(others), part, item.itemsize))
                    continue
                for parcel, onward in _spread(item, source, part, others, load):
                    first.append(parcel)
                    then += onward
    return SpreadParcels(tuple(first), tuple(then))


def covers(shape: Sequence[int], held: Sequence[Sequence[Box]]) -> bool:
    """Whether boxes by rank, equal or with nothing in common, are all of a tensor of this shape."""
    return sum(box.numel for box in _ranks_of(held)) == numel(shape)


def _ranks_of(boxes: Sequence[Sequence[Box]]) -> dict[Box, list[int]]:
    """The ranks of every box that has elements."""
    found: dict[Box, list[int]] = {}
    for rank, items in enumerate(boxes):
        for box in items:
            if box.numel:
                found.setdefault(box, []).append(rank)
    return found


def _parts(box: Box, holders: Mapping[Box, Sequence[int]]) -> Iterator[tuple[Box, Box]]:
    """(a box that is held, its part of this one)."""
    if box in holders:
        yield box, box
        return
    for whole in holders:
        common = whole.intersect(box)
        if common is not None:
            yield whole, common


def dealt(wanted: Sequence[WantedBoxes], readers: Sequence[int], block_bytes: int) -> tuple[Parcel, ...]:
    """The boxes of the ranks ``readers`` from these ranks, each of which fetches an even part of the rows.

    What the group needs is fetched once in all: by all of them, in rows, or by one of them where it is small. Boxes
    of other ranks are passed over. What a rank fetches comes in blocks of about ``block_bytes``: parcels with
    columns of the same rows follow each other, so that these rows can be read at once.
    """
    parcels: list[Parcel] = []
    load: dict[int, int] = {}
    for item in wanted:
        holders = Holders(item.boxes, readers)
        needed = {box for rank in readers for box in item.boxes[rank] if box.numel}
        for band in _bands(sorted(needed, key=lambda box: (box.offsets, box.sizes))):
            for reader, share in _shares(band, item.itemsize, readers, load):
                for block in cut(share, max(1, block_bytes // item.itemsize)):
                    parcels += holders.parcels(item, reader, block)
    return tuple(parcels)


class Holders:
    """Which of some ranks hold what of a tensor, to be asked block by block.

    Args:
        boxes: that each rank holds, as of :class:`WantedBoxes`.
        ranks: those that count.
    """

    def __init__(self, boxes: Sequence[Sequence[Box]], ranks: Iterable[int]) -> None:
        held = [(box, rank) for rank in ranks for box in boxes[rank] if box.numel]
        held.sort(key=lambda item: (item[0].offsets, item[1]))
        shape = (len(held), len(held[0][0].sizes) if held else 0)
        self._ranks = np.asarray([rank for _, rank in held], np.int64)
        self._starts = np.asarray([box.offsets for box, _ in held], np.int64).reshape(shape)
        self._stops = self._starts + np.asarray([box.sizes for box, _ in held], np.int64).reshape(shape)
        self.replicas = max(Counter(box for box, _ in held).values(), default=1)
        """The most ranks that hold the same box."""

    def parcels(self, item: WantedBoxes, source: int, block: Box, target: int | None = None) -> Iterator[Parcel]:
        """A block of the tensor, from who fetches it to all who hold some of it, or to one of these."""
        targets: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        ranks, starts, sizes = self._common(block, target)
        for rank, offset, size in zip(ranks.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            targets.setdefault((tuple(offset), tuple(size)), []).append(rank)
        # Whoever asks gets those of one target in one order.
        for (offsets, extent), found in sorted(targets.items()):
            yield Parcel(item.tensor, source, tuple(sorted(found)), Box(offsets, extent), item.itemsize, block)

    def staging_of(self, item: WantedBoxes, source: int, block: Box, size: int) -> npt.NDArray[np.int64]:
        """As :func:`staging_of` of all parcels of a block together, for each of ``size`` ranks."""
        ranks, _, sizes = self._common(block)
        staged = -(-sizes.prod(axis=1) * item.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        costs = np.zeros(size, np.int64)
        np.add.at(costs, ranks, staged)
        costs[source] += staged[ranks != source].sum()
        return costs

    def _common(self, block: Box, target: int | None = None) -> tuple[npt.NDArray[np.int64], ...]:
        """(ranks, offsets, sizes) of what is held of a block, by ``target`` or by all."""
        offsets = np.asarray(block.offsets, np.int64)
        starts = np.maximum(self._starts, offsets)
        sizes = np.minimum(self._stops, offsets + np.asarray(block.sizes, np.int64)) - starts
        is_held = (sizes > 0).all(axis=1)
        if target is not None:
            is_held &= self._ranks == target
        return self._ranks[is_held], starts[is_held], sizes[is_held]


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box that has all of these (at least one) in it."""
    dims = range(len(boxes[0].sizes))
    offsets = tuple(min(box.offsets[dim] for box in boxes) for dim in dims)
    stops = tuple(max(box.offsets[dim] + box.sizes[dim] for box in boxes) for dim in dims)
    return Box(offsets, tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True)))


def rounds(parcels: Iterable[Parcel], budget_bytes: int) -> list[Round]:
    """The parcels in order, in rounds: in none of them does a rank give, get and keep more than ``budget_bytes``.

    A parcel that is too large for that is cut along its rows, and a row that is too large along what is below it.

    Raises:
        ValueError: when not even one element fits into the budget.
    """
    made: list[Round] = []
    current: list[Parcel] = []
    used: dict[int, int] = {}
    for parcel in parcels:
        for piece in _pieces(parcel, budget_bytes):
            costs = staging_of(piece)
            if any(used.get(rank, 0) + nbytes > budget_bytes for rank, nbytes in costs.items()):
                made.append(Round.of_all(current))
                current, used = [], {}
            current.append(piece)
            for rank, nbytes in costs.items():
                used[rank] = used.get(rank, 0) + nbytes
    return [*made, Round.of_all(current)] if current else made


def staging_of(parcel: Parcel) -> dict[int, int]:
    """Bytes by rank that a parcel occupies while it is handed over; what a rank keeps for itself counts once."""
    staged = parcel.staged_bytes
    others = sum(target != parcel.source for target in parcel.targets)
    costs = dict.fromkeys(parcel.targets, staged)
    costs[parcel.source] = costs.get(parcel.source, 0) + others * staged
    return costs


def cut(box: Box, max_numel: int) -> Iterator[Box]:
    """A box as boxes of at most ``max_numel`` elements, in row-major order."""
    if box.numel <= max_numel:
        if box.numel:
            yield box
        return
    rows, row_numel = box.sizes[0], numel(box.sizes[1:])
    step = max(1, max_numel // row_numel)
    for start in range(0, rows, step):
        part = _rows(box, start, min(start + step, rows))
        if part.numel <= max_numel:
            yield part
        else:
            for below in cut(Box(box.offsets[1:], box.sizes[1:]), max_numel):
                yield Box((part.offsets[0], *below.offsets), (1, *below.sizes))


def _pieces(parcel: Parcel, budget_bytes: int) -> Iterator[Parcel]:
    """A parcel, cut where it is large: a quarter of the budget, so that a round is left with little room unused."""
    copies = max(1, max(staging_of(parcel).values()) // max(1, parcel.staged_bytes))
    for part in (4, 1):
        numel_allowed = (budget_bytes // part // copies // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // parcel.itemsize
        if numel_allowed:
            for box in cut(parcel.box, numel_allowed):
                yield parcel if box == parcel.box else replace(parcel, box=box)
            return
    raise ValueError(
        f"{budget_bytes} bytes are too few to hand an element of {parcel.tensor} to {len(parcel.targets)} ranks"
    )


def _shares(box: Box, itemsize: int, readers: Sequence[int], load: dict[int, int]) -> Iterator[tuple[int, Box]]:
    """(reader, its part) of a box; a small one goes to the reader with the fewest bytes of whole boxes so far."""
    if not readers:
        return
    nbytes = box.numel * itemsize
    if nbytes <= SMALL_BYTES or len(readers) == 1:
        reader = min(readers, key=lambda rank: (load.get(rank, 0), rank))
        load[reader] = load.get(reader, 0) + nbytes
        yield reader, box
        return
    parts = list(even_parts(box, len(readers)))
    for index, part in enumerate(parts):
        yield readers[index * len(readers) // len(parts)], part


def even_parts(box: Box, parts: int) -> Iterator[Box]:
    """A box as about ``parts`` boxes of nearly the same number of elements, in row-major order."""
    rows = box.sizes[0] if box.sizes else 1
    if rows >= parts:
        for index in range(parts):
            yield _rows(box, index * rows // parts, (index + 1) * rows // parts)
    elif len(box.sizes) < 2:
        yield from cut(box, 1)
    else:
        for row in range(rows):
            for below in even_parts(Box(box.offsets[1:], box.sizes[1:]), -(-parts // rows)):
                yield Box((box.offsets[0] + row, *below.offsets), (1, *below.sizes))


def _bands(boxes: Sequence[Box]) -> list[Box]:
    """Boxes that cover the given ones: runs of rows, as wide as what is wanted of them."""
    if not boxes or not boxes[0].sizes:
        return list(boxes[:1])
    edges = sorted({edge for box in boxes for edge in (box.offsets[0], box.offsets[0] + box.sizes[0])})
    bands: list[Box] = []
    for start, stop in itertools.pairwise(edges):
        inside = {box for box in boxes if box.offsets[0] <= start and stop <= box.offsets[0] + box.sizes[0]}
        if not inside:
            continue
        dims = range(1, len(boxes[0].sizes))
        offsets = tuple(min(box.offsets[dim] for box in inside) for dim in dims)
        stops = tuple(max(box.offsets[dim] + box.sizes[dim] for box in inside) for dim in dims)
        sizes = tuple(end - offset for offset, end in zip(offsets, stops, strict=True))
        last = bands[-1] if bands else None
        if last and (last.offsets[1:], last.sizes[1:], _stop(last)) == (offsets, sizes, start):
            bands[-1] = Box(last.offsets, (stop - last.offsets[0], *sizes))
        else:
            bands.append(Box((start, *offsets), (stop - start, *sizes)))
    return bands


def _stop(box: Box) -> int:
    return box.offsets[0] + box.sizes[0]


def _rows(box: Box, start: int, stop: int) -> Box:
    return Box((box.offsets[0] + start, *box.offsets[1:]), (stop - start, *box.sizes[1:]))
