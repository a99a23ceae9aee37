"""Weights in four bits as expressions: quantized while they are read, dequantized, or kept as they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.core.computed import BadValues, Computed, ComputedBlock, cast, every_nth, split_aligned
from shardwise.core.expression import (
    Concat,
    Expression,
    Permute,
    Reshape,
    Shape,
    Slice,
    Stack,
    concat,
    permute,
    reshape,
    slice_dim,
    stack,
)
from shardwise.core.tensors import Box, Code, DType, Form4, FourBitForm, numel
from shardwise.files import four_bit_blocks
from shardwise.files.dequantize import Dequantize
from shardwise.files.four_bit_blocks import NESTED_BLOCK

_BYTES = "bytes"
_VALUES = "values"


def pack(
    weights: Expression, form: FourBitForm, block_size: int, *, rounds_to: DType
) -> tuple[Expression, Expression]:
    """Return the expressions of a matrix in 4 bits: packed codes (.., out, in / 2), and scales.

    Scales are the bytes of float32, (.., out, 4 * in / block), or the exponents of MXFP4, (.., out, in / 32).
    Numbers are rounded to ``rounds_to`` before they are quantized. A matrix that is stored in this form, with this
    block size, is not quantized again.

    Raises:
        ValueError: the form is MXFP4, and the matrix is stored in another one.
    """
    # Stored in this very form: the codes and scales are read as they are, without rounding twice.
    stored = find_stored_rows(weights)
    if stored is not None and (stored.form, stored.block_size) == (form, block_size):
        # Scales of MXFP4 are bytes already.
        return stored.values, stored.scales if isinstance(form, Code) else as_bytes(stored.scales)
    if isinstance(form, Code):
        raise ValueError("weights are not quantized to MXFP4, which is only kept as it is stored")
    return quantize_to_packed_rows(weights, block_size, form, rounds_to)


@dataclass(frozen=True, slots=True)
class AsBytes:
    """The bytes of a tensor in memory.

    Attributes:
        shape: of the bytes, (.., itemsize * n) for (.., n).
        itemsize: bytes of an element.
    """

    shape: Shape
    itemsize: int
    label: str = "reinterpreting"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        unit = (*(1 for _ in self.shape[:-1]), self.itemsize)
        for box in split_aligned(requested[_BYTES], self.shape, unit, max(self.itemsize, max_block_bytes // 2)):
            yield ComputedBlock((every_nth(box, self.itemsize),), {_BYTES: box}, 2 * box.numel)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        return {_BYTES: values[0].view(cast(values[0].new_empty(0), DType.U8).dtype)}

    def evaluate_on_device(
        self, block: ComputedBlock, values: Sequence[Any], _max_block_bytes: int
    ) -> tuple[Mapping[str, Any], Any]:
        return self.evaluate(block, values), values[0].new_zeros(()).bool()


def as_bytes(weights: Expression) -> Expression:
    """Return the bytes of weights in memory: (.., n) become (.., n * itemsize)."""
    itemsize = weights.dtype.itemsize
    shape = (*weights.shape[:-1], itemsize * weights.shape[-1])
    return Computed(AsBytes(shape, itemsize), _BYTES, shape, DType.U8, (weights,))


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A weight (.., out, in) whose rows are stored in four bits.

    Attributes:
        form: of the codes.
        block_size: elements of a row with one scale.
        values: packed codes (.., out, in / 2).
        scales: (.., out, in / block): float32, or the exponents of MXFP4.
    """

    form: FourBitForm
    block_size: int
    values: Expression
    scales: Expression


def find_stored_rows(weights: Expression) -> StoredRows | None:
    """Return the stored rows that dequantized weights are made of, or None if they are not whole rows.

    No block crosses a row, so rows that are stacked, concatenated or sliced as weights can be so as codes.
    """
    if isinstance(weights, Computed):
        match weights.operation:
            case Dequantize(code=Form4() as form, unit=(*_, block)):
                return StoredRows(form, block, *weights.sources)
            case Dequantize(code=Code.E2M1, has_exponents=True, overall=0, unit=(*outer, block)) if (
                max(outer, default=1) == 1
            ):
                return StoredRows(Code.E2M1, block, *weights.sources)
        return None
    # A movement of elements: codes and scales are moved in the same way, if all sources have one form.
    # If one source is stored in another form, the whole result is quantized again.
    matrices = [find_stored_rows(source) for source in weights.sources]
    rows_of_sources = [rows for rows in matrices if rows is not None]
    if (
        not rows_of_sources
        or len(rows_of_sources) < len(matrices)
        or len({(rows.form, rows.block_size) for rows in rows_of_sources}) > 1
    ):
        return None
    values = _over_rows(weights, [rows.values for rows in rows_of_sources])
    scales = _over_rows(weights, [rows.scales for rows in rows_of_sources])
    if values is None or scales is None:
        return None
    return StoredRows(rows_of_sources[0].form, rows_of_sources[0].block_size, values, scales)


def _over_rows(node: Expression, sources: Sequence[Expression]) -> Expression | None:
    """Return the same node over rows of another width, or None if it does not keep rows whole."""
    # A node may move rows, but not cut or join them along the last dimension, where blocks are.
    last = len(node.shape) - 1
    match node:
        case Concat(dim=dim) if dim != last:
            return concat(sources, dim)
        case Stack(dim=dim) if dim != last:
            return stack(sources, dim)
        case Slice(dim=dim) if dim != last:
            return slice_dim(sources[0], dim, node.start, node.shape[dim], node.step)
        case Permute(dims=dims) if dims[-1] == last:
            return permute(sources[0], dims)
        case Reshape() if node.shape[-1] == node.source.shape[-1]:
            return reshape(sources[0], (*node.shape[:-1], sources[0].shape[-1]))
    return None


@dataclass(frozen=True, slots=True)
class DequantizeScales:
    """Scales that are stored in 8 bits, as float32: ``codebook[code] * scale of 256 + offset``.

    See [Note: Nested scales] in ``files/four_bit_blocks.py``.

    Attributes:
        count: number of scales.
        offset: the mean that was subtracted from all of them.
        codebook: values of the 256 codes.
    """

    count: int
    offset: float
    codebook: tuple[float, ...]
    label: str = "dequantizing scales"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        for box in split_aligned(requested[_VALUES], (self.count,), (NESTED_BLOCK,), max(1, max_block_bytes // 10)):
            yield ComputedBlock((box, every_nth(box, NESTED_BLOCK)), {_VALUES: box}, 10 * box.numel)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        codes, nested = values
        numbers = nested.new_tensor(self.codebook)[codes.int()]
        scales = nested.repeat_interleave(NESTED_BLOCK)[: numbers.numel()]
        return {_VALUES: numbers.mul_(scales).add_(self.offset)}


def dequantize_scales(
    codes: Expression, nested: Expression, offset: float, codebook: tuple[float, ...]
) -> Expression:
    """See :class:`DequantizeScales`. The result is flat."""
    count = numel(codes.shape)
    sources = (reshape(codes, (count,)), reshape(nested, (numel(nested.shape),)))
    return Computed(DequantizeScales(count, offset, codebook), _VALUES, (count,), DType.F32, sources)


def find_quant_type(weights: Expression) -> tuple[Form4, int] | None:
    """Return the 4-bit data type and the block size of a matrix stored in 4 bits, otherwise None."""
    match weights:
        case Computed(operation=Dequantize(code=Form4() as form, unit=(*_, block))):
            return form, block
    return None


def find_stored_nested(weights: Expression, form: Form4, block_size: int) -> tuple[Expression, ...] | None:
    """Return the stored tensors of a matrix with nested scales, or None if it is stored in another form.

    They are packed codes (out, in / 2), codes of scales (out, in / block), a float32 for 256 of these, and the
    offset (1,). Scales of another code table than bitsandbytes' are another form.
    """
    if find_quant_type(weights) != (form, block_size):
        return None
    # The scales may be reshaped between the two levels.
    values, scales = weights.sources
    inner = scales.source if isinstance(scales, Reshape) else scales
    operation = inner.operation if isinstance(inner, Computed) else None
    if not isinstance(operation, DequantizeScales) or operation.codebook != four_bit_blocks.dynamic_codebook():
        return None
    codes, nested = inner.sources
    offset = Computed(Constant(operation.offset), _VALUES, (1,), DType.F32, (nested,))
    return values, reshape(codes, scales.shape), nested, offset


@dataclass(frozen=True, slots=True)
class Constant:
    """A float32 (1,) that no file has as a tensor. Its input, any float32 tensor, is only the type to make."""

    number: float
    label: str = "a constant"

    def blocks(self, requested: Mapping[str, Sequence[Box]], _max_block_bytes: int) -> Iterator[ComputedBlock]:
        if any(requested.values()):
            one = Box((0,), (1,))
            yield ComputedBlock((one,), {_VALUES: one}, 8)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        return {_VALUES: values[0].new_tensor((self.number,))}


_CODES, _SCALES = "packed", "absmax"

_MAX_ELEMENTS = 1 << 20
"""Of a block: 4 MiB as float32."""

_ROWS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class QuantizeRows:
    """Codes and scales of a weight, in whole rows, as bitsandbytes computes them on a CPU.

    Outputs are ``packed``, uint8 ``[..., width / 2]``, and ``absmax``, the bytes of the float32 scales, uint8
    ``[..., 4 width / block]``.

    Attributes:
        shape: of the weight.
        block: elements of a row with one scale.
        form: 4-bit data type.
        stored: dtype of the weight.
        dtype: F32, BF16 or F16, to which values are rounded first, as in a model of this dtype.
    """

    shape: Shape
    block: int
    form: Form4
    stored: DType
    dtype: DType
    label: str = "quantizing"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        # Boxes of both outputs, of different widths, are rows of the weight: quantized once, they fill both.
        width = self.shape[-1]
        rows = [_with_width(box, width) for boxes in requested.values() for box in boxes]
        unit = (*(1 for _ in self.shape[:-1]), width)
        for box in split_aligned(rows, self.shape, unit, self._max_elements(max_block_bytes)):
            outputs = {
                _CODES: _with_width(box, width // 2),
                _SCALES: _with_width(box, 4 * width // self.block),
            }
            yield ComputedBlock((box,), outputs, self._nbytes(box.numel))

    def _nbytes(self, elements: int) -> int:
        """Return the bytes of a block: input, rounded input, output and scratch memory."""
        return (self.stored.itemsize + self.dtype.itemsize + 1) * elements + four_bit_blocks.scratch_bytes(elements)

    def _max_elements(self, nbytes: int) -> int:
        """Return the elements of the largest block within ``nbytes``."""
        small = nbytes // self._nbytes(1)
        if small < four_bit_blocks.CHUNK:
            return small
        scratch = four_bit_blocks.scratch_bytes(four_bit_blocks.CHUNK)
        return min(_MAX_ELEMENTS, (nbytes - scratch) // (self._nbytes(1) - four_bit_blocks.scratch_bytes(1)))

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        """Quantize the rows of a block.

        Raises:
            BadValues: rows are not finite.
        """
        # A tensor of torch, from which others of its library and device are made. This module does not import
        # torch.
        none = cast(values[0].new_empty(0), DType.U8)
        codes, scales = (none.new_empty(block.outputs[name].sizes) for name in (_CODES, _SCALES))
        weights = cast(values[0], self.dtype)
        absmax = four_bit_blocks.scales_in(scales)
        bad = four_bit_blocks.quantize_rows(weights, self.dtype, self.block, self.form, codes, absmax)
        if bad:
            raise BadValues(
                f"{_describe_rows(bad, block.inputs[0])} values that are not finite in {self.dtype.label}, and "
                "cannot be put into 4 bits. The checkpoint is damaged, or leave this weight as it is"
            )
        return {_CODES: codes, _SCALES: scales}

    def evaluate_on_device(
        self, block: ComputedBlock, values: Sequence[Any], max_block_bytes: int
    ) -> tuple[Mapping[str, Any], Any]:
        none = cast(values[0].new_empty(0), DType.U8)
        codes, scales = (none.new_empty(block.outputs[name].sizes) for name in (_CODES, _SCALES))
        weights, spare = cast(values[0], self.dtype), max(0, max_block_bytes - block.nbytes)
        # Spare memory allows more chunks at once, and so fewer kernels.
        chunks = 1 + spare // four_bit_blocks.scratch_bytes(1) // four_bit_blocks.CHUNK
        at_once = chunks * four_bit_blocks.CHUNK
        is_finite = four_bit_blocks.quantize_rows_on_device(
            weights, self.block, self.form, codes, four_bit_blocks.scales_in(scales), at_once
        )
        return {_CODES: codes, _SCALES: scales}, ~is_finite


def _with_width(box: Box, width: int) -> Box:
    """Return the same rows of a tensor of another width."""
    return Box((*box.offsets[:-1], 0), (*box.sizes[:-1], width))


def _describe_rows(rows: Sequence[int], box: Box) -> str:
    """Name rows of a box, numbered over all outer dimensions, by their indices in the whole weight."""
    places = np.stack(np.unravel_index(rows, box.sizes[:-1]), axis=1) + np.array(box.offsets[:-1])
    names: list[str] = []
    for place in places.tolist()[:_ROWS_SHOWN]:
        names.append(str(place[0]) if len(place) == 1 else str(tuple(place)))
    shown = ", ".join(names)
    more = f" and {len(rows) - _ROWS_SHOWN} more" if len(rows) > _ROWS_SHOWN else ""
    return f"row {shown} has" if len(rows) == 1 else f"rows {shown}{more} have"


def quantize_to_packed_rows(
    weight: Expression, block: int, form: Form4, dtype: DType
) -> tuple[Expression, Expression]:
    """Return the codes and the bytes of the scales of a weight ``[..., rows, width]``. See :class:`QuantizeRows`.

    Raises:
        ValueError: its rows are not whole blocks, or its dtype cannot be quantized.
    """
    shape = tuple(weight.shape)
    if len(shape) < 2 or block not in four_bit_blocks.BLOCKS or shape[-1] < 1 or shape[-1] % block:
        raise ValueError(f"{weight} has {shape}, whose rows are not of whole blocks of {block}")
    if weight.dtype.kind != "float" or weight.dtype.bits < 8 or dtype not in (DType.F32, DType.BF16, DType.F16):
        raise ValueError(f"{weight}, {weight.dtype.label}, cannot be put into 4 bits by way of {dtype.label}")
    operation = QuantizeRows(shape, block, form, weight.dtype, dtype)
    scales = (*shape[:-1], 4 * shape[-1] // block)
    return (
        Computed(operation, _CODES, (*shape[:-1], shape[-1] // 2), DType.U8, (weight,)),
        Computed(operation, _SCALES, scales, DType.U8, (weight,)),
    )
