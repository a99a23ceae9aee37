"""Pushes boxes down to the leaves: what is copied from where to where, and what is computed for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.conversion.computed import Computed
from shardwise.conversion.expression import Expression, Stored
from shardwise.conversion.region import Region
from shardwise.tensors import Box, Strided, contiguous_strides


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a stored tensor, and where they go.

    ``source`` counts elements of the leaf as it is stored (row-major), ``target`` counts elements of the memory
    the box was asked into. Both have the same ``sizes``, iterated in the same order.
    """

    leaf: Stored
    source: Strided
    target: Strided

    @property
    def numel(self) -> int:
        return self.source.numel

    def blocks(self, max_span: int) -> Iterator[Copy]:
        """The same copy in parts, none of which spans more than ``max_span`` (at least 1) elements of the leaf."""
        span = self.source.stop - self.source.offset
        if span <= max_span:
            yield self
            return
        axis = max(range(len(self.source.sizes)), key=lambda item: self.source.strides[item])
        size, stride = self.source.sizes[axis], self.source.strides[axis]
        rest = span - stride * (size - 1)
        steps = max(1, (max_span - rest) // stride + 1)
        for first in range(0, size, steps):
            count = min(steps, size - first)
            yield from Copy(
                self.leaf, _along(self.source, axis, first, count), _along(self.target, axis, first, count)
            ).blocks(max_span)


@dataclass(frozen=True, slots=True)
class ComputedPart:
    """Elements of something computed, and where they go."""

    leaf: Computed
    region: Region


def copies_and_computed(
    expression: Expression, box: Box, into: Strided | None = None
) -> tuple[list[Copy], list[ComputedPart]]:
    """What fills ``box`` of the expression, each of its elements exactly once, but for those of a hole.

    ``into`` says where the box lies in the target's memory (default: a contiguous tensor of the box's sizes).
    An empty box needs nothing.
    """
    if not box.is_within(expression.shape):
        raise ValueError(f"{box} is not within {expression.shape}")
    into = Strided.contiguous(box.sizes) if into is None else into
    if into.sizes != box.sizes:
        raise ValueError(f"{into} does not have the sizes of {box}")
    copied: list[Copy] = []
    computed: list[ComputedPart] = []
    if box.numel == 0:
        return copied, computed
    last: tuple[object, ...] = ()
    source = target = into
    for leaf, region in expression.leaves(Region.of(box, into)):
        if isinstance(leaf, Stored):
            way = (region.axes, region.origin, leaf.shape)
            if way != last:
                source, target = region.strided(contiguous_strides(leaf.shape))
                last = way
            copied.append(Copy(leaf, source, Strided(region.target, target.sizes, target.strides)))
        else:
            assert isinstance(leaf, Computed)
            computed.append(ComputedPart(leaf, region))
    return copied, computed


def copies(expression: Expression, box: Box, into: Strided | None = None) -> list[Copy]:
    """The copies that fill a box of an expression that computes nothing; see :func:`copies_and_computed`.

    Raises:
        ValueError: something in the box is computed.
    """
    copied, computed = copies_and_computed(expression, box, into)
    if computed:
        raise ValueError(f"{computed[0].leaf} is computed, not copied")
    return copied


def pieces(
    expression: Expression, held: Mapping[str, Sequence[tuple[Box, Strided]]], box: Box | None = None
) -> Iterator[Copy]:
    """The copies that take what is ``held`` of the leaves to its places in a box of the expression.

    The other direction of :func:`copies`: here ``source`` counts elements of the memory in which a leaf's box is
    held, and ``target`` those of a row-major tensor of the box's sizes. Together, the holders of all of a leaf make
    all elements that the box has of it.

    Args:
        expression: of stored tensors; what it computes is left out.
        held: by key, boxes of the leaf (without overlap) and where each lies in memory.
        box: of the expression; None is all of it.
    """
    box = Box.whole(expression.shape) if box is None else box
    if not box.is_within(expression.shape):
        raise ValueError(f"{box} is not within {expression.shape}")
    if box.numel == 0:
        return
    for leaf, region in expression.leaves(Region.of(box, Strided.contiguous(box.sizes))):
        if not isinstance(leaf, Stored):
            continue
        for part, memory in held.get(leaf.key, ()):
            for piece in region.within(part):
                yield Copy(leaf, *piece.strided(memory.strides, memory.offset))


def _along(view: Strided, axis: int, first: int, count: int) -> Strided:
    """``count`` steps of one axis from ``first`` on; the axis goes where there is one step only."""
    offset = view.offset + first * view.strides[axis]
    middle = ((count,), (view.strides[axis],)) if count > 1 else ((), ())
    sizes = view.sizes[:axis] + middle[0] + view.sizes[axis + 1 :]
    return Strided(offset, sizes, view.strides[:axis] + middle[1] + view.strides[axis + 1 :])
