"""Describes what ranks send each other: parcels, their rounds, and one rank's part of a round. Pure.

[Note: Parcels] Everything that moves between ranks is a parcel: elements of one box of a tensor, from one rank to
others, or from a rank to itself. A planner writes parcels down and lays them in rounds, of bounded staging memory.
:mod:`shardwise.execution.moving.exchange` carries rounds out. It asks the source for the values of a parcel and
brings them to the targets; where these lie on a rank is for its callers to know.

[Note: Nothing but values travels] What a rank sends of a round follows from the round, which every rank knows (or
those of its parcels that concern it). So every rank can work out what lies where in the bytes of every other: the
source packs its parcels in the order of the round, and the target takes them apart in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from shardwise.tensors import Box, Strided

ALIGNMENT_BYTES = 16
"""Parcels lie at multiples of this in staging memory, so that each can be seen as its own dtype."""

_SPARE = 1.25
"""Where every rank gets what all send, how much more may travel in parts of one size than in parts that fit."""


def staged(nbytes: int) -> int:
    """``nbytes`` up to where the next parcel may begin in staging memory."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that go from what a rank holds to a box. Both ends count elements of row-major tensors.

    Attributes:
        leaf: which of the parcel's ``leaves``.
        share: which of the source's shares of it.
        source: in the share.
        target: in the box.
    """

    leaf: int
    share: int
    source: Strided
    target: Strided


@dataclass(frozen=True, slots=True)
class Parcel:
    """Elements of a box of a tensor (in global indices) that one rank gives to others, to itself, or to both.

    Attributes:
        tensor: by the name that the targets know.
        source: the rank that gives them.
        targets: the ranks that get them.
        box: of the tensor.
        itemsize: bytes of an element, as it travels.
        block: what the source fetches at once, where this is a part of it.
        leaves: the tensors of the source that the pieces are of, by name.
        pieces: what the source gives of the box, in this order; none: it has all of the box, under the same name.
    """

    tensor: str
    source: int
    targets: tuple[int, ...]
    box: Box
    itemsize: int
    block: Box | None = None
    leaves: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def is_kept(self) -> bool:
        """Whether the source gives it to itself alone."""
        return self.targets == (self.source,)

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Of what is given, piece by piece."""
        return [piece.target.sizes for piece in self.pieces] or [self.box.sizes]

    @property
    def nbytes(self) -> int:
        numel = sum(piece.target.numel for piece in self.pieces) if self.pieces else self.box.numel
        return numel * self.itemsize

    @property
    def staged_bytes(self) -> int:
        """What one copy takes in staging memory."""
        return staged(self.nbytes)


@dataclass(frozen=True, slots=True)
class ToEach:
    """A round in which a rank sends every other what is for that one alone. Bytes by target, and by source."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToAll:
    """A round in which every rank gets what all send. Bytes by source; padded, they travel in parts of one size."""

    parts: tuple[int, ...]
    is_padded: bool


Load: TypeAlias = ToEach | ToAll
"""The bytes that a rank sends and receives in a round."""


@dataclass(frozen=True, slots=True)
class Round:
    """Parcels that are handed over at once.

    Attributes:
        parcels: those of all ranks, or those that one rank gives or gets; a rank packs in this order.
        moves: whether any rank sends anything, the same on every rank.
        is_gathered: all parcels go to all ranks, and the parcels are those of all ranks.
    """

    parcels: tuple[Parcel, ...]
    moves: bool
    is_gathered: bool = False

    @classmethod
    def of_all(cls, parcels: Sequence[Parcel]) -> Round:
        """Of the parcels of all ranks, each for its targets alone."""
        return cls(tuple(parcels), not all(parcel.is_kept for parcel in parcels))

    def boxes(self) -> list[tuple[str, Box]]:
        """(tensor, box) of all parcels, once and in order."""
        return list(dict.fromkeys((parcel.tensor, parcel.box) for parcel in self.parcels))

    def kept_by(self, rank: int) -> Round:
        """What one rank gives, to itself: where the targets see the memory in which it puts that."""
        own = (parcel for parcel in self.parcels if parcel.source == rank)
        return Round(tuple(replace(parcel, targets=(rank,)) for parcel in own), moves=False)

    def part(self, rank: int, size: int) -> RankPart:
        """What one of ``size`` ranks does in the round."""
        if self.is_gathered:
            return self._gathered(rank, size)
        sent, received = [0] * size, [0] * size
        keeps: list[Parcel] = []
        sends: list[tuple[Parcel, tuple[tuple[int, int], ...]]] = []
        receives: list[tuple[Parcel, int]] = []
        for parcel in self.parcels:
            if parcel.source == rank:
                if parcel.is_kept:
                    keeps.append(parcel)
                    continue
                others = [target for target in parcel.targets if target != rank]
                sends.append((parcel, tuple((target, sent[target]) for target in others)))
                for target in others:
                    sent[target] += parcel.staged_bytes
            elif rank in parcel.targets:
                receives.append((parcel, received[parcel.source]))
                received[parcel.source] += parcel.staged_bytes
        return RankPart(ToEach(tuple(sent), tuple(received)), tuple(keeps), tuple(sends), tuple(receives))

    def _gathered(self, rank: int, size: int) -> RankPart:
        parts = [0] * size
        receives: list[tuple[Parcel, int]] = []
        for parcel in self.parcels:
            receives.append((parcel, parts[parcel.source]))
            parts[parcel.source] += parcel.staged_bytes
        sends = tuple((parcel, ((rank, start),)) for parcel, start in receives if parcel.source == rank)
        is_padded = max(parts, default=0) * size <= _SPARE * sum(parts)
        return RankPart(ToAll(tuple(parts), is_padded), (), sends, tuple(receives))


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank does in a round.

    Attributes:
        load: the bytes it sends and receives.
        keeps: parcels that it gives to itself alone.
        sends: parcels with (target, the byte where it begins in what goes there). It may be a target itself.
        receives: parcels with the byte where each begins in what comes from its source.
    """

    load: Load
    keeps: tuple[Parcel, ...]
    sends: tuple[tuple[Parcel, tuple[tuple[int, int], ...]], ...]
    receives: tuple[tuple[Parcel, int], ...]
