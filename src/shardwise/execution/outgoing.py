"""Tensors on their way out: boxes of a save, made of boxes of a model's tensors, made of boxes of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.conversion import (
    ComputeTask,
    Expression,
    compute_tasks,
    computed_leaves,
    copies_and_computed,
    key_of,
    needed_boxes,
    pieces,
    smallest_block_bytes,
)
from shardwise.errors import CoverageError
from shardwise.execution.edited import EditedTensors, computing_dtype
from shardwise.execution.stored import StoredTensors, WantedBox
from shardwise.layout import ModelLayout
from shardwise.models.dtypes import to_torch
from shardwise.models.revert import Output
from shardwise.models.view import strided_view
from shardwise.planning.merge_plan import Edit
from shardwise.planning.save_plan import Saved
from shardwise.report.sizes import in_bytes
from shardwise.tensors import Box, Strided

COMPUTED_BYTES = 512 << 20
"""Of what a conversion that computes may take at once: its inputs and outputs."""


@dataclass
class MergedModel:
    """A model's tensors, those with edits merged."""

    base: StoredTensors
    layout: ModelLayout
    edits: Mapping[str, tuple[Edit, ...]]
    edited: EditedTensors

    def values_of(self, wanted: Sequence[WantedBox]) -> list[torch.Tensor]:
        plain = iter(self.base.values_of([item for item in wanted if item[0] not in self.edits]))
        return [self._merged(*item) if item[0] in self.edits else next(plain) for item in wanted]

    def _merged(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.layout.by_name[name]
        computing = computing_dtype(tensor.dtype)

        def read(part: Box) -> torch.Tensor:
            return self.base.values_of([(name, part, computing)])[0]

        return self.edited.apply(name, tensor.shape, self.edits[name], box, read, dtype)


@dataclass
class Outgoing:
    """The tensors of a save, box by box.

    Attributes:
        outputs: what they are made of, by key, as transformers orders them.
        model_values: boxes of the model's tensors, by name.
        stored: the checkpoint's own tensors, by key.
        carried: those of them that are saved as they are: key, dtype and shape.
        edits: of tensors of the save, by key.
        edited: by which edits are applied.
    """

    outputs: Mapping[str, Output]
    model_values: Callable[[Sequence[WantedBox]], list[torch.Tensor]]
    stored: StoredTensors
    carried: Sequence[Saved] = ()
    edits: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    edited: EditedTensors | None = None

    def __post_init__(self) -> None:
        self._as_stored = {key: dtype for key, dtype, _ in self.carried}
        self._last: tuple[object, Mapping[str, torch.Tensor]] | None = None

    def tensors(self) -> list[Saved]:
        """Key, dtype and shape of all, as transformers orders them; what is carried comes last."""
        return [(key, output.dtype, output.shape) for key, output in self.outputs.items()] + list(self.carried)

    def require_bounded(self, budget_bytes: int = COMPUTED_BYTES) -> None:
        """What is computed needs no more than this at once.

        Raises:
            CoverageError: naming a tensor that does.
        """
        for key, output in self.outputs.items():
            for leaf in computed_leaves(output.expression):
                if (nbytes := smallest_block_bytes(leaf)) > budget_bytes:
                    raise CoverageError(
                        f"{key} is computed from {len(leaf.sources)} tensors, which takes {in_bytes(nbytes)} at "
                        f"once, and {in_bytes(budget_bytes)} is the limit; load the model with transformers, and "
                        "save it"
                    )

    def values(self, parts: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Boxes of the save's tensors, in the dtype in which they are saved. Memory: a few times the boxes."""
        moved = [(key, box) for key, box in parts if key in self.outputs and key not in self.edits]
        outputs = [self.outputs[key] for key, _ in moved]
        wanted = [
            (output.expression, box, to_torch(output.dtype))
            for output, (_, box) in zip(outputs, moved, strict=True)
        ]
        found = iter(self._boxes(wanted))
        return [
            next(found) if key in self.outputs and key not in self.edits else self._otherwise(key, box)
            for key, box in parts
        ]

    def _otherwise(self, key: str, box: Box) -> torch.Tensor:
        """A box of what is carried along, or edited."""
        if key in self._as_stored:
            return self.stored.values_of([(key, box, to_torch(self._as_stored[key]))])[0]
        assert self.edited is not None
        output = self.outputs[key]
        computing = computing_dtype(output.dtype)

        def read(part: Box) -> torch.Tensor:
            return self._boxes([(output.expression, part, computing)])[0]

        return self.edited.apply(key, output.shape, self.edits[key], box, read, to_torch(output.dtype))

    def _boxes(self, wanted: Sequence[tuple[Expression, Box, torch.dtype]]) -> list[torch.Tensor]:
        """Boxes of expressions over the model's tensors."""
        needs = [
            [(name, part, dtype) for name, parts in needed_boxes(expression, box).items() for part in parts]
            for expression, box, dtype in wanted
        ]
        read = iter(self.model_values([item for needed in needs for item in needed]))
        return [
            self._put_together(*item, needed, [next(read) for _ in needed])
            for item, needed in zip(wanted, needs, strict=True)
        ]

    def _put_together(
        self,
        expression: Expression,
        box: Box,
        dtype: torch.dtype,
        needed: Sequence[WantedBox],
        values: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """A box of an expression, of boxes of the model's tensors, and of what is computed of others."""
        if key_of(expression) is not None and len(values) == 1:
            return values[0]
        made = torch.empty(box.sizes, dtype=dtype)
        for (name, part, _), tensor in zip(needed, values, strict=True):
            for copy in pieces(expression, {name: [(part, Strided.contiguous(part.sizes))]}, box):
                strided_view(made, copy.target).copy_(strided_view(tensor, copy.source))
        _, computed = copies_and_computed(expression, box)
        for item in compute_tasks(((0, part.leaf, part.region) for part in computed), COMPUTED_BYTES):
            outputs = self._evaluated(item)
            for move in item.moves:
                values_moved = strided_view(outputs[move.output].contiguous(), move.source)
                strided_view(made, move.place).copy_(values_moved)
        return made

    def _evaluated(self, item: ComputeTask) -> Mapping[str, torch.Tensor]:
        """What a block gives; that of the last one is kept, since boxes are asked for one after the other."""
        if self._last is None or self._last[0] != item.key:
            self._last = None
            needs = zip(item.inputs, item.block.needs, strict=True)
            values = self._boxes([(source, box, to_torch(source.dtype)) for source, box in needs])
            with torch.no_grad():
                self._last = item.key, item.operation.evaluate(item.block, values)
        return self._last[1]
