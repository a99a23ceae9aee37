"""Plans how tensors are put together from the shards of all ranks, each element from exactly one. Pure.

A tensor comes in blocks: boxes whose elements follow each other in its memory. What a rank gives of a block is a
parcel of pieces, which follow from the expression of the tensor and from the shares of all ranks; shares count as
row-major tensors of their own, however they lie in a rank's memory. Blocks are taken into rounds, in none of which
a rank sends, or gets, more than a bucket. All of it is the same on every rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shardwise.conversion import Expression, pieces, skeleton
from shardwise.planning.moves.exchange import SMALL_BYTES, cut, even_parts
from shardwise.planning.moves.parcels import Parcel, Piece, Round
from shardwise.tensors import Box, Strided

Boxes: TypeAlias = tuple[Box, ...]
"""Of one tensor, without overlap."""


def own_share(box: Box, replica: int, replicas: int, turn: int, itemsize: int) -> Boxes:
    """The part of a box that one of its holders gives: an even part of the rows, or all or nothing of a small box.

    Args:
        box: what all of them hold.
        replica: which of the holders this is: 0 and up, below ``replicas``.
        replicas: how many hold the box.
        turn: decides who gives a box of at most 64 KiB. Successive numbers for the tensors of a model, so that the
            holders take turns.
        itemsize: bytes of an element.
    """
    if not box.numel:
        return ()
    if replicas == 1:
        return (box,)
    if box.numel * itemsize <= SMALL_BYTES:
        return (box,) if turn % replicas == replica else ()
    parts = list(even_parts(box, replicas))
    return tuple(part for index, part in enumerate(parts) if index * replicas // len(parts) == replica)


def shares_by_rank(held: Sequence[Boxes], turn: int, itemsize: int) -> tuple[Boxes, ...]:
    """What each rank gives of a tensor, from what each holds of it.

    Ranks hold the same box or boxes that do not overlap, as the ranks of a mesh do.
    """
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    given: list[list[Box]] = [[] for _ in held]
    for box, ranks in holders.items():
        for replica, rank in enumerate(ranks):
            given[rank] += own_share(box, replica, len(ranks), turn, itemsize)
    return tuple(map(tuple, given))


def shares_of_first(held: Sequence[Boxes]) -> tuple[Boxes, ...]:
    """What each rank gives where all of a box is to come from the first rank that holds it."""
    seen: set[Box] = set()
    given: list[Boxes] = []
    for boxes in held:
        given.append(tuple(box for box in boxes if box not in seen))
        seen.update(boxes)
    return tuple(given)


Common: TypeAlias = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes that a rank holds together with others, each with all ranks that hold it, in order."""


def in_common(held: Mapping[str, Sequence[Boxes]], rank: int) -> dict[str, Common]:
    """What a rank holds together with others, of tensors by name. ``held`` is what each rank holds of them."""
    known: dict[int, Common] = {}
    found: dict[str, Common] = {}
    for name, boxes_by_rank in held.items():
        if id(boxes_by_rank) not in known:  # one value for all that lie alike
            known[id(boxes_by_rank)] = _in_common(boxes_by_rank, rank)
        if known[id(boxes_by_rank)]:
            found[name] = known[id(boxes_by_rank)]
    return found


def _in_common(held: Sequence[Boxes], rank: int) -> Common:
    found: list[tuple[Box, tuple[int, ...]]] = []
    for box in held[rank]:
        holders = tuple(other for other, boxes in enumerate(held) if box in boxes)
        if len(holders) > 1:
            found.append((box, holders))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A tensor of the checkpoint that is to be put together.

    Attributes:
        key: of the tensor.
        expression: over the model's tensors, by name, which ranks hold.
        itemsize: bytes of an element, as it travels and arrives.
        targets: the ranks where it is to be: one, or all.
    """

    key: str
    expression: Expression
    itemsize: int
    targets: tuple[int, ...]


_Block: TypeAlias = tuple[Parcel, ...]
"""What all ranks give of a box whose elements follow each other in its tensor."""


def plan_assembly(
    streams: Sequence[Sequence[WantedTensor]],
    shares: Mapping[str, Sequence[Boxes]],
    size: int,
    bucket_bytes: int,
) -> list[Round]:
    """The rounds in which all streams' tensors are put together, each stream's in order. Streams go side by side.

    Args:
        streams: what is wanted; of tensors without elements nothing is planned.
        shares: by name of the model's tensors, what each rank gives, each element once.
        size: the number of ranks.
        bucket_bytes: what a rank may get in a round, and what it may send; more is taken for alignment only.
    """
    cutter = _Cutter(shares, size)
    queues = [_Queue(_blocks(cutter, stream, bucket_bytes)) for stream in streams]
    rounds: list[Round] = []
    while any(queue.head is not None for queue in queues):
        filling = _Filling(bucket_bytes)
        while filling.take_from_each(queues):
            pass
        rounds.append(filling.round())
    return rounds


def _blocks(cutter: _Cutter, stream: Sequence[WantedTensor], bucket_bytes: int) -> Iterator[_Block]:
    for wanted in stream:
        form = cutter.form_of(wanted.expression)
        for box in cut(Box.whole(wanted.expression.shape), max(1, bucket_bytes // wanted.itemsize)):
            given = cutter.given(wanted.expression, form, box)
            yield tuple(
                Parcel(wanted.key, rank, wanted.targets, box, wanted.itemsize, None, form.leaves, found)
                for rank, found in given
            )


class _Queue:
    """A stream's blocks, of which the first can be looked at."""

    def __init__(self, blocks: Iterator[_Block]) -> None:
        self._blocks = blocks
        self.head = next(blocks, None)

    def pop(self) -> _Block:
        head = self.head
        assert head is not None
        self.head = next(self._blocks, None)
        return head


class _Filling:
    """A round that is being filled."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._parcels: list[Parcel] = []
        self._sent: dict[int, int] = {}
        self._got: dict[int, int] = {}

    def take_from_each(self, queues: Sequence[_Queue]) -> bool:
        """The next block of each queue, where there is room for it; whether there was for any."""
        return sum(self._take_from(queue) for queue in queues) > 0

    def _take_from(self, queue: _Queue) -> bool:
        if queue.head is None or not self._has_room(queue.head):
            return False
        block = queue.pop()
        for parcel in block:
            if not parcel.is_kept:
                self._sent[parcel.source] = self._sent.get(parcel.source, 0) + parcel.staged_bytes
        for rank in block[0].targets:
            self._got[rank] = self._got.get(rank, 0) + _nbytes(block)
        self._parcels += block
        return True

    def _has_room(self, block: _Block) -> bool:
        if not self._parcels:
            return True
        targets, nbytes, bucket = block[0].targets, _nbytes(block), self._bucket_bytes
        if (len(targets) > 1) is not (len(self._parcels[0].targets) > 1):
            return False
        return all(self._got.get(rank, 0) + nbytes <= bucket for rank in targets) and all(
            self._sent.get(parcel.source, 0) + parcel.staged_bytes <= bucket
            for parcel in block
            if not parcel.is_kept
        )

    def round(self) -> Round:
        moves = not all(parcel.is_kept for parcel in self._parcels)
        return Round(tuple(self._parcels), moves, is_gathered=len(self._parcels[0].targets) > 1)


def _nbytes(block: _Block) -> int:
    return block[0].box.numel * block[0].itemsize


@dataclass(frozen=True, slots=True)
class _GivingForm:
    """What tensors have alike of which ranks give the same. ``ways`` are the shares of each leaf, by identity."""

    skeleton: Hashable
    ways: tuple[int, ...]
    leaves: tuple[str, ...] = field(compare=False)


_GivenPieces: TypeAlias = tuple[tuple[int, tuple[Piece, ...]], ...]
"""What ranks give of a box, by rank."""


class _Cutter:
    """Finds what ranks give of a box; once for equal layers."""

    def __init__(self, shares: Mapping[str, Sequence[Boxes]], size: int) -> None:
        self._shares = shares
        self._size = size
        self._made: dict[tuple[_GivingForm, Box], _GivenPieces] = {}

    def form_of(self, expression: Expression) -> _GivingForm:
        bare, leaves = skeleton(expression)
        return _GivingForm(bare, tuple(id(self._shares[leaf]) for leaf in leaves), leaves)

    def given(self, expression: Expression, form: _GivingForm, box: Box) -> _GivenPieces:
        if (form, box) not in self._made:
            self._made[form, box] = self._given(expression, form.leaves, box)
        return self._made[form, box]

    def _given(self, expression: Expression, leaves: Sequence[str], box: Box) -> _GivenPieces:
        """The pieces of all ranks at once: their shares lie one behind the other in one memory, leaf by leaf."""
        held: dict[str, list[tuple[Box, Strided]]] = {}
        homes: list[tuple[int, int]] = []
        starts: list[int] = []
        used = 0
        for leaf in leaves:
            held[leaf] = []
            for rank in range(self._size):
                for number, share in enumerate(self._shares[leaf][rank]):
                    held[leaf].append((share, Strided.contiguous(share.sizes, used)))
                    homes.append((rank, number))
                    starts.append(used)
                    used += share.numel
        number_of = {leaf: number for number, leaf in enumerate(leaves)}
        given: dict[int, list[Piece]] = {}
        for copy in pieces(expression, held, box):
            home = bisect_right(starts, copy.source.offset) - 1
            rank, share_number = homes[home]
            source = Strided(copy.source.offset - starts[home], copy.source.sizes, copy.source.strides)
            piece = Piece(number_of[copy.leaf.key], share_number, source, copy.target)
            given.setdefault(rank, []).append(piece)
        return tuple((rank, tuple(found)) for rank, found in sorted(given.items()))
