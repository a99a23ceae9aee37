"""Integers in words of 32 bits as expressions: a weight (out, in), whose inputs are in groups; and what that takes.

[Note: Products] Of AWQ and GPTQ a number is ``(code - zero) * scale`` in the dtype of the scales, as AutoAWQ
(``awq/utils/packing_utils.py``) and GPTQModel (``gptqmodel/nn_modules/qlinear/__init__.py``) have it on a CPU. The
difference is exact, and the product is rounded once to that dtype, before any cast to the dtype of a model.

GPTQ's first format stores zero points less 1. GPTQModel takes that back by an addition to the whole word, with
what is carried from one zero point to the next; so does this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.conversion.computed import BadValues, Computed, ComputedBlock, aligned_blocks
from shardwise.conversion.dequantise import decoded, dequantised
from shardwise.conversion.expression import Expression, Shape, permute, reshape
from shardwise.tensors import Box, Code, DType, numel

_OUT = "numbers"
_WORD_BYTES = 4
_CODES = {4: Code.OFFSET4, 8: Code.OFFSET8}
"""By bits. Codes and zero points are counted from the same number, which is no part of their difference."""


@dataclass(frozen=True, slots=True)
class AddToWords:
    """Words of 32 bits, as bytes, with a constant added, modulo 2 ** 32.

    Attributes:
        shape: of the bytes (rows, 4 * words).
        constant: from -(2 ** 31) to 2 ** 31 - 1.
    """

    shape: Shape
    constant: int
    label: str = "adding to words"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        for box in aligned_blocks(wanted[_OUT], self.shape, (1, _WORD_BYTES), max(1, most_bytes // 2)):
            yield ComputedBlock((box,), {_OUT: box}, 2 * box.numel)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        words = values[0].view(values[0].new_empty(0).int().dtype)
        return {_OUT: (words + self.constant).view(values[0].dtype)}


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """``out[i, j] = rows[numbers[i], j]``, as float32.

    Attributes:
        count: of the rows.
        shape: of the result.
    """

    count: int
    shape: Shape
    label: str = "choosing rows"

    def blocks(self, wanted: Mapping[str, Sequence[Box]], most_bytes: int) -> Iterator[ComputedBlock]:
        at_once = max(1, most_bytes // (16 * self.count))  # columns, whatever the rows
        for whole in aligned_blocks(wanted[_OUT], self.shape, (1, 1), numel(self.shape)):
            (first, start), (count, width) = whole.offsets, whole.sizes
            for column in range(start, start + width, at_once):
                columns = min(at_once, start + width - column)
                rows = max(1, most_bytes // (8 * columns + 32))
                for row in range(first, first + count, rows):
                    box = Box((row, column), (min(rows, first + count - row), columns))
                    needs = Box((0, column), (self.count, columns)), Box((row,), box.sizes[:1])
                    yield ComputedBlock(needs, {_OUT: box}, 4 * box.numel + 8 * needs[0].numel + 16 * box.sizes[0])

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        """Raises :class:`BadValues` for numbers of rows that there are not."""
        rows, numbers = values
        if bool(((numbers < 0) | (numbers >= self.count)).any()):
            raise BadValues(
                f"groups are {int(numbers.min())} to {int(numbers.max())}, and there are scales for 0 to "
                f"{self.count - 1}. Download or write the checkpoint again.",
                1,
            )
        return {_OUT: rows.float().index_select(0, numbers.long())}


def _rows(source: Expression, numbers: Expression) -> Expression:
    """See :class:`ChosenRows`; ``source`` is (count, columns), ``numbers`` are integers (rows,)."""
    shape = (numbers.shape[0], source.shape[1])
    return Computed(ChosenRows(source.shape[0], shape), _OUT, shape, DType.F32, (source, numbers))


def columns_in_words(
    values: Expression, zeros: Expression, scales: Expression, shape: Shape, group: int, dtype: DType
) -> Expression:
    """AWQ's weight (out, in): words of eight outputs of one input, in 4 bits; see [Note: Layouts].

    Args:
        values: bytes of the words (in, out / 8).
        zeros: bytes of words (groups, out / 8), in the same order.
        scales: (groups, out).
        shape: (out, in).
        group: so many inputs have one scale.
        dtype: of the products.
    """
    out, columns = shape
    order, groups = (columns, out // 8, 2, 4), scales.shape[0]
    stored_order = permute(reshape(scales, (groups, out // 8, 4, 2)), (0, 1, 3, 2))
    points = decoded(zeros, (groups, *order[1:]), Code.OFFSET4)
    made = dequantised(values, stored_order, order, (group, 1, 1, 1), Code.OFFSET4, zeros=points, rounds_to=dtype)
    return reshape(permute(made, (1, 3, 2, 0)), shape)


def rows_in_words(
    values: Expression,
    zeros: Expression,
    scales: Expression,
    shape: Shape,
    group: int,
    dtype: DType,
    *,
    bits: int,
    is_less_one: bool,
    numbers: Expression | None,
) -> Expression:
    """GPTQ's weight (out, in): words of ``32 / bits`` inputs of one output.

    Args:
        values: bytes of the words (in * bits / 32, out).
        zeros: bytes of words (groups, out * bits / 32).
        scales: (groups, out).
        shape: (out, in).
        group: so many inputs have one scale, whole words.
        dtype: of the products.
        bits: 4 or 8.
        is_less_one: zero points are stored less 1.
        numbers: the group of each input (in,), where it is another than its place says.
    """
    (out, columns), per_word, groups = shape, 32 // bits, scales.shape[0]
    if is_less_one:
        ones = sum(1 << at for at in range(0, 32, bits))
        zeros = Computed(AddToWords(zeros.shape, ones), _OUT, zeros.shape, DType.U8, (zeros,))
    points = decoded(zeros, (groups, out), _CODES[bits])
    unit: Shape = (group // per_word, 1, per_word)
    if numbers is not None:
        unit = (1, 1, 1)
        scales, points = (
            permute(reshape(_rows(found, numbers), (columns // per_word, per_word, out)), (0, 2, 1))
            for found in (scales, points)
        )
    order = (columns // per_word, out, per_word)
    made = dequantised(values, scales, order, unit, _CODES[bits], zeros=points, rounds_to=dtype)
    return reshape(permute(made, (1, 0, 2)), shape)
