"""An estimate of a load's memory on a rank. A load whose estimate does not fit into memory is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.core.computed import Computed, SmallestBlocks, computes, iter_computed_leaves
from shardwise.core.errors import ShardingError
from shardwise.core.expression import count_stored_rows, iter_stored_leaves
from shardwise.core.formatting import in_bytes
from shardwise.core.layout import LocalBox, Spread, TensorKind, TensorLayout
from shardwise.core.reports import Available, RankEstimate
from shardwise.core.tensors import numel
from shardwise.files.storage import ReadPolicy
from shardwise.loading.plan import LoadPlan
from shardwise.transfer.file_requests import plan_staging

# Loading


@dataclass(frozen=True, slots=True)
class MemoryPlacement:
    """Placement of tensors on a rank, and the host memory that a load uses in addition.

    Attributes:
        device: "cpu", or the type of the mesh's accelerators.
        budget_bytes: host memory for staging, or for the largest conversion that computes.
        offloads_shards: whether sharded parameters stay on the host of an accelerator.
    """

    device: str
    budget_bytes: int
    offloads_shards: bool = False

    @classmethod
    def from_plan(
        cls, plan: LoadPlan, policy: ReadPolicy, *, device: str, budget_bytes: int, offloads_shards: bool
    ) -> MemoryPlacement:
        """Return the placement of a load, counting only the part of the budget that the load uses."""
        # Reads and computations share the budget, and do not take place at once, so the larger one counts.
        staging = plan_staging(budget_bytes, policy.concurrency, on_device=device != "cpu")
        return cls(device, max(staging.total_bytes, largest_computation(plan)), offloads_shards)

    def has_mesh(self, ranks: int) -> bool:
        """Return whether a model is sharded on so many ranks. FSDP2 gathers and offloads on one rank, too."""
        return ranks > 1 or self.device != "cpu"

    def memory(self, *, sharded_bytes: int, whole_bytes: int) -> tuple[int, int]:
        """Return the bytes on the device and on the host."""
        if self.device == "cpu":
            return 0, sharded_bytes + whole_bytes + self.budget_bytes
        if self.offloads_shards:
            return whole_bytes, sharded_bytes + self.budget_bytes
        return sharded_bytes + whole_bytes, self.budget_bytes


def largest_computation(plan: LoadPlan) -> int:
    """Return the bytes of memory that the largest conversion needs, in the smallest blocks it can be cut into."""
    blocks = SmallestBlocks()
    leaves = (leaf for read in plan.reads().values() for leaf in iter_computed_leaves(read.expression))
    return max(map(blocks.nbytes, leaves), default=0)


def estimate_rank(
    plan: LoadPlan, rank: int, placement: MemoryPlacement, padded_numels: Mapping[str, int]
) -> RankEstimate:
    """Forecast the load of ``plan`` on the rank whose boxes are in ``plan.layout``.

    Args:
        plan: the plan of the load.
        rank: the rank.
        placement: placement of tensors.
        padded_numels: elements of memory, by FQN, of tensors whose memory is padded.
    """
    shared: dict[tuple[tuple[LocalBox, ...], int], Spread] = {}  # one spread for tensors with equal boxes
    spreads: dict[str, Spread] = {}
    for tensor in plan.layout.tensors:
        # Elements in memory, at least those of the boxes: FSDP2 pads all shards to the size of the first.
        memory = padded_numels.get(tensor.fqn, tensor.local_numel)
        spreads[tensor.fqn] = shared.setdefault((tensor.boxes, memory), Spread((tensor.boxes,), memory))
    return LoadSizes(plan, plan.layout.tensors, spreads).at(rank, 0, placement)


class LoadSizes:
    """Bytes at each position of the mesh, summed by spread because a model has only a few different spreads.

    Attributes:
        sharded, whole: bytes of memory, padding included.
        saved: bytes of memory of parameters and persistent buffers.
        itemsizes: sum of the item sizes of all tensors with this spread.
        read_rates: stored bytes read for each element of this spread.
    """

    def __init__(self, plan: LoadPlan, tensors: Iterable[TensorLayout], spreads: Mapping[str, Spread]) -> None:
        self.sharded = self.whole = self.saved = 0
        self.itemsizes: Counter[Spread] = Counter()
        self.read_rates: dict[Spread, float] = {}
        for tensor in tensors:
            spread, itemsize = spreads[tensor.fqn], tensor.dtype.bits // 8
            memory = spread.padded_numel * itemsize
            self.sharded += memory if is_sharded(tensor) else 0
            self.whole += 0 if is_sharded(tensor) else memory
            if tensor.kind.is_saved:
                self.saved += memory
                self.itemsizes[spread] += itemsize
        for name, rate in bytes_per_element(plan).items():
            spread = spreads[plan.layout.by_name[name].fqn]
            self.read_rates[spread] = self.read_rates.get(spread, 0.0) + rate

    def at(self, rank: int, position: int, placement: MemoryPlacement) -> RankEstimate:
        device, host = placement.memory(sharded_bytes=self.sharded, whole_bytes=self.whole)
        # Elements of a spread times the item sizes of all tensors that have it.
        shards = sum(local_numel(spread, position) * size for spread, size in self.itemsizes.items())
        read = sum(local_numel(spread, position) * rate for spread, rate in self.read_rates.items())
        return RankEstimate(rank, shards, self.saved, device, host, round(read))


def local_numel(spread: Spread, position: int) -> int:
    return sum(piece.box.numel for piece in spread.boxes[position])


def bytes_per_element(plan: LoadPlan) -> dict[str, float]:
    """Return the stored bytes read for each element of a tensor, counting inputs of a shared computation once."""
    seen: set[object] = set()
    rates: dict[str, float] = {}
    for name, read in plan.reads().items():
        expression = read.expression
        if not computes(expression):
            # A resized tensor reads its stored rows only. Of 100 rows with 80 in the file, 0.8 of an element's
            # bytes.
            stored = count_stored_rows(expression)
            fraction = 1.0 if stored is None else stored / expression.shape[0]
            rates[name] = next(iter_stored_leaves(expression)).dtype.itemsize * fraction
            continue
        # Two outputs of one computation (codes and scales of a packed weight) read its inputs once.
        nbytes = 0
        for leaf in iter_computed_leaves(expression):
            key = (leaf.operation, leaf.sources)
            nbytes += 0 if key in seen else _input_bytes(leaf)
            seen.add(key)
        rates[name] = nbytes / max(numel(expression.shape), 1)
    return rates


def _input_bytes(leaf: Computed) -> int:
    stored = (item for source in leaf.sources for item in iter_stored_leaves(source))
    return sum(numel(item.shape) * item.dtype.itemsize for item in stored)


def is_sharded(tensor: TensorLayout) -> bool:
    """Return whether ranks hold different boxes of a tensor."""
    return tensor.kind is TensorKind.PARAMETER and tensor.placement != "whole"


def require_fits(estimate: RankEstimate, available: Available, ranks: int) -> None:
    """Refuse a load that does not fit, before anything is read.

    The host memory of the estimate is the sum of ``ranks`` ranks, which share the free memory of their container.

    Raises:
        ShardingError: the load does not fit. The error contains the rank, the memory it needs, the free memory and
            remedies.
    """
    sharing = f" for the {ranks} ranks of its container" if ranks > 1 else ""
    faults: list[str] = []
    for kind, need, free in (
        ("device memory", estimate.device_bytes, available.device_bytes),
        (f"host memory{sharing}", estimate.host_bytes, available.host_bytes),
    ):
        if free is not None and need > free:  # None if it is not known
            faults.append(f"{in_bytes(need)} of {kind}, of which {in_bytes(free)} is free")
    if faults:
        raise ShardingError(
            f"rank {estimate.rank} needs {', and '.join(faults)}. Load on more ranks, in a smaller dtype, or with "
            "the shards offloaded to the host (Sharding(offload_policy=CPUOffloadPolicy())). "
            "LoadOptions(check_memory=False) skips this check"
        )
