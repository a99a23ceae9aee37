"""Pure planning of transfers of tensor elements between ranks, in rounds of bounded staging memory.

Each move transfers an expression of tensors that ranks hold: one tensor, or several combined into the form of a
checkpoint. A rank sends its shares, which contain each element of a tensor once over all ranks. The pieces of a box
follow from the shares of all ranks, so the plan is the same on every rank, and only values are communicated.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Literal, TypeAlias

from shardwise.core.computed import copies_from_shards
from shardwise.core.expression import Expression, structure
from shardwise.core.tensors import Box, Strided, numel, split_box

SMALL_BYTES = 1 << 16
"""A box up to this size is given whole by one of its holders."""

ALIGNMENT_BYTES = 16
"""Parts of blocks begin at multiples of this in staging memory, so that each can be viewed as its own dtype."""

Boxes: TypeAlias = tuple[Box, ...]
"""Boxes of one tensor, without overlap."""

SharedBoxes: TypeAlias = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes that a rank holds together with others, each with all ranks that hold it, in order."""


def even_shares(box: Box, count: int) -> Iterator[Box]:
    """Yield about ``count`` boxes of nearly the same number of elements that make up a box, in row-major order.

    Example: (3, 4) in two shares is (1, 4) and (2, 4). (2, 3) in four is (1, 1), (1, 2) of each row.
    """
    rows = box.sizes[0] if box.sizes else 1
    # Enough rows: cut between rows. Otherwise every row is cut, into enough shares to reach `count` together.
    if rows >= count:
        for index in range(count):
            start, stop = index * rows // count, (index + 1) * rows // count
            yield box.narrow(0, box.offsets[0] + start, stop - start)
    elif len(box.sizes) < 2:
        yield from split_box(box, (1,) * len(box.sizes), 1)
    else:
        for row in range(rows):
            for below in even_shares(Box(box.offsets[1:], box.sizes[1:]), -(-count // rows)):
                yield Box((box.offsets[0] + row, *below.offsets), (1, *below.sizes))


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
    # There may be more shares than holders, or fewer. Example: 6 shares for 4 holders go to the holders 0, 0,
    # 1, 2, 2, 3, in order, so that each of them sends adjacent shares.
    shares = list(even_shares(box, replicas))
    return tuple(share for index, share in enumerate(shares) if index * replicas // len(shares) == replica)


def find_holders(boxes: Sequence[Boxes]) -> dict[Box, list[int]]:
    """Return the ranks that hold each box with elements, from the boxes by rank."""
    holders: dict[Box, list[int]] = {}
    for rank, local in enumerate(boxes):
        for box in local:
            if box.numel:
                holders.setdefault(box, []).append(rank)
    return holders


def covers(shape: Sequence[int], boxes: Sequence[Boxes]) -> bool:
    """Check if boxes by rank, either equal or disjoint, cover a tensor of this shape."""
    # Each box counts once. Equal or disjoint boxes cannot overlap in part, so the sum is exact.
    return sum(box.numel for box in find_holders(boxes)) == numel(shape)


def find_incomplete(tensors: Iterable[tuple[str, tuple[int, ...], tuple[Boxes, ...]]]) -> list[str]:
    """Return the names of the tensors, given with shapes and boxes by rank, of which no rank has some elements."""
    # By identity: models have many tensors with one layout.
    covered: dict[tuple[tuple[int, ...], int], bool] = {}  # by shape, id of the boxes
    incomplete: list[str] = []
    for name, shape, boxes in list(tensors):  # a list, which keeps the boxes and so their ids
        layout = shape, id(boxes)
        if layout not in covered:
            covered[layout] = covers(shape, boxes)
        if not covered[layout]:
            incomplete.append(name)
    return incomplete


def shares_by_rank(boxes: Sequence[Boxes], turn: int, itemsize: int) -> tuple[Boxes, ...]:
    """Return each rank's share of a tensor from the boxes that the ranks hold.

    Ranks hold either the same box or boxes that do not overlap, as on a mesh.
    """
    shares: list[list[Box]] = [[] for _ in boxes]
    for box, ranks in find_holders(boxes).items():
        for replica, rank in enumerate(ranks):
            shares[rank] += local_share(box, replica, len(ranks), turn, itemsize)
    return tuple(map(tuple, shares))


def shares_in_turn(tensors: Iterable[tuple[tuple[Boxes, ...], int]]) -> Iterator[tuple[Boxes, ...]]:
    """Yield each rank's share of each tensor: one object for all equal tensors with the same senders.

    The holders of a small box send it in turn. ``tensors`` are the boxes by rank and the bytes of an element.
    """
    count_turns, share = cache(_count_turns), cache(shares_by_rank)
    # By identity first: models have many tensors with one layout, and a hash of it visits the boxes of all ranks.
    turns: dict[tuple[int, int], int] = {}  # by id of the boxes, bytes of an element
    shares: dict[tuple[int, int, int], tuple[Boxes, ...]] = {}  # also by turn
    for number, (boxes, itemsize) in enumerate(list(tensors)):  # a list, which keeps the boxes and so their ids
        layout = id(boxes), itemsize
        if layout not in turns:
            turns[layout] = count_turns(boxes, itemsize)
        turn = number % turns[layout]
        if (*layout, turn) not in shares:
            shares[*layout, turn] = share(boxes, turn, itemsize)
        yield shares[*layout, turn]


def _count_turns(boxes: Sequence[Boxes], itemsize: int) -> int:
    """Return the number of turns after which the senders of a tensor's small boxes are the first ones again."""
    small = (len(ranks) for box, ranks in find_holders(boxes).items() if box.numel * itemsize <= SMALL_BYTES)
    return max(small, default=1)


def first_holder_shares(boxes: Sequence[Boxes]) -> tuple[Boxes, ...]:
    """Return the share of each rank if the first rank that holds a box sends all of it."""
    # Ranks hold equal boxes or disjoint ones, so a box that was seen before is sent in full by an earlier rank.
    seen: set[Box] = set()
    shares: list[Boxes] = []
    for local in boxes:
        shares.append(tuple(box for box in local if box not in seen))
        seen.update(local)
    return tuple(shares)


def find_shared_boxes(boxes: Mapping[str, Sequence[Boxes]], rank: int) -> dict[str, SharedBoxes]:
    """Return the boxes, by tensor name, that a rank holds together with others.

    ``boxes`` are those of all ranks, by name and rank.
    """
    # By identity: tensors with equal boxes have one object (tensor_metadata.collect_boxes), and models have many.
    cache: dict[int, SharedBoxes] = {}
    shared: dict[str, SharedBoxes] = {}
    for name, by_rank in boxes.items():
        if id(by_rank) not in cache:
            holders = find_holders(by_rank)
            local = (box for box in by_rank[rank] if len(holders.get(box, ())) > 1)
            cache[id(by_rank)] = tuple((box, tuple(holders[box])) for box in local)
        if cache[id(by_rank)]:
            shared[name] = cache[id(by_rank)]
    return shared


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor that ranks receive.

    Attributes:
        key: the tensor's name.
        expression: an expression over tensors that ranks hold.
        itemsize: bytes of an element as it is sent and received.
        target_boxes: the boxes that each rank receives, by rank.
    """

    key: str
    expression: Expression
    itemsize: int
    target_boxes: Sequence[Boxes]


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
    """A box of a tensor that ranks receive.

    Attributes:
        key: the tensor's name.
        box: the box.
        targets: the ranks that receive it.
        itemsize: bytes of an element.
        leaves: names of the tensors that the pieces are parts of.
        pieces_by_rank: the pieces that each source sends, with its rank. Together they make up the box.
        is_broadcast: all ranks receive it, so a source stages its pieces once. Otherwise it does for each target.
    """

    key: str
    box: Box
    targets: tuple[int, ...]
    itemsize: int
    leaves: tuple[str, ...]
    pieces_by_rank: tuple[tuple[int, tuple[Piece, ...]], ...]
    is_broadcast: bool

    def staged_bytes(self, pieces: Sequence[Piece]) -> int:
        """Return the bytes of one copy of a rank's pieces in staging memory."""
        nbytes = sum(piece.target.numel for piece in pieces) * self.itemsize
        return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def count_staged_bytes(self) -> Counter[int]:
        """Return the bytes of staging memory of each rank, for the pieces that it sends and receives."""
        if self.is_broadcast:
            total = sum(self.staged_bytes(pieces) for _, pieces in self.pieces_by_rank)
            return Counter(dict.fromkeys(self.targets, total))
        counts: Counter[int] = Counter()
        for source, pieces in self.pieces_by_rank:
            nbytes = self.staged_bytes(pieces)
            for target in self.targets:
                if target != source:
                    counts[source] += nbytes
                    counts[target] += nbytes
        return counts

    def count_local_bytes(self) -> Counter[int]:
        """Return the bytes of each rank's pieces that it uses itself."""
        counts: Counter[int] = Counter()
        for rank, pieces in self.pieces_by_rank:
            if rank in self.targets:
                # Aligned although nothing is staged: an upper bound of what the rank keeps in this round.
                counts[rank] = self.staged_bytes(pieces)
        return counts


Round: TypeAlias = tuple[Block, ...]
"""Blocks that are handed over at once. All of them, or none, are broadcast."""


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
    # A round takes blocks until one rank, as a sender or as a receiver, would exceed the bucket. The cuts
    # depend on all ranks, so every rank plans the same rounds.
    cutter = _Cutter(shares)
    rounds: list[list[Block]] = [[]]
    staged: Counter[int] = Counter()  # bytes of the last round, by rank
    local: Counter[int] = Counter()
    for blocks in zip_longest(*(cutter.blocks(stream, bucket_bytes) for stream in streams)):
        for block in blocks:
            if block is None:  # of a stream that has ended
                continue
            more_staged, more_local = block.count_staged_bytes(), block.count_local_bytes()
            is_full = any(staged[rank] + nbytes > bucket_bytes for rank, nbytes in more_staged.items())
            is_full = is_full or any(local[rank] + nbytes > bucket_bytes for rank, nbytes in more_local.items())
            # A block that is too large by itself gets a round of its own.
            if rounds[-1] and (is_full or rounds[-1][-1].is_broadcast != block.is_broadcast):
                rounds.append([])
                staged.clear()
                local.clear()
            rounds[-1].append(block)
            staged.update(more_staged)
            local.update(more_local)
    return [tuple(blocks) for blocks in rounds if blocks]


class _Cutter:
    """A splitter of moves into blocks, which computes the pieces only once for equal layers."""

    def __init__(self, shares: Mapping[str, Sequence[Boxes]]) -> None:
        self._shares = shares
        self._cache: dict[Hashable, tuple[tuple[int, tuple[Piece, ...]], ...]] = {}

    def blocks(self, stream: Sequence[Move], bucket_bytes: int) -> Iterator[Block]:
        for move in stream:
            bare, leaves = structure(move.expression)
            # By identity: equal shares of many tensors are one object (shares_in_turn).
            form = bare, tuple(id(self._shares[leaf]) for leaf in leaves)
            for whole, ranks in find_holders(move.target_boxes).items():
                is_broadcast = len(ranks) == len(move.target_boxes) > 1
                # A rank that sends the block to several others stages it once for each. At least two: one that
                # sends and receives stages both.
                copies = 1 if is_broadcast else max(2, len(ranks))
                max_numel = bucket_bytes // (move.itemsize * copies)
                # Equal layers have equal forms. Only their first one computes pieces, the others differ in the
                # key.
                for box in split_box(whole, (1,) * len(whole.sizes), max(1, max_numel)):
                    if (form, box) not in self._cache:
                        self._cache[form, box] = self._find_pieces(move.expression, leaves, box)
                    pieces = self._cache[form, box]
                    yield Block(move.key, box, tuple(ranks), move.itemsize, leaves, pieces, is_broadcast)

    def _find_pieces(
        self, expression: Expression, leaves: Sequence[str], box: Box
    ) -> tuple[tuple[int, tuple[Piece, ...]], ...]:
        """Find the pieces of a box, by the rank that sends them.

        The shares of all ranks are placed one after the other in one imaginary memory, so that one call finds the
        copies from all of them. The offset of a copy then tells its share. Example: shares of 6 and 4 elements
        start at 0 and 6, and a copy from offset 7 is from element 1 of the second.
        """
        placed: dict[str, list[tuple[Box, Strided]]] = {leaf: [] for leaf in leaves}
        owners: list[tuple[int, int, int]] = []  # (rank, leaf, share)
        starts: list[int] = []  # in elements, ascending
        end = 0
        for number, leaf in enumerate(leaves):
            for rank, boxes in enumerate(self._shares[leaf]):
                for share, local in enumerate(boxes):
                    placed[leaf].append((local, Strided.contiguous(local.sizes, end)))
                    owners.append((rank, number, share))
                    starts.append(end)
                    end += local.numel
        # Offsets in the imaginary memory become offsets in the share that contains them.
        pieces: dict[int, list[Piece]] = {}
        for copy in copies_from_shards(expression, placed, box):
            index = bisect_right(starts, copy.source.offset) - 1
            rank, number, share = owners[index]
            source = Strided(copy.source.offset - starts[index], copy.source.sizes, copy.source.strides)
            pieces.setdefault(rank, []).append(Piece(number, share, source, copy.target))
        return tuple((rank, tuple(local)) for rank, local in sorted(pieces.items()))
