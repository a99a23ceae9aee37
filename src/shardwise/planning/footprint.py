"""Which bytes of which files each rank reads.

[Note: Kinds] A model has a few kinds of tensors, repeated in every layer. Tensors whose expressions are equal but
for their keys, and which are spread alike over the ranks, have the same copies with other keys in them. So the
copies are worked out once for each kind and position, and then moved to the place of every tensor of that kind,
all of them at once. A model of 45,000 stored tensors has about twenty kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from shardwise.conversion import Copy, Expression, Opaque, Stored, copies, skeleton
from shardwise.formats import CheckpointIndex
from shardwise.layout import LocalBox, Spread
from shardwise.storage import ReadPolicy
from shardwise.tensors import Strided, numel

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


class Footprints:
    """The footprints of all positions of a mesh.

    Args:
        index: where every stored tensor lies.
        wanted: what each tensor is made of, and how it is spread over the positions.
        policy: how the storage is asked: what gaps are read over, and how much one request asks for.
    """

    def __init__(
        self, index: CheckpointIndex, wanted: Iterable[tuple[Expression, Spread]], policy: ReadPolicy
    ) -> None:
        self._policy = policy
        self._map = _FileMap(index, policy.max_gap_bytes)
        kinds: dict[object, _Kind] = {}
        self._computed: dict[int, _Computed] = {}
        for expression, spread in wanted:
            if isinstance(expression, Opaque):
                computed = self._computed.setdefault(id(expression.operation), _Computed(expression))
                computed.spreads.append(spread)
                continue
            bare, keys = skeleton(expression)
            kind = kinds.setdefault((bare, id(spread)), _Kind(expression, keys, spread))
            kind.places.append([self._map.place_of(key) for key in keys])
        self._kinds = [(kind, np.asarray(kind.places, dtype=np.int64)) for kind in kinds.values()]

    def at(self, position: int) -> Footprint:
        """What a rank at this position of the shard axis reads."""
        wanted = self.ranges(position)
        if not len(wanted.starts):
            return Footprint(0, 0, 0, ())
        order = np.argsort(wanted.starts, kind="stable")
        starts, reach = wanted.starts[order], np.maximum.accumulate(wanted.stops[order])
        apart = starts[1:] > reach[:-1] + self._policy.max_gap_bytes
        firsts = starts[np.concatenate(([True], apart))]
        lengths = reach[np.concatenate((apart, [True]))] - firsts
        requests = -(-lengths // self._policy.request_bytes)
        files = self._map.files_at(firsts)
        return Footprint(wanted.needed_bytes, int(lengths.sum()), int(requests.sum()), files)

    def ranges(self, position: int) -> Ranges:
        """All that a rank at this position wants, tensor by tensor, not joined yet."""
        found: list[Ranges] = []
        for kind, places in self._kinds:
            if boxes := kind.spread.boxes[position]:
                wanted = kind.ranges(boxes, self._policy.max_gap_bytes)
                moved = places[:, wanted.leaves]
                starts, stops = (moved + wanted.starts).ravel(), (moved + wanted.stops).ravel()
                found.append(Ranges(starts, stops, wanted.needed_bytes * len(places)))
        for computed in self._computed.values():
            if any(spread.boxes[position] for spread in computed.spreads):
                found.append(self._whole_inputs(computed.leaf))
        if not found:
            return Ranges(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
        return Ranges(
            np.concatenate([item.starts for item in found]),
            np.concatenate([item.stops for item in found]),
            sum(item.needed_bytes for item in found),
        )

    def _whole_inputs(self, leaf: Opaque) -> Ranges:
        sizes = np.asarray([numel(stored.shape) * stored.dtype.itemsize for stored in leaf.inputs], np.int64)
        starts = np.asarray([self._map.place_of(stored.key) for stored in leaf.inputs], np.int64)
        return Ranges(starts, starts + sizes, int(sizes.sum()))


@dataclass(frozen=True, slots=True)
class Ranges:
    """Bytes ``starts <= i < stops``, and how many of them are wanted: those between may be gaps to be read over.

    Places count along all files, one after the other, with a distance between them.
    """

    starts: _Numbers
    stops: _Numbers
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class _LeafRanges:
    """Ranges inside of leaves: ``leaves`` has the number of each one's leaf, from whose first byte it counts."""

    leaves: _Numbers
    starts: _Numbers
    stops: _Numbers
    needed_bytes: int


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
class _Kind:
    """Tensors made in the same way of other keys: one of them, and for each where its leaves lie."""

    expression: Expression
    keys: tuple[str, ...]
    spread: Spread
    places: list[list[int]] = field(default_factory=list)
    _last: tuple[tuple[LocalBox, ...], _LeafRanges] | None = None

    def ranges(self, boxes: tuple[LocalBox, ...], max_gap_bytes: int) -> _LeafRanges:
        """What fills the boxes of one of the tensors."""
        if self._last is not None and self._last[0] is boxes:  # a tensor that every rank holds whole
            return self._last[1]
        number_of = {key: number for number, key in enumerate(self.keys)}
        parts: list[_LeafRanges] = []
        for copy in _copies(self.expression, boxes):
            assert isinstance(copy.leaf, Stored)  # an opaque leaf is never below another node
            itemsize = copy.leaf.dtype.itemsize
            run, offsets = _runs(copy.source, max_gap_bytes // itemsize)
            leaves = np.full(len(offsets), number_of[copy.leaf.key], np.int64)
            starts = offsets * itemsize
            parts.append(_LeafRanges(leaves, starts, starts + run * itemsize, copy.numel * itemsize))
        found = _LeafRanges(
            np.concatenate([part.leaves for part in parts]),
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.stops for part in parts]),
            sum(part.needed_bytes for part in parts),
        )
        self._last = (boxes, found)
        return found


@dataclass
class _Computed:
    """An operation that reads its inputs whole, and how its outputs are spread."""

    leaf: Opaque
    spreads: list[Spread] = field(default_factory=list)


def _copies(expression: Expression, boxes: Iterable[LocalBox]) -> Iterator[Copy]:
    for part in boxes:
        yield from copies(expression, part.box, part.local)


def _runs(source: Strided, max_gap: int) -> tuple[int, _Numbers]:
    """(length of each run, where the runs begin), in elements; gaps up to ``max_gap`` belong to a run."""
    run = 1
    offsets = np.asarray([source.offset], np.int64)
    for size, stride in zip(reversed(source.sizes), reversed(source.strides), strict=True):
        if len(offsets) == 1 and stride - run <= max_gap:
            run += (size - 1) * stride
        else:
            offsets = np.add.outer(np.arange(size, dtype=np.int64) * stride, offsets).ravel()
    return run, offsets
