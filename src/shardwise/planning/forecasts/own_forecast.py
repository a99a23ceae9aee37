"""What a load will take on one rank: pure, and refused, before anything is read, where memory will not hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shardwise.conversion import Expression, SmallestBlocks, computed_leaves, leaf_boxes, leaves_of
from shardwise.errors import ConfigError, PlacementError
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.layout import LocalBox, MeshShape, ModelLayout, Spread, TensorKind, TensorLayout
from shardwise.planning.forecasts.footprint import Footprint, Footprints, Reading
from shardwise.planning.loads.load_plan import LoadPlan
from shardwise.planning.loads.schedule import staging_within
from shardwise.report.forecast_parts import Experts, RankForecast
from shardwise.report.names import collapse, in_bytes
from shardwise.storage.contract import ReadPolicy


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
    holdings = Holdings(plan.layout, spreads)
    readings = readings_of(plan, spreads, homes).values()
    footprint = Footprints(MeshShape.flat(1), index, readings, policy, homes.budget_bytes).at(0)
    experts = Stacks(plan, plan.layout, spreads).at(0)
    return rank_forecast(rank, holdings.shard_bytes(0), experts, holdings, footprint, homes)


class Holdings:
    """Bytes held at each position, added up by spread: a model has a few of these only."""

    def __init__(self, layout: ModelLayout, spreads: Mapping[str, Spread]) -> None:
        self.sharded_memory = 0
        self.whole_memory = 0
        self.saved_memory = 0
        self.itemsizes: dict[Spread, int] = {}
        for tensor in layout.tensors:
            spread, itemsize = spreads[tensor.fqn], tensor.dtype.bits // 8
            memory = spread.padded_numel * itemsize
            if is_sharded(tensor):
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


class Stacks:
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


def readings_of(plan: LoadPlan, spreads: Mapping[str, Spread], homes: Homes) -> dict[str, Reading]:
    """What is read, by name, each rank reading its own."""
    found: dict[str, Reading] = {}
    for name, read in plan.reads().items():
        tensor = plan.layout.by_name[name]
        on_device = homes.device != "cpu" and not (homes.offloads_shards and is_sharded(tensor))
        found[name] = Reading(read.expression, spreads[name], tensor.dtype, on_device)
    return found


def is_sharded(tensor: TensorLayout) -> bool:
    """Whether ranks hold parts of it."""
    return tensor.kind is TensorKind.PARAMETER and tensor.placement != "whole"


def rank_forecast(
    rank: int,
    shard_bytes: int,
    experts: Mapping[str, Experts],
    holdings: Holdings,
    footprint: Footprint,
    homes: Homes,
) -> RankForecast:
    """What has been worked out for one rank, as one."""
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


@dataclass(frozen=True, slots=True)
class Available:
    """Free memory where a rank runs, in bytes; None for what nobody knows.

    ``pools`` are what host memory is taken from at once, with what each has left: the machine (named "") and the
    control groups with a limit. Ranks of one machine may share some of them. Empty, ``host_bytes`` is the
    machine's.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    pools: Mapping[str, int] = field(default_factory=dict)

    def by_pool(self) -> Mapping[str, int | None]:
        """What each pool has left; where none is known, the machine."""
        return self.pools or {"": self.host_bytes}


@dataclass(frozen=True, slots=True)
class RequireMemory:
    """Refuse a load that does not fit into the memory that is free, less ``reserve_bytes`` of each kind."""

    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        if self.reserve_bytes < 0:
            raise ConfigError(f"reserve_bytes={self.reserve_bytes} is negative; 0 lets a load use all that is free")


@dataclass(frozen=True, slots=True)
class TryAnyway:
    """Load whatever the forecast says of memory."""


MemoryCheck: TypeAlias = RequireMemory | TryAnyway
"""What to do about a load that does not fit into the memory that is free."""


def require_fits(forecast: RankForecast, available: Available, check: MemoryCheck) -> None:
    """Refuse a load that does not fit, before anything is read.

    Raises:
        PlacementError: naming the rank, what it needs, what there is, and what to do.
    """
    if isinstance(check, TryAnyway):
        return
    needs = (
        ("device", forecast.device_bytes, available.device_bytes),
        ("host", forecast.host_bytes, available.host_bytes),
    )
    faults = [
        f"{in_bytes(need)} of {kind} memory, of which {in_bytes(free)} is free"
        + (f" and {in_bytes(check.reserve_bytes)} is to stay so" if check.reserve_bytes else "")
        for kind, need, free in needs
        if free is not None and need > free - check.reserve_bytes
    ]
    if faults:
        raise PlacementError(
            f"rank {forecast.rank} needs {', and '.join(faults)}; load on more ranks, in a smaller dtype, or with "
            "the shards offloaded to the host (Sharding(offload_policy=CPUOffloadPolicy())); "
            "LoadOptions(memory_check=TryAnyway()) loads all the same"
        )
