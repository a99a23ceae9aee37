"""A node that makes numbers of elements that are stored in few bits: each times the scale of its block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.conversion.computed import Computed, ComputedBlock, aligned_blocks
from shardwise.conversion.decoding import BYTES_AN_ELEMENT, Decoder
from shardwise.conversion.expression import Expression, Shape, reshape
from shardwise.tensors import Box, Code, DType, numel

_OUT = "numbers"

_EXPONENT_BIAS = 127

_MOST_ELEMENTS = 4 << 20
"""Of a block: what is read of it is still in the cache when it is evaluated."""

_STRIP_ELEMENTS = 1 << 18
"""What is evaluated at once, within a core's cache or nearly so. With less, several threads would wait for each
other between any two steps, more often than it is worth."""

_STRIP_BYTES = 8 + BYTES_AN_ELEMENT
"""Of memory for each element of a strip: as float32, a scale where each needs its own, and what decoding takes."""


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
        for box in aligned_blocks(wanted[_OUT], self.shape, self._whole_bytes, self._most_elements(most_bytes)):
            values, scales = self._bytes_of(box), self._scales_of(box)
            needs = (values, scales) if not self.overall else (values, scales, Box((0,), (1,)))
            yield ComputedBlock(needs, {_OUT: box}, self._nbytes(box.numel, scales.numel))

    @property
    def _whole_bytes(self) -> Shape:
        """The least that blocks and strips are made of."""
        return (*(1 for _ in self.shape[:-1]), self.code.per_byte)

    def _bytes_of(self, box: Box) -> Box:
        step = self.code.per_byte
        return Box((*box.offsets[:-1], box.offsets[-1] // step), (*box.sizes[:-1], box.sizes[-1] // step))

    def _scales_of(self, box: Box) -> Box:
        starts = [at // size for at, size in zip(box.offsets, self.unit, strict=True)]
        stops = [-(-(at + size) // unit) for at, size, unit in zip(box.offsets, box.sizes, self.unit, strict=True)]
        return Box(tuple(starts), tuple(b - a for a, b in zip(starts, stops, strict=True)))

    def _nbytes(self, elements: int, scales: int) -> int:
        """Of a block: stored, its numbers as float32, its scales three times, and what a strip takes."""
        return 5 * elements + 12 * scales + _STRIP_BYTES * min(elements, _STRIP_ELEMENTS)

    def _most_elements(self, most_bytes: int) -> int:
        """Of a block of at most so many bytes, whose rows are whole or of which each is of one row."""
        an_element = 5 + -(-12 // self.unit[-1])
        small = most_bytes // (an_element + _STRIP_BYTES)
        if small < _STRIP_ELEMENTS:
            return small
        return min(_MOST_ELEMENTS, (most_bytes - _STRIP_BYTES * _STRIP_ELEMENTS) // an_element)

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        numbers = values[0].new_empty(0).float().new_empty(block.gives[_OUT].sizes)
        self.evaluate_into(block, values, {_OUT: numbers})
        return {_OUT: numbers}

    def evaluate_into(self, block: ComputedBlock, values: Sequence[Any], outputs: Mapping[str, Any]) -> None:
        box = block.gives[_OUT]
        factors = values[1].float()
        if self.has_exponents and not values[1].is_floating_point():
            factors = factors.new_tensor(POWERS)[values[1].int()]
        if self.overall:
            whole = values[2].float()
            factors = factors * whole if self.overall > 0 else factors / whole
        strips = list(aligned_blocks([box], self.shape, self._whole_bytes, _STRIP_ELEMENTS))
        most = max(strip.numel for strip in strips)
        decoder, memory = Decoder(self.code, values[0], most), factors.new_empty(most)
        factors, unit = _taken_in(factors, decoder.unit)
        for strip in strips:
            numbers = memory[: strip.numel].view(strip.sizes)
            decoder.decode(_part(values[0], self._bytes_of(strip), self._bytes_of(box)), numbers)
            if unit != 1:
                numbers.mul_(unit)
            self._scale(numbers, _part(factors, self._scales_of(strip), self._scales_of(box)), strip)
            _part(outputs[_OUT], strip, box).copy_(numbers)

    def _scale(self, numbers: Any, factors: Any, box: Box) -> None:
        *outer, last = range(len(box.sizes))
        for dim in outer:
            factors = self._repeated(factors, dim, box)
        unit, at, width = self.unit[last], box.offsets[last], box.sizes[last]
        if at % unit == 0 and width % unit == 0:
            numbers = numbers.view(*box.sizes[:-1], width // unit, unit)
            factors = factors.unsqueeze(-1)
        else:
            factors = self._repeated(factors, last, box)
        numbers.mul_(factors)

    def _repeated(self, factors: Any, dim: int, box: Box) -> Any:
        """A scale for each element along a dimension; as it is where one is everybody's."""
        unit, at, size = self.unit[dim], box.offsets[dim], box.sizes[dim]
        if unit == 1 or factors.shape[dim] == 1:
            return factors
        return factors.repeat_interleave(unit, dim).narrow(dim, at % unit, size)


POWERS = (*(2.0 ** (byte - _EXPONENT_BIAS) for byte in range(255)), float("nan"))
"""Scales by the byte that stands for them (E8M0)."""


def _part(tensor: Any, box: Box, whole: Box) -> Any:
    """A box of what holds another one."""
    for dim, (at, start, size) in enumerate(zip(box.offsets, whole.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at - start, size)
    return tensor


def _taken_in(factors: Any, unit: float) -> tuple[Any, float]:
    """Factors by which numbers that are to be multiplied by ``unit`` are, too; and what is left of that."""
    if unit == 1:
        return factors, 1.0
    both = factors * unit
    return (both, 1.0) if bool((both.isinf() == factors.isinf()).all()) else (factors, unit)


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
