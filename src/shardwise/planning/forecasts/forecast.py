"""What a load will take on every rank: pure, from the index, the plan and the layout of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.conversion import (
    Computed,
    Expression,
    SmallestBlocks,
    computed_leaves,
    computes,
    leaf_boxes,
    leaves_of,
    rows_stored,
    skeleton,
)
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.layout import LocalBox, MeshShape, ModelLayout, Spread, TensorKind, TensorLayout, WorldLayout
from shardwise.planning.forecasts.fetching import Fetching, FetchingPeers, peers_on
from shardwise.planning.forecasts.footprint import Footprint, Footprints, Reading, ReadPart
from shardwise.planning.loads.load_plan import LoadPlan
from shardwise.planning.loads.staging import staging_within
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
from shardwise.report.forecast_parts import ComputedForecast, Experts, GroupForecast, RankForecast, TrainingForecast
from shardwise.report.names import collapse
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import DType, numel


@dataclass(frozen=True, slots=True)
class Homes:
    """Where a load puts tensors, and the host memory it may use beside them.

    Attributes:
        device: "cpu", or the kind of accelerator that the mesh is of.
        offloads_shards: sharded parameters live on the host although the mesh is of an accelerator.
        budget_bytes: host memory for staging, or for the conversion that computes and needs the most.
    """

    device: str
    budget_bytes: int
    offloads_shards: bool = False

    @classmethod
    def of(
        cls, plan: LoadPlan, policy: ReadPolicy, *, device: str, budget_bytes: int, offloads_shards: bool
    ) -> Homes:
        """Those of a load with this budget, of which only what it uses counts."""
        staging = staging_within(budget_bytes, policy.concurrency, on_device=device != "cpu")
        blocks = SmallestBlocks()
        leaves = (leaf for read in plan.reads().values() for leaf in computed_leaves(read.expression))
        computed = max(map(blocks.nbytes, leaves), default=0)
        return cls(device, max(staging.total_bytes, computed), offloads_shards)

    def memory(self, *, sharded_bytes: int, whole_bytes: int) -> tuple[int, int]:
        """(bytes on the device, bytes on the host) of tensors of these sizes, and the budget."""
        if self.device == "cpu":
            return 0, sharded_bytes + whole_bytes + self.budget_bytes
        if self.offloads_shards:
            return whole_bytes, sharded_bytes + self.budget_bytes
        return sharded_bytes + whole_bytes, self.budget_bytes


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
    foreseen as far as :mod:`shardwise.planning.forecasts.fetching` says.
    """
    readings = _readings(plan, world.spreads, homes)
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
    holdings = _Holdings(world.first, world.spreads)
    stacks = _Stacks(plan, world.first, world.spreads)
    positions = range(world.mesh.shard_size)
    shard_bytes = [holdings.shard_bytes(position) for position in positions]
    experts = [stacks.at(position) for position in positions]
    found: list[RankForecast] = []
    for rank in range(world.mesh.ranks):
        position = world.mesh.position(rank)
        footprint = footprints.at(rank)
        found.append(_forecast(rank, shard_bytes[position], experts[position], holdings, footprint, homes))
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
        peers = peers_on(world.mesh, spread, tensor.shape, is_sharded=_is_sharded(tensor))
        if peers is None or computes(read.expression):
            continue
        kind = (skeleton(read.expression)[0], spread)
        if kind not in chosen:
            factor = times_read(
                read.expression, spread.boxes[0], index, policy, size=peers.size, replicas=peers.replicas
            )
            over_fabric = homes.device != "cpu" and _is_sharded(tensor)
            network = FABRIC_BYTES_PER_S if over_fabric else ETHERNET_BYTES_PER_S
            choice = choose(sharing, policy, replicas=peers.replicas, factor=factor, network_bytes_per_s=network)
            chosen[kind] = choice.is_shared
        if chosen[kind]:
            found[name] = peers
    return found


def forecast_rank(
    plan: LoadPlan,
    index: CheckpointIndex,
    rank: int,
    homes: Homes,
    policy: ReadPolicy,
    padded_numels: Mapping[str, int] | None = None,
) -> RankForecast:
    """What the load of ``plan`` will take on the rank whose boxes ``plan.layout`` has, if it reads them alone.

    ``padded_numels`` has, by FQN, the elements of memory of the tensors that get more than they hold.
    """
    padded = padded_numels or {}
    made: dict[tuple[tuple[LocalBox, ...], int], Spread] = {}
    spreads: dict[str, Spread] = {}
    for tensor in plan.layout.tensors:
        memory = padded.get(tensor.fqn, tensor.local_numel)
        spreads[tensor.fqn] = made.setdefault((tensor.boxes, memory), Spread((tensor.boxes,), memory))
    holdings = _Holdings(plan.layout, spreads)
    readings = _readings(plan, spreads, homes).values()
    footprint = Footprints(MeshShape.flat(1), index, readings, policy, homes.budget_bytes).at(0)
    experts = _Stacks(plan, plan.layout, spreads).at(0)
    return _forecast(rank, holdings.shard_bytes(0), experts, holdings, footprint, homes)


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
        if _is_sharded(tensor):
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


class _Holdings:
    """Bytes held at each position, added up by spread: a model has a few of these only."""

    def __init__(self, layout: ModelLayout, spreads: Mapping[str, Spread]) -> None:
        self.sharded_memory = 0
        self.whole_memory = 0
        self.saved_memory = 0
        self.itemsizes: dict[Spread, int] = {}
        for tensor in layout.tensors:
            spread, itemsize = spreads[tensor.fqn], tensor.dtype.bits // 8
            memory = spread.padded_numel * itemsize
            if _is_sharded(tensor):
                self.sharded_memory += memory
            else:
                self.whole_memory += memory
            if tensor.kind.is_saved:
                self.saved_memory += memory
                self.itemsizes[spread] = self.itemsizes.get(spread, 0) + itemsize

    def shard_bytes(self, position: int) -> int:
        return sum(
            itemsize * sum(part.box.numel for part in spread.boxes[position])
            for spread, itemsize in self.itemsizes.items()
        )


class _Stacks:
    """The stacks of experts of a model, those of equal layers together."""

    def __init__(self, plan: LoadPlan, layout: ModelLayout, spreads: Mapping[str, Spread]) -> None:
        reads = plan.reads()
        alike: dict[tuple[Spread, tuple[int, ...]], list[str]] = {}
        for tensor in layout.tensors:
            read = reads.get(tensor.fqn)
            if tensor.kind is TensorKind.PARAMETER and _is_stack(tensor, read.expression if read else None):
                alike.setdefault((spreads[tensor.fqn], tensor.shape), []).append(tensor.fqn)
        self._stacks = [
            (pattern, spread, shape) for (spread, shape), names in alike.items() for pattern, _ in collapse(names)
        ]

    def at(self, position: int) -> dict[str, Experts]:
        return {pattern: _experts(spread.boxes[position], shape) for pattern, spread, shape in self._stacks}


def _is_stack(tensor: TensorLayout, expression: Expression | None) -> bool:
    """Whether the first dimension counts experts: they are stored one by one, or the name says so."""
    if len(tensor.shape) < 3:
        return False
    return "experts" in tensor.fqn.split(".") or (expression is not None and _stacks_first(expression))


def _stacks_first(expression: Expression) -> bool:
    """Whether every index of the first dimension is stored by itself."""
    if any(len(leaf.shape) >= len(expression.shape) for leaf in leaves_of(expression)):
        return False
    return all(box.sizes[0] == 1 for box in leaf_boxes(expression))


def _experts(boxes: Sequence[LocalBox], shape: tuple[int, ...]) -> Experts:
    if not boxes:
        return Experts(0, 0, shape[0], is_cut=False)
    start = min(part.box.offsets[0] for part in boxes)
    stop = max(part.box.offsets[0] + part.box.sizes[0] for part in boxes)
    return Experts(start, stop, shape[0], is_cut=any(part.box.sizes[1:] != shape[1:] for part in boxes))


def _readings(plan: LoadPlan, spreads: Mapping[str, Spread], homes: Homes) -> dict[str, Reading]:
    """What is read, by name, each rank reading its own."""
    found: dict[str, Reading] = {}
    for name, read in plan.reads().items():
        tensor = plan.layout.by_name[name]
        on_device = homes.device != "cpu" and not (homes.offloads_shards and _is_sharded(tensor))
        found[name] = Reading(read.expression, spreads[name], tensor.dtype, on_device)
    return found


def _is_sharded(tensor: TensorLayout) -> bool:
    return tensor.kind is TensorKind.PARAMETER and tensor.placement != "whole"


def _forecast(
    rank: int,
    shard_bytes: int,
    experts: Mapping[str, Experts],
    holdings: _Holdings,
    footprint: Footprint,
    homes: Homes,
) -> RankForecast:
    device_bytes, host_bytes = homes.memory(
        sharded_bytes=holdings.sharded_memory, whole_bytes=holdings.whole_memory
    )
    return RankForecast(
        rank=rank,
        shard_bytes=shard_bytes,
        padded_bytes=holdings.saved_memory,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        needed_bytes=footprint.needed_bytes,
        read_bytes=footprint.read_bytes,
        reads=footprint.reads,
        files=len(footprint.files),
        experts=experts,
    )
