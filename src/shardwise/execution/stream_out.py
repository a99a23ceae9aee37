"""Single-process writing of a save block by block, with its commit, and merging of adapters into its tensors.

[Note: One rounding] Everything is computed in float32 (float64 for tensors of that dtype), from the stored values
of the base and the adapter, and rounded once, to the dtype that is written. PEFT rounds a delta of low precision
before it adds it, and so may differ in the last bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import torch

from shardwise.conversion.computed import Computed, ComputedBlock, SmallestBlocks, aligned_blocks, computed_leaves
from shardwise.conversion.expression import Expression
from shardwise.errors import FormatError, KeyMismatchError
from shardwise.execution.committing import begin_save, commit_save, undo_save
from shardwise.execution.memory import memory_of, trim_heap
from shardwise.execution.reading import ReadExecutor
from shardwise.execution.world import World
from shardwise.execution.write import OwnFiles, WrittenTensors
from shardwise.models.torch_api import to_torch
from shardwise.planning.merge_plan import Added, Edit, LowRank, Replaced, WeightForm
from shardwise.planning.save_plan import Saved, SavePlan
from shardwise.report.names import in_bytes
from shardwise.storage.contract import StorageWriter
from shardwise.storage.names import shown
from shardwise.tensors import Box, DType, numel, row_blocks

Part = tuple[str, Box]
"""A box of a tensor of the save, by its key."""

BLOCK_BYTES = 8 << 20
"""Of what is written at once. A few times this much is in memory."""

_KEPT_BYTES = 256 << 20
"""Written between two times that free memory is given back: memory that is given back has to be had anew."""


ValuesOf: TypeAlias = Callable[[Sequence[Part]], Sequence[torch.Tensor]]
"""Returns the values of parts of tensors."""


def stream_out(
    writer: StorageWriter,
    plan: SavePlan,
    values: ValuesOf,
    *,
    companions: Mapping[str, bytes],
    check: Callable[[WrittenTensors], None] | None = None,
    advance: Callable[[int], None],
    block_bytes: int = BLOCK_BYTES,
) -> WrittenTensors:
    """Write all files of a plan, then commit.

    Args:
        writer: to the folder of the save.
        plan: its files.
        values: returns the requested boxes, each in the dtype of the plan, contiguous, on the CPU.
        companions: small files that belong to the save.
        check: called after everything is written and before the commit. An exception of it cancels the save.
        advance: called with the number of bytes handed to the writer.
        block_bytes: bytes requested and written at once.

    The older checkpoint stays valid until the commit ([Note: One commit]). A save that fails removes its files.

    Memory: four blocks, and that of ``values``.

    Raises:
        StorageError: something could not be written.
    """
    out = OwnFiles(World(0, 1), writer, plan.files, advance)
    begun = begin_save(writer, plan)
    try:
        _write_ahead(out, parts_of(plan, block_bytes), values)
        if check is not None:
            check(out.written)
        commit_save(writer, plan, begun, companions, out.written.fingerprints)
    except BaseException:
        undo_save(writer, plan, begun)
        raise
    return out.written


def parts_of(plan: SavePlan, block_bytes: int) -> Iterator[list[Part]]:
    """The boxes of a plan's tensors in their order, about ``block_bytes`` at a time."""
    block: list[Part] = []
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


def _write_ahead(out: OwnFiles, blocks: Iterable[Sequence[Part]], values: ValuesOf) -> None:
    """Write blocks, each while the next is made."""
    pending: Future[None] | None = None
    kept = 0
    with ThreadPoolExecutor(1) as pool:
        for block in blocks:
            tensors = values(block)
            if pending is not None:
                pending.result()
            memories = [memory_of(tensor.contiguous().view(-1).view(torch.uint8)) for tensor in tensors]
            run = [(key, box, memory) for (key, box), memory in zip(block, memories, strict=True)]
            kept += sum(map(len, memories))
            pending = pool.submit(out.write, run)
            del tensors, memories, run
            if kept >= _KEPT_BYTES:
                trim_heap()
                kept = 0
        if pending is not None:
            pending.result()
    out.finish()


COMPUTED_BYTES = 512 << 20
"""Of what a conversion that computes may take at once: its inputs and outputs."""


@dataclass
class Outgoing:
    """The tensors of a save, box by box.

    ``made`` has the dtype and the expression of each, by key, in the order of the save. ``placer`` reads the
    leaves.
    """

    made: Mapping[str, tuple[DType, Expression]]
    placer: ReadExecutor

    def tensors(self) -> list[Saved]:
        """Key, dtype and shape of all, in order."""
        return [(key, dtype, expression.shape) for key, (dtype, expression) in self.made.items()]

    def require_bounded(self) -> None:
        """Check that computed tensors need at most :data:`COMPUTED_BYTES` at once.

        Raises:
            KeyMismatchError: naming a tensor that does.
        """
        blocks = SmallestBlocks()
        for key, (_, expression) in self.made.items():
            for leaf in computed_leaves(expression):
                if (nbytes := blocks.nbytes(leaf)) > COMPUTED_BYTES:
                    raise KeyMismatchError(
                        f"{shown(key)} is made by {leaf.operation.label} of {len(leaf.sources)} tensors, of which "
                        f"{in_bytes(nbytes)} would be needed at once, and {in_bytes(COMPUTED_BYTES)} is the limit. "
                        "Do this with transformers, or PEFT, in memory"
                    )

    def values(self, parts: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Boxes of the save's tensors, in the dtype in which they are saved.

        Memory: a few times the boxes.
        """
        made = [(self.made[key], box) for key, box in parts]
        return self.placer.values_of([(expression, box, to_torch(dtype)) for (dtype, expression), box in made])


_BYTES = 16
"""Of memory for an element of a block while it is computed: the base, the delta, their sum, what is rounded."""


def edited(name: str, base: Expression, edits: Sequence[Edit], dtype: DType, changed: set[str]) -> Expression:
    """A tensor of the base with its edits, rounded to ``dtype``.

    The leaves of the edits are tensors of the adapter. ``changed`` gets the modules whose edits are found to change
    something.
    """
    shape = base.shape
    computing = DType.F64 if base.dtype is DType.F64 else DType.F32
    inputs: list[Expression] = [base]
    for number, edit in enumerate(edits):
        inputs += _leaves_of(edit)
        if isinstance(edit, LowRank) and edit.magnitude is not None:
            before = (*edits[:number], edit)
            norms = _Norms(name, shape, tuple(before), to_torch(computing))
            needs = [leaf for item in before for leaf in _leaves_of(item)]
            kept = shape[_kept(edit)]
            inputs += [Computed(norms, "norms", (kept,), DType.F64, (base, *needs)), edit.magnitude]
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

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        unit = (1,) * len(self.shape)
        for box in aligned_blocks(wanted["merged"], self.shape, unit, most_bytes // _BYTES):
            needs = [box]
            for edit in self.edits:
                needs += _boxes_of(edit, box, self.shape)
                if isinstance(edit, LowRank) and edit.magnitude is not None:
                    kept = _kept(edit)
                    needs += 2 * [Box((box.offsets[kept],), (box.sizes[kept],))]
            nbytes = _BYTES * box.numel + 8 * sum(need.numel for need in needs[1:])
            yield ComputedBlock(tuple(needs), {"merged": box}, nbytes)

    def evaluate(self, block: ComputedBlock, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Raises :class:`FormatError` when the outcome is not finite where the base is."""
        given = iter(values)
        base = next(given).to(self.computing)
        box = block.outputs["merged"]
        value = base
        for edit in self.edits:
            value = _applied(edit, value, given, box, self.shape)
            if isinstance(edit, LowRank) and edit.magnitude is not None:
                norms, magnitude = next(given), next(given).to(torch.float64)
                stretch = (magnitude.flatten() / norms).to(self.computing)
                kept = _kept(edit)
                value = value * stretch.view([-1 if dim == kept else 1 for dim in range(value.ndim)])
        rounded = value.to(self.dtype)
        modules = {edit.module for edit in self.edits}
        if not modules <= self.changed and not torch.equal(rounded, base.to(self.dtype)):
            self.changed.update(modules)
        is_suspect = not bool(rounded.sum(dtype=torch.float32).isfinite())  # quicker than asking each element
        if is_suspect and bool((~rounded.isfinite() & base.to(self.dtype).isfinite()).any()):
            raise FormatError(
                f"{shown(self.name)}: merging makes values that are not finite in {self.dtype}; the adapter "
                f"({', '.join(shown(edit.module) for edit in self.edits)}) is damaged, or the dtype too narrow"
            )
        return {"merged": rounded}


@dataclass(frozen=True, eq=False)
class _Norms:
    """DoRA: the norms of the rows (or columns) of a tensor with some edits, over the whole of its other dimensions.

    The last edit is the one whose magnitude replaces these norms.
    """

    name: str
    shape: tuple[int, ...]
    edits: tuple[Edit, ...]
    computing: torch.dtype
    label: str = "norms of a merge"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        kept = _kept(self.edits[-1])
        others = numel([size for dim, size in enumerate(self.shape) if dim != kept])
        for part in aligned_blocks(wanted["norms"], (self.shape[kept],), (1,), most_bytes // (_BYTES * others)):
            offsets = [part.offsets[0] if dim == kept else 0 for dim in range(len(self.shape))]
            sizes = [part.sizes[0] if dim == kept else size for dim, size in enumerate(self.shape)]
            box = Box(tuple(offsets), tuple(sizes))
            needs = [box, *(need for edit in self.edits for need in _boxes_of(edit, box, self.shape))]
            nbytes = _BYTES * box.numel + 8 * sum(need.numel for need in needs[1:])
            yield ComputedBlock(tuple(needs), {"norms": part}, nbytes)

    def evaluate(self, block: ComputedBlock, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        given = iter(values)
        value = next(given).to(self.computing)
        box = block.inputs[0]
        for edit in self.edits:
            value = _applied(edit, value, given, box, self.shape)
        kept = _kept(self.edits[-1])
        others = [dim for dim in range(value.ndim) if dim != kept]
        return {"norms": value.square().sum(dim=others, dtype=torch.float64).sqrt()}


def _kept(edit: Edit) -> int:
    """The dimension along which DoRA has a magnitude."""
    return 1 if isinstance(edit, LowRank) and edit.form is WeightForm.COLUMNS else 0


def _leaves_of(edit: Edit) -> list[Expression]:
    return [edit.a, edit.b] if isinstance(edit, LowRank) else [edit.leaf]


def _boxes_of(edit: Edit, box: Box, shape: tuple[int, ...]) -> list[Box]:
    """The boxes of an edit's leaves that a box of the weight takes."""
    if not isinstance(edit, LowRank):
        return [box]
    starts, sizes, rank = box.offsets, box.sizes, edit.rank
    match edit.form:
        case WeightForm.ROWS:
            a = Box((0, *starts[1:]), (rank, *sizes[1:]))
            return [a, Box((starts[0], *(0 for _ in shape[1:])), (sizes[0], *edit.b.shape[1:]))]
        case WeightForm.COLUMNS:
            return [Box((0, starts[0]), (rank, sizes[0])), Box((starts[1], 0), (sizes[1], rank))]
        case WeightForm.EXPERTS | WeightForm.EXPERT_COLUMNS:
            outs, ins = (1, 2) if edit.form is WeightForm.EXPERTS else (2, 1)
            a = Box((starts[0] * rank, starts[ins]), (sizes[0] * rank, sizes[ins]))
            return [a, Box((starts[outs], 0), (sizes[outs], edit.b.shape[1]))]
        case _:
            assert_never(edit.form)


def _applied(
    edit: Edit, value: torch.Tensor, given: Iterator[torch.Tensor], box: Box, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a box of the weight after an edit, given its leaves' boxes. For DoRA, before its magnitude."""
    match edit:
        case Replaced():
            return next(given).to(value.dtype)
        case Added(_, scaling, _):
            return torch.add(value, next(given).to(value.dtype), alpha=scaling)
        case LowRank():
            a, b = next(given).to(value.dtype), next(given).to(value.dtype)
            return torch.add(value, _delta(edit, a, b, box, shape), alpha=edit.scaling)
        case _:
            assert_never(edit)


def _delta(edit: LowRank, a: torch.Tensor, b: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """A box of ``B @ A``, not yet scaled."""
    rank = edit.rank
    if edit.form.is_stacked:
        first, count = box.offsets[0], box.sizes[0]
        b = b.view(-1, rank, shape[0])[:, :, first : first + count]
        delta = torch.bmm(b.permute(2, 0, 1), a.view(count, rank, -1))
        return delta if edit.form is WeightForm.EXPERTS else delta.transpose(1, 2)
    if edit.form is WeightForm.COLUMNS:
        return a.t() @ b.t()
    return (b.reshape(-1, rank) @ a.reshape(rank, -1)).view(box.sizes)
