"""A node of one's own, in one file: a tensor times a scale for every two by two elements of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.core.computed import Computed, ComputedBlock, split_aligned
from shardwise.core.expression import Expression
from shardwise.core.tensors import Box

UNIT = 2


@dataclass(frozen=True)
class Scale:
    """``out[i, j] = weight[i, j] * scales[i // 2, j // 2]``."""

    shape: tuple[int, int]
    label: str = "Scale"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        for box in split_aligned(requested["scaled"], self.shape, (UNIT, UNIT), max_block_bytes // 12):
            scales = Box(tuple(at // UNIT for at in box.offsets), tuple(-(-size // UNIT) for size in box.sizes))
            yield ComputedBlock((box, scales), {"scaled": box}, 8 * box.numel + 4 * scales.numel)

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        weight, scales = values
        rows, columns = block.outputs["scaled"].sizes
        if isinstance(weight, np.ndarray):
            return {"scaled": weight * scales.repeat(UNIT, 0).repeat(UNIT, 1)[:rows, :columns]}
        wide = scales.repeat_interleave(UNIT, 0).repeat_interleave(UNIT, 1)
        return {"scaled": weight * wide[:rows, :columns]}


def scales_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a tensor."""
    return tuple(-(-size // UNIT) for size in shape)


def scaled(weight: Expression, scales: Expression) -> Expression:
    """``weight`` (out, in) times ``scales`` (ceil(out / 2), ceil(in / 2))."""
    rows, columns = weight.shape
    return Computed(Scale((rows, columns)), "scaled", weight.shape, weight.dtype, (weight, scales))
