"""Reads boxes of a save from the checkpoint that they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from shardwise.conversion import Expression, SmallestBlocks, computed_leaves
from shardwise.errors import CoverageError
from shardwise.execution.reading.place import Placer
from shardwise.models.torch_words import to_torch
from shardwise.planning.saves.save_plan import Saved
from shardwise.report.names import in_bytes
from shardwise.storage.names import shown
from shardwise.tensors import Box, DType, numel

COMPUTED_BYTES = 512 << 20
"""Of what a conversion that computes may take at once: its inputs and outputs."""


_TOGETHER_BYTES = 128 << 20
"""Of tensors that one computation makes, such as packed bytes and their scales: these are made once, together."""


@dataclass
class Outgoing:
    """The tensors of a save, box by box.

    ``made`` has the dtype of each, and what it is made of, by key, in the order of the save; leaves are what
    ``placer`` reads.
    """

    made: Mapping[str, tuple[DType, Expression]]
    placer: Placer
    _whole: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that have been made with others, until they have been asked for."""

    @cached_property
    def _together(self) -> Mapping[str, tuple[str, ...]]:
        """The keys of what one computation makes, by each of them, where that is not too large."""
        outputs: dict[object, dict[str, list[str]]] = {}
        for key, (_, expression) in self.made.items():
            for leaf in computed_leaves(expression):
                same = leaf.operation, *map(id, leaf.sources)  # looking into these would take long
                outputs.setdefault(same, {}).setdefault(leaf.output, []).append(key)
        found: dict[str, tuple[str, ...]] = {}
        for by_output in outputs.values():
            keys = tuple(dict.fromkeys(key for members in by_output.values() for key in members))
            if len(by_output) > 1 and sum(map(self._nbytes, keys)) <= _TOGETHER_BYTES:
                found |= dict.fromkeys(keys, keys)
        return found

    def leaders(self) -> dict[str, str]:
        """Of what is made together, the first key, by each: it is made once if it is asked for in one go."""
        return {key: keys[0] for key, keys in self._together.items()}

    def _nbytes(self, key: str) -> int:
        dtype, expression = self.made[key]
        return numel(expression.shape) * dtype.itemsize

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
        """Boxes of the save's tensors, in the dtype in which they are saved.

        What one computation makes is made when any of it is first asked for, and kept as long as each call asks for
        some of it.

        Memory: a few times the boxes, and 128 MiB.
        """
        whole = dict.fromkeys(other for key, _ in parts for other in self._together.get(key, ()))
        self._whole = {key: tensor for key, tensor in self._whole.items() if key in whole}
        new = [(key, Box.whole(self.made[key][1].shape)) for key in whole if key not in self._whole]
        boxes = [part for part in parts if part[0] not in whole]
        read = self.placer.values_of(
            [
                (expression, box, to_torch(dtype))
                for key, box in (*new, *boxes)
                for dtype, expression in [self.made[key]]
            ]
        )
        self._whole |= {key: tensor for (key, _), tensor in zip(new, read, strict=False)}
        others = iter(read[len(new) :])
        return [_part(self._whole[key], box) if key in whole else next(others) for key, box in parts]


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor.contiguous()
