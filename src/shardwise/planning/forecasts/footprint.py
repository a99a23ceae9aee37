"""Which bytes of which files each rank reads, and in how many requests.

[Note: Kinds] A model has a few kinds of tensors, repeated in every layer. Tensors whose expressions are equal but
for their keys, and which are spread alike over the ranks, have the same copies with other keys in them. So the
copies, and the segments they are read by, are worked out once for each kind and position, and then moved to the
place of every tensor of that kind, all of them at once. A model of 45,000 stored tensors has about twenty kinds.
Of stacked experts that no rank has some of, each expert is such a tensor by itself. The segments of all tensors are
then joined to requests, by the rules of :mod:`shardwise.planning.loads.schedule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from shardwise.conversion import (
    Copy,
    Expression,
    Stored,
    computes,
    copies,
    copies_and_computed,
    leaves_of,
    rows_apart,
    skeleton,
)
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.layout import LocalBox, MeshShape, Spread
from shardwise.planning.forecasts.computed_reads import ComputedReads
from shardwise.planning.forecasts.segments import Numbers, Segments, requests, stored_bytes, within_leaf
from shardwise.planning.loads.schedule import staging_within
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import Box, DType, Strided


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
        budget_bytes: for staging; see :func:`~shardwise.planning.loads.schedule.staging_within`.
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
        self._parts = parts
        computing: list[tuple[Expression, Spread]] = []
        kinds: dict[object, _AlikeTensors] = {}
        for item in wanted:
            if computes(item.expression):
                computing.append((item.expression, item.spread))
                if not any(isinstance(leaf, Stored) for leaf in leaves_of(item.expression)):
                    continue
            bare, keys = skeleton(item.expression)
            kind = kinds.setdefault(
                (bare, id(item.spread), item.dtype, item.on_device, id(item.fetched)),
                _AlikeTensors(item, keys, policy, self._staging_bytes[item.on_device]),
            )
            kind.places.append([self._map.place_of(key) for key in keys])
        self._kinds = list(kinds.values())
        self._computed = ComputedReads(computing, self._map.place_of, policy, budget_bytes)
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
        computed = self._computed.at(position)
        needed = sum(kind.needed_bytes(kind.wanted.spread.boxes[position]) for kind in self._kinds)
        found = [requests(segments, self._policy, staging_bytes) for segments, staging_bytes in passes]
        found.append((computed.starts, computed.stops))
        starts = np.concatenate([item[0] for item in found])
        return Footprint(
            needed_bytes=needed + computed.needed_bytes,
            read_bytes=sum(int((stops - starts).sum()) for starts, stops in found),
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
            within = within_leaf(copy, self._policy, self._staging_bytes[False], needs_staging=needs_staging)
            found.append(within.moved(np.asarray([self._map.place_of(copy.leaf.key)], np.int64)))
        return Segments.all_of(found)


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

    def files_at(self, places: Numbers) -> tuple[str, ...]:
        """The names of the files in which these places lie."""
        before = np.searchsorted(np.sort(places, kind="stable"), self._starts)  # nearly in order: one pass
        counts = np.diff(before, append=len(places))
        return tuple(self._names[number] for number in np.flatnonzero(counts))


@dataclass(frozen=True, slots=True)
class _Part:
    """What several parts of a tensor are made of but for their keys: of one, and for each key those of all."""

    expression: Expression
    numbers: dict[str, list[int]]


@dataclass
class _AlikeTensors:
    """Tensors made in the same way of other keys: one of them, and for each where its leaves lie."""

    wanted: Reading
    keys: tuple[str, ...]
    policy: ReadPolicy
    staging_bytes: int
    places: list[list[int]] = field(default_factory=list)
    _last: tuple[tuple[LocalBox, ...], Segments] | None = None
    _by_key: list[Numbers] = field(default_factory=list)
    """Of each key, its places in all of the tensors; worked out once all are known."""

    def needed_bytes(self, boxes: tuple[LocalBox, ...]) -> int:
        """Stored bytes that the boxes of all of the tensors are made of."""
        if self._last is not None and self._last[0] is boxes:
            return self._last[1].needed_bytes
        stored = sum(stored_bytes(copy) for copy in _copies(self.wanted.expression, boxes))
        return stored * len(self.places)

    def segments(self, boxes: tuple[LocalBox, ...]) -> Segments:
        """What fills the boxes of all of the tensors."""
        if self._last is not None and self._last[0] is boxes:  # a tensor that every rank holds whole
            return self._last[1]
        # Of stacked experts, the copies of all leaves are alike.
        alike: dict[object, tuple[Copy, list[int]]] = {}
        inner = [_below(part) for part in boxes if part.box.numel] if self._is_apart else boxes
        for part in self._parts:
            for copy in _copies(part.expression, inner):
                leaf = copy.leaf
                form = (leaf.shape, leaf.dtype, copy.source, copy.target.sizes, copy.target.strides)
                alike.setdefault(form, (copy, []))[1].extend(part.numbers[leaf.key])
        if not self._by_key:
            self._by_key = list(np.ascontiguousarray(np.asarray(self.places, np.int64).T))
        found: list[Segments] = []
        for copy, numbers in alike.values():
            needs_staging = self.wanted.on_device or self.wanted.dtype != copy.leaf.dtype
            within = within_leaf(copy, self.policy, self.staging_bytes, needs_staging=needs_staging)
            found.append(within.moved(np.concatenate([self._by_key[number] for number in numbers])))
        made = Segments.all_of(found)
        self._last = (boxes, made)
        return made

    @cached_property
    def _parts(self) -> list[_Part]:
        """The tensor, or the parts that :attr:`_is_apart` tells of, those that are alike as one."""
        rows = rows_apart(self.wanted.expression) if self._is_apart else None
        number_of = {key: number for number, key in enumerate(self.keys)}
        found: dict[object, tuple[_Part, tuple[str, ...]]] = {}
        for row in rows or (self.wanted.expression,):
            bare, keys = skeleton(row)
            part, names = found.setdefault(bare, (_Part(row, {key: [] for key in keys}), keys))
            for name, key in zip(names, keys, strict=True):
                part.numbers[name].append(number_of[key])
        return [part for part, _ in found.values()]

    @cached_property
    def _is_apart(self) -> bool:
        """Whether indices of the first dimension are tensors by themselves, of which each rank has all or none."""
        expression = self.wanted.expression
        if self.wanted.fetched is not None or computes(expression) or rows_apart(expression) is None:
            return False
        boxes = [part.box for held in self.wanted.spread.boxes for part in held]
        return all(box.numel == 0 or box.sizes[0] == expression.shape[0] for box in boxes)


def _below(part: LocalBox) -> LocalBox:
    """The same of one index of the first dimension."""
    box, local = part.box, part.local
    return LocalBox(Box(box.offsets[1:], box.sizes[1:]), Strided(local.offset, local.sizes[1:], local.strides[1:]))


def _copies(expression: Expression, boxes: Iterable[LocalBox]) -> Iterator[Copy]:
    """Those of stored tensors."""
    for part in boxes:
        yield from copies_and_computed(expression, part.box, part.local)[0]
