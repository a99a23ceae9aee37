"""Forecasts the memory of a load on one rank, and refuses a load that does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from shardwise._face import found_at
from shardwise.conversion.computed import Computed, SmallestBlocks, computed_leaves, computes
from shardwise.conversion.expression import Expression, Stored, concat, rows_stored, stored_leaves, view
from shardwise.errors import ConfigError, PlacementError
from shardwise.formats.contract import CheckpointIndex, ComposedPart, Joined, View, Whole
from shardwise.layout import LocalBox, Spread, TensorKind, TensorLayout
from shardwise.planning.load_plan import LoadPlan
from shardwise.planning.schedule import staging_within
from shardwise.report.names import in_bytes
from shardwise.report.reports import RankForecast
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import numel

# Loading


@dataclass(frozen=True, slots=True)
class Homes:
    """Placement of tensors on a rank, and the host memory that a load uses in addition.

    Attributes:
        device: "cpu", or the kind of accelerator of the mesh.
        budget_bytes: host memory for staging, or for the largest conversion that computes.
        offloads_shards: whether sharded parameters stay on the host of an accelerator.
    """

    device: str
    budget_bytes: int
    offloads_shards: bool = False

    @classmethod
    def of(
        cls, plan: LoadPlan, policy: ReadPolicy, *, device: str, budget_bytes: int, offloads_shards: bool
    ) -> Homes:
        """Homes of a load. Of the budget only the part that the load uses counts."""
        staging = staging_within(budget_bytes, policy.concurrency, on_device=device != "cpu")
        return cls(device, max(staging.total_bytes, largest_computation(plan)), offloads_shards)

    def memory(self, *, sharded_bytes: int, whole_bytes: int) -> tuple[int, int]:
        """Bytes on the device and on the host."""
        if self.device == "cpu":
            return 0, sharded_bytes + whole_bytes + self.budget_bytes
        if self.offloads_shards:
            return whole_bytes, sharded_bytes + self.budget_bytes
        return sharded_bytes + whole_bytes, self.budget_bytes


def largest_computation(plan: LoadPlan) -> int:
    """Bytes of memory that the largest conversion needs, in the smallest blocks it can be cut into."""
    blocks = SmallestBlocks()
    leaves = (leaf for read in plan.reads().values() for leaf in computed_leaves(read.expression))
    return max(map(blocks.nbytes, leaves), default=0)


def forecast_rank(
    plan: LoadPlan, rank: int, homes: Homes, padded_numels: Mapping[str, int] | None = None
) -> RankForecast:
    """Forecast of the load of ``plan`` on the rank whose boxes ``plan.layout`` has.

    Args:
        plan: of the load.
        rank: its number.
        homes: where tensors are put.
        padded_numels: elements of memory, by FQN, of tensors whose memory is padded.
    """
    padded = padded_numels or {}
    made: dict[tuple[tuple[LocalBox, ...], int], Spread] = {}
    spreads: dict[str, Spread] = {}
    for tensor in plan.layout.tensors:
        memory = padded.get(tensor.fqn, tensor.local_numel)
        spreads[tensor.fqn] = made.setdefault((tensor.boxes, memory), Spread((tensor.boxes,), memory))
    return LoadSizes(plan, plan.layout.tensors, spreads).at(rank, 0, homes)


class LoadSizes:
    """Bytes at each position of the mesh, summed by spread: a model has only a few different ones."""

    def __init__(self, plan: LoadPlan, tensors: Iterable[TensorLayout], spreads: Mapping[str, Spread]) -> None:
        self.sharded = self.whole = self.saved = 0
        self.held: Counter[Spread] = Counter()
        self.read: dict[Spread, float] = {}
        for tensor in tensors:
            spread, itemsize = spreads[tensor.fqn], tensor.dtype.bits // 8
            memory = spread.padded_numel * itemsize
            self.sharded += memory if is_sharded(tensor) else 0
            self.whole += 0 if is_sharded(tensor) else memory
            if tensor.kind.is_saved:
                self.saved += memory
                self.held[spread] += itemsize
        for name, rate in bytes_per_element(plan).items():
            spread = spreads[plan.layout.by_name[name].fqn]
            self.read[spread] = self.read.get(spread, 0.0) + rate

    def at(self, rank: int, position: int, homes: Homes) -> RankForecast:
        device, host = homes.memory(sharded_bytes=self.sharded, whole_bytes=self.whole)
        held = sum(local_numel(spread, position) * size for spread, size in self.held.items())
        read = sum(local_numel(spread, position) * rate for spread, rate in self.read.items())
        return RankForecast(rank, held, self.saved, device, host, round(read))


def local_numel(spread: Spread, position: int) -> int:
    return sum(part.box.numel for part in spread.boxes[position])


def bytes_per_element(plan: LoadPlan) -> dict[str, float]:
    """Stored bytes read for each element of a tensor. Outputs of one computation share what it reads."""
    seen: set[object] = set()
    found: dict[str, float] = {}
    for name, read in plan.reads().items():
        expression = read.expression
        if not computes(expression):
            stored = rows_stored(expression)
            part = 1.0 if stored is None else stored / expression.shape[0]
            found[name] = next(stored_leaves(expression)).dtype.itemsize * part
            continue
        nbytes = 0
        for leaf in computed_leaves(expression):
            key = (leaf.operation, leaf.sources)
            nbytes += 0 if key in seen else _input_bytes(leaf)
            seen.add(key)
        found[name] = nbytes / max(numel(expression.shape), 1)
    return found


def _input_bytes(leaf: Computed) -> int:
    stored = (item for source in leaf.sources for item in stored_leaves(source))
    return sum(numel(item.shape) * item.dtype.itemsize for item in stored)


def is_sharded(tensor: TensorLayout) -> bool:
    """Whether ranks hold different parts of it."""
    return tensor.kind is TensorKind.PARAMETER and tensor.placement != "whole"


@dataclass(frozen=True, slots=True)
class Available:
    """Free memory of a rank, in bytes; None if unknown.

    Attributes:
        device_bytes: of its accelerator.
        host_bytes: of its machine.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None


def require_fits(forecast: RankForecast, available: Available) -> None:
    """Refuse a load that does not fit, before anything is read.

    Raises:
        PlacementError: naming the rank, what it needs, what is free, and what to do.
    """
    needs = (
        ("device", forecast.device_bytes, available.device_bytes),
        ("host", forecast.host_bytes, available.host_bytes),
    )
    faults = [
        f"{in_bytes(need)} of {kind} memory, of which {in_bytes(free)} is free"
        for kind, need, free in needs
        if free is not None and need > free
    ]
    if faults:
        raise PlacementError(
            f"rank {forecast.rank} needs {', and '.join(faults)}; load on more ranks, in a smaller dtype, or with "
            "the shards offloaded to the host (Sharding(offload_policy=CPUOffloadPolicy())); "
            "LoadOptions(check_memory=False) loads all the same"
        )


MakeNode: TypeAlias = Callable[[Any, Callable[[str], Expression]], Expression]
"""What a :class:`~shardwise.formats.contract.Coded` of one kind stands for; leaves are had by key."""

NODES: Final[dict[str, str]] = {
    "scaled": "shardwise.planning.coded:scaled",
    "four bits": "shardwise.planning.coded:four_bits",
    "grouped": "shardwise.planning.coded:grouped",
}
"""By kind, where its :data:`MakeNode` is, as ``package.module:name``."""


def stored_tensors(index: CheckpointIndex) -> dict[str, Expression]:
    """The checkpoint's tensors by key, in file order: a leaf for each, or what composes it of leaves.

    Raises:
        ConfigError: numbers are coded in a way that has no line in :data:`NODES`.
    """
    return {
        item.key: _expression(index, index.composed[item.key].part)
        if item.key in index.composed
        else Stored(item.key, item.shape, item.dtype)
        for item in index.tensors()
    }


def spare_tensors(index: CheckpointIndex) -> dict[str, Expression]:
    """What is loaded only into a model that has a tensor of that name, by key."""
    return {key: Stored(key, index.entries[key].shape, index.entries[key].dtype) for key in sorted(index.spare)}


def _expression(index: CheckpointIndex, part: ComposedPart) -> Expression:
    def leaf(key: str) -> Stored:
        entry = index.entries[key]
        return Stored(key, entry.shape, entry.dtype)

    match part:
        case Whole(key):
            return leaf(key)
        case View(key, strided):
            return view(leaf(key), strided)
        case Joined(parts, dim):
            return concat([_expression(index, inner) for inner in parts], dim)
        case _:
            if part.kind not in NODES:
                raise ConfigError(f"nobody makes numbers of {part.kind!r}; add a line for it to NODES")
            node: MakeNode = found_at(NODES[part.kind])
            return node(part, leaf)
