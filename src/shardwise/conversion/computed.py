"""Copies and computations that fill a box: the box is pushed down to leaves and to nodes that compute.

[Note: Blocks] An operation maps boxes of its inputs to boxes of its outputs. Boxes are counted in full tensors,
never in a shard, so a scale always belongs to the same elements, regardless of the sharding. Executors divide the
requested box into such blocks, read the inputs of a block, evaluate it, and move the results to their places,
within a memory budget. An operation that can writes its outputs straight to these places, in the dtype that is
wanted there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardwise.conversion.expression import Expression, Leaf, Shape, Stored, leaves_of
from shardwise.conversion.regions import Region
from shardwise.errors import FormatError
from shardwise.tensors import Box, DType, Strided, contiguous_strides, numel


@dataclass(frozen=True, slots=True)
class ComputedBlock:
    """A step of a computation.

    Attributes:
        needs: a box of each input, in their order.
        gives: by output, the box that is made.
        nbytes: memory of the computation: inputs, outputs, and intermediate values.
    """

    needs: tuple[Box, ...]
    gives: Mapping[str, Box]
    nbytes: int


class BadValues(FormatError):
    """An operation cannot make anything of the values that it was given.

    It has no names of tensors. :class:`ComputeTask` adds the name of the input.

    Args:
        source: the number of the input.
    """

    def __init__(self, message: str, source: int = 0) -> None:
        super().__init__(message)
        self.source = source


class Operation(Hashable, Protocol):
    """Computation of outputs from inputs. Equal operations on equal inputs are one computation.

    Attributes:
        label: its name, for messages.
    """

    @property
    def label(self) -> str: ...

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        """Blocks that together give all that is wanted of each output, each of its elements once.

        They may give more. Each has at most ``most_bytes`` where the operation can be cut so small. Pure.
        """
        ...

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        """Return the values of a block, by output.

        ``values`` are the boxes that it needs, as contiguous CPU tensors in the dtypes of the inputs. May be called
        by several threads at once.
        """
        ...


@dataclass(frozen=True, slots=True)
class Computed(Leaf):
    """One output of an operation. ``dtype`` is the one in which it is evaluated."""

    operation: Operation
    output: str
    shape: Shape
    dtype: DType
    sources: tuple[Expression, ...]

    @property
    def form(self) -> Hashable:
        return "computed", self.operation, self.output, self.shape

    def over(self, sources: Sequence[Expression]) -> Expression:
        return Computed(self.operation, self.output, self.shape, self.dtype, tuple(sources))

    def __str__(self) -> str:
        return f"{self.operation.label}({', '.join(map(str, self.sources))})[{self.output}]"


@dataclass(frozen=True, slots=True, eq=False)
class WholeOperation:
    """An operation that is run once, on its inputs whole, and makes all of its outputs.

    ``function`` takes the inputs in their order. ``nbytes`` is the memory that it needs.
    """

    label: str
    inputs: tuple[Shape, ...]
    outputs: Mapping[str, Shape]
    function: Callable[[Sequence[Any]], Mapping[str, Any]]
    nbytes: int

    def blocks(self, wanted: Mapping[str, Sequence[Box]], _most_bytes: int) -> Iterator[ComputedBlock]:
        if any(wanted.values()):
            gives = {name: Box.whole(shape) for name, shape in self.outputs.items()}
            yield ComputedBlock(tuple(map(Box.whole, self.inputs)), gives, self.nbytes)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        return self.function(values)


@dataclass(frozen=True, slots=True)
class OutputMove:
    """Elements of a block's output, counted in its box, and their places in a target's memory."""

    target: int
    output: str
    source: Strided
    place: Strided


@dataclass(frozen=True, slots=True)
class ComputeTask:
    """A block to compute from these inputs, and the places of its outputs."""

    operation: Operation
    inputs: tuple[Expression, ...]
    block: ComputedBlock
    moves: tuple[OutputMove, ...]

    @property
    def key(self) -> object:
        """Equal where the same is computed."""
        return self.operation, self.inputs, self.block

    def evaluate(self, values: Sequence[Any]) -> Mapping[str, Any]:
        """Return the values of the block, by output, for the boxes that it needs (:meth:`Operation.evaluate`).

        Raises:
            FormatError: with the name of an input, where the operation finds bad values in it.
        """
        try:
            return self.operation.evaluate(self.block, values)
        except BadValues as error:
            raise FormatError(f"{self.inputs[error.source]}: {self.operation.label}: {error}") from error


def compute_tasks(parts: Iterable[tuple[int, Computed, Region]], most_bytes: int) -> Iterator[ComputeTask]:
    """Yield the computations that fill parts of targets, given as (number of the target, leaf, region of it).

    Each block is computed once.
    """
    groups: dict[tuple[Operation, tuple[Expression, ...]], list[tuple[int, Computed, Region]]] = {}
    for part in parts:
        groups.setdefault((part[1].operation, part[1].sources), []).append(part)
    for (operation, inputs), group in groups.items():
        wanted: dict[str, list[Box]] = {}
        for _, leaf, region in group:
            wanted.setdefault(leaf.output, []).append(region.bounds)
        for block in operation.blocks({name: apart(boxes) for name, boxes in wanted.items()}, most_bytes):
            moves = [
                OutputMove(target, leaf.output, *piece.strided(contiguous_strides(block.gives[leaf.output].sizes)))
                for target, leaf, region in group
                if leaf.output in block.gives
                for piece in region.within(block.gives[leaf.output])
            ]
            yield ComputeTask(operation, inputs, block, tuple(moves))


class SmallestBlocks:
    """Smallest memory in which leaves can be computed, in bytes, cached for equal ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[Operation, str, Shape], int] = {}

    def nbytes(self, leaf: Computed) -> int:
        """Return the bytes of one leaf and its inputs."""
        key = (leaf.operation, leaf.output, leaf.shape)
        if key not in self._known:
            first = next(leaf.operation.blocks({leaf.output: [Box.whole(leaf.shape)]}, 1), None)
            self._known[key] = 0 if first is None else first.nbytes
        inner = sum(self.nbytes(found) for item in leaf.sources for found in computed_leaves(item))
        return self._known[key] + inner


def computed_leaves(expression: Expression) -> Iterator[Computed]:
    """Yield the outermost computed nodes of an expression, without the nodes that they are computed from."""
    return (leaf for leaf in leaves_of(expression) if isinstance(leaf, Computed))


def computes(expression: Expression) -> bool:
    """Return whether anything in an expression is computed."""
    return next(computed_leaves(expression), None) is not None


def aligned_blocks(boxes: Iterable[Box], shape: Shape, unit: Shape, most: int) -> Iterator[Box]:
    """Boxes of whole units of a tensor, without overlap, that hold these boxes.

    Units are counted from the tensor's first element. Those at its end may be smaller. No box has more than
    ``most`` elements, but for one of a single unit.
    """
    for box in apart(_grown(box, shape, unit) for box in boxes):
        yield from _cut(box, unit, most)


def _grown(box: Box, shape: Shape, unit: Shape) -> Box:
    starts = [at // size * size for at, size in zip(box.offsets, unit, strict=True)]
    stops = [
        min(-(-(at + size) // step) * step, length)
        for at, size, step, length in zip(box.offsets, box.sizes, unit, shape, strict=True)
    ]
    return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def _cut(box: Box, unit: Shape, most: int) -> Iterator[Box]:
    for dim, (size, step) in enumerate(zip(box.sizes, unit, strict=True)):
        if box.numel > most and size > step:
            rest = (*box.sizes[:dim], *box.sizes[dim + 1 :])
            rows = max(step, most // numel(rest) // step * step)
            for start in range(0, size, rows):
                offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
                sizes = (*box.sizes[:dim], min(rows, size - start), *box.sizes[dim + 1 :])
                yield from _cut(Box(offsets, sizes), unit, most)
            return
    yield box


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a stored tensor, and their places in the target.

    ``source`` counts elements of the stored leaf (row-major), ``target`` counts elements of the target's memory.
    Both have the same ``sizes``, iterated in the same order.
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
        axis = max(range(len(self.source.sizes)), key=self.source.strides.__getitem__)
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
    """Elements of a computed tensor, and their places in the target."""

    leaf: Computed
    region: Region


def copies_and_computed(
    expression: Expression, box: Box, into: Strided | None = None
) -> tuple[list[Copy], list[ComputedPart]]:
    """Return the copies and computed parts that fill ``box``: each element exactly once, except for a hole's.

    ``into`` is the box's layout in the target's memory (default: a contiguous tensor of the box's sizes). An empty
    box needs nothing.
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
    """Return the copies that fill a box of an expression without computations. See :func:`copies_and_computed`.

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
    """Return the copies from the ``held`` boxes of the leaves to a box of the expression.

    The other direction of :func:`copies`: here ``source`` counts elements of the memory in which a leaf's box is
    held, and ``target`` those of a row-major tensor of the box's sizes. Together, the holders of all of a leaf make
    all elements that the box has of it.

    Args:
        expression: of stored tensors. Computed parts are skipped.
        held: by key, boxes of the leaf (without overlap) and where each lies in memory.
        box: of the expression. None is all of it.
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
    """Return ``count`` steps of one axis starting at ``first``. The axis is dropped if there is only one step."""
    offset = view.offset + first * view.strides[axis]
    middle = ((count,), (view.strides[axis],)) if count > 1 else ((), ())
    sizes = view.sizes[:axis] + middle[0] + view.sizes[axis + 1 :]
    return Strided(offset, sizes, view.strides[:axis] + middle[1] + view.strides[axis + 1 :])


def apart(boxes: Iterable[Box]) -> list[Box]:
    """The boxes, those that overlap joined to one around them."""
    found: list[Box] = []
    for box in boxes:
        while overlapping := [other for other in found if other.intersect(box) is not None]:
            for other in overlapping:
                found.remove(other)
                box = _around(box, other)
        found.append(box)
    return found


def _around(box: Box, other: Box) -> Box:
    starts = [min(pair) for pair in zip(box.offsets, other.offsets, strict=True)]
    stops = [
        max(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
    ]
    return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


@dataclass(frozen=True, slots=True)
class Bindings:
    """The outcome of applying renames and conversions to the keys of a checkpoint.

    ``offers`` has, for a name of the model, every expression that claims to be it (more than one is a fault that a
    plan reports). ``unmatched`` maps the keys that lead to nothing the model has to the name they were given.
    ``leaders`` names, for a tensor made by a conversion, the first tensor that the conversion makes (transformers
    chooses the dtype of all by it). ``faults`` are conversions that could not be understood: a sentence for each,
    with the names that it leaves without a value. ``strays`` are expressions of unmatched keys, by their given
    names, because the model may get a tensor of that name.
    """

    offers: Mapping[str, tuple[Expression, ...]]
    leaders: Mapping[str, str] = field(default_factory=dict)
    unmatched: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, Sequence[str]] = field(default_factory=dict)
    strays: Mapping[str, Expression] = field(default_factory=dict)
