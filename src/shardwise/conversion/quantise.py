"""A node that puts rows of a weight into 4 bits while they are read (see [Note: Four bits])."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.conversion.computed import BadValues, Computed, ComputedBlock, aligned_blocks
from shardwise.conversion.expression import Expression, Shape
from shardwise.conversion.four_bit import (
    CHUNK,
    fits_blocks,
    packed_shape,
    quantise_rows,
    raw_scales_shape,
    scales_in,
    scales_shape,
    scratch_bytes,
)
from shardwise.tensors import Box, DType, Form4

_PACKED, _SCALES, _NUMBERS = "packed", "absmax", "scales"

_MOST_ELEMENTS = 1 << 20
"""Of a block: 4 MiB as float32."""

_ROWS_TOLD = 5


@dataclass(frozen=True, slots=True)
class Quantise:
    """Codes and scales of a weight, in whole rows, as bitsandbytes makes them of it on a CPU.

    Outputs are ``packed``, uint8 ``[..., width / 2]``, and ``absmax``, the bytes of the float32 scales, uint8
    ``[..., 4 width / block]``; where they are wanted also ``scales``, the same as float32 ``[..., width / block]``.

    Attributes:
        shape: of the weight.
        block: how many elements have one scale.
        form: what the codes stand for.
        stored: the dtype that the weight comes in.
        dtype: its values are rounded to this first, as they are in a model of this dtype: F32, BF16 or F16.
    """

    shape: Shape
    block: int
    form: Form4
    stored: DType
    dtype: DType
    label: str = "quantising"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        width = self.shape[-1]
        rows = [_as_wide(box, width) for boxes in wanted.values() for box in boxes]
        unit = (*(1 for _ in self.shape[:-1]), width)
        for box in aligned_blocks(rows, self.shape, unit, self._most_elements(most_bytes)):
            gives = {
                _PACKED: _as_wide(box, packed_shape(self.shape)[-1]),
                _SCALES: _as_wide(box, raw_scales_shape(self.shape, self.block)[-1]),
            }
            if _NUMBERS in wanted:
                gives[_NUMBERS] = _as_wide(box, scales_shape(self.shape, self.block)[-1])
            yield ComputedBlock((box,), gives, self._nbytes(box.numel))

    def _nbytes(self, elements: int) -> int:
        """Of a block: as it comes, as it is rounded, what is made of it, and what that takes."""
        return (self.stored.itemsize + self.dtype.itemsize + 1) * elements + scratch_bytes(elements)

    def _most_elements(self, most_bytes: int) -> int:
        """Of a block of at most so many bytes."""
        small = most_bytes // self._nbytes(1)
        if small < CHUNK:
            return small
        return min(_MOST_ELEMENTS, (most_bytes - scratch_bytes(CHUNK)) // (self._nbytes(1) - scratch_bytes(1)))

    def evaluate(self, block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        """Raises :class:`BadValues` for rows that are not finite."""
        none = values[0].new_empty(0).byte()
        packed, raw = (none.new_empty(block.gives[name].sizes) for name in (_PACKED, _SCALES))
        bad = quantise_rows(_rounded(values[0], self.dtype), self.block, self.form, packed, scales_in(raw))
        if bad:
            raise BadValues(
                f"{_told(bad, block.needs[0])} values that are not finite in {self.dtype.label}, and cannot be put "
                "into 4 bits; the checkpoint is damaged, or leave this weight as it is"
            )
        return {_PACKED: packed, _SCALES: raw, _NUMBERS: scales_in(raw)}


def _as_wide(box: Box, width: int) -> Box:
    """The same rows, of another tensor with as many."""
    return Box((*box.offsets[:-1], 0), (*box.sizes[:-1], width))


def _rounded(values: Any, dtype: DType) -> Any:
    """Values in a dtype; those of 16 bits need no more of them to be float32."""
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


def quantised(weight: Expression, block: int, form: Form4, dtype: DType) -> tuple[Expression, Expression]:
    """The codes and the scales (as bytes) of a weight ``[..., rows, width]``, rounded to ``dtype`` before.

    See :class:`Quantise`.

    Raises:
        ValueError: its rows are not of whole blocks, or it is not of numbers that can be quantised.
    """
    shape = tuple(weight.shape)
    if not fits_blocks(shape, block):
        raise ValueError(f"{weight} has {shape}, whose rows are not of whole blocks of {block}")
    if weight.dtype.kind != "float" or weight.dtype.bits < 8 or dtype not in (DType.F32, DType.BF16, DType.F16):
        raise ValueError(f"{weight}, {weight.dtype.label}, cannot be put into 4 bits by way of {dtype.label}")
    operation = Quantise(shape, block, form, weight.dtype, dtype)
    return (
        Computed(operation, _PACKED, packed_shape(shape), DType.U8, (weight,)),
        Computed(operation, _SCALES, raw_scales_shape(shape, block), DType.U8, (weight,)),
    )


def scales_as_numbers(raw: Expression) -> Expression | None:
    """The scales whose bytes these are, as float32, of the computation that makes them; None of any other bytes."""
    if not isinstance(raw, Computed) or not isinstance(raw.operation, Quantise) or raw.output != _SCALES:
        return None
    shape = scales_shape(raw.operation.shape, raw.operation.block)
    return Computed(raw.operation, _NUMBERS, shape, DType.F32, raw.sources)
