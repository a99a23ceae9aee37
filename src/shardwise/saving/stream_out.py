"""Writes a save block by block in a single process, and merges adapters into its tensors.

[Note: One rounding] Merging is computed in float32 (float64 for tensors of that dtype), from the stored values of
the base and the adapter, and rounded once, to the dtype that is written. PEFT rounds a delta of low precision
before it adds it, and so may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch

from shardwise.core.computed import Computed, ComputedBlock, SmallestBlocks, iter_computed_leaves, split_aligned
from shardwise.core.errors import ConfigError, FormatError
from shardwise.core.expression import Expression
from shardwise.core.formatting import in_bytes
from shardwise.core.tensors import Box, DType, numel, row_blocks
from shardwise.files.urls import shown
from shardwise.fsdp.torch_private import to_torch
from shardwise.saving.merge_plan import Edit, LowRank, Replaced, WeightForm
from shardwise.saving.plan import SavePlan, TensorToSave
from shardwise.saving.write import LocalFiles
from shardwise.transfer.memory import trim_heap
from shardwise.transfer.read import ReadExecutor
from shardwise.transfer.workers import in_background

TensorBox = tuple[str, Box]
"""A box of a tensor of the save, by its key."""

BLOCK_BYTES = 8 << 20
"""Bytes written at once. A few times as many are in memory."""

_TRIM_BYTES = 256 << 20
"""Bytes written between two calls of :func:`trim_heap`, which makes later allocations slower."""


def plan_blocks(plan: SavePlan, block_bytes: int) -> Iterator[list[TensorBox]]:
    """Yield the boxes of a plan's tensors in order, about ``block_bytes`` at a time."""
    # Small tensors share a block, and a large one has several.
    block: list[TensorBox] = []
    used = 0
    for entry in plan.entries.values():
        for box in row_blocks(entry.shape, max(1, block_bytes // entry.dtype.itemsize)):
            nbytes = box.numel * entry.dtype.itemsize
            if block and used + nbytes > block_bytes:
                yield block
                block, used = [], 0
            block.append((entry.key, box))
            used += nbytes
    yield block


def write_blocks(out: LocalFiles, blocks: Iterable[Sequence[TensorBox]], to_save: TensorsToSave) -> None:
    """Write blocks, each while the next is computed. Memory: four blocks, and :meth:`TensorsToSave.values`."""
    # While block n is computed, block n - 1 is written.
    computed: list[tuple[str, Box, torch.Tensor]] = []
    untrimmed = 0
    for block in blocks:
        # The end of the with block waits for the write, so blocks reach the file in order, and at most two are in
        # memory. An error of the write is raised there.
        with in_background(out.write, computed):
            tensors = to_save.values(block)
        computed = [(key, box, tensor) for (key, box), tensor in zip(block, tensors, strict=True)]
        untrimmed += sum(tensor.nbytes for tensor in tensors)
        if untrimmed >= _TRIM_BYTES:
            trim_heap()
            untrimmed = 0
    out.write(computed)
    out.finish()


COMPUTED_BYTES = 512 << 20
"""Maximum memory of one block of a conversion that computes: its inputs and outputs."""


@dataclass
class TensorsToSave:
    """The tensors of a save.

    ``by_key`` has the dtype and the expression of each, by key, in the order of the save. ``executor`` reads the
    leaves.
    """

    by_key: Mapping[str, tuple[DType, Expression]]
    executor: ReadExecutor

    def tensors(self) -> list[TensorToSave]:
        """Return key, dtype and shape of all, in order."""
        return [(key, dtype, expression.shape) for key, (dtype, expression) in self.by_key.items()]

    def require_bounded(self) -> None:
        """Check that computed tensors need at most :data:`COMPUTED_BYTES` at once.

        Raises:
            ConfigError: naming a tensor that needs more.
        """
        blocks = SmallestBlocks()
        for key, (_, expression) in self.by_key.items():
            for leaf in iter_computed_leaves(expression):
                if (nbytes := blocks.nbytes(leaf)) > COMPUTED_BYTES:
                    raise ConfigError(
                        f"{shown(key)}: is computed by {leaf.operation.label} from {len(leaf.sources)} tensors, "
                        f"which needs {in_bytes(nbytes)} at once, and the limit is {in_bytes(COMPUTED_BYTES)}. "
                        "Do this with transformers, or PEFT, in memory"
                    )

    def values(self, boxes: Sequence[TensorBox]) -> list[torch.Tensor]:
        """Return boxes of tensors in the dtype in which they are saved, contiguous, on the CPU.

        Memory: a few times the boxes.
        """
        items = [(self.by_key[key], box) for key, box in boxes]
        return self.executor.read_values([(expression, box, to_torch(dtype)) for (dtype, expression), box in items])


_ELEMENT_BYTES = 16
"""Memory for an element of a block while it is merged: the base, the delta, their sum, the rounded sum."""


def apply_edits(name: str, base: Expression, edits: Sequence[Edit], dtype: DType, changed: set[str]) -> Expression:
    """Return a tensor of the base with its edits, rounded to ``dtype``.

    The leaves of the edits are tensors of the adapter. Modules whose edits change a value are added to ``changed``
    when the tensor is computed.
    """
    # Edits accumulate in this dtype. Only the result is rounded.
    shape = base.shape
    computing = DType.F64 if base.dtype is DType.F64 else DType.F32
    # The order of the inputs is that in which _Merge.evaluate takes them: the base, then for each edit its leaves,
    # and for DoRA the norms of all edits so far and the magnitude.
    inputs: list[Expression] = [base]
    for number, edit in enumerate(edits):
        inputs += _edit_leaves(edit)
        if isinstance(edit, LowRank) and edit.magnitude is not None:
            edits_so_far = edits[: number + 1]
            norms = _Norms(shape, tuple(edits_so_far), to_torch(computing))
            leaves = [leaf for item in edits_so_far for leaf in _edit_leaves(item)]
            size = shape[_magnitude_dim(edit)]
            inputs += [Computed(norms, "norms", (size,), DType.F64, (base, *leaves)), edit.magnitude]
    merge = _Merge(name, shape, tuple(edits), to_torch(computing), to_torch(dtype), changed)
    return Computed(merge, "merged", shape, dtype, tuple(inputs))


@dataclass(frozen=True, eq=False)
class _Merge:
    """All edits of a tensor."""

    name: str
    shape: tuple[int, ...]
    edits: tuple[Edit, ...]
    computing: torch.dtype
    dtype: torch.dtype
    changed: set[str]
    label: str = "a merge"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        unit = (1,) * len(self.shape)
        for box in split_aligned(requested["merged"], self.shape, unit, max_block_bytes // _ELEMENT_BYTES):
            # The inputs of a block in the order of apply_edits(): the base, then for each edit its leaves,
            # norms, magnitude.
            boxes = [box]
            for edit in self.edits:
                boxes += _leaf_boxes(edit, box, self.shape)
                if isinstance(edit, LowRank) and edit.magnitude is not None:
                    dim = _magnitude_dim(edit)
                    boxes += 2 * [Box((box.offsets[dim],), (box.sizes[dim],))]  # of the norms and the magnitude
            nbytes = _ELEMENT_BYTES * box.numel + 8 * sum(item.numel for item in boxes[1:])
            yield ComputedBlock(tuple(boxes), {"merged": box}, nbytes)

    def evaluate(self, block: ComputedBlock, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Raises :class:`FormatError` if a value is not finite where the base is."""
        inputs = iter(values)
        base = next(inputs).to(self.computing)
        box = block.outputs["merged"]
        value = base
        for edit in self.edits:
            value = _apply_edit(edit, value, inputs, box, self.shape)
            if isinstance(edit, LowRank) and edit.magnitude is not None:
                norms, magnitude = next(inputs), next(inputs).to(torch.float64)
                # DoRA: each row is scaled from its norm after the edits so far to its magnitude.
                scale = (magnitude.flatten() / norms).to(self.computing)  # (rows,), or (columns,) for COLUMNS
                shape = [1] * value.ndim
                shape[_magnitude_dim(edit)] = -1
                value = value * scale.view(shape)
        rounded = value.to(self.dtype)  # the only rounding: [Note: One rounding]
        modules = {edit.module for edit in self.edits}
        # Compared after rounding: a delta that vanishes in the dtype has changed nothing.
        if not modules <= self.changed and not torch.equal(rounded, base.to(self.dtype)):
            self.changed.update(modules)
        # The sum is not finite if an element is not, and faster than a test of each. It may overflow on its own, so
        # the elements are tested then.
        is_suspect = not bool(rounded.sum(dtype=torch.float32).isfinite())
        if is_suspect and bool((~rounded.isfinite() & base.to(self.dtype).isfinite()).any()):
            raise FormatError(
                f"{shown(self.name)}: the merged values are not finite in {self.dtype}. Check the adapter "
                f"({', '.join(shown(edit.module) for edit in self.edits)}) for damage, or pass a wider dtype"
            )
        return {"merged": rounded}


@dataclass(frozen=True, eq=False)
class _Norms:
    """DoRA: the norms of the rows (or columns) of a tensor with some edits, over the whole of its other dimensions.

    The last edit is the one whose magnitude replaces these norms.
    """

    shape: tuple[int, ...]
    edits: tuple[Edit, ...]
    computing: torch.dtype
    label: str = "norms of a merge"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        dim = _magnitude_dim(self.edits[-1])
        # A norm needs a whole row, so a block is a number of whole rows: at least one, however long it is.
        row_numel = numel(self.shape[:dim] + self.shape[dim + 1 :])
        most_rows = max_block_bytes // (_ELEMENT_BYTES * row_numel)
        for rows in split_aligned(requested["norms"], (self.shape[dim],), (1,), most_rows):
            offsets, sizes = [0] * len(self.shape), list(self.shape)
            offsets[dim], sizes[dim] = rows.offsets[0], rows.sizes[0]
            box = Box(tuple(offsets), tuple(sizes))
            boxes = [box]
            for edit in self.edits:
                boxes += _leaf_boxes(edit, box, self.shape)
            nbytes = _ELEMENT_BYTES * box.numel + 8 * sum(item.numel for item in boxes[1:])
            yield ComputedBlock(tuple(boxes), {"norms": rows}, nbytes)

    def evaluate(self, block: ComputedBlock, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        inputs = iter(values)
        value = next(inputs).to(self.computing)
        box = block.inputs[0]
        for edit in self.edits:
            value = _apply_edit(edit, value, inputs, box, self.shape)
        others = [dim for dim in range(value.ndim) if dim != _magnitude_dim(self.edits[-1])]
        # (rows,), summed in float64: a row may have many elements
        return {"norms": value.square().sum(dim=others, dtype=torch.float64).sqrt()}


def _magnitude_dim(edit: Edit) -> int:
    """Return the dimension along which DoRA has a magnitude: that of the outputs, or of an embedding's columns."""
    return 1 if isinstance(edit, LowRank) and edit.form is WeightForm.COLUMNS else 0


def _edit_leaves(edit: Edit) -> list[Expression]:
    return [edit.a, edit.b] if isinstance(edit, LowRank) else [edit.leaf]


def _leaf_boxes(edit: Edit, box: Box, shape: tuple[int, ...]) -> list[Box]:
    """Return the boxes of an edit's leaves that a box of the weight depends on.

    Example: rows 4 to 6 and columns 0 to 8 of a weight (16, 8) of form ROWS, with a rank of 2, depend on all of A,
    (2, 8), and on rows 4 to 6 of B, (16, 2).
    """
    if not isinstance(edit, LowRank):
        return [box]
    starts, sizes, rank = box.offsets, box.sizes, edit.rank
    match edit.form:
        case WeightForm.ROWS:  # A (rank, in, ...), B (out, rank, 1, ...)
            a = Box((0, *starts[1:]), (rank, *sizes[1:]))
            return [a, Box((starts[0], *(0 for _ in shape[1:])), (sizes[0], *edit.b.shape[1:]))]
        case WeightForm.COLUMNS:  # A (rank, in), B (out, rank), the weight (in, out)
            return [Box((0, starts[0]), (rank, sizes[0])), Box((starts[1], 0), (sizes[1], rank))]
        case WeightForm.EXPERTS | WeightForm.EXPERT_COLUMNS:  # A (experts * rank, in), B (out, rank * experts)
            outs, ins = (1, 2) if edit.form is WeightForm.EXPERTS else (2, 1)
            a = Box((starts[0] * rank, starts[ins]), (sizes[0] * rank, sizes[ins]))
            # In B the experts vary fastest, so those of the box are not contiguous: all are read.
            return [a, Box((starts[outs], 0), (sizes[outs], edit.b.shape[1]))]
        case _:
            assert_never(edit.form)


def _apply_edit(
    edit: Edit, value: torch.Tensor, inputs: Iterator[torch.Tensor], box: Box, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a box of the weight after an edit whose leaves are the next inputs. For DoRA, before its magnitude."""
    match edit:
        case Replaced():
            return next(inputs).to(value.dtype)
        case LowRank():
            a, b = next(inputs).to(value.dtype), next(inputs).to(value.dtype)
            return torch.add(value, _delta(edit, a, b, box, shape), alpha=edit.scaling)
        case _:
            assert_never(edit)


def _delta(edit: LowRank, a: torch.Tensor, b: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a box of ``B @ A``, not yet scaled, in the shape of the box."""
    rank = edit.rank
    if edit.form.is_stacked:
        # A is read for the experts of the box only, B for all of them, of which these are chosen here.
        first, count = box.offsets[0], box.sizes[0]
        b = b.view(-1, rank, shape[0])[:, :, first : first + count]  # (out, rank, experts of the box)
        # (experts, out, rank) @ (experts, rank, in) -> (experts, out, in)
        delta = torch.bmm(b.permute(2, 0, 1), a.view(count, rank, -1))
        return delta if edit.form is WeightForm.EXPERTS else delta.transpose(1, 2)
    if edit.form is WeightForm.COLUMNS:
        return a.t() @ b.t()  # (in, rank) @ (rank, out)
    # (out, rank) @ (rank, in * kernel): a convolution's kernel is a part of the columns, and 1 x 1 in B.
    return (b.reshape(-1, rank) @ a.reshape(rank, -1)).view(box.sizes)
