"""A node that makes numbers of elements that are stored in few bits: each times the scale of its block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.conversion.computed import Computed, ComputedBlock, aligned_blocks
from shardwise.conversion.expression import Expression, Shape, reshape
from shardwise.tensors import Box, Code, DType, numel

_OUT = "numbers"
_BYTES_AN_ELEMENT = 12
"""The element as it is stored, as float32, and its scale."""

_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class Dequantise:
    """``out[i, j, ...] = numbers[i, j, ...] * scales[i // unit[0], j // unit[1], ...]``, in float32.

    Indices are those of the whole tensor, so that any part of it has the scales that are its own. Blocks at the end
    of a dimension may be smaller than the unit.

    Attributes:
        shape: of the result.
        unit: how many elements have one scale, by dimension.
        code: what stored bytes stand for.
        has_exponents: scales are bytes ``b`` that stand for ``2 ** (b - 127)`` (E8M0 of OCP's microscaling
            formats; 255 is NaN).
        overall: of a third input, one number for the whole tensor: scales are multiplied by it to this power.
    """

    shape: Shape
    unit: Shape
    code: Code
    has_exponents: bool = False
    overall: int = 0
    label: str = "dequantising"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        step = self.code.per_byte
        unit = (*(1 for _ in self.shape[:-1]), step)
        for box in aligned_blocks(wanted[_OUT], self.shape, unit, most_bytes // _BYTES_AN_ELEMENT):
            last, width = box.offsets[-1], box.sizes[-1]
            values = Box((*box.offsets[:-1], last // step), (*box.sizes[:-1], width // step))
            starts = [at // size for at, size in zip(box.offsets, self.unit, strict=True)]
            stops = [
                -(-(at + size) // unit) for at, size, unit in zip(box.offsets, box.sizes, self.unit, strict=True)
            ]
            scales = Box(tuple(starts), tuple(b - a for a, b in zip(starts, stops, strict=True)))
            needs = (values, scales) if not self.overall else (values, scales, Box((0,), (1,)))
            yield ComputedBlock(needs, {_OUT: box}, _BYTES_AN_ELEMENT * box.numel)

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        box = block.gives[_OUT]
        numbers = _numbers(values[0], self.code, box.sizes)
        factors = values[1].float()
        if self.has_exponents and not values[1].is_floating_point():
            factors = factors.new_tensor(_POWERS)[values[1].int()]
        if self.overall:
            whole = values[2].float()
            factors = factors * whole if self.overall > 0 else factors / whole
        *outer, last = range(len(box.sizes))
        for dim in outer:
            factors = self._repeated(factors, dim, box)
        unit, at, width = self.unit[last], box.offsets[last], box.sizes[last]
        if at % unit == 0 and width % unit == 0:
            by_block = numbers.view(*box.sizes[:-1], width // unit, unit)
            by_block.mul_(factors.unsqueeze(-1))
        else:
            numbers.mul_(self._repeated(factors, last, box))
        return {_OUT: numbers}

    def _repeated(self, factors: Any, dim: int, box: Box) -> Any:
        """A scale for each element along a dimension; as it is where one is everybody's."""
        unit, at, size = self.unit[dim], box.offsets[dim], box.sizes[dim]
        if unit == 1 or factors.shape[dim] == 1:
            return factors
        return factors.repeat_interleave(unit, dim).narrow(dim, at % unit, size)


_POWERS = (*(2.0 ** (byte - _EXPONENT_BIAS) for byte in range(255)), float("nan"))


def _numbers(stored: Any, code: Code, sizes: Sequence[int]) -> Any:
    """What bytes stand for, as float32, in memory of its own.

    Two numbers at a time are looked up, by one byte or by two. numpy's ``take`` is several times quicker at that
    than torch's indexing, or than its casts of 8-bit floats.
    """
    found = stored.new_empty(0).float().new_empty(sizes)
    keys, out = stored.numpy().reshape(-1), found.numpy().reshape(-1)
    even = keys.size if code.per_byte == 2 else keys.size // 2 * 2
    pairs = keys if code.per_byte == 2 else keys[:even].view(np.uint16)
    # Within the table whatever is asked for, so that "clip" changes nothing but the time.
    np.take(_pairs_of(code), pairs, out=out[: 2 * pairs.size].view(np.uint64), mode="clip")
    if even < keys.size:
        out[-1] = code.numbers[int(keys[-1])]
    return found


@lru_cache
def _pairs_of(code: Code) -> NDArray[np.uint64]:
    """Two float32 in a row, by the byte or the two bytes (the first is the lower one) that stand for them."""
    numbers = np.array(code.numbers, dtype=np.float32)
    count = len(numbers)
    first, second = np.tile(numbers, count), np.repeat(numbers, count)
    return np.stack([first, second], axis=1).view(np.uint64).reshape(-1)


def dequantised(
    values: Expression,
    scales: Expression,
    shape: Sequence[int],
    unit: Sequence[int],
    code: Code,
    *,
    has_exponents: bool = False,
    overall: tuple[Expression, int] | None = None,
) -> Expression:
    """Elements times their scales, as float32; see :class:`Dequantise`.

    Args:
        values: as many bytes as ``shape`` needs, row by row, under any shape.
        scales: one for each block, row by row.
        shape: of the result.
        unit: sizes of a block, by dimension.
        code: what the bytes stand for.
        has_exponents: scales of bytes are exponents.
        overall: a tensor of one element, and 1 or -1: by which scales are multiplied, or divided.

    Raises:
        ValueError: there are not as many scales as blocks, or not as many bytes as elements.
    """
    operation = Dequantise(tuple(shape), tuple(unit), code, has_exponents, 0 if overall is None else overall[1])
    per_byte = code.per_byte
    counts = tuple(-(-size // step) for size, step in zip(shape, unit, strict=True))
    if not shape or shape[-1] % per_byte or numel(values.shape) * per_byte != numel(shape):
        raise ValueError(f"{values} has {values.shape}, which is not {tuple(shape)}, {per_byte} in a byte")
    if numel(scales.shape) != numel(counts):
        raise ValueError(f"{scales} has {scales.shape}, and blocks of {tuple(unit)} want {counts}")
    packed = (*shape[:-1], shape[-1] // per_byte)
    sources = [reshape(values, packed), reshape(scales, counts)]
    if overall is not None:
        sources.append(reshape(overall[0], (1,)))
    return Computed(operation, _OUT, tuple(shape), DType.F32, tuple(sources))
