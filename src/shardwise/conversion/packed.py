"""Defines weights in four bits as expressions: packed while they are read, or taken as they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.conversion import expression, four_bit
from shardwise.conversion.computed import BadValues, Computed, ComputedBlock, aligned_blocks
from shardwise.conversion.dequantize import Dequantize
from shardwise.tensors import Box, Code, DType, Form4, FourBitForm, numel

_OUT = "bytes"
_NUMBERS = "numbers"
_BYTES_A_NUMBER = 5
"""The number, its half byte, and its part of a scale."""


@dataclass(frozen=True, slots=True)
class Reinterpret:
    """Numbers as memory has them, taken for others: rows of float32 for their bytes, or the other way round.

    Attributes:
        shape: of the result.
        dtype: of the result.
        source: dtype of the input.
    """

    shape: expression.Shape
    dtype: DType
    source: DType
    label: str = "reinterpreting"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        made, given = self.dtype.itemsize, self.source.itemsize
        unit = (*(1 for _ in self.shape[:-1]), max(1, given // made))
        for box in aligned_blocks(wanted[_OUT], self.shape, unit, max(unit[-1], most_bytes // (2 * made))):
            offsets = (*box.offsets[:-1], box.offsets[-1] * made // given)
            sizes = (*box.sizes[:-1], box.sizes[-1] * made // given)
            yield ComputedBlock((Box(offsets, sizes),), {_OUT: box}, 2 * made * box.numel)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        none = values[0].new_empty(0)
        return {_OUT: values[0].contiguous().view((none.float() if self.dtype is DType.F32 else none.byte()).dtype)}


def _reinterpreted(numbers: expression.Expression, dtype: DType) -> expression.Expression:
    shape = (*numbers.shape[:-1], numbers.shape[-1] * numbers.dtype.itemsize // dtype.itemsize)
    return Computed(Reinterpret(shape, dtype, numbers.dtype), _OUT, shape, dtype, (numbers,))


def as_bytes(numbers: expression.Expression) -> expression.Expression:
    """The bytes of numbers, as memory has them: (.., n) become (.., n * itemsize)."""
    return _reinterpreted(numbers, DType.U8)


def from_bytes(raw: expression.Expression) -> expression.Expression:
    """Return the float32 (.., n) with these bytes (.., 4 n). Float inputs are returned unchanged."""
    if isinstance(raw, Computed) and isinstance(raw.operation, Reinterpret) and raw.operation.source is DType.F32:
        return raw.sources[0]
    if (made := float_scales(raw)) is not None:
        return made
    return _reinterpreted(raw, DType.F32)


def packed(
    numbers: expression.Expression, form: FourBitForm, block_size: int, *, rounds_to: DType
) -> tuple[expression.Expression, expression.Expression]:
    """Return the expressions of a matrix in 4 bits: packed bytes (.., out, in / 2), and scales.

    Scales are the bytes of float32, (.., out, 4 * in / block), or the exponents of MXFP4 (.., out, in / 32).
    Numbers are rounded to ``rounds_to`` before they are packed. A matrix that is stored in this form with this
    block size is used unchanged.

    Raises:
        ValueError: numbers are to be MXFP4, which are only taken as they are stored.
    """
    stored = stored_rows(numbers)
    if stored is not None and (stored.form, stored.block_size) == (form, block_size):
        return stored.values, stored.scales if isinstance(form, Code) else as_bytes(stored.scales)
    if isinstance(form, Code):
        raise ValueError("its numbers are not packed as MXFP4, which is only taken as it is stored")
    return quantized(numbers, block_size, form, rounds_to)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A weight (.., out, in) whose rows are stored in four bits.

    Attributes:
        form: of the codes.
        block_size: elements of a row with one scale.
        values: packed bytes (.., out, in / 2).
        scales: (.., out, in / block): float32, or the exponent bytes of MXFP4.
    """

    form: FourBitForm
    block_size: int
    values: expression.Expression
    scales: expression.Expression


def stored_rows(numbers: expression.Expression) -> StoredRows | None:
    """Return the packed rows of dequantized values if these are only concatenated rows, otherwise None.

    No block crosses a row, so that rows that are stacked, concatenated or sliced as numbers are so as bytes.
    """
    if isinstance(numbers, Computed):
        match numbers.operation:
            case Unpack(form=form, block_size=block):
                return StoredRows(form, block, *numbers.sources)
            case Dequantize(code=Code.E2M1, has_exponents=True, overall=0, unit=(*outer, block)) if set(outer) <= {
                1
            }:
                return StoredRows(Code.E2M1, block, *numbers.sources)
        return None
    parts = [stored_rows(source) for source in numbers.sources]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts) or len({(part.form, part.block_size) for part in found}) > 1:
        return None
    values = _over_rows(numbers, [part.values for part in found])
    scales = _over_rows(numbers, [part.scales for part in found])
    if values is None or scales is None:
        return None
    return StoredRows(found[0].form, found[0].block_size, values, scales)


def _over_rows(
    node: expression.Expression, sources: Sequence[expression.Expression]
) -> expression.Expression | None:
    """Return the same node over rows of another width, or None if it does not keep rows together."""
    last = len(node.shape) - 1
    match node:
        case expression.Concat(dim=dim) if dim != last:
            return expression.concat(sources, dim)
        case expression.Stack(dim=dim) if dim != last:
            return expression.stack(sources, dim)
        case expression.Slice(dim=dim) if dim != last:
            return expression.slice_dim(sources[0], dim, node.start, node.shape[dim], node.step)
        case expression.Permute(dims=dims) if dims[-1] == last:
            return expression.permute(sources[0], dims)
        case expression.Reshape() if node.shape[-1] == node.source.shape[-1]:
            return expression.reshape(sources[0], (*node.shape[:-1], sources[0].shape[-1]))
    return None


@dataclass(frozen=True, slots=True)
class Unnest:
    """``numbers[code] * scale of 256 + offset``: scales that are kept in a byte each, in float32.

    Attributes:
        count: of the scales.
        offset: their mean, which was taken from all before they were packed.
        numbers: values of the 256 bytes.
    """

    count: int
    offset: float
    numbers: tuple[float, ...]
    label: str = "unpacking scales"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        for box in aligned_blocks(
            wanted[_NUMBERS], (self.count,), (four_bit.NESTED_BLOCK,), max(1, most_bytes // 10)
        ):
            (start,), (size,) = box.offsets, box.sizes
            first, last = start // four_bit.NESTED_BLOCK, -(-(start + size) // four_bit.NESTED_BLOCK)
            yield ComputedBlock((box, Box((first,), (last - first,))), {_NUMBERS: box}, 10 * size)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        codes, nested = values
        found = nested.new_tensor(self.numbers)[codes.int()]
        scales = nested.repeat_interleave(four_bit.NESTED_BLOCK)[: found.numel()]
        return {_NUMBERS: found.mul_(scales).add_(self.offset)}


def unnested(
    codes: expression.Expression, nested: expression.Expression, offset: float, numbers: tuple[float, ...]
) -> expression.Expression:
    """See :class:`Unnest`."""
    count = numel(codes.shape)
    sources = (expression.reshape(codes, (count,)), expression.reshape(nested, (numel(nested.shape),)))
    return Computed(Unnest(count, offset, numbers), _NUMBERS, (count,), DType.F32, sources)


def unpacked(
    values: expression.Expression,
    scales: expression.Expression,
    shape: expression.Shape,
    form: Form4,
    block_size: int,
    dtype: DType,
) -> expression.Expression:
    """Numbers, rounded to the ``dtype`` that they had, of packed bytes and float32 scales, row by row in any shape.

    If rows are not whole blocks, blocks continue from row to row, and all values are computed as one row.

    Raises:
        ValueError: there are not as many of them as ``shape`` has elements and blocks.
    """
    if not shape or numel(values.shape) != -(-numel(shape) // 2):
        raise ValueError(
            f"{values} has {values.shape}, which is not {shape} in four bits, in blocks of {block_size}"
        )
    if numel(scales.shape) != -(-numel(shape) // block_size):
        raise ValueError(f"{scales} has {scales.shape}, and {shape} in blocks of {block_size} needs other shapes")
    *outer, columns = shape if shape[-1] % block_size == 0 else (numel(shape),)
    computed = (*outer, columns)
    sources = tuple(
        expression.reshape(source, (*outer, -(-columns // step)))
        for source, step in ((values, 2), (scales, block_size))
    )
    made = Computed(Unpack(computed, block_size, form, dtype), _NUMBERS, computed, dtype, sources)
    return expression.reshape(made, shape)


@dataclass(frozen=True, slots=True)
class Unpack:
    """``code[nibble] * scale`` for each half of a byte, in float32, rounded once. See [Note: Four bits].

    Attributes:
        shape: of the values (.., out, in), or all of them in one row, whose last block may be smaller.
        block_size: so many in a row have one scale.
        form: 4-bit data type.
        dtype: of the numbers.
    """

    shape: expression.Shape
    block_size: int
    form: Form4
    dtype: DType
    label: str = "unpacking"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        unit = (*(1 for _ in self.shape[:-1]), self.block_size)
        for box in aligned_blocks(wanted[_NUMBERS], self.shape, unit, max(1, most_bytes // _BYTES_A_NUMBER)):
            needs = tuple(
                Box((*box.offsets[:-1], box.offsets[-1] // step), (*box.sizes[:-1], -(-box.sizes[-1] // step)))
                for step in (2, self.block_size)
            )
            yield ComputedBlock(needs, {_NUMBERS: box}, _BYTES_A_NUMBER * box.numel)

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        packed, scales = values
        none = scales.new_empty(0)
        kinds = {DType.BF16: none.bfloat16, DType.F16: none.half}
        *outer, columns = block.gives[_NUMBERS].sizes
        whole = -(-columns // self.block_size) * self.block_size
        if whole != columns:  # the end of a row of all numbers
            stored, packed = packed, packed.new_zeros(whole // 2)
            packed[: stored.numel()] = stored
        out = kinds.get(self.dtype, none.float)().new_empty((*outer, whole))
        four_bit.dequantize_rows(packed, scales, self.block_size, self.form, out)
        return {_NUMBERS: out[..., :columns]}


def nested_as_stored(numbers: expression.Expression, form: Form4, block_size: int) -> NestedParts | None:
    """Return the stored parts of a matrix with nested scales, or None if it is stored in another form.

    Only if these bytes have the same code table as here.
    """
    stored = _stored_so(numbers, form, block_size)
    if stored is None:
        return None
    values, scales = stored
    inner = scales.source if isinstance(scales, expression.Reshape) else scales
    if not isinstance(inner, Computed) or not isinstance(inner.operation, Unnest):
        return None
    if inner.operation.numbers != four_bit.dynamic_numbers():
        return None
    codes, nested = inner.sources
    return NestedParts(
        values, expression.reshape(codes, scales.shape), nested, _constant(inner.operation.offset, nested)
    )


@dataclass(frozen=True, slots=True)
class NestedParts:
    """Packed bytes (.., out, in / 2), codes (.., out, in / block), a float32 for 256 of these, the offset (1,)."""

    packed: expression.Expression
    codes: expression.Expression
    nested: expression.Expression
    offset: expression.Expression


@dataclass(frozen=True, slots=True)
class Constant:
    """One float32 constant (1,) that no file has as a tensor.

    Its input, any float32, determines the device and type.
    """

    number: float
    label: str = "a constant"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], _most_bytes: int) -> Iterator[ComputedBlock]:
        if any(wanted.values()):
            one = Box((0,), (1,))
            yield ComputedBlock((one,), {_NUMBERS: one}, 8)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        return {_NUMBERS: values[0].new_tensor((self.number,))}


def _constant(number: float, beside: expression.Expression) -> expression.Expression:
    return Computed(Constant(number), _NUMBERS, (1,), DType.F32, (beside,))


def stored_form(numbers: expression.Expression) -> tuple[Form4, int] | None:
    """Return the 4-bit data type and the block size of a matrix stored in 4 bits, otherwise None."""
    operation = numbers.operation if isinstance(numbers, Computed) else None
    return (operation.form, operation.block_size) if isinstance(operation, Unpack) else None


def _stored_so(
    numbers: expression.Expression, form: Form4, block_size: int
) -> tuple[expression.Expression, ...] | None:
    """Return the packed bytes and the scales of a matrix that is stored in this form, otherwise None."""
    return numbers.sources if stored_form(numbers) == (form, block_size) else None


_PACKED, _SCALES, _SCALE_NUMBERS = "packed", "absmax", "scales"

_MOST_ELEMENTS = 1 << 20
"""Of a block: 4 MiB as float32."""

_ROWS_TOLD = 5


@dataclass(frozen=True, slots=True)
class Quantize:
    """Codes and scales of a weight, in whole rows, as bitsandbytes makes them of it on a CPU.

    Outputs are ``packed``, uint8 ``[..., width / 2]``, ``absmax``, the bytes of the float32 scales, uint8 ``[..., 4
    width / block]``, and on request ``scales``, the same as float32 ``[..., width / block]``.

    Attributes:
        shape: of the weight.
        block: how many elements have one scale.
        form: 4-bit data type.
        stored: the dtype that the weight comes in.
        dtype: its values are rounded to this first, as they are in a model of this dtype: F32, BF16 or F16.
    """

    shape: expression.Shape
    block: int
    form: Form4
    stored: DType
    dtype: DType
    label: str = "quantizing"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        width = self.shape[-1]
        rows = [_as_wide(box, width) for boxes in wanted.values() for box in boxes]
        unit = (*(1 for _ in self.shape[:-1]), width)
        for box in aligned_blocks(rows, self.shape, unit, self._most_elements(most_bytes)):
            gives = {
                _PACKED: _as_wide(box, four_bit.packed_shape(self.shape)[-1]),
                _SCALES: _as_wide(box, four_bit.raw_scales_shape(self.shape, self.block)[-1]),
            }
            if _SCALE_NUMBERS in wanted:
                gives[_SCALE_NUMBERS] = _as_wide(box, four_bit.scales_shape(self.shape, self.block)[-1])
            yield ComputedBlock((box,), gives, self._nbytes(box.numel))

    def _nbytes(self, elements: int) -> int:
        """Return the bytes of a block: input, rounded input, output and scratch memory."""
        return (self.stored.itemsize + self.dtype.itemsize + 1) * elements + four_bit.scratch_bytes(elements)

    def _most_elements(self, most_bytes: int) -> int:
        """Return the elements of the largest block within ``most_bytes``."""
        small = most_bytes // self._nbytes(1)
        if small < four_bit.CHUNK:
            return small
        return min(
            _MOST_ELEMENTS,
            (most_bytes - four_bit.scratch_bytes(four_bit.CHUNK)) // (self._nbytes(1) - four_bit.scratch_bytes(1)),
        )

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        """Raises :class:`BadValues` for rows that are not finite."""
        none = values[0].new_empty(0).byte()
        packed, raw = (none.new_empty(block.gives[name].sizes) for name in (_PACKED, _SCALES))
        bad = four_bit.quantize_rows(
            _rounded(values[0], self.dtype), self.block, self.form, packed, four_bit.scales_in(raw)
        )
        if bad:
            raise BadValues(
                f"{_told(bad, block.needs[0])} values that are not finite in {self.dtype.label}, and cannot be put "
                "into 4 bits. The checkpoint is damaged, or leave this weight as it is"
            )
        return {_PACKED: packed, _SCALES: raw, _SCALE_NUMBERS: four_bit.scales_in(raw)}


def _as_wide(box: Box, width: int) -> Box:
    """The same rows, of another tensor with as many."""
    return Box((*box.offsets[:-1], 0), (*box.sizes[:-1], width))


def _rounded(values: Any, dtype: DType) -> Any:
    """Return values rounded to a dtype. 16-bit values need no rounding to become float32."""
    match dtype:
        case DType.BF16:
            return values.bfloat16()
        case DType.F16:
            return values.half()
        case _:
            none = values.new_empty(0)
            return values if values.dtype in (none.bfloat16().dtype, none.half().dtype) else values.float()


def _told(rows: Sequence[int], box: Box) -> str:
    """These rows of a box, by their places in the whole weight."""
    places = np.stack(np.unravel_index(rows, box.sizes[:-1]), axis=1) + np.array(box.offsets[:-1])
    shown = ", ".join(
        str(place[0]) if len(place) == 1 else str(tuple(place)) for place in places.tolist()[:_ROWS_TOLD]
    )
    more = f" and {len(rows) - _ROWS_TOLD} more" if len(rows) > _ROWS_TOLD else ""
    return f"row {shown} has" if len(rows) == 1 else f"rows {shown}{more} have"


def quantized(
    weight: expression.Expression, block: int, form: Form4, dtype: DType
) -> tuple[expression.Expression, expression.Expression]:
    """The codes and the scales (as bytes) of a weight ``[..., rows, width]``, rounded to ``dtype`` before.

    See :class:`Quantize`.

    Raises:
        ValueError: its rows are not of whole blocks, or it is not of numbers that can be quantized.
    """
    shape = tuple(weight.shape)
    if not four_bit.fits_blocks(shape, block):
        raise ValueError(f"{weight} has {shape}, whose rows are not of whole blocks of {block}")
    if weight.dtype.kind != "float" or weight.dtype.bits < 8 or dtype not in (DType.F32, DType.BF16, DType.F16):
        raise ValueError(f"{weight}, {weight.dtype.label}, cannot be put into 4 bits by way of {dtype.label}")
    operation = Quantize(shape, block, form, weight.dtype, dtype)
    return (
        Computed(operation, _PACKED, four_bit.packed_shape(shape), DType.U8, (weight,)),
        Computed(operation, _SCALES, four_bit.raw_scales_shape(shape, block), DType.U8, (weight,)),
    )


def float_scales(raw: expression.Expression) -> expression.Expression | None:
    """Return the float32 scales with these bytes, from the computation that makes them, or None for other bytes."""
    if not isinstance(raw, Computed) or not isinstance(raw.operation, Quantize) or raw.output != _SCALES:
        return None
    shape = four_bit.scales_shape(raw.operation.shape, raw.operation.block)
    return Computed(raw.operation, _SCALE_NUMBERS, shape, DType.F32, raw.sources)
