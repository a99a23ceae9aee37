"""Which ranges of which files are asked for, in which order, what becomes of their bytes, and through which memory.

Pure: from the copies of a plan and the policy of a storage to a list of requests, which execution obeys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.conversion.computed import Copy
from shardwise.formats.contract import TensorEntry
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import ByteRange, DType, Strided

WASTE = 64
"""Of what a request brings, at most one part in this many may be gaps between segments."""

SEGMENT_ALIGNMENT = 64
"""Segments begin at multiples of this in a staging buffer."""


def aligned(nbytes: int) -> int:
    """``nbytes`` up to where the next segment may begin in a staging buffer."""
    return -(-nbytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Segment:
    """One range of a file that a copy needs, from its first byte to its last.

    ``target`` says which tensor the copy fills. A direct segment is one run of bytes that belongs as it is into one
    run of the tensor's memory; any other is staged: read into a buffer, and copied (cast, strided) from there.
    """

    bytes: ByteRange
    dtype: DType
    target: int
    copy: Copy
    is_direct: bool

    @property
    def is_strided(self) -> bool:
        """Whether there is more between the first byte and the last than the copy needs."""
        return not self.copy.source.is_contiguous


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One range to ask a storage for, and the segments in it, in order and without overlap."""

    file: str
    bytes: ByteRange
    segments: tuple[Segment, ...]


def segments_of(
    copy: Copy, target: int, entry: TensorEntry, *, needs_staging: bool, policy: ReadPolicy, block_bytes: int
) -> Iterator[Segment]:
    """The ranges that one copy is read by.

    Runs that lie no further apart than ``policy.max_gap_bytes`` are read over; those that lie further apart are
    segments of their own. Direct segments are as long as a request may be, staged ones at most ``block_bytes``.

    Args:
        copy: from a stored tensor.
        target: of the segments.
        entry: where the stored tensor lies.
        needs_staging: whether nothing can be direct: the tensor has another dtype, or is not in host memory.
        policy: the storage's.
        block_bytes: at least one element.
    """
    itemsize = entry.dtype.itemsize
    for part in copies_by_run(copy, max_gap=policy.max_gap_bytes // itemsize):
        is_direct = not needs_staging and part.source.is_contiguous and part.target.is_contiguous
        cut = policy.request_bytes if is_direct else min(block_bytes, policy.request_bytes)
        for block in part.blocks(max(1, cut // itemsize)):
            start = entry.start + block.source.offset * itemsize
            stop = entry.start + block.source.stop * itemsize
            yield Segment(ByteRange(start, stop), entry.dtype, target, block, is_direct)


def copies_by_run(copy: Copy, *, max_gap: int) -> Iterator[Copy]:
    """The same copy, cut where more than ``max_gap`` unwanted elements of the leaf would be read over."""
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
    for steps in _indices(source.sizes[:kept]):
        yield Copy(copy.leaf, _inside(source, kept, steps), _inside(copy.target, kept, steps))


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for flat in range(math.prod(sizes)):
        steps: list[int] = []
        for size in reversed(sizes):
            flat, step = divmod(flat, size)
            steps.append(step)
        yield tuple(reversed(steps))


def _inside(view: Strided, kept: int, steps: tuple[int, ...]) -> Strided:
    moved = sum(step * stride for step, stride in zip(steps, view.strides[:kept], strict=True))
    return Strided(view.offset + moved, view.sizes[kept:], view.strides[kept:])


def schedule(
    segments: Iterable[tuple[str, Segment]], policy: ReadPolicy, *, staging_bytes: int, start_at: float = 0.0
) -> list[ReadRequest]:
    """Requests, in the order of the files and of the bytes in them.

    Neighbours are joined when the gap is at most ``policy.max_gap_bytes``, gaps are a small part of the whole,
    nothing overlaps, and what must be staged (gaps included) fits ``staging_bytes``. Strided segments stay among
    themselves: they may be copied another way.

    Args:
        segments: with the file each lies in.
        policy: the storage's.
        staging_bytes: of one worker.
        start_at: the fraction of the list to begin with, so that ranks do not all begin with the same file.
    """
    ordered = sorted(segments, key=lambda item: (item[0], item[1].bytes.start, item[1].bytes.stop))
    firsts = firsts_of_requests(
        [segment.bytes.start for _, segment in ordered],
        [segment.bytes.stop for _, segment in ordered],
        [0 if segment.is_direct else aligned(segment.bytes.nbytes) for _, segment in ordered],
        [(file, segment.is_strided) for file, segment in ordered],
        policy,
        staging_bytes=staging_bytes,
    )
    requests: list[ReadRequest] = []
    for first, end in itertools.pairwise([*firsts, len(ordered)]):
        joined = tuple(segment for _, segment in ordered[first:end])
        whole = ByteRange(joined[0].bytes.start, joined[-1].bytes.stop)
        requests.append(ReadRequest(ordered[first][0], whole, joined))
    begin = int(len(requests) * start_at)
    return requests[begin:] + requests[:begin]


def firsts_of_requests(
    starts: Sequence[int],
    stops: Sequence[int],
    staged: Sequence[int],
    kinds: Sequence[object],
    policy: ReadPolicy,
    *,
    staging_bytes: int,
) -> list[int]:
    """Which ranges begin a request; every other one joins the one before it, by the rule of :func:`schedule`.

    Args:
        starts: of the ranges, in order.
        stops: of the ranges.
        staged: what each takes of staging memory.
        kinds: only neighbours of equal ones are joined.
        policy: the storage's.
        staging_bytes: of one worker.
    """
    firsts: list[int] = []
    begin, last_stop, last_kind, used, gaps = 0, 0, None, 0, 0
    for number, (start, stop, own, kind) in enumerate(zip(starts, stops, staged, kinds, strict=True)):
        gap = start - last_stop
        more = aligned(max(gap, 0)) + own
        if (
            firsts
            and kind == last_kind
            and 0 <= gap <= policy.max_gap_bytes
            and stop - begin <= policy.request_bytes
            and used + more <= staging_bytes
            and (gaps + gap) * WASTE <= stop - begin
        ):
            used, gaps = used + more, gaps + gap
        else:
            firsts.append(number)
            begin, used, gaps = start, own, 0
        last_stop, last_kind = stop, kind
    return firsts


_HOST_BYTES = 4 << 20
"""What one worker stages at most for tensors in host memory: it stays in the cache between read and copy."""

_DEVICE_BYTES = 32 << 20
"""The same for tensors on an accelerator: large enough that the transfer runs at full speed."""

_LEAST_BYTES = 1 << 18
"""With less than this a worker is not worth its thread."""

_DEVICE_SLABS = 2
"""One is on its way to the device while the other is read into."""


@dataclass(frozen=True, slots=True)
class Staging:
    """The number of workers, the bytes that each can stage at once, and the host memory that all of it takes."""

    workers: int
    nbytes: int
    total_bytes: int


def staging_within(budget_bytes: int, concurrency: int, *, on_device: bool) -> Staging:
    """At most ``concurrency`` workers with staging within a budget, for tensors on an accelerator or the host."""
    slabs = _DEVICE_SLABS if on_device else 1
    workers = max(1, min(concurrency, budget_bytes // (slabs * _LEAST_BYTES)))
    share = min(_DEVICE_BYTES if on_device else _HOST_BYTES, budget_bytes // (slabs * workers))
    nbytes = max(SEGMENT_ALIGNMENT, share // SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT)
    # torch rounds pinned blocks up to a power of two; a slab that is one wastes nothing.
    if on_device:
        nbytes = 1 << (nbytes.bit_length() - 1)
    return Staging(workers, nbytes, slabs * workers * nbytes)


@dataclass(frozen=True, slots=True)
class ComputingShare:
    """How a budget is shared where values are computed: half is for blocks, half for the staging of their inputs.

    ``most_bytes`` are those of a block that each worker can make beside the others; one that cannot be cut so small
    is made alone.
    """

    staging_bytes: int
    most_bytes: int

    @classmethod
    def of(cls, budget_bytes: int, concurrency: int) -> ComputingShare:
        half = budget_bytes // 2
        return cls(half, max(1, half // staging_within(half, concurrency, on_device=False).workers))
