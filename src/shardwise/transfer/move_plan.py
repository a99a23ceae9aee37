"""Pure planning of transfers of tensor elements between ranks, in rounds of bounded staging memory.

Each move transfers an expression of tensors that ranks hold: one tensor, or several combined into the form of a
checkpoint. A rank sends its shares, which contain each element of a tensor once over all ranks. The pieces of a box
follow from the shares of all ranks, so the plan is the same on every rank, and only values are communicated.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeAlias

from shardwise.core.computed import copies_from_shards
from shardwise.core.expression import Expression, structure
from shardwise.core.tensors import Box, Strided, numel, row_blocks

SMALL_BYTES = 1 << 16
"""A box up to this size is given whole by one of its holders."""

ALIGNMENT_BYTES = 16
"""Parts of blocks begin at multiples of this in staging memory, so that each can be viewed as its own dtype."""

Boxes: TypeAlias = tuple[Box, ...]
"""Boxes of one tensor, without overlap."""

Common: TypeAlias = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes that a rank holds together with others, each with all ranks that hold it, in order."""


def even_shares(box: Box, count: int) -> Iterator[Box]:
    """Yield about ``count`` boxes of nearly the same number of elements that make up a box, in row-major order."""
    rows = box.sizes[0] if box.sizes else 1
    if rows >= count:
        for index in range(count):
            start, stop = index * rows // count, (index + 1) * rows // count
            yield Box((box.offsets[0] + start, *box.offsets[1:]), (stop - start, *box.sizes[1:]))
    elif len(box.sizes) < 2:
        yield from cut(box, 1)
    else:
        for row in range(rows):
            for below in even_shares(Box(box.offsets[1:], box.sizes[1:]), -(-count // rows)):
                yield Box((box.offsets[0] + row, *below.offsets), (1, *below.sizes))


def cut(box: Box, most: int) -> Iterator[Box]:
    """Yield contiguous row-major runs of a box that are boxes of at most ``most`` elements, in order."""
    for block in row_blocks(box.sizes, most):
        yield Box(tuple(map(int.__add__, box.offsets, block.offsets)), block.sizes)


def local_share(box: Box, replica: int, replicas: int, turn: int, itemsize: int) -> Boxes:
    """Return the share of a box that one of its holders sends.

    It is an even share of the rows. A small box is sent by one holder alone.

    Args:
        box: the box that all of these ranks hold.
        replica: index of this holder, from 0 up to ``replicas`` - 1.
        replicas: number of ranks that hold the box.
        turn: selects the rank that sends a small box, so that successive numbers alternate between the holders.
        itemsize: bytes of an element.
    """
    if not box.numel:
        return ()
    if replicas == 1:
        return (box,)
    if box.numel * itemsize <= SMALL_BYTES:
        return (box,) if turn % replicas == replica else ()
    shares = list(even_shares(box, replicas))
    return tuple(share for index, share in enumerate(shares) if index * replicas // len(shares) == replica)


def find_holders(boxes: Sequence[Boxes]) -> dict[Box, list[int]]:
    """Return the ranks that hold each box with elements, from the boxes by rank."""
    found: dict[Box, list[int]] = {}
    for rank, items in enumerate(boxes):
        for box in items:
            if box.numel:
                found.setdefault(box, []).append(rank)
    return found


def covers(shape: Sequence[int], held: Sequence[Boxes]) -> bool:
    """Check if boxes by rank, either equal or disjoint, cover a tensor of this shape."""
    return sum(box.numel for box in find_holders(held)) == numel(shape)


def shares_by_rank(held: Sequence[Boxes], turn: int, itemsize: int) -> tuple[Boxes, ...]:
    """Return each rank's share of a tensor from the boxes that the ranks hold.

    Ranks hold either the same box or boxes that do not overlap, as on a mesh.
    """
    given: list[list[Box]] = [[] for _ in held]
    for box, ranks in find_holders(held).items():
        for replica, rank in enumerate(ranks):
            given[rank] += local_share(box, replica, len(ranks), turn, itemsize)
    return tuple(map(tuple, given))


def first_holder_shares(held: Sequence[Boxes]) -> tuple[Boxes, ...]:
    """Return the share of each rank if the first rank that holds a box sends all of it."""
    seen: set[Box] = set()
    given: list[Boxes] = []
    for boxes in held:
        given.append(tuple(box for box in boxes if box not in seen))
        seen.update(boxes)
    return tuple(given)


def in_common(held: Mapping[str, Sequence[Boxes]], rank: int) -> dict[str, Common]:
    """Return the boxes, by tensor name, that a rank holds together with others.

    ``held`` contains the boxes of each rank.
    """
    known: dict[int, Common] = {}
    for boxes_by_rank in held.values():  # one value for all tensors with equal boxes
        if id(boxes_by_rank) not in known:
            holders = find_holders(boxes_by_rank)
            mine = (box for box in boxes_by_rank[rank] if len(holders.get(box, ())) > 1)
            known[id(boxes_by_rank)] = tuple((box, tuple(holders[box])) for box in mine)
    return {name: found for name, boxes_by_rank in held.items() if (found := known[id(boxes_by_rank)])}


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor that ranks receive.

    Attributes:
        key: the tensor's name.
        expression: an expression over tensors that ranks hold.
        itemsize: bytes of an element as it is sent and received.
        wanted: the boxes that each rank receives, by rank.
    """

    key: str
    expression: Expression
    itemsize: int
    wanted: Sequence[Boxes]


StateForm: TypeAlias = Literal["full", "full_on_all_ranks", "sharded"]
"""Form of a state in memory.

``"full"``: whole tensors on the CPU of the first rank, nothing on the others.
``"full_on_all_ranks"``: whole tensors on the CPU of every rank.
``"sharded"``: what each rank has, DTensors where tensors are sharded, in the model's own memory.
"""


def receivers(form: StateForm, size: int) -> range:
    """Return the ranks, out of ``size``, that receive full tensors."""
    return range(1 if form == "full" else size)


def full_on_ranks(ranks: Sequence[int], shape: Sequence[int], size: int) -> tuple[Boxes, ...]:
    """Return the boxes by rank of a full tensor on these ranks, and of nothing on the others of ``size``."""
    return tuple((Box.whole(shape),) if rank in ranks else () for rank in range(size))


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that move from a share of a rank to a box, both addressed by element in row-major order.

    ``leaf`` is the index of the tensor among the leaves of the block, and ``share`` the index of the share in it.
    """

    leaf: int
    share: int
    source: Strided
    target: Strided


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a tensor, the ranks that receive it, and the pieces of it that ranks send, by rank."""

    key: str
    box: Box
    targets: tuple[int, ...]
    itemsize: int
    leaves: tuple[str, ...]
    given: tuple[tuple[int, tuple[Piece, ...]], ...]

    def staged_bytes(self, given: Sequence[Piece]) -> int:
        """Return the bytes of one copy of a rank's pieces in staging memory."""
        nbytes = sum(piece.target.numel for piece in given) * self.itemsize
        return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def costs(self) -> Counter[int]:
        """Return the bytes of staging memory by rank for the pieces that it sends and receives."""
        costs: Counter[int] = Counter()
        for source, given in self.given:
            nbytes = self.staged_bytes(given)
            for target in self.targets:
                if target != source:
                    costs[source] += nbytes
                    costs[target] += nbytes
        return costs

    def kept(self) -> Counter[int]:
        """Return the bytes by rank of the pieces that it keeps."""
        return Counter({rank: self.staged_bytes(given) for rank, given in self.given if rank in self.targets})


Round: TypeAlias = tuple[Block, ...]
"""Blocks that are handed over at once."""


def plan_rounds(
    streams: Sequence[Sequence[Move]], shares: Mapping[str, Sequence[Boxes]], bucket_bytes: int
) -> list[Round]:
    """Plan the rounds that move the tensors of all streams, each stream in order and one block of each in turn.

    Args:
        streams: the tensors to move. Tensors without elements are skipped.
        shares: the share of each rank, by name of the tensors that ranks hold.
        bucket_bytes: the staging memory of a round on a rank, and the most bytes that it keeps. A single element
            and alignment may need more.
    """
    cutter = _Cutter(shares)
    rounds: list[list[Block]] = [[]]
    staged: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    for blocks in zip_longest(*(cutter.blocks(stream, bucket_bytes) for stream in streams)):
        for block in blocks:
            if block is None:
                continue
            costs, own = block.costs(), block.kept()
            is_full = any(staged[rank] + nbytes > bucket_bytes for rank, nbytes in costs.items())
            if rounds[-1] and (is_full or any(kept[rank] + nbytes > bucket_bytes for rank, nbytes in own.items())):
                rounds.append([])
                staged.clear()
                kept.clear()
            rounds[-1].append(block)
            staged.update(costs)
            kept.update(own)
    return [tuple(blocks) for blocks in rounds if blocks]


class _Cutter:
    """A splitter of moves into blocks, which computes the pieces only once for equal layers."""

    def __init__(self, shares: Mapping[str, Sequence[Boxes]]) -> None:
        self._shares = shares
        self._made: dict[Hashable, tuple[tuple[int, tuple[Piece, ...]], ...]] = {}

    def blocks(self, stream: Sequence[Move], bucket_bytes: int) -> Iterator[Block]:
        for move in stream:
            bare, leaves = structure(move.expression)
            form = bare, tuple(id(self._shares[leaf]) for leaf in leaves)
            for whole, ranks in find_holders(move.wanted).items():
                most = bucket_bytes // (move.itemsize * max(2, len(ranks)))
                for box in cut(whole, max(1, most)):
                    if (form, box) not in self._made:
                        self._made[form, box] = self._given(move.expression, leaves, box)
                    yield Block(move.key, box, tuple(ranks), move.itemsize, leaves, self._made[form, box])

    def _given(
        self, expression: Expression, leaves: Sequence[str], box: Box
    ) -> tuple[tuple[int, tuple[Piece, ...]], ...]:
        """Find the pieces of all ranks at once, with their shares placed one after the other in one memory."""
        held: dict[str, list[tuple[Box, Strided]]] = {leaf: [] for leaf in leaves}
        owners: list[tuple[int, int, int]] = []
        starts: list[int] = []
        used = 0
        for number, leaf in enumerate(leaves):
            for rank, boxes in enumerate(self._shares[leaf]):
                for share, own in enumerate(boxes):
                    held[leaf].append((own, Strided.contiguous(own.sizes, used)))
                    owners.append((rank, number, share))
                    starts.append(used)
                    used += own.numel
        given: dict[int, list[Piece]] = {}
        for copy in copies_from_shards(expression, held, box):
            index = bisect_right(starts, copy.source.offset) - 1
            rank, number, share = owners[index]
            source = Strided(copy.source.offset - starts[index], copy.source.sizes, copy.source.strides)
            given.setdefault(rank, []).append(Piece(number, share, source, copy.target))
        return tuple((rank, tuple(found)) for rank, found in sorted(given.items()))
