"""What a load will take on every rank, and who fetches what: pure, from the index, the plan and all layouts.

On the meshes that FSDP2 has, the peers of a tensor are its replicas, or all ranks. What they need in common is
fetched in even parts; what is small, by one of them, in turn. An exchange balances the small ones by their sizes
and cuts the parts to rounds: a rank's bytes may differ a little from this, and its requests are more. What is read
in intervals is not fetched by tensors, see :mod:`shardwise.planning.moves.intervals`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.conversion import (
    Computed,
    SmallestBlocks,
    computed_leaves,
    computes,
    rows_stored,
    skeleton,
)
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.layout import LocalBox, MeshShape, Spread, TensorKind, TensorLayout, WorldLayout
from shardwise.planning.forecasts.footprint import Footprints, ReadPart
from shardwise.planning.forecasts.own_forecast import (
    Holdings,
    Homes,
    Stacks,
    is_sharded,
    rank_forecast,
    readings_of,
)
from shardwise.planning.loads.load_plan import LoadPlan
from shardwise.planning.moves.exchange import SMALL_BYTES, even_parts
from shardwise.planning.moves.intervals import intervals
from shardwise.planning.moves.sharing_choice import (
    ETHERNET_BYTES_PER_S,
    FABRIC_BYTES_PER_S,
    Alone,
    InIntervals,
    SharedReads,
    Weighed,
    choose,
    times_read,
)
from shardwise.report.forecast_parts import ComputedForecast, GroupForecast, RankForecast, TrainingForecast
from shardwise.report.names import collapse
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import Box, DType, Strided, numel


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


def forecast_ranks(
    plan: LoadPlan,
    world: WorldLayout,
    index: CheckpointIndex,
    homes: Homes,
    policy: ReadPolicy,
    shared: Mapping[str, FetchingPeers] | None = None,
    sharing: SharedReads = Alone(),  # noqa: B008 - frozen
) -> tuple[RankForecast, ...]:
    """What the load of ``plan`` will take, for every rank of the mesh.

    The boxes of ``plan.layout`` do not count, those of ``world`` do. ``shared`` are the tensors that ranks read
    once, see :func:`shared_tensors`, in the way of ``sharing``. The intervals are those of a load; other ways are
    foreseen as far as :mod:`shardwise.planning.forecasts.forecast` says.
    """
    readings = readings_of(plan, world.spreads, homes)
    parts: list[list[ReadPart]] = []
    if isinstance(sharing, InIntervals):
        nothing = Spread(((),) * world.mesh.ranks, 0)
        for name in shared or {}:
            readings[name] = replace(readings[name], on_device=False, fetched=nothing)
        wanted = {name: readings[name].expression for name in shared or {}}
        parts = [
            [ReadPart(wanted[part.tensor], readings[part.tensor].dtype, part.box) for part in interval]
            for interval in intervals(wanted, index, world.mesh.ranks)
        ]
    else:
        fetching = Fetching(world.mesh)
        for name, peers in sorted((shared or {}).items()):
            tensor = plan.layout.by_name[name]
            fetched = fetching.spread(world.spreads[name], tensor.shape, tensor.dtype.itemsize, peers)
            readings[name] = replace(readings[name], on_device=False, fetched=fetched)
    footprints = Footprints(world.mesh, index, readings.values(), policy, homes.budget_bytes, parts)
    holdings = Holdings(world.first, world.spreads)
    stacks = Stacks(plan, world.first, world.spreads)
    positions = range(world.mesh.shard_size)
    shard_bytes = [holdings.shard_bytes(position) for position in positions]
    experts = [stacks.at(position) for position in positions]
    found: list[RankForecast] = []
    for rank in range(world.mesh.ranks):
        position = world.mesh.position(rank)
        footprint = footprints.at(rank)
        found.append(rank_forecast(rank, shard_bytes[position], experts[position], holdings, footprint, homes))
    return tuple(found)


def shared_tensors(
    plan: LoadPlan,
    world: WorldLayout,
    index: CheckpointIndex,
    homes: Homes,
    policy: ReadPolicy,
    sharing: SharedReads,
) -> dict[str, FetchingPeers]:
    """The tensors that are read once by ranks that need the same of them, with these ranks."""
    found: dict[str, FetchingPeers] = {}
    if isinstance(sharing, Alone) or (isinstance(sharing, Weighed) and not policy.is_remote):
        return found
    chosen: dict[object, bool] = {}
    for name, read in plan.reads().items():
        tensor, spread = plan.layout.by_name[name], world.spreads[name]
        if rows_stored(read.expression) is not None:
            continue
        if isinstance(sharing, InIntervals):
            if world.mesh.ranks > 1 and not computes(read.expression):
                found[name] = FetchingPeers(True, world.mesh.ranks, world.mesh.ranks // world.mesh.shard_size)
            continue
        peers = peers_on(world.mesh, spread, tensor.shape, is_sharded=is_sharded(tensor))
        if peers is None or computes(read.expression):
            continue
        kind = (skeleton(read.expression)[0], spread)
        if kind not in chosen:
            factor = times_read(
                read.expression, spread.boxes[0], index, policy, size=peers.size, replicas=peers.replicas
            )
            over_fabric = homes.device != "cpu" and is_sharded(tensor)
            network = FABRIC_BYTES_PER_S if over_fabric else ETHERNET_BYTES_PER_S
            choice = choose(sharing, policy, replicas=peers.replicas, factor=factor, network_bytes_per_s=network)
            chosen[kind] = choice.is_shared
        if chosen[kind]:
            found[name] = peers
    return found


def forecast_groups(world: WorldLayout, gathered_as: DType | None) -> tuple[GroupForecast, ...]:
    """What each group holds and gathers; groups without parameters are left out.

    ``gathered_as`` is the dtype in which parameters are gathered, None for their own.
    """
    found: list[GroupForecast] = []
    for group in world.groups:
        tensors = [world.first.by_name[name] for name in group.parameters]
        if not tensors:
            continue
        gathered = sum(
            world.spreads[tensor.fqn].padded_numel * (gathered_as or tensor.dtype).bits // 8 for tensor in tensors
        )
        found.append(
            GroupForecast(
                modules=group.modules,
                dtype="+".join(dict.fromkeys(tensor.dtype.label for tensor in tensors)),
                tensors=len(tensors),
                parameters=sum(tensor.numel for tensor in tensors),
                gathered_bytes=gathered * world.mesh.shard_size,
            )
        )
    return tuple(found)


def forecast_training(
    world: WorldLayout,
    groups: Sequence[GroupForecast],
    ranks: Sequence[RankForecast],
    summed_in: DType | None = None,
) -> tuple[TrainingForecast, ...]:
    """What training with AdamW takes on every rank, activations not counted.

    ``summed_in`` is what gradients are summed in over ranks; None: each in that of its parameter.
    """
    padded = whole = 0
    itemsizes: dict[Spread, int] = {}
    for tensor in world.first.tensors:
        if tensor.kind is TensorKind.PARAMETER and tensor.requires_grad:
            spread, itemsize = world.spreads[tensor.fqn], tensor.dtype.bits // 8
            padded += spread.padded_numel * itemsize
            whole += tensor.numel * (tensor.dtype if summed_in is None else summed_in).bits // 8
            itemsizes[spread] = itemsizes.get(spread, 0) + itemsize
    held = [
        sum(
            itemsize * sum(part.box.numel for part in spread.boxes[position])
            for spread, itemsize in itemsizes.items()
        )
        for position in range(world.mesh.shard_size)
    ]
    gathered = max((group.gathered_bytes for group in groups), default=0)
    return tuple(
        TrainingForecast(
            rank=rank.rank,
            weight_bytes=rank.padded_bytes,
            gradient_bytes=padded,
            optimizer_bytes=2 * held[world.mesh.position(rank.rank)],
            gathered_bytes=gathered if world.mesh.ranks > 1 else 0,
            accumulated_bytes=whole if world.mesh.ranks > 1 else 0,
        )
        for rank in ranks
    )


def forecast_computed(plan: LoadPlan) -> tuple[ComputedForecast, ...]:
    """The conversions that compute, each with all that it makes."""
    blocks = SmallestBlocks()
    made: dict[object, tuple[Computed, list[str]]] = {}
    for name, read in plan.reads().items():
        for leaf in computed_leaves(read.expression):
            names = made.setdefault((leaf.operation, leaf.sources), (leaf, []))[1]
            if name not in names[-1:]:
                names.append(name)
    return tuple(
        ComputedForecast(
            tuple(names),
            leaf.operation.label,
            sum(numel(source.shape) * source.dtype.itemsize for source in leaf.sources),
            blocks.nbytes(leaf),
        )
        for leaf, names in made.values()
    )


def uneven_tensors(world: WorldLayout, tolerance: float) -> list[str]:
    """A sentence for each kind of sharded tensor whose largest shard is more than ``tolerance`` times the mean.

    The largest first. Only those that matter: what such a tensor adds to the first rank is at least a hundredth of
    what the rank holds.
    """
    ranks = world.mesh.shard_size
    held = sum(world.spreads[t.fqn].padded_numel * t.dtype.bits // 8 for t in world.first.saved())
    kinds: dict[Spread, list[TensorLayout]] = {}
    for tensor in world.first.saved():
        if is_sharded(tensor):
            kinds.setdefault(world.spreads[tensor.fqn], []).append(tensor)
    found: list[tuple[int, str]] = []
    for spread, tensors in kinds.items():
        shape, numel = tensors[0].shape, tensors[0].numel
        excess = sum((spread.padded_numel - numel / ranks) * tensor.dtype.bits / 8 for tensor in tensors)
        if spread.padded_numel * ranks <= tolerance * numel or excess * 100 < held:
            continue
        empty = sum(not boxes for boxes in spread.boxes)
        names = ", ".join(pattern for pattern, _ in collapse(tensor.fqn for tensor in tensors))
        sentence = (
            f"{names}: {shape} is dealt unevenly to {ranks} ranks, of which {empty} hold nothing of it; FSDP2 "
            "splits no dimension but the first unevenly, and no other splits evenly into parts that lie together"
        )
        found.append((int(excess), sentence))
    return [sentence for _, sentence in sorted(found, reverse=True)]
