"""Tensors of a checkpoint put together out of what all ranks give, on one rank or on every rank. Pure.

A tensor comes in blocks, each a run of its bytes. Blocks are taken into rounds, in none of which a rank sends, or
gets, more than a bucket. All of it is the same on every rank.

[Note: Nothing but values travels] What a rank gives of a block is a list of pieces. It follows from the block and
from the shares of all ranks, so every rank knows the list of every other: the giver packs its pieces one after the
other, and the receiver takes them apart by the same list. Shares count as row-major tensors of their own,
however they lie in a rank's memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.conversion import Expression, pieces, skeleton
from shardwise.planning.exchange import ALIGNMENT_BYTES, cut
from shardwise.planning.giving import Boxes
from shardwise.tensors import Box, Strided

_SPARE = 1.25
"""Where every rank gets what all give, how much more may travel in parts of one size than in parts that fit."""


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


@dataclass(frozen=True, slots=True)
class GivenPiece:
    """Elements that go from a share to a block. Both sides count elements of row-major tensors.

    Attributes:
        leaf: which of the block's ``leaves``.
        share: which of the giver's shares of it.
        source: in the share.
        target: in the block.
    """

    leaf: int
    share: int
    source: Strided
    target: Strided


@dataclass(frozen=True, slots=True)
class Gift:
    """What a rank gives of a block, in this order."""

    source: int
    pieces: tuple[GivenPiece, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a tensor's bytes: a box whose elements follow each other. ``leaves`` are names of the model."""

    key: str
    box: Box
    itemsize: int
    targets: tuple[int, ...]
    leaves: tuple[str, ...]
    gifts: tuple[Gift, ...]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    def staged_bytes(self, gift: Gift) -> int:
        """What a gift takes of a buffer that is sent."""
        return -(-gift.numel * self.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Round:
    """Blocks that are put together at once.

    Attributes:
        blocks: in order.
        is_for_all: every rank gets what all give; else what one rank gives another goes to that one alone.
        lanes: bytes by (giver, receiver); by (giver, giver) where every rank gets them.
    """

    blocks: tuple[Block, ...]
    is_for_all: bool
    lanes: Mapping[tuple[int, int], int]

    @property
    def is_padded(self) -> bool:
        """Whether what goes to every rank travels in parts of one size: when little is wasted by that."""
        return self.is_for_all and self.part_bytes * self._ranks <= _SPARE * sum(self.lanes.values())

    @property
    def _ranks(self) -> int:
        return len(self.blocks[0].targets)

    @property
    def part_bytes(self) -> int:
        """Of one rank's part where parts have one size."""
        return max(self.lanes.values(), default=0)


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
        rounds.append(filling.round(size))
    return rounds


def _blocks(cutter: _Cutter, stream: Sequence[WantedTensor], bucket_bytes: int) -> Iterator[Block]:
    for wanted in stream:
        form = cutter.form_of(wanted.expression)
        for box in cut(Box.whole(wanted.expression.shape), max(1, bucket_bytes // wanted.itemsize)):
            gifts = cutter.gifts(wanted.expression, form, box)
            yield Block(wanted.key, box, wanted.itemsize, wanted.targets, form.leaves, gifts)


class _Queue:
    """A stream's blocks, of which the first can be looked at."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks = blocks
        self.head = next(blocks, None)

    def pop(self) -> Block:
        head = self.head
        assert head is not None
        self.head = next(self._blocks, None)
        return head


class _Filling:
    """A round that is being filled."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._blocks: list[Block] = []
        self._sent: dict[int, int] = {}
        self._got: dict[int, int] = {}
        self._lanes: dict[tuple[int, int], int] = {}

    def take_from_each(self, queues: Sequence[_Queue]) -> bool:
        """The next block of each queue, where there is room for it; whether there was for any."""
        return sum(self._take_from(queue) for queue in queues) > 0

    def _take_from(self, queue: _Queue) -> bool:
        block = queue.head
        if block is None or not self._has_room(block):
            return False
        is_for_all = len(block.targets) > 1
        for gift in block.gifts:
            receiver = gift.source if is_for_all else block.targets[0]
            if not is_for_all and gift.source == receiver:
                continue
            staged = block.staged_bytes(gift)
            lane = (gift.source, receiver)
            self._lanes[lane] = self._lanes.get(lane, 0) + staged
            self._sent[gift.source] = self._sent.get(gift.source, 0) + staged
        for rank in block.targets:
            self._got[rank] = self._got.get(rank, 0) + block.nbytes
        self._blocks.append(queue.pop())
        return True

    def _has_room(self, block: Block) -> bool:
        if not self._blocks:
            return True
        if (len(block.targets) > 1) is not (len(self._blocks[0].targets) > 1):
            return False
        bucket = self._bucket_bytes
        return all(self._got.get(rank, 0) + block.nbytes <= bucket for rank in block.targets) and all(
            self._sent.get(gift.source, 0) + block.staged_bytes(gift) <= bucket
            for gift in block.gifts
            if block.targets != (gift.source,)
        )

    def round(self, size: int) -> Round:
        is_for_all = size > 1 and len(self._blocks[0].targets) > 1
        return Round(tuple(self._blocks), is_for_all, self._lanes)


@dataclass(frozen=True, slots=True)
class _GivingForm:
    """What tensors have alike of which ranks give the same. ``ways`` are the shares of each leaf, by identity."""

    skeleton: Hashable
    ways: tuple[int, ...]
    leaves: tuple[str, ...] = field(compare=False)


class _Cutter:
    """Finds what ranks give of a box; once for equal layers."""

    def __init__(self, shares: Mapping[str, Sequence[Boxes]], size: int) -> None:
        self._shares = shares
        self._size = size
        self._made: dict[tuple[_GivingForm, Box], tuple[Gift, ...]] = {}

    def form_of(self, expression: Expression) -> _GivingForm:
        bare, leaves = skeleton(expression)
        return _GivingForm(bare, tuple(id(self._shares[leaf]) for leaf in leaves), leaves)

    def gifts(self, expression: Expression, form: _GivingForm, box: Box) -> tuple[Gift, ...]:
        if (form, box) not in self._made:
            self._made[form, box] = self._gifts(expression, form.leaves, box)
        return self._made[form, box]

    def _gifts(self, expression: Expression, leaves: Sequence[str], box: Box) -> tuple[Gift, ...]:
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
        given: dict[int, list[GivenPiece]] = {}
        for copy in pieces(expression, held, box):
            home = bisect_right(starts, copy.source.offset) - 1
            rank, share_number = homes[home]
            source = Strided(copy.source.offset - starts[home], copy.source.sizes, copy.source.strides)
            piece = GivenPiece(number_of[copy.leaf.key], share_number, source, copy.target)
            given.setdefault(rank, []).append(piece)
        return tuple(
            Gift(rank, tuple(found), sum(piece.source.numel for piece in found))
            for rank, found in sorted(given.items())
        )
