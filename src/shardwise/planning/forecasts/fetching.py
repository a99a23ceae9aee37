"""Who fetches what, where ranks share reads: the forecast's view of :mod:`shardwise.planning.moves.exchange`.

On the meshes that FSDP2 has, the peers of a tensor are its replicas, or all ranks. What they need in common is
fetched in even parts; what is small, by one of them, in turn. An exchange balances the small ones by their sizes
and cuts the parts to rounds: a rank's bytes may differ a little from this, and its requests are more. What is read
in intervals is not fetched by tensors, see :mod:`shardwise.planning.moves.intervals`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout import LocalBox, MeshShape, Spread
from shardwise.planning.moves.exchange import SMALL_BYTES, even_parts
from shardwise.tensors import Box, Strided


@dataclass(frozen=True, slots=True)
class FetchingPeers:
    """The ranks that need the same bytes: all, or those that hold the same. ``replicas`` hold each element."""

    are_all: bool
    size: int
    replicas: int


def peers_on(mesh: MeshShape, spread: Spread, shape: tuple[int, ...], *, is_sharded: bool) -> FetchingPeers | None:
    """With whom each rank could share its reads of a tensor; None: with nobody."""
    if mesh.ranks == 1:
        return None
    replicas = mesh.ranks // mesh.shard_size
    if not is_sharded or mesh.shard_size == 1:
        return FetchingPeers(True, mesh.ranks, mesh.ranks)
    first = spread.boxes[0][0].box
    is_by_rows = first.sizes[1:] == shape[1:]
    if not is_by_rows:
        return FetchingPeers(True, mesh.ranks, replicas)
    return FetchingPeers(False, replicas, replicas) if replicas > 1 else None


class Fetching:
    """What every rank fetches, as spreads whose boxes are by rank; equal ones are one object."""

    def __init__(self, mesh: MeshShape) -> None:
        self._mesh = mesh
        self._made: dict[tuple[int, bool, int | None], Spread] = {}
        self._turn = {True: 0, False: 0}

    def spread(self, spread: Spread, shape: tuple[int, ...], itemsize: int, peers: FetchingPeers) -> Spread:
        """Of one tensor of this shape, spread over the positions as ``spread``."""
        largest = Box.whole(shape) if peers.are_all else spread.boxes[0][0].box
        reader: int | None = None
        if largest.numel * itemsize <= SMALL_BYTES:
            reader = self._turn[peers.are_all] % peers.size
            self._turn[peers.are_all] += 1
        key = (id(spread), peers.are_all, reader)
        if key not in self._made:
            self._made[key] = self._dealt(spread, shape, peers, reader)
        return self._made[key]

    def _dealt(self, spread: Spread, shape: tuple[int, ...], peers: FetchingPeers, reader: int | None) -> Spread:
        if peers.are_all:
            parts = _parts(Box.whole(shape), peers.size, reader)
            return Spread(tuple(_local(part) for part in parts), spread.padded_numel)
        by_rank: list[tuple[LocalBox, ...]] = [()] * self._mesh.ranks
        for position, held in enumerate(spread.boxes):
            for item in held:
                for number, part in enumerate(_parts(item.box, peers.size, reader)):
                    by_rank[number * self._mesh.shard_size + position] += _local(part)
        return Spread(tuple(by_rank), spread.padded_numel)


def _parts(box: Box, count: int, reader: int | None) -> list[list[Box]]:
    """The boxes that each of ``count`` ranks fetches of one."""
    found: list[list[Box]] = [[] for _ in range(count)]
    if reader is not None:
        found[reader].append(box)
        return found
    parts = list(even_parts(box, count))
    for number, part in enumerate(parts):
        found[number * count // len(parts)].append(part)
    return found


def _local(boxes: list[Box]) -> tuple[LocalBox, ...]:
    return tuple(LocalBox(box, Strided.contiguous(box.sizes)) for box in boxes if box.numel)
