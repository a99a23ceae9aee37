"""Dequantization of integers and of low-bit floats: (code - zero point) * scale.

Codes are stored row by row, with the first of two codes in the lower half of a byte, or of a :class:`Form4` in the
upper half. Packed zero points are decoded by a node of their own (:func:`decode`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from shardwise.core.computed import BadValues, Computed, ComputedBlock, cast, every_nth, split_aligned, table_for
from shardwise.core.expression import Expression, Shape, permute, reshape
from shardwise.core.tensors import Box, Code, DType, Form4, numel

_OUT = "values"

_EXPONENT_BIAS = 127

_MAX_ELEMENTS = 4 << 20
"""Elements of a block, which should still be in the cache when it is evaluated."""

_STRIP_ELEMENTS = 1 << 18
"""Elements evaluated at once, about a core's cache. With fewer, threads wait for each other too often."""

_STRIP_BYTES = 12
"""Memory for each element of a strip: its value, its scale if scales are expanded, and an index."""


_Check: TypeAlias = tuple[Any, int, str]
"""Whether an input is usable, its index, and its fault otherwise."""


@dataclass(frozen=True, slots=True)
class Dequantize:
    """``out[i, j] = (codes[i, j] - zeros[i // unit[0], j // unit[1]]) * scales[i // unit[0], j // unit[1]]``.

    Computed in float32 and rounded once to ``dtype``, for any number of dimensions. Indices are those of the full
    tensor. Blocks at the end of a dimension may be smaller than the unit. Inputs are the codes, the scales, and if
    there are any, the scale of the whole tensor and the zero points.

    A weight (3, 8) in INT4 with groups of 4 columns has ``shape`` (3, 8), ``unit`` (1, 4), codes (3, 4), two in a
    byte, and scales (3, 2). Its box ``[1:3, 4:8]`` needs the codes ``[1:3, 2:4]`` and the scales ``[1:3, 1:2]``.

    Attributes:
        shape: of the result.
        unit: number of elements with one scale, by dimension. Empty without scales.
        code: values of the stored bytes.
        has_exponents: scales are bytes ``b`` that represent ``2 ** (b - 127)`` (E8M0 of OCP's microscaling formats,
            255 is NaN).
        overall: power of the scale of the whole tensor by which scales are multiplied: 1, -1, or 0 without one.
        has_zeros: an input has a zero point for each scale.
        dtype: of the result, F32, BF16 or F16.
    """

    shape: Shape
    unit: Shape
    code: Code | Form4
    has_exponents: bool = False
    overall: int = 0
    has_zeros: bool = False
    dtype: DType = DType.F32
    label: str = "dequantizing"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        numel = self._max_elements(max_block_bytes)
        for box in split_aligned(requested[_OUT], self.shape, self._byte_aligned, numel):
            # In the order of the operation's sources: codes, scales, scale of the whole tensor, zero points.
            inputs = [every_nth(box, self.code.per_byte)]
            if self.unit:
                inputs.append(self._get_scales(box))
            if self.overall:
                inputs.append(Box((0,), (1,)))
            if self.has_zeros:
                # Zero points have one value for each scale, and so the same box.
                inputs.append(inputs[1])
            scales = inputs[1].numel if self.unit else 0
            yield ComputedBlock(tuple(inputs), {_OUT: box}, self._nbytes(box.numel, scales))

    @property
    def _byte_aligned(self) -> Shape:
        """The smallest box whose codes are whole bytes."""
        return (*(1 for _ in self.shape[:-1]), self.code.per_byte)

    def _get_scales(self, box: Box) -> Box:
        # From the block of the first element to that of the last, both included.
        starts = (at // size for at, size in zip(box.offsets, self.unit, strict=True))
        return Box.between(starts, (-(-stop // size) for stop, size in zip(box.stops, self.unit, strict=True)))

    @property
    def _bytes_per_scale(self) -> int:
        """Memory of a scale: three times itself, and the same for its zero point."""
        return 24 if self.has_zeros else 12

    def _nbytes(self, elements: int, scales: int) -> int:
        """Return the bytes of a block: codes, values of up to 4 bytes, scales, and scratch memory of a strip."""
        return 5 * elements + self._bytes_per_scale * scales + _STRIP_BYTES * min(elements, _STRIP_ELEMENTS)

    def _max_elements(self, max_block_bytes: int) -> int:
        """Return the elements of the largest block within ``max_block_bytes``, with full rows or within one row."""
        # The same terms as in _nbytes(), solved for the number of elements.
        per_element = 5  # a stored code and a value of up to 4 bytes
        if self.unit:
            per_element += -(-self._bytes_per_scale // self.unit[-1])
        # Below a strip, scratch memory grows with the elements. From a strip on it is constant.
        small = max_block_bytes // (per_element + _STRIP_BYTES)
        if small < _STRIP_ELEMENTS:
            return small
        return min(_MAX_ELEMENTS, (max_block_bytes - _STRIP_BYTES * _STRIP_ELEMENTS) // per_element)

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        """Evaluate a block.

        Raises:
            BadValues: scales are not finite, or the scale of the whole tensor is 0.
        """
        # On the device of the inputs.
        result = cast(values[0].new_empty(0), self.dtype).new_empty(block.outputs[_OUT].sizes)
        checks = self._write(block.outputs[_OUT], values, result, _STRIP_ELEMENTS)
        for is_usable, source, fault in checks:
            if not is_usable:
                shown = fault.format(float(values[source].view(-1)[0]))
                raise BadValues(f"{shown}. Download or write the checkpoint again", source)
        return {_OUT: result}

    def evaluate_on_device(
        self, block: ComputedBlock, values: Sequence[Any], max_block_bytes: int
    ) -> tuple[Mapping[str, Any], Any]:
        box = block.outputs[_OUT]
        result = cast(values[0].new_empty(0), self.dtype).new_empty(box.sizes)
        strip_elements = _STRIP_ELEMENTS + max(0, max_block_bytes - block.nbytes) // _STRIP_BYTES
        checks = self._write(box, values, result, strip_elements)
        is_bad = result.isnan().any()
        for is_usable, _, _ in checks:
            is_bad = is_bad | ~is_usable
        return {_OUT: result}, is_bad

    def _write(self, box: Box, values: Sequence[Any], out: Any, strip_elements: int) -> Sequence[_Check]:
        """Write the values of a box, strip by strip. Return checks of the inputs."""
        # Strip by strip, so that a strip's values are still in the cache when they are scaled and copied.
        packed, factors, zeros, checks = self._inputs(values)
        numbers = table_for(_values_by_byte(self.code), DType.F32, packed)
        # The two numbers of a byte are looked up as one integer of 8 bytes.
        table = numbers.view(numbers.new_empty(0).long().dtype) if self.code.per_byte == 2 else numbers
        for strip in split_aligned([box], self.shape, self._byte_aligned, strip_elements):
            codes = _slice(packed, every_nth(strip, self.code.per_byte), every_nth(box, self.code.per_byte))
            result = table.index_select(0, codes.int().view(-1)).view(numbers.dtype).view(strip.sizes)
            # The difference of two small integers is exact. Only the product is rounded.
            if zeros is not None:
                by_block, spread = self._spread(result, self._strip_scales(zeros, strip, box), strip)
                by_block.sub_(spread)
            if factors is not None:
                by_block, spread = self._spread(result, self._strip_scales(factors, strip, box), strip)
                by_block.mul_(spread)
            _slice(out, strip, box).copy_(result)
        return checks

    def _inputs(self, values: Sequence[Any]) -> tuple[Any, Any, Any, Sequence[_Check]]:
        """Return the codes, scales and zero points (float32 or None), and checks."""
        # In the order of blocks(): codes, scales, the scale of the whole tensor, zero points.
        codes, *others = values
        if not self.unit:
            return codes, None, None, ()
        scales, *others = others
        factors = scales.float()
        if self.has_exponents and not scales.is_floating_point():
            factors = table_for(POWERS, DType.F32, scales)[scales.int()]
        # Checks are tensors that nobody has looked at: on an accelerator, looking waits for the device.
        checks: list[_Check] = [(factors.isfinite().all(), 1, "a scale is NaN or infinite")]
        if self.overall:
            whole = others.pop(0).float()
            factors = factors * whole if self.overall > 0 else factors / whole
            is_usable = whole.isfinite().all() & whole.all() & factors.isfinite().all()
            fault = "the scale of the whole tensor is {}, with which scales are 0 or not finite"
            checks.append((is_usable, 2, fault))
        zeros = others.pop(0).float() if self.has_zeros else None
        if zeros is not None:
            checks.append((zeros.isfinite().all(), 2 + bool(self.overall), "a zero point is NaN or infinite"))
        return codes, factors, zeros, checks

    def _strip_scales(self, scales: Any, strip: Box, box: Box) -> Any:
        return _slice(scales, self._get_scales(strip), self._get_scales(box))

    def _spread(self, result: Any, scales: Any, box: Box) -> tuple[Any, Any]:
        """Return values and their scales (or zero points) in shapes that broadcast.

        Values (3, 8) with scales (3, 2) are returned as (3, 2, 4) and (3, 2, 1), if blocks of 4 columns are whole.
        """
        # Outer dimensions are repeated. Along the last one, views are broadcast if blocks are whole.
        *outer, last = range(len(box.sizes))
        for dim in outer:
            scales = self._repeat(scales, dim, box)
        unit, at, width = self.unit[last], box.offsets[last], box.sizes[last]
        if at % unit == 0 and width % unit == 0:
            return result.view(*box.sizes[:-1], width // unit, unit), scales.unsqueeze(-1)
        # A block is cut at an end: each column gets its scale.
        return result, self._repeat(scales, last, box)

    def _repeat(self, scales: Any, dim: int, box: Box) -> Any:
        """Return a scale for each element along a dimension, unchanged if one scale is for all."""
        unit, at, size = self.unit[dim], box.offsets[dim], box.sizes[dim]
        if unit == 1 or scales.shape[dim] == 1:
            return scales
        # ``scales`` begin with the block of the first element, which may be inside of that block.
        return scales.repeat_interleave(unit, dim).narrow(dim, at % unit, size)


POWERS = (*(2.0 ** (byte - _EXPONENT_BIAS) for byte in range(255)), float("nan"))
"""Values of the 256 codes of E8M0."""


def _slice(tensor: Any, box: Box, whole: Box) -> Any:
    """Return a box of the tensor that holds the box ``whole``."""
    for dim, (at, start, size) in enumerate(zip(box.offsets, whole.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at - start, size)
    return tensor


@cache
def _values_by_byte(code: Code | Form4) -> tuple[float, ...]:
    """Return the one or two values of each byte, one byte after the other."""
    if code.per_byte == 1:
        return code.codebook
    numbers: list[float] = []
    for upper in code.codebook:
        for lower in code.codebook:
            numbers += (upper, lower) if isinstance(code, Form4) else (lower, upper)
    return tuple(numbers)


def decode(values: Expression, shape: Sequence[int], code: Code) -> Expression:
    """Return the values of codes, as float32, without scales.

    Args:
        values: as many bytes as ``shape`` needs, row by row, under any shape.
        shape: of the result.
        code: values of the bytes.

    Raises:
        ValueError: there are not as many bytes as elements.
    """
    return Computed(
        Dequantize(tuple(shape), (), code), _OUT, tuple(shape), DType.F32, (_bytes(values, shape, code),)
    )


def dequantize(
    values: Expression,
    scales: Expression,
    shape: Sequence[int],
    unit: Sequence[int],
    code: Code | Form4,
    *,
    has_exponents: bool = False,
    overall: tuple[Expression, int] | None = None,
    zeros: Expression | None = None,
    groups: Expression | None = None,
    dtype: DType = DType.F32,
) -> Expression:
    """Return (elements - zero points) * scales, rounded once to ``dtype``. See :class:`Dequantize`.

    Args:
        values: as many bytes as ``shape`` needs, row by row, under any shape.
        scales: one for each block, row by row.
        shape: of the result.
        unit: sizes of a block, by dimension.
        code: values of the bytes.
        has_exponents: scales of bytes are exponents.
        overall: a tensor of one element, and 1 or -1: by which scales are multiplied, or divided.
        zeros: numbers of any dtype, one for each block, that are subtracted.
        groups: integers, the block of each index of the last dimension, if it does not follow from the index.
        dtype: of the result, F32, BF16 or F16.

    Raises:
        ValueError: there are not as many scales, or zero points, as blocks, not as many bytes as elements, or not
            as many groups as columns.
    """
    shape, unit = tuple(shape), tuple(unit)
    # Numbers of blocks, the last ones of a dimension possibly smaller. Scales may be stored under any shape.
    counts = tuple(-(-size // step) for size, step in zip(shape, unit, strict=True))
    factors = [reshape(scales, counts)]
    if zeros is not None:
        factors.append(reshape(zeros, counts))
    if groups is not None:
        factors = [_expand_by_column(by_block, reshape(groups, shape[-1:])) for by_block in factors]
        unit = (*unit[:-1], 1)  # each column has its scale from here on
    if overall is not None:
        factors.insert(1, reshape(overall[0], (1,)))  # between scales and zero points: see ``blocks``
    power = 0 if overall is None else overall[1]
    operation = Dequantize(shape, unit, code, has_exponents, power, zeros is not None, dtype)
    sources = (_bytes(values, shape, code), *factors)
    return Computed(operation, _OUT, shape, dtype, sources)


def _expand_by_column(by_block: Expression, groups: Expression) -> Expression:
    """Return the scales (or zero points) of all indices of the last dimension, from those of the blocks."""
    *outer, count = by_block.shape
    transposed = permute(reshape(by_block, (numel(outer), count)), (1, 0))  # (blocks, rows)
    by_column = _gather_rows(transposed, groups)  # (columns, rows)
    return reshape(permute(by_column, (1, 0)), (*outer, groups.shape[0]))


def _bytes(values: Expression, shape: Sequence[int], code: Code | Form4) -> Expression:
    per_byte = code.per_byte
    if not shape or shape[-1] % per_byte or numel(values.shape) * per_byte != numel(shape):
        raise ValueError(f"{values} has {values.shape}, which is not {tuple(shape)}, {per_byte} in a byte")
    return reshape(values, (*shape[:-1], shape[-1] // per_byte))


@dataclass(frozen=True, slots=True)
class GatherRows:
    """``out[i, j] = rows[indices[i], j]``. Floats are float32, integers are unchanged.

    Attributes:
        count: of the rows.
        shape: of the result.
    """

    count: int
    shape: Shape
    label: str = "choosing rows"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        # A block reads all rows, because their indices are known only when it is evaluated, of a few columns.
        at_once = max(1, max_block_bytes // (16 * self.count))
        for whole in split_aligned(requested[_OUT], self.shape, (1, 1), numel(self.shape)):
            (first, start), (count, width) = whole.offsets, whole.sizes
            for column in range(start, start + width, at_once):
                columns = min(at_once, start + width - column)
                rows = max(1, max_block_bytes // (8 * columns + 32))
                for row in range(first, first + count, rows):
                    box = Box((row, column), (min(rows, first + count - row), columns))
                    inputs = Box((0, column), (self.count, columns)), Box((row,), box.sizes[:1])
                    nbytes = 4 * box.numel + 8 * inputs[0].numel + 16 * box.sizes[0]
                    yield ComputedBlock(inputs, {_OUT: box}, nbytes)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        """Take the rows of a block.

        Raises:
            BadValues: a number is not that of a row.
        """
        # Indices come from a file, so they are checked before they are used.
        rows, indices = values
        if bool(((indices < 0) | (indices >= self.count)).any()):
            raise BadValues(
                f"groups are {int(indices.min())} to {int(indices.max())}, and there are scales for 0 to "
                f"{self.count - 1}. Download or write the checkpoint again",
                1,
            )
        return {_OUT: (rows.float() if rows.is_floating_point() else rows).index_select(0, indices.long())}


def _gather_rows(source: Expression, indices: Expression) -> Expression:
    """Return the chosen rows (see :class:`GatherRows`).

    ``source`` is (count, columns), ``indices`` are integers (rows,).
    """
    shape = (indices.shape[0], source.shape[1])
    dtype = DType.F32 if source.dtype.kind == "float" else source.dtype
    return Computed(GatherRows(source.shape[0], shape), _OUT, shape, dtype, (source, indices))
