"""Reads once what several ranks need, and hands it to the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.conversion import computes
from shardwise.execution.moving.exchange import exchange
from shardwise.execution.ranks.line import Patience
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.place import Destination, Placer
from shardwise.execution.reading.workers import Ahead
from shardwise.layout import place_of
from shardwise.models.torch_words import splitting_dim
from shardwise.models.view import Held, boxes_of_ranks, strided_view
from shardwise.planning.moves.exchange import WantedBoxes, dealt, hull, rounds
from shardwise.planning.moves.intervals import handed_over, intervals
from shardwise.planning.moves.parcels import Parcel, Round
from shardwise.planning.moves.sharing_choice import (
    ETHERNET_BYTES_PER_S,
    FABRIC_BYTES_PER_S,
    InIntervals,
    SharedReads,
    SharingChoice,
    choose,
    times_read,
)
from shardwise.tensors import Box

_ROUND_BYTES = 20 << 20
"""The most that a rank gives and gets in a round: the last one is handed over while nothing is left to read."""


@dataclass(frozen=True, slots=True)
class SharingPeers:
    """The ranks with which a tensor's bytes could be shared: along one axis of its mesh, or (None) all ranks."""

    axis: int | None
    size: int
    replicas: int


def peers_of(tensor: torch.Tensor, world: World) -> SharingPeers | None:
    """Who else needs (some of) the bytes that this rank needs of a tensor; None: nobody.

    These are replicas, and ranks that hold other columns of the same rows: between these pieces lies what they
    would all read over. Where that is so on several axes of a mesh, but not on all, the largest counts.
    """
    if world.size == 1:
        return None
    if not isinstance(tensor, DTensor):
        return SharingPeers(None, world.size, world.size)
    mesh = tensor.device_mesh
    sizes = dict(enumerate(mesh.shape))
    split = [splitting_dim(placement) for placement in tensor.placements]
    replicated = [axis for axis, dim in enumerate(split) if dim is None]
    columns = [axis for axis, dim in enumerate(split) if dim]
    candidates = [axis for axis in (*replicated, *columns) if sizes[axis] > 1]
    if not candidates:
        return None
    if len(candidates) == sum(size > 1 for size in sizes.values()) and mesh.size() == world.size:
        replicas = 1
        for axis in replicated:
            replicas *= sizes[axis]
        return SharingPeers(None, world.size, replicas)
    axis = max(candidates, key=lambda item: sizes[item])
    return SharingPeers(axis, sizes[axis], sizes[axis] if axis in replicated else 1)


def peers_in(mode: SharedReads, tensor: torch.Tensor, world: World) -> SharingPeers | None:
    """With whom this rank could share its reads of a tensor in such a way; None: with nobody."""
    return _all_ranks(tensor, world) if isinstance(mode, InIntervals) else peers_of(tensor, world)


def _all_ranks(tensor: torch.Tensor, world: World) -> SharingPeers | None:
    """All ranks, where all have a part in a tensor; None: it is sharded over some of them, or there is one only."""
    if world.size == 1 or (isinstance(tensor, DTensor) and tensor.device_mesh.size() != world.size):
        return None
    return SharingPeers(None, world.size, 1)


@dataclass(frozen=True)
class SharePlan:
    """Which tensors are read together with which peers, in which way, and what was chosen for those with peers."""

    mode: SharedReads
    shared: Mapping[str, SharingPeers]
    choices: Mapping[str, SharingChoice]


def plan_sharing(
    world: World,
    held: Mapping[str, Held],
    items: Sequence[Destination],
    peers: Mapping[str, SharingPeers],
    placer: Placer,
    mode: SharedReads,
) -> SharePlan:
    """What is shared of the tensors that have peers. The first rank decides for all. Collective: yes."""

    def decide() -> dict[str, SharingChoice]:
        return {
            item.fqn: choose(
                mode,
                placer.reader.policy,
                replicas=peers[item.fqn].replicas,
                factor=times_read(
                    item.expression,
                    item.boxes,
                    placer.index,
                    placer.reader.policy,
                    size=peers[item.fqn].size,
                    replicas=peers[item.fqn].replicas,
                ),
                network_bytes_per_s=_network(held[item.fqn].tensor),
            )
            for item in items
            if item.fqn in peers and not computes(item.expression)
        }

    if not peers:
        return SharePlan(mode, {}, {})
    choices = world.from_first(decide)
    return SharePlan(mode, {name: peers[name] for name, choice in choices.items() if choice.is_shared}, choices)


def _network(tensor: torch.Tensor) -> float:
    is_accelerated = isinstance(tensor, DTensor) and tensor.device_mesh.device_type != "cpu"
    return FABRIC_BYTES_PER_S if is_accelerated else ETHERNET_BYTES_PER_S


def read_shared(
    world: World,
    plan: SharePlan,
    held: Mapping[str, Held],
    items: Sequence[Destination],
    placer: Placer,
    patience: Patience,
) -> None:
    """Read the shared tensors, each byte by one of the peers, and hand them over.

    Collective: yes.
    Memory: the budget, at most a fifth of it each for reading, for what has been read for this round and for the
    next two, and for what is sent and received.
    """
    together: dict[tuple[DeviceMesh | None, int | None], list[Destination]] = {}
    for item in sorted(items, key=lambda item: item.fqn):
        if item.fqn in plan.shared:
            axis = plan.shared[item.fqn].axis
            tensor = held[item.fqn].tensor
            mesh = tensor.device_mesh if axis is not None and isinstance(tensor, DTensor) else None
            together.setdefault((mesh, axis), []).append(item)
    for (mesh, axis), members in together.items():
        if mesh is None:
            _Sharing(world, members, held, placer, plan.mode).run()
        else:
            with World.current(mesh.get_group(axis), patience, around=world) as peers:
                world.together(_Sharing(peers, members, held, placer, plan.mode).run)


class _Sharing:
    """One exchange: tensors that the same peers need."""

    def __init__(
        self,
        peers: World,
        members: Sequence[Destination],
        held: Mapping[str, Held],
        placer: Placer,
        mode: SharedReads,
    ) -> None:
        self._peers = peers
        self._mode = mode
        self._members = {item.fqn: item for item in members}
        self._held = held
        self._placer = placer
        self._fetched: dict[Parcel, torch.Tensor] = {}
        self._ahead: Iterator[Ahead[dict[Parcel, torch.Tensor]]] = iter(())

    def run(self) -> None:
        rounds = self._rounds(min(self._placer.budget_bytes // 5, _ROUND_BYTES))
        self._ahead = self._read_ahead(rounds)
        exchange(
            self._peers,
            rounds,
            self.give,
            self.take,
            {name: item.dtype for name, item in self._members.items()},
            self._staging_device(),
            budget_bytes=self._placer.budget_bytes // 5,
        )

    def _rounds(self, budget_bytes: int) -> list[Round]:
        """What this rank hands to whom and gets from whom."""
        wanted, peers = self._wanted(), self._peers
        if isinstance(self._mode, InIntervals):
            reads = {name: item.expression for name, item in self._members.items()}
            read = intervals(reads, self._placer.index, peers.size)
            return handed_over(wanted, read, budget_bytes, peers.rank)
        parcels = dealt(wanted, range(peers.size), budget_bytes // (4 * peers.size))
        return rounds(parcels, budget_bytes)

    def _wanted(self) -> list[WantedBoxes]:
        """The boxes of all ranks. Tensors of one shape that lie alike on a mesh have one value of these."""
        ranks = dist.get_process_group_ranks(self._peers.group)
        alike: dict[object, tuple[tuple[Box, ...], ...]] = {}
        found: list[WantedBoxes] = []
        for name, item in self._members.items():
            tensor = self._held[name].tensor
            lies = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
            form = (tuple(tensor.shape), lies)
            if form not in alike:
                alike[form] = boxes_of_ranks(tensor, name, ranks)
            found.append(WantedBoxes(name, item.dtype.itemsize, alike[form]))
        return found

    def _staging_device(self) -> torch.device:
        """Where any of the tensors is that is not on the host: the group's backend moves what is there."""
        devices = [item.device for item in self._members.values()]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def give(self, parcel: Parcel) -> torch.Tensor:
        while parcel not in self._fetched:
            self._fetched.update(next(self._ahead).value(self._peers.check))
        return self._fetched.pop(parcel)

    def _read_ahead(self, rounds: Sequence[Round]) -> Iterator[Ahead[dict[Parcel, torch.Tensor]]]:
        """What this rank gives, round by round; while one is handed over, the next two are read.

        Two, since the last requests of a round leave the storage idle that the first of another can use.
        """
        begun = (Ahead(partial(self._fetch, items.parcels)) for items in rounds)
        waiting = deque(islice(begun, 2))
        while waiting:
            current = waiting.popleft()
            current.value(self._peers.check)
            waiting.extend(islice(begun, 1))
            yield current

    def _fetch(self, parcels: Sequence[Parcel]) -> dict[Parcel, torch.Tensor]:
        """Read what this rank gives in a round, all at once: the storage is asked for many ranges together.

        What is of one block is read as one box: each column of the same rows alone would be read over the others.
        """
        alike: dict[tuple[str, Box], list[Parcel]] = {}
        for parcel in parcels:
            if parcel.source == self._peers.rank:
                alike.setdefault((parcel.tensor, parcel.block or parcel.box), []).append(parcel)
        together = [(hull([parcel.box for parcel in group]), group) for group in alike.values()]
        values = self._placer.values_of(
            [
                (self._members[group[0].tensor].expression, box, self._members[group[0].tensor].dtype)
                for box, group in together
            ]
        )
        fetched: dict[Parcel, torch.Tensor] = {}
        for (box, group), whole in zip(together, values, strict=True):
            for parcel in group:
                starts = (at - first for at, first in zip(parcel.box.offsets, box.offsets, strict=True))
                spans = zip(starts, parcel.box.sizes, strict=True)
                fetched[parcel] = whole[tuple(slice(start, start + size) for start, size in spans)]
        return fetched

    def take(self, parcel: Parcel, values: torch.Tensor) -> None:
        item = self._members[parcel.tensor]
        strided_view(self._held[item.fqn].local, place_of(parcel.box, item.boxes)).copy_(values)
        self._placer.count(item.fqn, parcel.box.numel)
