"""Axis-aligned boxes of a tensor's index space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.tensors.strided import numel


@dataclass(frozen=True, slots=True)
class Box:
    """The indices ``offsets[d] <= i[d] < offsets[d] + sizes[d]`` of an N-d tensor (N may be 0)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"offsets {self.offsets} and sizes {self.sizes} differ in length")
        if any(offset < 0 for offset in self.offsets) or any(size < 0 for size in self.sizes):
            raise ValueError(f"negative offset or size in {self}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return numel(self.sizes)

    def is_within(self, shape: Sequence[int]) -> bool:
        """Whether every index of the box is an index of a tensor of this shape."""
        return len(shape) == len(self.sizes) and all(
            offset + size <= bound for offset, size, bound in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common indices of two boxes of the same tensor; None when there are none."""
        offsets: list[int] = []
        sizes: list[int] = []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))
