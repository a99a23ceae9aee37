"""Boxes of a checkpoint's tensors, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from shardwise.conversion import Expression
from shardwise.execution.place import Placer
from shardwise.tensors import Box

WantedBox: TypeAlias = tuple[str, Box, torch.dtype]
"""A tensor by name, a box of it, and the dtype it is to have."""


@dataclass
class StoredTensors:
    """Tensors that a checkpoint has, by names of one's own."""

    placer: Placer
    expressions: Mapping[str, Expression]

    def values_of(self, wanted: Sequence[WantedBox]) -> list[torch.Tensor]:
        """Boxes of tensors by name, as new tensors, read together."""
        return self.placer.values_of([(self.expressions[name], box, dtype) for name, box, dtype in wanted])


def box_slices(box: Box) -> tuple[slice, ...]:
    """To index a whole tensor with."""
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
