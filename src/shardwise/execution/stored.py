"""Boxes of a checkpoint's tensors, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from shardwise.conversion import Expression, Opaque
from shardwise.execution.place import Placer
from shardwise.tensors import Box

WantedBox: TypeAlias = tuple[str, Box, torch.dtype]
"""A tensor by name, a box of it, and the dtype it is to have."""


@dataclass
class StoredTensors:
    """Tensors that a checkpoint has, by names of one's own."""

    placer: Placer
    expressions: Mapping[str, Expression]
    _computed: tuple[str, torch.Tensor] | None = None

    def values_of(self, wanted: Sequence[WantedBox]) -> list[torch.Tensor]:
        """Boxes of tensors by name, as new tensors, read together."""
        moved = [item for item in wanted if not isinstance(self.expressions[item[0]], Opaque)]
        read = iter(self.placer.values_of([(self.expressions[name], box, dtype) for name, box, dtype in moved]))
        return [
            self._computed_box(*item) if isinstance(self.expressions[item[0]], Opaque) else next(read)
            for item in wanted
        ]

    def _computed_box(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        if self._computed is None or self._computed[0] != name:
            expression = self.expressions[name]
            self._computed = name, self.placer.values(expression, Box.whole(expression.shape), dtype)
        return self._computed[1][box_slices(box)].to(dtype, copy=True).contiguous()


def box_slices(box: Box) -> tuple[slice, ...]:
    """To index a whole tensor with."""
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
