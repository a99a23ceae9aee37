"""Boxes of a tensor's index space, and the memory that they lie in: strided, in one piece, in ranges of bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """The bytes ``start <= i < stop`` of a file."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a byte range: {self.start}..{self.stop}")

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def coalesce(ranges: Iterable[ByteRange], *, max_gap_bytes: int) -> list[ByteRange]:
    """Sorted ranges that cover all of ``ranges``, joined where at most ``max_gap_bytes`` lie between them."""
    joined: list[ByteRange] = []
    for item in sorted(ranges):
        if joined and item.start - joined[-1].stop <= max_gap_bytes:
            joined[-1] = ByteRange(joined[-1].start, max(joined[-1].stop, item.stop))
        else:
            joined.append(item)
    return joined


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


def row_blocks(shape: Sequence[int], max_numel: int) -> list[Box]:
    """The tensor in boxes that are one run of a row-major tensor each, in order, of ``max_numel`` elements at most.

    (Of one element at least.) A tensor without elements has no blocks.
    """
    if not numel(shape):
        return []
    split = len(shape)
    inner = 1
    while split and inner * shape[split - 1] <= max_numel:
        split -= 1
        inner *= shape[split]
    if not split:
        return [Box.whole(shape)]
    dim, step = split - 1, max(1, max_numel // inner)
    boxes: list[Box] = []
    for lead in product(*(range(size) for size in shape[:dim])):
        for first in range(0, shape[dim], step):
            count = min(step, shape[dim] - first)
            boxes.append(
                Box((*lead, first, *(0 for _ in shape[split:])), (*(1 for _ in lead), count, *shape[split:]))
            )
    return boxes


def in_bytes_of(size: int | str) -> int:
    """A size as "5GB", "200MB" (powers of 1000, as on the hub) or "1GiB", or a number of bytes.

    Raises:
        ConfigError: for anything else, and for less than a byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", str(size).upper())
    nbytes = 0
    if found is not None:
        base = 1024 if found[3] else 1000
        exact = float(found[1]) * base ** " KMGT".index(found[2] or " ")
        nbytes = int(exact) if math.isfinite(exact) else 0
    if nbytes < 1:
        raise ConfigError(f"{size!r} is not a size of at least one byte; pass bytes, or text such as 5GB")
    return nbytes
