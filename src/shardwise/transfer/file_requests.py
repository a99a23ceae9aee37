"""Pure planning of the requests of a storage: ranges of files that a worker reads or writes at once.

The copies of a plan and the policy of a storage determine a list of requests, which ``read.py`` carries out. A
request (:class:`FileRequest`) consists of segments (:class:`Segment`), each of one copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.core.computed import Copy
from shardwise.core.tensors import ByteRange, DType, Strided
from shardwise.files.checkpoint_index import TensorEntry
from shardwise.files.storage import ReadPolicy

_RANGE_PER_GAP = 64
"""A request is at least this many times as long as the gaps in it."""

SEGMENT_ALIGNMENT = 64
"""Segments begin at multiples of this in a staging buffer."""


def align(nbytes: int) -> int:
    """Round ``nbytes`` up to the alignment of segments in a staging buffer."""
    return -(-nbytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Segment:
    """One range of a file that a copy reads, from its first byte to its last.

    ``target`` is the index of the tensor that the copy fills. A direct segment is one contiguous run of bytes that
    is read straight into one contiguous run of the tensor's memory. Any other is staged: it is read into a staging
    buffer, and copied from there with casts and strides. Direct is not O_DIRECT, which no read uses.
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
class FileRequest:
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
    # Pieces are separate runs in the file. Blocks are parts of a run that fit into one request or staging
    # buffer.
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
    # Axes of a copy are sorted, widest stride first. `run` is what the inner axes span, in elements. Example: 3
    # rows of 4 elements out of rows of 10 (sizes (3, 4), strides (10, 1)) have gaps of 6. With max_gap=5 that is
    # one run of 4 for each row, with max_gap=6 one run of 24.
    run, num_outer = 1, len(source.sizes)
    for axis in range(len(source.sizes) - 1, -1, -1):
        if source.strides[axis] - run > max_gap:
            break
        run += source.strides[axis] * (source.sizes[axis] - 1)
        num_outer = axis
    if num_outer == 0:
        yield copy
        return
    # One piece for each step of the outer axes, in the order of the file.
    for steps in itertools.product(*map(range, source.sizes[:num_outer])):
        yield Copy(copy.leaf, _inner_view(source, num_outer, steps), _inner_view(copy.target, num_outer, steps))


def _inner_view(view: Strided, num_outer: int, steps: tuple[int, ...]) -> Strided:
    moved = sum(step * stride for step, stride in zip(steps, view.strides[:num_outer], strict=True))
    return Strided(view.offset + moved, view.sizes[num_outer:], view.strides[num_outer:])


def plan_requests(
    segments: Iterable[tuple[str, Segment]], policy: ReadPolicy, *, staging_bytes: int, start_at: float = 0.0
) -> list[FileRequest]:
    """Return the requests, in the order of the files and of the bytes in them.

    Adjacent segments are joined if the gap is at most ``policy.max_gap_bytes``, gaps are a small part of the
    request, no segments overlap, and the staged bytes (gaps included) fit in ``staging_bytes``. Strided segments
    are joined with strided ones only, because they may be copied in another way.

    Args:
        segments: segments with their files.
        policy: read policy of the storage.
        staging_bytes: staging memory of one worker.
        start_at: fraction of the list at which to start, so that ranks do not all start with the same file.
    """
    # State of the request that is being joined: its file and whether it is strided, its staged bytes, its bytes
    # of gaps.
    ordered = sorted(segments, key=lambda item: (item[0], item[1].bytes.start, item[1].bytes.stop))
    requests: list[FileRequest] = []
    joined: list[Segment] = []
    last, used, gaps = ("", False), 0, 0
    for file, segment in ordered:
        begin, stop = (joined[0].bytes.start, joined[-1].bytes.stop) if joined else (0, 0)
        gap, staged = segment.bytes.start - stop, 0 if segment.is_direct else align(segment.bytes.nbytes)
        more = align(max(gap, 0)) + staged  # a gap is read into staging memory, too
        if (
            joined
            and last == (file, segment.is_strided)
            and 0 <= gap <= policy.max_gap_bytes
            and segment.bytes.stop - begin <= policy.request_bytes
            and used + more <= staging_bytes
            and (gaps + gap) * _RANGE_PER_GAP <= segment.bytes.stop - begin
        ):
            used, gaps = used + more, gaps + gap
            joined.append(segment)
        else:
            requests += _request(last[0], joined)
            last, joined, used, gaps = (file, segment.is_strided), [segment], staged, 0
    requests += _request(last[0], joined)
    # Rotated: rank 2 of 4 starts in the middle of the list, and ends with its first half.
    begin = int(len(requests) * start_at)
    return requests[begin:] + requests[:begin]


def _request(file: str, joined: Sequence[Segment]) -> list[FileRequest]:
    if not joined:
        return []
    return [FileRequest(file, ByteRange(joined[0].bytes.start, joined[-1].bytes.stop), tuple(joined))]


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
    # A small budget gets fewer workers before it gets smaller buffers.
    slabs = _DEVICE_SLABS if on_device else 1
    workers = max(1, min(concurrency, budget_bytes // (slabs * _LEAST_BYTES)))
    share = min(_DEVICE_BYTES if on_device else _HOST_BYTES, budget_bytes // (slabs * workers))
    nbytes = max(SEGMENT_ALIGNMENT, share // SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT)
    # torch rounds pinned blocks up to a power of two; a slab that is one wastes nothing.
    if on_device:
        nbytes = 1 << (nbytes.bit_length() - 1)
    return Staging(workers, nbytes, slabs * workers * nbytes)


def max_staged_bytes(requests: Iterable[FileRequest]) -> int:
    """Return a bound of the bytes that one of the requests stages: all of its range, each part of it aligned."""
    margin = 2 * SEGMENT_ALIGNMENT  # of a segment and of the gap before it
    return max((request.bytes.nbytes + margin * len(request.segments) for request in requests), default=0)


@dataclass(frozen=True, slots=True)
class ComputingShare:
    """The split of a memory budget for computed values: half for blocks, half for the staging of their inputs.

    ``max_block_bytes`` is the maximum size of a block that workers compute concurrently. A block that cannot be cut
    so small is computed alone.
    """

    staging_bytes: int
    max_block_bytes: int

    @classmethod
    def from_budget(cls, budget_bytes: int, concurrency: int) -> ComputingShare:
        half = budget_bytes // 2
        return cls(half, max(1, half // plan_staging(half, concurrency, on_device=False).workers))
