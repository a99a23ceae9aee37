"""The tensors of a base with an adapter folded in, box by box.

[Note: One rounding] Everything is computed in float32 (float64 for tensors of that dtype), from the stored values
of the base and the adapter, and rounded once, to the dtype that is written. PEFT rounds a delta of low precision
before it adds it, and so may differ in the last bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import torch

from shardwise.conversion import Stored
from shardwise.errors import CoverageError, FormatError
from shardwise.execution.stored import StoredTensors
from shardwise.planning.merge_plan import Added, Edit, LowRank, Replaced, WeightForm
from shardwise.report.sizes import in_bytes
from shardwise.storage.names import shown
from shardwise.tensors import Box, DType, numel, row_blocks

Read = Callable[[Box], torch.Tensor]

_KEPT_BYTES = 256 << 20
"""Of factors that are kept for the next block, and the most that one block may need of one factor."""

_NORM_BLOCK_BYTES = 16 << 20


@dataclass
class EditedTensors:
    """Applies the edits of an adapter, and notes which of them have changed anything.

    ``adapter`` has the adapter's tensors, ``changed`` the modules whose tensors are not what they were.

    Memory: the factors of a few modules, 256 MiB at most, and a few times the block that is asked for.
    """

    adapter: StoredTensors
    changed: set[str] = field(default_factory=set)
    _factors: OrderedDict[str, torch.Tensor] = field(default_factory=OrderedDict)
    _norms: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def apply(
        self, name: str, shape: tuple[int, ...], edits: Sequence[Edit], box: Box, read: Read, dtype: torch.dtype
    ) -> torch.Tensor:
        """A box of a tensor of the base with its edits, rounded to ``dtype``.

        ``read`` gives boxes of the tensor as the base has it, in :func:`computing_dtype`.

        Raises:
            FormatError: the outcome is not finite where the base is.
        """
        base = read(box)
        value = self._edited(name, shape, edits, len(edits), box, base, read)
        rounded = value.to(dtype)
        modules = {edit.module for edit in edits}
        if not modules <= self.changed and not torch.equal(rounded, base.to(dtype)):
            self.changed |= modules
        is_suspect = not bool(rounded.sum(dtype=torch.float32).isfinite())  # quicker than asking each element
        if is_suspect and bool((~rounded.isfinite() & base.to(dtype).isfinite()).any()):
            raise FormatError(
                f"{shown(name)}: merging makes values that are not finite in {dtype}; the adapter "
                f"({', '.join(shown(edit.module) for edit in edits)}) is damaged, or the dtype too narrow"
            )
        return rounded

    def is_without_effect(self, edits: Sequence[Edit]) -> bool:
        """Whether edits are known to change nothing before the base is looked at: factors that are zero."""
        for edit in edits:
            if not isinstance(edit, LowRank) or edit.magnitude is not None:
                return False
            if all(bool(self._whole(leaf).any()) for leaf in (edit.a, edit.b)):
                return False
        return True

    def _edited(
        self,
        name: str,
        shape: tuple[int, ...],
        edits: Sequence[Edit],
        count: int,
        box: Box,
        base: torch.Tensor,
        read: Read,
    ) -> torch.Tensor:
        """After the first ``count`` edits."""
        value = base
        for number, edit in enumerate(edits[:count]):
            match edit:
                case Replaced(_, leaf):
                    value = self._box(leaf, box, base.dtype)
                case Added(_, scaling, leaf):
                    value = torch.add(value, self._box(leaf, box, base.dtype), alpha=scaling)
                case LowRank():
                    value = torch.add(value, self._delta(edit, shape, box, base.dtype), alpha=edit.scaling)
                    if edit.magnitude is not None:
                        value *= self._stretch(name, shape, edits, number, read)[_along(edit, box, shape)]
                case _:
                    assert_never(edit)
        return value

    def _delta(self, edit: LowRank, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A box of ``B @ A``, not yet scaled."""
        starts, stops = box.offsets, tuple(start + size for start, size in zip(box.offsets, box.sizes, strict=True))
        rank = edit.rank
        if edit.form.is_stacked:
            outs, ins = (1, 2) if edit.form is WeightForm.EXPERTS else (2, 1)
            experts, first, stop = shape[0], starts[0], stops[0]
            whole_a, whole_b = self._whole(edit.a), self._whole(edit.b)
            a = whole_a.view(experts, rank, -1)[first:stop, :, starts[ins] : stops[ins]].to(dtype)
            b = whole_b.view(-1, rank, experts)[starts[outs] : stops[outs], :, first:stop].to(dtype)
            delta = torch.bmm(b.permute(2, 0, 1), a)
            return delta if edit.form is WeightForm.EXPERTS else delta.transpose(1, 2)
        if edit.form is WeightForm.COLUMNS:
            a = self._factor(edit.a, Box((0, starts[0]), (rank, box.sizes[0])), dtype)
            b = self._factor(edit.b, Box((starts[1], 0), (box.sizes[1], rank)), dtype)
            return a.t() @ b.t()
        a = self._factor(edit.a, Box((0, *starts[1:]), (rank, *box.sizes[1:])), dtype)
        b = self._factor(
            edit.b, Box((starts[0], *(0 for _ in shape[1:])), (box.sizes[0], *edit.b.shape[1:])), dtype
        )
        return (b.reshape(-1, rank) @ a.reshape(rank, -1)).view(box.sizes)

    def _stretch(
        self, name: str, shape: tuple[int, ...], edits: Sequence[Edit], number: int, read: Read
    ) -> torch.Tensor:
        """DoRA: what rows (or columns) of the weight and its delta are multiplied by, shaped to be broadcast.

        Their norms are those of the whole tensor: a pass over all of its blocks.
        """
        found = self._norms.get((name, number))
        if found is not None:
            return found
        edit = edits[number]
        assert isinstance(edit, LowRank)
        assert edit.magnitude is not None
        kept = 1 if edit.form is WeightForm.COLUMNS else 0
        squares = torch.zeros(shape[kept], dtype=torch.float64)
        for box in row_blocks(shape, _NORM_BLOCK_BYTES // 4):
            base = read(box)
            value = self._edited(name, shape, edits, number, box, base, read)
            value = torch.add(value, self._delta(edit, shape, box, base.dtype), alpha=edit.scaling)
            others = [dim for dim in range(len(shape)) if dim != kept]
            rows = slice(box.offsets[kept], box.offsets[kept] + box.sizes[kept])
            squares[rows] += value.square().sum(dim=others, dtype=torch.float64)
        magnitude = self._whole(edit.magnitude).to(torch.float64).flatten()
        stretched = (magnitude / squares.sqrt()).to(computing_dtype(edit.magnitude.dtype))
        self._norms[name, number] = stretched.view([-1 if dim == kept else 1 for dim in range(len(shape))])
        return self._norms[name, number]

    # The adapter's tensors

    def _factor(self, leaf: Stored, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A box of a factor: of the whole, which is kept, or, of a large one, read by itself."""
        if _nbytes(leaf.shape) <= _KEPT_BYTES // 2:
            where = tuple(slice(start, start + n) for start, n in zip(box.offsets, box.sizes, strict=True))
            return self._whole(leaf)[where].to(dtype)
        if _nbytes(box.sizes) > _KEPT_BYTES:
            raise _too_large(leaf, _nbytes(box.sizes))
        return self._box(leaf, box, dtype)

    def _whole(self, leaf: Stored) -> torch.Tensor:
        if leaf.key in self._factors:
            self._factors.move_to_end(leaf.key)
            return self._factors[leaf.key]
        if _nbytes(leaf.shape) > _KEPT_BYTES:
            raise _too_large(leaf, _nbytes(leaf.shape))
        value = self._box(leaf, Box.whole(leaf.shape), computing_dtype(leaf.dtype))
        self._factors[leaf.key] = value
        while sum(kept.nbytes for kept in self._factors.values()) > _KEPT_BYTES and len(self._factors) > 1:
            self._factors.popitem(last=False)
        return value

    def _box(self, leaf: Stored, box: Box, dtype: torch.dtype) -> torch.Tensor:
        return self.adapter.values_of([(leaf.key, box, dtype)])[0]


def computing_dtype(dtype: DType) -> torch.dtype:
    """In which a tensor of this dtype is computed with."""
    return torch.float64 if dtype is DType.F64 else torch.float32


def _along(edit: LowRank, box: Box, shape: tuple[int, ...]) -> tuple[slice, ...]:
    kept = 1 if edit.form is WeightForm.COLUMNS else 0
    return tuple(
        slice(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) if dim == kept else slice(None)
        for dim in range(len(shape))
    )


def _nbytes(shape: Sequence[int]) -> int:
    return 4 * numel(shape)


def _too_large(leaf: Stored, nbytes: int) -> CoverageError:
    return CoverageError(
        f"{shown(leaf.key)}: {leaf.shape}, of which {in_bytes(nbytes)} would be needed at once; factors of that "
        "size cannot be merged in bounded memory: merge the adapter with PEFT"
    )
