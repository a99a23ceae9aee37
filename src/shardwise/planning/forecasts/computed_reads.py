"""Which bytes are read for what is computed, block by block.

As for copies ([Note: Kinds]), tensors of equal layers share what is worked out, and so do the parts of one tensor:
of stacked experts, one on every rank, all are computed in the same blocks. The inputs of a block are read by
themselves, and so their segments are joined among themselves only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardwise.conversion import (
    Axis,
    Computed,
    Expression,
    Operation,
    Region,
    apart,
    computed_leaves,
    copies_and_computed,
    skeletons,
)
from shardwise.layout import Spread
from shardwise.planning.forecasts.segments import Numbers, Segments, joined, within_leaf
from shardwise.planning.loads.schedule import ComputingShare, staging_within
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import Box

_Wanted: TypeAlias = dict[str, list[Box]]
"""Of a computation, by output."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Requests, and the bytes that are needed of what they bring."""

    starts: Numbers
    stops: Numbers
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class _BlockReads:
    """The segments of the inputs of a block, each counted from the first byte of its leaf.

    ``leaves`` says of which leaf each is, counted among those of the computation.
    """

    segments: Segments
    leaves: Numbers
    staging_bytes: int


_Ways: TypeAlias = tuple[tuple[str, tuple[int, ...], tuple[Axis, ...]], ...]
"""Of outputs, which of their elements: regions of them, wherever these go."""


@dataclass(frozen=True, slots=True)
class _Computation:
    """An operation on its inputs; ``leaves`` are numbers among those of the tensors that it is computed for.

    ``alike`` is equal for equal operations on inputs that are alike but for their keys.
    """

    operation: Operation
    inputs: tuple[Expression, ...]
    keys: tuple[str, ...]
    leaves: tuple[int, ...]
    alike: int


@dataclass
class _Kind:
    """Tensors that are alike but for their keys: one of every layer, or several whose values are made at once.

    ``computations`` are those of the first ones, by the id of what of theirs is computed.
    """

    wanted: tuple[tuple[Expression, Spread], ...]
    computations: Mapping[int, _Computation]


class ComputedReads:
    """What is read for the tensors of a model that are computed, or in part.

    Args:
        wanted: expressions that compute, and how each is spread over the positions.
        place_of: where a stored tensor begins.
        policy: how the storage is asked.
        budget_bytes: of a load.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[Expression, Spread]],
        place_of: Callable[[str], int],
        policy: ReadPolicy,
        budget_bytes: int,
    ) -> None:
        self._policy, self._budget_bytes = policy, budget_bytes
        self._alike: dict[Hashable, int] = {}
        self._known: dict[Hashable, list[_BlockReads]] = {}
        kinds: dict[Hashable, tuple[_Kind, list[list[int]]]] = {}
        for group in _computed_together(wanted):
            forms, keys = skeletons([expression for expression, _ in group])
            kind = (forms, tuple(id(spread) for _, spread in group))
            if kind not in kinds:
                kinds[kind] = _Kind(tuple(group), self._computations([item for item, _ in group], keys)), []
            kinds[kind][1].append([place_of(key) for key in keys])
        self._kinds = [(kind, np.asarray(places, np.int64)) for kind, places in kinds.values()]

    def _computations(self, expressions: Sequence[Expression], keys: Sequence[str]) -> dict[int, _Computation]:
        number_of = {key: number for number, key in enumerate(keys)}
        made: dict[Hashable, _Computation] = {}
        found: dict[int, _Computation] = {}
        for expression in expressions:
            for leaf in computed_leaves(expression):
                computation = (leaf.operation, leaf.sources)
                if computation not in made:
                    forms, own = skeletons(leaf.sources)
                    alike = self._alike.setdefault((leaf.operation, forms), len(self._alike))
                    numbers = tuple(number_of[key] for key in own)
                    made[computation] = _Computation(leaf.operation, leaf.sources, own, numbers, alike)
                found[id(leaf)] = made[computation]
        return found

    def at(self, position: int) -> Reads:
        """What is read for what one position holds."""
        found = [
            _requests(block, begins, self._policy)
            for kind, places in self._kinds
            for blocks, leaves in self._of_kind(kind, position)
            for begins in [places[:, leaves].reshape(-1, len(leaves[0]))]
            for block in blocks
        ]
        none = np.zeros(0, np.int64)
        return Reads(
            np.concatenate([none, *(item.starts for item in found)]),
            np.concatenate([none, *(item.stops for item in found)]),
            sum(item.needed_bytes for item in found),
        )

    def _of_kind(self, kind: _Kind, position: int) -> Iterable[tuple[list[_BlockReads], list[tuple[int, ...]]]]:
        """What is read for one of them, and the leaves of all of its computations of which just that is read."""
        asked: dict[int, tuple[_Computation, _Ways]] = {}
        ways: _Ways = (("", (), ()),)
        for expression, spread in kind.wanted:
            for held in spread.boxes[position]:
                for leaf, region in expression.leaves(Region.of(held.box, held.local)):
                    computation = kind.computations.get(id(leaf))
                    if computation is None:
                        continue  # stored
                    assert isinstance(leaf, Computed)
                    # Of hundreds of experts, all are asked for the same: one object says so.
                    if ways[0] != (way := (leaf.output, region.origin, region.axes)):
                        ways = (way,)
                    before = asked.get(id(computation))
                    asked[id(computation)] = computation, (ways if before is None else (*before[1], way))
        found: dict[int, tuple[list[_BlockReads], list[tuple[int, ...]]]] = {}
        last: tuple[int, _Ways] = -1, ways
        leaves: list[tuple[int, ...]] = []
        for computation, own in asked.values():
            if last[0] != computation.alike or last[1] is not own:
                last = computation.alike, own
                known = self._known_reads(computation, own)
                leaves = found.setdefault(id(known), (known, []))[1]
            leaves.append(computation.leaves)
        return found.values()

    def _known_reads(self, computation: _Computation, ways: _Ways) -> list[_BlockReads]:
        key = (computation.alike, ways)
        if key not in self._known:
            wanted: _Wanted = {}
            for output, origin, axes in ways:
                wanted.setdefault(output, []).append(Region(origin, 0, axes).bounds)
            number_of = {name: number for number, name in enumerate(computation.keys)}
            operation, inputs = computation.operation, computation.inputs
            self._known[key] = list(self._reads(operation, inputs, wanted, number_of, self._budget_bytes))
        return self._known[key]

    def _reads(
        self,
        operation: Operation,
        inputs: Sequence[Expression],
        wanted: _Wanted,
        number_of: dict[str, int],
        budget_bytes: int,
    ) -> Iterator[_BlockReads]:
        share = ComputingShare.of(budget_bytes, self._policy.concurrency)
        nbytes = staging_within(share.staging_bytes, self._policy.concurrency, on_device=False).nbytes
        apart_from_others = {output: apart(boxes) for output, boxes in wanted.items()}
        for block in operation.blocks(apart_from_others, share.most_bytes):
            leaves: list[int] = []
            found: list[Segments] = []
            computed: list[tuple[Computed, Box]] = []
            for source, box in zip(inputs, block.needs, strict=True):
                copied, inner = copies_and_computed(source, box)
                computed += ((part.leaf, part.region.bounds) for part in inner)
                for copy in copied:
                    found.append(within_leaf(copy, self._policy, nbytes, needs_staging=False))
                    leaves += [number_of[copy.leaf.key]] * len(found[-1].starts)
            if leaves:
                yield _BlockReads(Segments.all_of(found), np.asarray(leaves, np.int64), nbytes)
            for item in _by_computation(computed):
                yield from self._reads(*item, number_of, share.staging_bytes)


def _by_computation(
    parts: Iterable[tuple[Computed, Box]],
) -> Iterator[tuple[Operation, tuple[Expression, ...], _Wanted]]:
    groups: dict[tuple[Operation, tuple[Expression, ...]], _Wanted] = {}
    for leaf, box in parts:
        groups.setdefault((leaf.operation, leaf.sources), {}).setdefault(leaf.output, []).append(box)
    return ((operation, inputs, wanted) for (operation, inputs), wanted in groups.items())


def _computed_together(
    wanted: Sequence[tuple[Expression, Spread]],
) -> Iterable[list[tuple[Expression, Spread]]]:
    """Those together that are outputs of one computation, whose blocks are made once for all of them."""
    group_of: dict[Hashable, int] = {}
    groups: dict[int, list[tuple[Expression, Spread]]] = {}
    for number, item in enumerate(wanted):
        computations = {(leaf.operation, leaf.sources) for leaf in computed_leaves(item[0])}
        others = {group_of[computation] for computation in computations if computation in group_of}
        members = [member for other in sorted(others) for member in groups.pop(other)]
        groups[number] = [*members, item]
        for computation, other in group_of.items() if others else ():
            if other in others:
                group_of[computation] = number
        group_of.update(dict.fromkeys(computations, number))
    return groups.values()


def _requests(block: _BlockReads, begins: Numbers, policy: ReadPolicy) -> Reads:
    """The requests of alike blocks; ``begins`` has, for each of them, where its leaves begin."""
    segments, places = block.segments, begins[:, block.leaves]
    starts, stops = places + segments.starts, places + segments.stops
    needed = segments.needed_bytes * len(begins)
    gaps = starts[:, 1:] - stops[:, :-1]
    if (gaps <= policy.max_gap_bytes).any():  # or they are not in order
        order = np.lexsort((stops, starts), axis=-1)
        starts, stops, staged, strided = (
            np.take_along_axis(np.broadcast_to(own, starts.shape), order, axis=1)
            for own in (starts, stops, segments.staged, segments.strided)
        )
        first = np.zeros(starts.shape, bool)
        first[:, 0] = True
        ordered = Segments(starts.ravel(), stops.ravel(), staged.ravel(), strided.ravel(), needed)
        return Reads(*joined(ordered, first.ravel(), policy, block.staging_bytes), needed)
    return Reads(starts.ravel(), stops.ravel(), needed)
