"""Reads boxes of a save from the checkpoint that they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.conversion import Expression, SmallestBlocks, computed_leaves
from shardwise.errors import CoverageError
from shardwise.execution.reading.place import Placer
from shardwise.models.dtypes import to_torch
from shardwise.planning.saves.save_plan import Saved
from shardwise.report.sizes import in_bytes
from shardwise.storage.names import shown
from shardwise.tensors import Box, DType

COMPUTED_BYTES = 512 << 20
"""Of what a conversion that computes may take at once: its inputs and outputs."""


@dataclass
class Outgoing:
    """The tensors of a save, box by box.

    ``made`` has the dtype of each, and what it is made of, by key, in the order of the save; leaves are what
    ``placer`` reads.
    """

    made: Mapping[str, tuple[DType, Expression]]
    placer: Placer

    def tensors(self) -> list[Saved]:
        """Key, dtype and shape of all, in order."""
        return [(key, dtype, expression.shape) for key, (dtype, expression) in self.made.items()]

    def require_bounded(self) -> None:
        """What is computed needs no more than :data:`COMPUTED_BYTES` at once.

        Raises:
            CoverageError: naming a tensor that does.
        """
        blocks = SmallestBlocks()
        for key, (_, expression) in self.made.items():
            for leaf in computed_leaves(expression):
                if (nbytes := blocks.nbytes(leaf)) > COMPUTED_BYTES:
                    raise CoverageError(
                        f"{shown(key)} is made by {leaf.operation.label} of {len(leaf.sources)} tensors, of which "
                        f"{in_bytes(nbytes)} would be needed at once, and {in_bytes(COMPUTED_BYTES)} is the limit; "
                        "do this with transformers, or PEFT, in memory"
                    )

    def values(self, parts: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Boxes of the save's tensors, in the dtype in which they are saved. Memory: a few times the boxes."""
        return self.placer.values_of(
            [(expression, box, to_torch(dtype)) for key, box in parts for dtype, expression in [self.made[key]]]
        )
