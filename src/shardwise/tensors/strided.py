"""Strided views of flat memory, in elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def numel(sizes: Sequence[int]) -> int:
    """The number of elements of a tensor of these sizes (1 for a 0-d tensor)."""
    return math.prod(sizes)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a contiguous tensor of these sizes."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Strided:
    """The elements ``offset + sum(i[d] * strides[d])`` with ``0 <= i[d] < sizes[d]`` of a flat memory.

    All numbers count elements. Strides are not negative.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, sizes: Sequence[int], offset: int = 0) -> Strided:
        """A row-major tensor of these sizes that starts at ``offset``."""
        return cls(offset, tuple(sizes), contiguous_strides(sizes))

    @property
    def numel(self) -> int:
        return numel(self.sizes)

    @property
    def stop(self) -> int:
        """One past the last element touched (``offset`` when there is none)."""
        if self.numel == 0:
            return self.offset
        reach = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return self.offset + reach + 1

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are one run of memory, in iteration order."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True
