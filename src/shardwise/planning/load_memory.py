"""Pure planning of the read requests of a load, and an estimate of its memory on a rank.

The copies of a plan and the policy of a storage determine a list of requests, which the execution layer carries
out. A load whose estimate does not fit into memory is refused.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from shardwise._face import found_at
from shardwise.conversion.computed import Computed, Copy, SmallestBlocks, computed_leaves, computes
from shardwise.conversion.expression import Expression, Stored, as_strided, concat, rows_stored, stored_leaves
from shardwise.errors import ConfigError, ShardingError
from shardwise.formats.contract import CheckpointIndex, Composition, Joined, TensorEntry, View, Whole
from shardwise.layout import LocalBox, Spread, TensorKind, TensorLayout
from shardwise.planning.load_plan import LoadPlan
from shardwise.report.names import in_bytes
from shardwise.report.reports import RankEstimate
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import ByteRange, DType, Strided, numel

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
        staging = plan_staging(budget_bytes, policy.concurrency, on_device=device != "cpu")
        return cls(device, max(staging.total_bytes, largest_computation(plan)), offloads_shards)

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
    leaves = (leaf for read in plan.reads().values() for leaf in computed_leaves(read.expression))
    return max(map(blocks.nbytes, leaves), default=0)


def estimate_rank(
    plan: LoadPlan, rank: int, placement: MemoryPlacement, padded_numels: Mapping[str, int] | None = None
) -> RankEstimate:
    """Forecast the load of ``plan`` on the rank whose boxes are in ``plan.layout``.

    Args:
        plan: the plan of the load.
        rank: the rank.
        placement: placement of tensors.
        padded_numels: elements of memory, by FQN, of tensors whose memory is padded.
    """
    padded = padded_numels or {}
    made: dict[tuple[tuple[LocalBox, ...], int], Spread] = {}
    spreads: dict[str, Spread] = {}
    for tensor in plan.layout.tensors:
        memory = padded.get(tensor.fqn, tensor.local_numel)
        spreads[tensor.fqn] = made.setdefault((tensor.boxes, memory), Spread((tensor.boxes,), memory))
    return LoadSizes(plan, plan.layout.tensors, spreads).at(rank, 0, placement)


class LoadSizes:
    """Bytes at each position of the mesh, summed by spread because a model has only a few different spreads."""

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

    def at(self, rank: int, position: int, placement: MemoryPlacement) -> RankEstimate:
        device, host = placement.memory(sharded_bytes=self.sharded, whole_bytes=self.whole)
        held = sum(local_numel(spread, position) * size for spread, size in self.held.items())
        read = sum(local_numel(spread, position) * rate for spread, rate in self.read.items())
        return RankEstimate(rank, held, self.saved, device, host, round(read))


def local_numel(spread: Spread, position: int) -> int:
    return sum(piece.box.numel for piece in spread.boxes[position])


def bytes_per_element(plan: LoadPlan) -> dict[str, float]:
    """Return the stored bytes read for each element of a tensor, counting inputs of a shared computation once."""
    seen: set[object] = set()
    found: dict[str, float] = {}
    for name, read in plan.reads().items():
        expression = read.expression
        if not computes(expression):
            stored = rows_stored(expression)
            fraction = 1.0 if stored is None else stored / expression.shape[0]
            found[name] = next(stored_leaves(expression)).dtype.itemsize * fraction
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
    """Check if ranks hold different boxes of a tensor."""
    return tensor.kind is TensorKind.PARAMETER and tensor.placement != "whole"


@dataclass(frozen=True, slots=True)
class Available:
    """Free memory of a rank in bytes, or None if unknown.

    Attributes:
        device_bytes: free memory of its accelerator.
        host_bytes: free memory of its machine.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None


def require_fits(estimate: RankEstimate, available: Available, ranks: int = 1) -> None:
    """Refuse a load that does not fit, before anything is read.

    The host memory of the estimate is that of so many ``ranks``, which share what is free.

    Raises:
        ShardingError: the load does not fit. The error contains the rank, the memory it needs, the free memory and
            remedies.
    """
    sharing = f" for the {ranks} ranks of its container" if ranks > 1 else ""
    needs = (
        ("device memory", estimate.device_bytes, available.device_bytes),
        (f"host memory{sharing}", estimate.host_bytes, available.host_bytes),
    )
    faults = [
        f"{in_bytes(need)} of {kind}, of which {in_bytes(free)} is free"
        for kind, need, free in needs
        if free is not None and need > free
    ]
    if faults:
        raise ShardingError(
            f"rank {estimate.rank} needs {', and '.join(faults)}. Load on more ranks, in a smaller dtype, or with "
            "the shards offloaded to the host (Sharding(offload_policy=CPUOffloadPolicy())). "
            "LoadOptions(check_memory=False) skips this check"
        )


MakeNode: TypeAlias = Callable[[Any, Callable[[str], Expression]], Expression]
"""Makes the expression of a :class:`~shardwise.formats.contract.Coded` of one kind, given leaves by key."""

NODES: Final[dict[str, str]] = {
    "scaled": "shardwise.planning.coded:scaled",
    "four bits": "shardwise.planning.coded:four_bits",
    "grouped": "shardwise.planning.coded:grouped",
}
"""Location of the :data:`MakeNode` of each kind, as ``package.module:name``."""


def stored_tensors(index: CheckpointIndex) -> dict[str, Expression]:
    """Return the checkpoint's tensors by key, in file order: a leaf for each, or an expression over several leaves.

    Raises:
        ConfigError: a tensor is quantized in a format that has no entry in :data:`NODES`.
    """
    return {
        item.key: _expression(index, index.composed[item.key].composition)
        if item.key in index.composed
        else Stored(item.key, item.shape, item.dtype)
        for item in index.tensors()
    }


def extra_tensors(index: CheckpointIndex) -> dict[str, Expression]:
    """Return the tensors, by key, that are loaded only into a model that has a tensor of that name."""
    return {key: Stored(key, index.entries[key].shape, index.entries[key].dtype) for key in sorted(index.extra)}


def _expression(index: CheckpointIndex, composition: Composition) -> Expression:
    def leaf(key: str) -> Stored:
        entry = index.entries[key]
        return Stored(key, entry.shape, entry.dtype)

    match composition:
        case Whole(key):
            return leaf(key)
        case View(key, strided):
            return as_strided(leaf(key), strided)
        case Joined(pieces, dim):
            return concat([_expression(index, inner) for inner in pieces], dim)
        case _:
            if composition.kind not in NODES:
                raise ConfigError(
                    f"{composition.kind!r}: has no entry in NODES, by which it is dequantized. Add one"
                )
            node: MakeNode = found_at(NODES[composition.kind])
            return node(composition, leaf)


WASTE = 64
"""At most one byte in this many of a request may be in gaps between segments."""

SEGMENT_ALIGNMENT = 64
"""Segments begin at multiples of this in a staging buffer."""


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to the alignment of segments in a staging buffer."""
    return -(-nbytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Segment:
    """One range of a file that a copy reads, from its first byte to its last.

    ``target`` is the index of the tensor that the copy fills. A direct segment is one contiguous run of bytes that
    is read straight into one contiguous run of the tensor's memory. Any other is staged: it is read into a staging
    buffer, and copied from there with casts and strides.
    """

    bytes: ByteRange
    dtype: DType
    target: int
    copy: Copy
    is_direct: bool

    @property
    def is_strided(self) -> bool:
        """True if the range contains bytes that the copy does not need."""
        return not self.copy.source.is_contiguous


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One range to read from a storage, and the segments in it, in order and without overlap."""

    file: str
    bytes: ByteRange
    segments: tuple[Segment, ...]


def iter_segments(
    copy: Copy, target: int, entry: TensorEntry, *, needs_staging: bool, policy: ReadPolicy, block_bytes: int
) -> Iterator[Segment]:
    """Yield the ranges that one copy reads.

    Runs that are at most ``policy.max_gap_bytes`` apart are read as one range including the gap, and others are
    separate segments. Direct segments are at most as long as a request, staged ones at most ``block_bytes``.

    Args:
        copy: the copy from a stored tensor.
        target: index of the tensor that the segments fill.
        entry: location of the stored tensor.
        needs_staging: whether no segment can be direct, because the tensor has another dtype or is not in host
            memory.
        policy: read policy of the storage.
        block_bytes: the maximum of a staged segment, with room for at least one element.
    """
    itemsize = entry.dtype.itemsize
    for piece in copies_by_run(copy, max_gap=policy.max_gap_bytes // itemsize):
        is_direct = not needs_staging and piece.source.is_contiguous and piece.target.is_contiguous
        cut = policy.request_bytes if is_direct else min(block_bytes, policy.request_bytes)
        for block in piece.blocks(max(1, cut // itemsize)):
            start = entry.start + block.source.offset * itemsize
            stop = entry.start + block.source.stop * itemsize
            yield Segment(ByteRange(start, stop), entry.dtype, target, block, is_direct)


def copies_by_run(copy: Copy, *, max_gap: int) -> Iterator[Copy]:
    """Yield the copy in pieces, cut at every gap of more than ``max_gap`` elements in the leaf."""
    source = copy.source
    # Axes of a copy are sorted, widest stride first. `run` is what the inner axes span.
    run, kept = 1, len(source.sizes)
    for axis in range(len(source.sizes) - 1, -1, -1):
        if source.strides[axis] - run > max_gap:
            break
        run += source.strides[axis] * (source.sizes[axis] - 1)
        kept = axis
    if kept == 0:
        yield copy
        return
    for steps in itertools.product(*map(range, source.sizes[:kept])):
        yield Copy(copy.leaf, _inner_view(source, kept, steps), _inner_view(copy.target, kept, steps))


def _inner_view(view: Strided, kept: int, steps: tuple[int, ...]) -> Strided:
    moved = sum(step * stride for step, stride in zip(steps, view.strides[:kept], strict=True))
    return Strided(view.offset + moved, view.sizes[kept:], view.strides[kept:])


def schedule(
    segments: Iterable[tuple[str, Segment]], policy: ReadPolicy, *, staging_bytes: int, start_at: float = 0.0
) -> list[ReadRequest]:
    """Return the requests, in the order of the files and of the bytes in them.

    Adjacent segments are joined if the gap is at most ``policy.max_gap_bytes``, gaps are a small part of the
    request, no segments overlap, and the staged bytes (gaps included) fit in ``staging_bytes``. Strided segments
    are not joined with others because they may be copied in another way.

    Args:
        segments: segments with their files.
        policy: read policy of the storage.
        staging_bytes: staging memory of one worker.
        start_at: fraction of the list at which to start, so that ranks do not all start with the same file.
    """
    ordered = sorted(segments, key=lambda item: (item[0], item[1].bytes.start, item[1].bytes.stop))
    requests: list[ReadRequest] = []
    joined: list[Segment] = []
    last, used, gaps = ("", False), 0, 0
    for file, segment in ordered:
        begin, stop = (joined[0].bytes.start, joined[-1].bytes.stop) if joined else (0, 0)
        gap, own = segment.bytes.start - stop, 0 if segment.is_direct else aligned(segment.bytes.nbytes)
        more = aligned(max(gap, 0)) + own
        if (
            joined
            and last == (file, segment.is_strided)
            and 0 <= gap <= policy.max_gap_bytes
            and segment.bytes.stop - begin <= policy.request_bytes
            and used + more <= staging_bytes
            and (gaps + gap) * WASTE <= segment.bytes.stop - begin
        ):
            used, gaps = used + more, gaps + gap
            joined.append(segment)
        else:
            requests += _request(last[0], joined)
            last, joined, used, gaps = (file, segment.is_strided), [segment], own, 0
    requests += _request(last[0], joined)
    begin = int(len(requests) * start_at)
    return requests[begin:] + requests[:begin]


def _request(file: str, joined: Sequence[Segment]) -> list[ReadRequest]:
    if not joined:
        return []
    return [ReadRequest(file, ByteRange(joined[0].bytes.start, joined[-1].bytes.stop), tuple(joined))]


_HOST_BYTES = 4 << 20
"""Staging of one worker for tensors in host memory: it stays in the cache between read and copy."""

_DEVICE_BYTES = 32 << 20
"""The same for tensors on an accelerator: large enough that the transfer runs at full speed."""

_LEAST_BYTES = 1 << 18
"""With less than this a worker is not worth its thread."""

_DEVICE_SLABS = 2
"""One is on its way to the device while the other is read into."""


@dataclass(frozen=True, slots=True)
class Staging:
    """The number of workers, the bytes that each can stage at once, and the host memory of all staging buffers."""

    workers: int
    nbytes: int
    total_bytes: int


def plan_staging(budget_bytes: int, concurrency: int, *, on_device: bool) -> Staging:
    """Return the staging of at most ``concurrency`` workers within a budget, for tensors on a device or host."""
    slabs = _DEVICE_SLABS if on_device else 1
    workers = max(1, min(concurrency, budget_bytes // (slabs * _LEAST_BYTES)))
    share = min(_DEVICE_BYTES if on_device else _HOST_BYTES, budget_bytes // (slabs * workers))
    nbytes = max(SEGMENT_ALIGNMENT, share // SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT)
    # torch rounds pinned blocks up to a power of two; a slab that is one wastes nothing.
    if on_device:
        nbytes = 1 << (nbytes.bit_length() - 1)
    return Staging(workers, nbytes, slabs * workers * nbytes)


def max_staged_bytes(requests: Iterable[ReadRequest]) -> int:
    """Return a bound of the bytes that one of the requests stages: all of its range, each part of it aligned."""
    margin = 2 * SEGMENT_ALIGNMENT  # of a segment and of the gap before it
    return max((request.bytes.nbytes + margin * len(request.segments) for request in requests), default=0)


@dataclass(frozen=True, slots=True)
class ComputingShare:
    """The split of a memory budget for computed values: half for blocks, half for the staging of their inputs.

    ``most_bytes`` is the maximum size of a block that workers compute concurrently. A block that cannot be cut so
    small is computed alone.
    """

    staging_bytes: int
    most_bytes: int

    @classmethod
    def from_budget(cls, budget_bytes: int, concurrency: int) -> ComputingShare:
        half = budget_bytes // 2
        return cls(half, max(1, half // plan_staging(half, concurrency, on_device=False).workers))
