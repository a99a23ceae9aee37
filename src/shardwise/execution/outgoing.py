"""Tensors on their way out: boxes of a save, made of boxes of a model's tensors, made of boxes of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.conversion import Stored, needed_boxes, pieces
from shardwise.errors import CoverageError
from shardwise.execution.edited import EditedTensors, computing_dtype
from shardwise.execution.stored import StoredTensors, WantedBox, box_slices
from shardwise.layout import ModelLayout
from shardwise.models.dtypes import to_torch
from shardwise.models.revert import ComputedOutputs, Output, Reverted
from shardwise.models.view import strided_view
from shardwise.planning.merge_plan import Edit
from shardwise.planning.save_plan import Saved
from shardwise.report.sizes import in_bytes
from shardwise.tensors import Box, Strided, numel

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
        reverted: what they are made of.
        layout: of the model whose tensors these are.
        model_values: boxes of the model's tensors, by name.
        stored: the checkpoint's own tensors, by key.
        carried: those of them that are saved as they are: key, dtype and shape.
        edits: of tensors of the save, by key.
        edited: by which edits are applied.
    """

    reverted: Reverted
    layout: ModelLayout
    model_values: Callable[[Sequence[WantedBox]], list[torch.Tensor]]
    stored: StoredTensors
    carried: Sequence[Saved] = ()
    edits: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    edited: EditedTensors | None = None

    def __post_init__(self) -> None:
        self._computing = {key: made for made in self.reverted.computed for key, _, _ in made.outputs}
        self._as_stored = {key: dtype for key, dtype, _ in self.carried}
        self._computed: tuple[ComputedOutputs, Mapping[str, torch.Tensor]] | None = None

    def tensors(self) -> list[Saved]:
        """Key, dtype and shape of all, as transformers orders them; what is carried comes last."""
        made = {key: (key, output.dtype, output.shape) for key, output in self.reverted.outputs.items()}
        made |= {item[0]: item for computed in self.reverted.computed for item in computed.outputs}
        return [made[key] for key in self.reverted.order] + list(self.carried)

    def require_bounded(self, budget_bytes: int = COMPUTED_BYTES) -> None:
        """Conversions that compute need no more than this at once.

        Raises:
            CoverageError: naming one that does.
        """
        for made in self.reverted.computed:
            nbytes = sum(numel(shape) * dtype.itemsize for _, dtype, shape in made.outputs)
            nbytes += sum(self.layout.by_name[name].numel * self._dtype(name).itemsize for name in made.sources)
            if nbytes > budget_bytes:
                raise CoverageError(
                    f"{made.outputs[0][0]} is computed from {len(made.sources)} whole tensors, which takes "
                    f"{in_bytes(nbytes)} at once, and {in_bytes(budget_bytes)} is the limit; load the model with "
                    "transformers and save it"
                )

    def values(self, parts: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Boxes of the save's tensors, in the dtype in which they are saved. Memory: a few times the boxes."""
        needs = [self._needs(key, box) for key, box in parts]
        read = iter(self.model_values([item for needed in needs for item in needed]))
        found = [[next(read) for _ in needed] for needed in needs]
        return [self._made(*part, needed, values) for part, needed, values in zip(parts, needs, found, strict=True)]

    def _needs(self, key: str, box: Box) -> list[WantedBox]:
        """What of the model's tensors is moved into a box; nothing for what is made in another way."""
        output = self.reverted.outputs.get(key)
        return [] if output is None or key in self.edits else _moved_into(output, box, to_torch(output.dtype))

    def _made(
        self, key: str, box: Box, needed: Sequence[WantedBox], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if key in self._as_stored:
            return self.stored.values_of([(key, box, to_torch(self._as_stored[key]))])[0]
        if key in self._computing:
            return self._evaluated(self._computing[key])[key][box_slices(box)].contiguous()
        output = self.reverted.outputs[key]
        dtype = to_torch(output.dtype)
        if key not in self.edits:
            return _put_together(output, box, dtype, needed, values)
        assert self.edited is not None
        computing = computing_dtype(output.dtype)

        def read(part: Box) -> torch.Tensor:
            wanted = _moved_into(output, part, computing)
            return _put_together(output, part, computing, wanted, self.model_values(wanted))

        return self.edited.apply(key, output.shape, self.edits[key], box, read, dtype)

    def _evaluated(self, made: ComputedOutputs) -> Mapping[str, torch.Tensor]:
        """The outputs of a conversion that computes; those of the last one are kept."""
        if self._computed is None or self._computed[0] is not made:
            shapes = {name: self.layout.by_name[name].shape for name in made.sources}
            wanted = [(name, Box.whole(shape), self._dtype(name)) for name, shape in shapes.items()]
            values = dict(zip(made.sources, self.model_values(wanted), strict=True))
            with torch.no_grad():
                self._computed = made, made.operation(values)
        return self._computed[1]

    def _dtype(self, name: str) -> torch.dtype:
        return to_torch(self.layout.by_name[name].dtype)


def _moved_into(output: Output, box: Box, dtype: torch.dtype) -> list[WantedBox]:
    needed = needed_boxes(output.expression, box)
    return [(name, part, dtype) for name, parts in needed.items() for part in parts]


def _put_together(
    output: Output, box: Box, dtype: torch.dtype, needed: Sequence[WantedBox], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A box of an output, of boxes of the model's tensors."""
    if isinstance(output.expression, Stored) and len(values) == 1:
        return values[0]
    made = torch.empty(box.sizes, dtype=dtype)
    for (name, part, _), tensor in zip(needed, values, strict=True):
        for copy in pieces(output.expression, {name: [(part, Strided.contiguous(part.sizes))]}, box):
            strided_view(made, copy.target).copy_(strided_view(tensor, copy.source))
    return made
