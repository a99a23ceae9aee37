"""Plans a load in which every rank reads one interval of the checkpoint, and hands the bytes on.

A rank that reads what it holds opens nearly every file, since it holds rows of every tensor. Here the ranks cut
the checkpoint itself into even intervals, and what one has read it hands to those that hold it. An interval begins
where the one before it ends, so over all ranks at most files + ranks - 1 files are opened.

[Note: Intervals] What is handed over are boxes of the model's tensors, not bytes of files. So the tensors are cut
into boxes that are made of one stored tensor each (:func:`leaf_boxes`: of stacked experts, one expert), these are
laid in the order of the bytes that they are made of, and the line of them is cut at even distances. A box that has
to be cut is cut along the dimension that is outermost in its file. What a conversion takes from a stored tensor
with gaps (an interleave, columns of a fused matrix) is one box, and has its place by its first byte: two ranks may
then read over the same gaps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.conversion import Expression, copies, leaf_boxes, skeleton
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.planning.moves.exchange import Holders, WantedBoxes, cut
from shardwise.planning.moves.parcels import Parcel, Round
from shardwise.tensors import Box, numel

_GRAINS = 64
"""An interval may be cut where it is shorter or longer than the mean by one part in this many, so that rows, and
small tensors, stay whole."""

_BLOCKS = 8
"""Of the budget of a round, a block takes one part in this many, and less where many ranks hold it: so whoever gets
blocks has room for those of several readers."""


@dataclass(frozen=True, slots=True)
class IntervalPart:
    """A box of a tensor that one rank reads, a part of its interval.

    ``order`` has the dimensions of the tensor as the file has them, outermost first; ``nbytes`` are as stored.
    """

    tensor: str
    box: Box
    order: tuple[int, ...]
    nbytes: int

    def blocks(self, max_numel: int) -> Iterator[IntervalPart]:
        """The portion in parts of at most so many elements, in the order of the file."""
        for part in cut(_in_order(self.box, self.order), max_numel):
            nbytes = self.nbytes * part.numel // self.box.numel
            yield IntervalPart(self.tensor, _back_in_place(part, self.order), self.order, nbytes)


_OPEN = 16
"""So many rounds are filled at once."""

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, less their whole parts, are spread evenly and come near no simple fraction."""

Interval = tuple[IntervalPart, ...]
"""What one rank reads, in the order of the files."""


def intervals(reads: Mapping[str, Expression], index: CheckpointIndex, ranks: int) -> tuple[Interval, ...]:
    """What each rank reads of these tensors, none of which is computed.

    All portions together are all tensors, each element once. An interval is as long as the mean, but for one part
    in 64, or for an element where these are longer.
    """
    pieces = _pieces(reads, index)
    total = sum(piece.nbytes for piece in pieces)
    grain_bytes = total // (ranks * _GRAINS)
    found: list[list[IntervalPart]] = [[] for _ in range(ranks)]
    before = 0
    for piece in pieces:
        first, last = before * ranks // total, -(-(before + piece.nbytes) * ranks // total) - 1
        start = 0
        for rank in range(first, last + 1):
            stop = _cut(piece, total * (rank + 1) - before * ranks, ranks, grain_bytes)
            found[rank] += piece.stretch(start, stop)
            start = stop
        before += piece.nbytes
    return tuple(map(tuple, found))


def handed_over(
    wanted: Sequence[WantedBoxes], intervals: Sequence[Interval], budget_bytes: int, rank: int
) -> list[Round]:
    """What one rank gives of its interval and gets of the others', in rounds that keep the budget on every rank.

    Parcels are written down of this rank alone: at a thousand ranks there are tens of millions in all. What is gone
    through for all ranks are blocks: about as many as stored tensors, or as an eighth of the budget is in the
    checkpoint.

    All readers go through their intervals at the same pace, each from another point on: tensors repeat from layer
    to layer, and readers that began alike would all hand to the same rank at the same time. Where a rank is handed
    too much all the same, a block waits for a later round, and those of others go before it.

    Raises:
        ValueError: when not even one element fits into the budget.
    """
    by_name = {item.tensor: item for item in wanted}
    made: dict[int, Holders] = {}
    for item in wanted:
        if id(item.boxes) not in made:
            made[id(item.boxes)] = Holders(item.boxes, range(len(intervals)))
    holders = {item.tensor: made[id(item.boxes)] for item in wanted}
    rounds: list[list[Parcel]] = [[] for _ in range(_OPEN)]
    moves = [False] * _OPEN
    used = np.zeros((_OPEN, len(intervals)), np.int64)  # bytes by round, the last ones, and rank
    pending = _blocks(intervals, by_name, holders, budget_bytes)
    pending.reverse()
    while pending:
        reader, block = pending.pop()
        item, held = by_name[block.tensor], holders[block.tensor]
        costs = held.staging_of(item, reader, block.box, len(intervals))
        if costs.max() > budget_bytes:
            pending += [(reader, half) for half in reversed(_halves(block, budget_bytes))]
            continue
        (fitting,) = np.nonzero((used + costs).max(axis=1) <= budget_bytes)
        if not len(fitting):
            rounds.append([])
            moves.append(False)
            used = np.concatenate((used[1:], np.zeros_like(used[:1])))
        number = len(rounds) - _OPEN + int(fitting[0] if len(fitting) else _OPEN - 1)
        used[number - len(rounds)] += costs
        moves[number] |= bool(costs.sum() > costs[reader])
        if rank == reader or costs[rank]:
            rounds[number] += held.parcels(item, reader, block.box, None if rank == reader else rank)
    filled = len(rounds) - int((used.max(axis=1) == 0).sum())
    return [Round(tuple(items), moved) for items, moved in zip(rounds[:filled], moves[:filled], strict=True)]


def _halves(block: IntervalPart, budget_bytes: int) -> list[IntervalPart]:
    if block.box.numel == 1:
        raise ValueError(f"{budget_bytes} bytes are too few to hand an element of {block.tensor} to who holds it")
    return list(block.blocks(-(-block.box.numel // 2)))


def _blocks(
    intervals: Sequence[Interval],
    wanted: Mapping[str, WantedBoxes],
    holders: Mapping[str, Holders],
    budget_bytes: int,
) -> list[tuple[int, IntervalPart]]:
    """(reader, what it hands over at once), in the order of the rounds."""
    found: list[tuple[float, int, IntervalPart]] = []
    for reader, interval in enumerate(intervals):
        length = sum(portion.nbytes for portion in interval)
        done = 0
        for portion in interval:
            item, held = wanted[portion.tensor], holders[portion.tensor]
            most = budget_bytes // (_BLOCKS * held.replicas * item.itemsize)
            for block in portion.blocks(max(1, most)):
                found.append(((done / length - _GOLDEN * reader) % 1, reader, block))
                done += block.nbytes
    found.sort(key=lambda entry: entry[:2])
    return [(reader, block) for _, reader, block in found]


def stretch(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements ``start <= i < stop`` of a tensor of these sizes, in row-major order, as few boxes."""
    if start >= stop:
        return
    if not sizes or stop - start == numel(sizes):
        yield Box.whole(sizes)
        return
    row = numel(sizes[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _below(last, stretch(sizes[1:], start - last * row, stop - last * row))
        return
    if start < first * row:
        yield from _below(first - 1, stretch(sizes[1:], start - (first - 1) * row, row))
    if first < last:
        yield Box((first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:]))
    if last * row < stop:
        yield from _below(last, stretch(sizes[1:], 0, stop - last * row))


def _below(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (Box((row, *box.offsets), (1, *box.sizes)) for box in boxes)


@dataclass(frozen=True, slots=True)
class _BoxForm:
    """A box of tensors of one kind: which of their leaves it is made of, and from which byte of each on."""

    portion: IntervalPart
    leaves: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _StoredPiece:
    """A box of a tensor at its place: the number of the file, and the first byte in it."""

    place: tuple[int, int]
    portion: IntervalPart

    @property
    def nbytes(self) -> int:
        return self.portion.nbytes

    def stretch(self, start: int, stop: int) -> Iterator[IntervalPart]:
        """The elements from ``start`` to ``stop``, in the order of the file."""
        whole = self.portion
        sizes = _in_order(whole.box, whole.order).sizes
        for part in stretch(sizes, start, stop):
            box = _back_in_place(part, whole.order)
            offsets = tuple(map(sum, zip(box.offsets, whole.box.offsets, strict=True)))
            nbytes = whole.nbytes * part.numel // whole.box.numel
            yield IntervalPart(whole.tensor, Box(offsets, box.sizes), whole.order, nbytes)


def _pieces(reads: Mapping[str, Expression], index: CheckpointIndex) -> list[_StoredPiece]:
    """All boxes of all tensors, in the order of their places. See [Note: Intervals]."""
    number_of = {file: number for number, file in enumerate(index.files)}
    forms: dict[Hashable, list[_BoxForm]] = {}
    found: list[_StoredPiece] = []
    for name, expression in sorted(reads.items()):
        bare, keys = skeleton(expression)
        if bare not in forms:  # equal layers have the same boxes, of other keys
            forms[bare] = list(_forms(expression, keys))
        entries = [index.entries[key] for key in keys]
        places = [(number_of[entry.file], entry.start) for entry in entries]
        for form in forms[bare]:
            file, start = min((places[leaf][0], places[leaf][1] + offset) for leaf, offset in form.leaves)
            found.append(_StoredPiece((file, start), replace(form.portion, tensor=name)))
    found.sort(key=lambda piece: piece.place)  # stable: those of one place stay in the order of the names
    return found


def _forms(expression: Expression, keys: Sequence[str]) -> Iterator[_BoxForm]:
    number_of = {key: number for number, key in enumerate(keys)}
    for box in leaf_boxes(expression):
        starts: dict[int, int] = {}
        nbytes = 0
        for copy in copies(expression, box):
            itemsize = copy.leaf.dtype.itemsize
            number, start = number_of[copy.leaf.key], copy.source.offset * itemsize
            starts[number] = min(start, starts.get(number, start))
            nbytes += copy.numel * itemsize
        if nbytes:
            yield _BoxForm(IntervalPart("", box, _order(expression, box), nbytes), tuple(starts.items()))


def _order(expression: Expression, box: Box) -> tuple[int, ...]:
    """The dimensions of a box, that along which a step is widest in the file first."""

    def place(dim: int | None) -> int:
        offsets = tuple(offset + (d == dim) for d, offset in enumerate(box.offsets))
        (copy,) = copies(expression, Box(offsets, (1,) * len(offsets)))
        return copy.source.offset

    first = place(None)
    steps = [place(dim) - first if size > 1 else 0 for dim, size in enumerate(box.sizes)]
    return tuple(sorted(range(len(steps)), key=lambda dim: -steps[dim]))


def _cut(piece: _StoredPiece, times_ranks: int, ranks: int, grain_bytes: int) -> int:
    """The element of a piece at which the interval of a rank ends that goes ``times_ranks / ranks`` bytes into it.

    It is the nearest at which what is shorter than a grain stays whole.
    """
    portion = piece.portion
    itemsize = portion.nbytes // portion.box.numel
    step = 1
    for size in reversed(_in_order(portion.box, portion.order).sizes):
        if step * size * itemsize > grain_bytes:
            break
        step *= size
    unit = ranks * itemsize * step
    return min(portion.box.numel, (2 * times_ranks + unit) // (2 * unit) * step)


def _in_order(box: Box, order: Sequence[int]) -> Box:
    return Box(tuple(box.offsets[dim] for dim in order), tuple(box.sizes[dim] for dim in order))


def _back_in_place(box: Box, order: Sequence[int]) -> Box:
    place = {dim: number for number, dim in enumerate(order)}
    return _in_order(box, [place[dim] for dim in range(len(order))])
