"""Copies and computations that fill a box of an expression.

[Note: Blocks] An operation maps boxes of its inputs to boxes of its outputs. Indices of boxes are those of the full
tensors, never of a shard, so a scale always belongs to the same elements, regardless of the sharding. Executors
divide the requested box into such blocks, read the inputs of a block, evaluate it, and copy the results to the
target, within a memory budget.

[Note: Bits of devices] A :class:`DeviceOperation` can be evaluated on an accelerator, because its steps have one
correct result: copies, comparisons, integers, and single roundings (a product, a difference, a quotient, a cast).
Sums are not among them. The bits of NaN differ between devices, and an error that depends on values would need a
wait. So it returns a tensor in addition, which is true if the CPU has to evaluate the block again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardwise.core.errors import FormatError
from shardwise.core.expression import Expression, Leaf, Shape, Stored, iter_leaves
from shardwise.core.regions import Region
from shardwise.core.tensors import Box, DType, Strided, contiguous_strides, split_box


@dataclass(frozen=True, slots=True)
class ComputedBlock:
    """One block of a computation.

    Attributes:
        inputs: the box of each input that is read.
        outputs: the box of each output that is computed.
        nbytes: memory of the computation: inputs, outputs, and intermediate values.
    """

    inputs: tuple[Box, ...]
    outputs: Mapping[str, Box]
    nbytes: int


class BadValues(FormatError):
    """An operation cannot be evaluated on these values.

    :class:`ComputeTask` adds the name of the input, which an operation does not have.

    Args:
        message: the reason.
        source: index of the input with the values.
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

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        """Yield blocks that together compute the requested boxes of each output, each element once.

        They may compute more. Each block needs at most ``max_block_bytes``, if the operation can be divided so far.
        """
        ...

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        """Return the values of a block, by output.

        ``values`` are the boxes of its inputs, as contiguous CPU tensors in the dtypes of the inputs. May be called
        by several threads at once.
        """
        ...


@runtime_checkable
class DeviceOperation(Operation, Protocol):
    """Operation that an accelerator can evaluate with the bits of the CPU. See [Note: Bits of devices]."""

    def evaluate_on_device(
        self, block: ComputedBlock, values: Sequence[Any], max_block_bytes: int
    ) -> tuple[Mapping[str, Any], Any]:
        """Return the values of a block, by output, and whether the CPU has to evaluate it, without waiting.

        All tensors are on the device of ``values``. Memory: ``max_block_bytes``, at least those of the block.
        """
        ...


@dataclass(frozen=True, slots=True)
class Computed(Leaf):
    """One output of an operation. ``dtype`` is that of the evaluated values."""

    operation: Operation
    output: str
    shape: Shape
    dtype: DType
    sources: tuple[Expression, ...]

    @property
    def signature(self) -> Hashable:
        return "computed", self.operation, self.output, self.shape

    def with_sources(self, sources: Sequence[Expression]) -> Expression:
        return Computed(self.operation, self.output, self.shape, self.dtype, tuple(sources))

    def __str__(self) -> str:
        return f"{self.operation.label}({', '.join(map(str, self.sources))})[{self.output}]"


@dataclass(frozen=True, slots=True, eq=False)
class FullOperation(ABC):
    """Base class of operations that are evaluated once, on full inputs, and compute all of their outputs in full.

    ``nbytes`` is the memory that the operation needs.
    """

    label: str
    inputs: tuple[Shape, ...]
    outputs: Mapping[str, Shape]
    nbytes: int

    def blocks(self, requested: Mapping[str, Sequence[Box]], _max_block_bytes: int) -> Iterator[ComputedBlock]:
        if any(requested.values()):
            outputs = {name: Box.whole(shape) for name, shape in self.outputs.items()}
            yield ComputedBlock(tuple(map(Box.whole, self.inputs)), outputs, self.nbytes)

    @abstractmethod
    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class OutputMove:
    """Elements of a block's output, relative to its box, and their location in a target's memory.

    Attributes:
        target: index of the target.
        output: name of the output.
        source: location in the block's values of the output.
        place: location in the target's memory.
    """

    target: int
    output: str
    source: Strided
    place: Strided


@dataclass(frozen=True, slots=True)
class ComputeTask:
    """A block to compute from these inputs, and the locations of its outputs.

    ``fits_devices`` means that an accelerator can compute it, and everything that it is computed from.
    """

    operation: Operation
    inputs: tuple[Expression, ...]
    block: ComputedBlock
    moves: tuple[OutputMove, ...]
    fits_devices: bool = False

    @property
    def key(self) -> object:
        """Equal for tasks that compute the same values."""
        return self.operation, self.inputs, self.block

    def evaluate(self, values: Sequence[Any]) -> Mapping[str, Any]:
        """Return the values of the block, by output. See :meth:`Operation.evaluate`.

        Raises:
            FormatError: an input has values that the operation cannot take. The message names the input.
        """
        try:
            return self.operation.evaluate(self.block, values)
        except BadValues as error:
            raise FormatError(f"{self.inputs[error.source]}: {self.operation.label}: {error}") from error


def compute_tasks(items: Iterable[tuple[int, Computed, Region]], max_block_bytes: int) -> Iterator[ComputeTask]:
    """Yield the computations that fill regions of targets, given as (number of the target, leaf, region of it).

    Each block is computed once.
    """
    groups: dict[tuple[Operation, tuple[Expression, ...]], list[tuple[int, Computed, Region]]] = {}
    # Outputs of one operation (codes and scales, say) are grouped, so that both come from one evaluation.
    for target, leaf, region in items:
        groups.setdefault((leaf.operation, leaf.sources), []).append((target, leaf, region))
    for (operation, inputs), group in groups.items():
        requested: dict[str, list[Box]] = {}
        for _, leaf, region in group:
            requested.setdefault(leaf.output, []).append(region.bounds)
        # Overlapping boxes would be computed twice, and one of the results would be lost.
        disjoint = {name: merge_overlapping(boxes) for name, boxes in requested.items()}
        fits_devices = _fits_devices(operation, inputs)
        for block in operation.blocks(disjoint, max_block_bytes):
            # A block may exceed the requested regions, because it consists of whole units: only its common
            # elements with each region are moved.
            moves: list[OutputMove] = []
            for target, leaf, region in group:
                box = block.outputs.get(leaf.output)
                if box is None:
                    continue
                for piece in region.within(box):
                    source, place = piece.to_strided(contiguous_strides(box.sizes))
                    moves.append(OutputMove(target, leaf.output, source, place))
            yield ComputeTask(operation, inputs, block, tuple(moves), fits_devices)


def _fits_devices(operation: Operation, inputs: Iterable[Expression]) -> bool:
    return isinstance(operation, DeviceOperation) and all(
        _fits_devices(leaf.operation, leaf.sources) for source in inputs for leaf in iter_computed_leaves(source)
    )


class SmallestBlocks:
    """The least memory in which leaves can be computed, in bytes, cached for equal leaves."""

    def __init__(self) -> None:
        self._nbytes: dict[tuple[Operation, str, Shape], int] = {}

    def nbytes(self, leaf: Computed) -> int:
        """Return the bytes of one leaf and its inputs."""
        key = (leaf.operation, leaf.output, leaf.shape)
        if key not in self._nbytes:
            # With a budget of one byte an operation yields its smallest blocks, which have about equal sizes.
            first = next(leaf.operation.blocks({leaf.output: [Box.whole(leaf.shape)]}, 1), None)
            self._nbytes[key] = 0 if first is None else first.nbytes
        inner = sum(self.nbytes(computed) for item in leaf.sources for computed in iter_computed_leaves(item))
        return self._nbytes[key] + inner


def iter_computed_leaves(expression: Expression) -> Iterator[Computed]:
    """Yield the outermost computed nodes of an expression, without the nodes that they are computed from."""
    return (leaf for leaf in iter_leaves(expression) if isinstance(leaf, Computed))


def computes(expression: Expression) -> bool:
    """Return whether anything in an expression is computed."""
    return next(iter_computed_leaves(expression), None) is not None


def split_aligned(boxes: Iterable[Box], shape: Shape, unit: Shape, most: int) -> Iterator[Box]:
    """Yield disjoint boxes that cover these boxes and consist of whole units of a tensor.

    Units are aligned to the tensor's first element, and may be smaller at its end. A box has at most ``most``
    elements, unless it is a single unit.

    With ``shape`` (5, 6), ``unit`` (2, 2) and ``most`` 8, the box of row 1 becomes rows 0 and 1, in boxes of
    sizes (2, 4) and (2, 2).
    """
    for box in merge_overlapping(_align(box, shape, unit) for box in boxes):
        yield from split_box(box, unit, most)


def _align(box: Box, shape: Shape, unit: Shape) -> Box:
    starts = (at // step * step for at, step in zip(box.offsets, unit, strict=True))
    stops = (
        min(-(-stop // step) * step, length) for stop, step, length in zip(box.stops, unit, shape, strict=True)
    )
    return Box.between(starts, stops)


def every_nth(box: Box, step: int) -> Box:
    """Return the same box of a tensor with one element for each ``step`` elements of a row.

    The box begins at a multiple of ``step``. With ``step`` 2, columns 4 to 8 of codes are columns 2 to 4 of bytes.
    """
    # Rounded up: the last byte of a row may hold a single code.
    return Box((*box.offsets[:-1], box.offsets[-1] // step), (*box.sizes[:-1], -(-box.sizes[-1] // step)))


_CASTS = {DType.F32: "float", DType.BF16: "bfloat16", DType.F16: "half", DType.I32: "int", DType.U8: "byte"}


def cast(values: Any, dtype: DType) -> Any:
    """Cast a torch tensor to one of these dtypes, without importing torch."""
    return getattr(values, _CASTS[dtype])()


_tables: dict[tuple[tuple[float, ...], DType], Any] = {}


def table_for(numbers: tuple[float, ...], dtype: DType, like: Any) -> Any:
    """Return numbers as a flat tensor on the device of ``like``, without waiting. Keeps pinned copies."""
    # An empty CPU tensor of the dtype: its methods create the others, because this package does not import torch.
    empty = cast(like.new_empty(0, device="cpu"), dtype)
    if like.is_cpu:
        return empty.new_tensor(numbers)
    if (numbers, dtype) not in _tables:
        # A copy from pageable memory would wait for the device. Copies from pinned memory are in stream order.
        pinned = empty.new_empty(len(numbers), pin_memory=True)
        _tables[numbers, dtype] = pinned.copy_(empty.new_tensor(numbers))
    return _tables[numbers, dtype].to(like.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a stored tensor, and their location in the target.

    ``source`` is in elements of the stored leaf (row-major), ``target`` in elements of the target's memory. Both
    have the same ``sizes``, iterated in the same order.
    """

    leaf: Stored
    source: Strided
    target: Strided

    @property
    def numel(self) -> int:
        return self.source.numel

    def blocks(self, max_span: int) -> Iterator[Copy]:
        """Yield the same copy in pieces that span at most ``max_span`` (at least 1) elements of the leaf each."""
        span = self.source.stop - self.source.offset
        if span <= max_span:
            yield self
            return
        # The axis of the largest stride in the leaf separates the pieces in the file. A piece of ``steps`` of its
        # steps spans ``reach + stride * (steps - 1)`` elements, where ``reach`` is the span of one step. Example: 5
        # rows of 4 out of rows of 10 span 44. With ``max_span`` 30 a piece has (30 - 4) // 10 + 1 = 3 rows, and the
        # pieces span 24 and 14.
        axis = max(range(len(self.source.sizes)), key=self.source.strides.__getitem__)
        size, stride = self.source.sizes[axis], self.source.strides[axis]
        reach = span - stride * (size - 1)
        steps = max(1, (max_span - reach) // stride + 1)
        for first in range(0, size, steps):
            count = min(steps, size - first)
            yield from Copy(
                self.leaf, _along(self.source, axis, first, count), _along(self.target, axis, first, count)
            ).blocks(max_span)


def copies_and_computed(
    expression: Expression, box: Box, into: Strided | None = None
) -> tuple[list[Copy], list[tuple[Computed, Region]]]:
    """Return the copies and computed regions that fill ``box``, each of its elements once.

    ``into`` is the box's layout in the target's memory, by default a contiguous tensor of the box's sizes. An empty
    box needs none.
    """
    if not box.is_within(expression.shape):
        raise ValueError(f"{box} is not within {expression.shape}")
    into = Strided.contiguous(box.sizes) if into is None else into
    if into.sizes != box.sizes:
        raise ValueError(f"{into} does not have the sizes of {box}")
    copied: list[Copy] = []
    computed: list[tuple[Computed, Region]] = []
    if box.numel == 0:
        return copied, computed
    # The strided views of one leaf serve the next if it has an equal layout, as stacked experts have. Only the
    # position in the target differs.
    last: tuple[object, ...] = ()
    source = target = into
    for leaf, region in expression.leaves(Region.from_box(box, into)):
        if isinstance(leaf, Stored):
            layout = (region.axes, region.origin, leaf.shape)
            if layout != last:
                source, target = region.to_strided(contiguous_strides(leaf.shape))
                last = layout
            copied.append(Copy(leaf, source, Strided(region.target, target.sizes, target.strides)))
        else:
            assert isinstance(leaf, Computed)
            computed.append((leaf, region))
    return copied, computed


def copies(expression: Expression, box: Box, into: Strided | None = None) -> list[Copy]:
    """Return the copies that fill a box of an expression without computations. See :func:`copies_and_computed`.

    Raises:
        ValueError: something in the box is computed.
    """
    copied, computed = copies_and_computed(expression, box, into)
    if computed:
        raise ValueError(f"{computed[0][0]} is computed, not copied")
    return copied


def copies_from_shards(
    expression: Expression, shards_by_key: Mapping[str, Sequence[tuple[Box, Strided]]], box: Box | None = None
) -> Iterator[Copy]:
    """Yield the copies from the boxes of the leaves that ranks hold to a box of the expression.

    In contrast to :func:`copies`, ``source`` is in elements of the memory that holds a leaf's box. ``target`` is in
    elements of a row-major tensor of the box's sizes. Ranks that together hold a leaf fill all that comes from it.

    Args:
        expression: an expression over stored tensors. Computed regions are skipped.
        shards_by_key: disjoint boxes of each leaf by key, each with its layout in memory.
        box: the box of the expression. None is all of it.
    """
    box = Box.whole(expression.shape) if box is None else box
    if not box.is_within(expression.shape):
        raise ValueError(f"{box} is not within {expression.shape}")
    if box.numel == 0:
        return
    for leaf, region in expression.leaves(Region.from_box(box, Strided.contiguous(box.sizes))):
        if not isinstance(leaf, Stored):
            continue
        for shard_box, memory in shards_by_key.get(leaf.key, ()):
            for piece in region.within(shard_box):
                yield Copy(leaf, *piece.to_strided(memory.strides, memory.offset))


def _along(view: Strided, axis: int, first: int, count: int) -> Strided:
    """Return ``count`` steps of one axis starting at ``first``. The axis is dropped if there is only one step."""
    offset = view.offset + first * view.strides[axis]
    middle = ((count,), (view.strides[axis],)) if count > 1 else ((), ())
    sizes = view.sizes[:axis] + middle[0] + view.sizes[axis + 1 :]
    return Strided(offset, sizes, view.strides[:axis] + middle[1] + view.strides[axis + 1 :])


def merge_overlapping(boxes: Iterable[Box]) -> list[Box]:
    """Replace boxes that overlap by the smallest box that contains them, until no two overlap."""
    disjoint: list[Box] = []
    for box in boxes:
        # A box that was enlarged may overlap others, which did not overlap the box before.
        while overlapping := [other for other in disjoint if other.intersect(box) is not None]:
            for other in overlapping:
                disjoint.remove(other)
                box = Box.between(map(min, box.offsets, other.offsets), map(max, box.stops, other.stops))
        disjoint.append(box)
    return disjoint
