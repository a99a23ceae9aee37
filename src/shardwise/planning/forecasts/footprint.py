"""Which bytes of which files each rank reads, and in how many requests.

[Note: Kinds] A model has a few kinds of tensors, repeated in every layer. Tensors whose expressions are equal but
for their keys, and which are spread alike over the ranks, have the same copies with other keys in them. So the
copies, and the segments they are read by, are worked out once for each kind and position, and then moved to the
place of every tensor of that kind, all of them at once. A model of 45,000 stored tensors has about twenty kinds.
The segments of all tensors are then joined to requests, by the rules of :mod:`shardwise.planning.loads.schedule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from shardwise.conversion import (
    Computed,
    Copy,
    Expression,
    Region,
    compute_tasks,
    computes,
    copies,
    copies_and_computed,
    skeleton,
)
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.safetensors_header import TensorEntry
from shardwise.layout import LocalBox, MeshShape, Spread
from shardwise.planning.loads.schedule import aligned, firsts_of_requests, segments_of
from shardwise.planning.loads.staging import ComputingShare, staging_within
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import Box, DType, numel

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one rank reads of a checkpoint, headers not counted.

    ``needed_bytes`` are those of the stored elements that its shards are made of, ``read_bytes`` those of the
    ranges that are asked for, with the gaps that are read over. ``reads`` counts requests.
    """

    needed_bytes: int
    read_bytes: int
    reads: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """A tensor to read: what it is made of, how it is spread over the positions, its dtype and where it lives.

    ``fetched`` has, by rank, what each reads of it where ranks share their reads; None where each reads its own.
    """

    expression: Expression
    spread: Spread
    dtype: DType
    on_device: bool
    fetched: Spread | None = None


@dataclass(frozen=True, slots=True)
class ReadPart:
    """A box that one rank reads of a tensor of this dtype, into host memory, whoever holds it."""

    expression: Expression
    dtype: DType
    box: Box


class Footprints:
    """The footprints of all ranks of a mesh.

    Args:
        mesh: of the ranks.
        index: where every stored tensor lies.
        wanted: the tensors that are read.
        policy: how the storage is asked.
        budget_bytes: for staging; see :func:`~shardwise.planning.loads.staging.staging_within`.
        parts: by rank, what each reads beside ``wanted``.
    """

    def __init__(
        self,
        mesh: MeshShape,
        index: CheckpointIndex,
        wanted: Iterable[Reading],
        policy: ReadPolicy,
        budget_bytes: int,
        parts: Sequence[Sequence[ReadPart]] = (),
    ) -> None:
        self._mesh = mesh
        self._map = _FileMap(index, policy.max_gap_bytes)
        self._policy = policy
        self._staging_bytes = {
            on_device: staging_within(budget_bytes, policy.concurrency, on_device=on_device).nbytes
            for on_device in (False, True)
        }
        self._budget_bytes = budget_bytes
        self._parts = parts
        self._computing: list[Reading] = []
        kinds: dict[object, _AlikeTensors] = {}
        for item in wanted:
            if computes(item.expression):
                self._computing.append(item)
            bare, keys = skeleton(item.expression)
            kind = kinds.setdefault(
                (bare, id(item.spread), item.dtype, item.on_device, id(item.fetched)),
                _AlikeTensors(item, keys, policy, self._staging_bytes[item.on_device]),
            )
            kind.places.append([self._map.place_of(key) for key in keys])
        self._kinds = list(kinds.values())
        self._is_shared = bool(parts) or any(kind.wanted.fetched is not None for kind in self._kinds)
        self._by_position: dict[int, Footprint] = {}

    def at(self, rank: int) -> Footprint:
        """What a rank reads."""
        if self._is_shared:
            return self._footprint(rank)
        position = self._mesh.position(rank)
        if position not in self._by_position:
            self._by_position[position] = self._footprint(rank)
        return self._by_position[position]

    def _footprint(self, rank: int) -> Footprint:
        position = self._mesh.position(rank)
        passes = [
            (self.segments(rank, on_device=on_device, is_shared=is_shared), self._staging_bytes[on_device])
            for on_device, is_shared in ((False, False), (True, False), (False, True))
        ]
        computed = list(self._for_computed(position))
        passes += computed
        needed = sum(kind.needed_bytes(kind.wanted.spread.boxes[position]) for kind in self._kinds)
        requests = [_requests(segments, self._policy, staging_bytes) for segments, staging_bytes in passes]
        starts = np.concatenate([found[0] for found in requests])
        return Footprint(
            needed_bytes=needed + sum(segments.needed_bytes for segments, _ in computed),
            read_bytes=sum(int((stops - starts).sum()) for starts, stops in requests),
            reads=len(starts),
            files=self._map.files_at(starts),
        )

    def segments(self, rank: int, *, on_device: bool, is_shared: bool = False) -> Segments:
        """All that a rank reads of what is not computed, tensor by tensor, not joined yet."""
        found: list[Segments] = []
        for kind in self._kinds:
            fetched = kind.wanted.fetched
            if (kind.wanted.on_device, fetched is not None) != (on_device, is_shared):
                continue
            boxes = kind.wanted.spread.boxes[self._mesh.position(rank)] if fetched is None else fetched.boxes[rank]
            if boxes:
                found.append(kind.segments(boxes))
        if is_shared and self._parts:
            found += [self._of_part(part) for part in self._parts[rank]]
        return Segments.all_of(found)

    def _of_part(self, part: ReadPart) -> Segments:
        found: list[Segments] = []
        for copy in copies(part.expression, part.box):
            needs_staging = part.dtype != copy.leaf.dtype
            within = _within_leaf(copy, self._policy, self._staging_bytes[False], needs_staging=needs_staging)
            found.append(within.moved(np.asarray([self._map.place_of(copy.leaf.key)], np.int64)))
        return Segments.all_of(found)

    def _for_computed(self, position: int) -> Iterator[tuple[Segments, int]]:
        """What is read for each block that is computed, its inputs one after the other, and with which staging."""
        parts = (
            (number, part.leaf, part.region)
            for number, item in enumerate(self._computing)
            for held in item.spread.boxes[position]
            for part in copies_and_computed(item.expression, held.box, held.local)[1]
        )
        return self._inputs(parts, self._budget_bytes)

    def _inputs(
        self, parts: Iterable[tuple[int, Computed, Region]], budget_bytes: int
    ) -> Iterator[tuple[Segments, int]]:
        share = ComputingShare.of(budget_bytes, self._policy.concurrency)
        nbytes = staging_within(share.staging_bytes, self._policy.concurrency, on_device=False).nbytes
        for item in compute_tasks(parts, share.most_bytes):
            found: list[Segments] = []
            computed: list[tuple[int, Computed, Region]] = []
            for number, (source, box) in enumerate(zip(item.inputs, item.block.needs, strict=True)):
                copied, inner = copies_and_computed(source, box)
                computed += ((number, part.leaf, part.region) for part in inner)
                for copy in copied:
                    within = _within_leaf(copy, self._policy, nbytes, needs_staging=False)
                    found.append(within.moved(np.asarray([self._map.place_of(copy.leaf.key)], np.int64)))
            yield Segments.all_of(found), nbytes
            yield from self._inputs(computed, share.staging_bytes)


@dataclass(frozen=True, slots=True)
class Segments:
    """Ranges ``starts <= i < stops`` of bytes; ``staged`` is what each takes of staging memory.

    ``strided`` is 1 for those that are not wanted whole. Places count along all files, one after the other, with a
    distance between them. ``needed_bytes`` are wanted of all of them together: inside of a range there may be gaps,
    to be read over.
    """

    starts: _Numbers
    stops: _Numbers
    staged: _Numbers
    strided: _Numbers
    needed_bytes: int

    @classmethod
    def all_of(cls, parts: list[Segments]) -> Segments:
        """Those of all parts."""
        none = [np.zeros(0, np.int64)]
        return cls(
            np.concatenate([part.starts for part in parts] or none),
            np.concatenate([part.stops for part in parts] or none),
            np.concatenate([part.staged for part in parts] or none),
            np.concatenate([part.strided for part in parts] or none),
            sum(part.needed_bytes for part in parts),
        )

    def moved(self, places: _Numbers) -> Segments:
        """The same at every one of ``places``."""
        starts = np.add.outer(places, self.starts).ravel()
        stops = np.add.outer(places, self.stops).ravel()
        staged, strided = np.tile(self.staged, len(places)), np.tile(self.strided, len(places))
        return Segments(starts, stops, staged, strided, self.needed_bytes * len(places))


class _FileMap:
    """All files on one line, so far apart that no gap between two of them is ever read over."""

    def __init__(self, index: CheckpointIndex, max_gap_bytes: int) -> None:
        self._index = index
        self._names = list(index.files)
        sizes = [nbytes + max_gap_bytes + 1 for nbytes in index.files.values()]
        starts = list(accumulate(sizes, initial=0))[:-1]
        self._start = dict(zip(self._names, starts, strict=True))
        self._starts = np.asarray(starts, dtype=np.int64)

    def place_of(self, key: str) -> int:
        """Where a stored tensor begins."""
        entry = self._index.entries[key]
        return self._start[entry.file] + entry.start

    def files_at(self, places: _Numbers) -> tuple[str, ...]:
        """The names of the files in which these places lie."""
        found = np.unique(np.searchsorted(self._starts, places, side="right") - 1)
        return tuple(self._names[number] for number in found)


@dataclass
class _AlikeTensors:
    """Tensors made in the same way of other keys: one of them, and for each where its leaves lie."""

    wanted: Reading
    keys: tuple[str, ...]
    policy: ReadPolicy
    staging_bytes: int
    places: list[list[int]] = field(default_factory=list)
    _last: tuple[tuple[LocalBox, ...], Segments] | None = None
    _by_key: list[_Numbers] = field(default_factory=list)
    """Of each key, its places in all of the tensors; worked out once all are known."""

    def needed_bytes(self, boxes: tuple[LocalBox, ...]) -> int:
        """Stored bytes that the boxes of all of the tensors are made of."""
        if self._last is not None and self._last[0] is boxes:
            return self._last[1].needed_bytes
        stored = sum(_stored_bytes(copy) for copy in _copies(self.wanted.expression, boxes))
        return stored * len(self.places)

    def segments(self, boxes: tuple[LocalBox, ...]) -> Segments:
        """What fills the boxes of all of the tensors."""
        if self._last is not None and self._last[0] is boxes:  # a tensor that every rank holds whole
            return self._last[1]
        number_of = {key: number for number, key in enumerate(self.keys)}
        # Of stacked experts, the copies of all leaves are alike.
        alike: dict[object, tuple[Copy, list[int]]] = {}
        for copy in _copies(self.wanted.expression, boxes):
            leaf = copy.leaf
            form = (leaf.shape, leaf.dtype, copy.source, copy.target.sizes, copy.target.strides)
            alike.setdefault(form, (copy, []))[1].append(number_of[leaf.key])
        if not self._by_key:
            self._by_key = list(np.ascontiguousarray(np.asarray(self.places, np.int64).T))
        found: list[Segments] = []
        for copy, numbers in alike.values():
            needs_staging = self.wanted.on_device or self.wanted.dtype != copy.leaf.dtype
            within = _within_leaf(copy, self.policy, self.staging_bytes, needs_staging=needs_staging)
            found.append(within.moved(np.concatenate([self._by_key[number] for number in numbers])))
        made = Segments.all_of(found)
        self._last = (boxes, made)
        return made


def _copies(expression: Expression, boxes: Iterable[LocalBox]) -> Iterator[Copy]:
    """Those of stored tensors."""
    for part in boxes:
        yield from copies_and_computed(expression, part.box, part.local)[0]


def _within_leaf(copy: Copy, policy: ReadPolicy, block_bytes: int, *, needs_staging: bool) -> Segments:
    """The segments of one copy, counted from the first byte of its leaf."""
    leaf = copy.leaf
    nbytes = numel(leaf.shape) * leaf.dtype.itemsize
    entry = TensorEntry(leaf.key, leaf.dtype, leaf.shape, "", 0, nbytes)
    found = list(segments_of(copy, 0, entry, needs_staging=needs_staging, policy=policy, block_bytes=block_bytes))
    return Segments(
        np.asarray([segment.bytes.start for segment in found], np.int64),
        np.asarray([segment.bytes.stop for segment in found], np.int64),
        np.asarray([0 if segment.is_direct else aligned(segment.bytes.nbytes) for segment in found], np.int64),
        np.asarray([segment.is_strided for segment in found], np.int64),
        _stored_bytes(copy),
    )


def _stored_bytes(copy: Copy) -> int:
    return copy.numel * copy.leaf.dtype.itemsize


def _requests(segments: Segments, policy: ReadPolicy, staging_bytes: int) -> tuple[_Numbers, _Numbers]:
    """(starts, stops) of the requests that :func:`~shardwise.planning.loads.schedule.schedule` makes of them.

    Most lie alone, or side by side with few others: these are joined all at once, and the others one by one.
    """
    if not len(segments.starts):
        return segments.starts, segments.stops
    order = np.lexsort((segments.stops, segments.starts))
    starts, stops, staged = segments.starts[order], segments.stops[order], segments.staged[order]
    strided = segments.strided[order]
    gaps = starts[1:] - stops[:-1]
    apart = (gaps < 0) | (gaps > policy.max_gap_bytes) | (strided[1:] != strided[:-1])
    first = np.flatnonzero(np.concatenate(([True], apart)))
    last = np.concatenate((first[1:], [len(starts)])) - 1
    lengths = stops[last] - starts[first]
    # Side by side: no gap is left over when all that is asked for is taken from the length.
    is_dense = np.add.reduceat(stops - starts, first) == lengths
    fits = (lengths <= policy.request_bytes) & (np.add.reduceat(staged, first) <= staging_bytes)
    whole = (first == last) | (is_dense & fits)
    joined = [(starts[first[whole]], stops[last[whole]])]
    for begin, end in zip(first[~whole].tolist(), last[~whole].tolist(), strict=True):
        part = slice(begin, end + 1)
        firsts = firsts_of_requests(
            starts[part].tolist(),
            stops[part].tolist(),
            staged[part].tolist(),
            strided[part].tolist(),
            policy,
            staging_bytes=staging_bytes,
        )
        joined.append((starts[part][firsts], stops[part][[*(number - 1 for number in firsts[1:]), -1]]))
    return np.concatenate([found[0] for found in joined]), np.concatenate([found[1] for found in joined])
