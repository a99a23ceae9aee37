"""What quantised forms make of entries: numbers in few bits, times the scales of their blocks. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from shardwise.formats.checkpoint_index import Whole
from shardwise.tensors import Code, DType, Form4


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zero points, one for each scale.

    Attributes:
        values: the zero points; as numbers, or bytes of words.
        in_a_word: 0, or so many of a column of them, in the code of the elements, are in a word of 32 bits.
    """

    values: Whole
    in_a_word: int = 0


@dataclass(frozen=True, slots=True)
class Scaled:
    """Elements that are stored in few bits, less their zero points, times the scales of their blocks.

    Attributes:
        values: the elements, row by row; rows may have further bytes at their end.
        scales: one for each block.
        shape: of the elements.
        unit: sizes of a block, by dimension; those at an end may be smaller.
        code: what the stored bytes stand for.
        has_exponents: scales are exponents of 2, counted from -127.
        overall: one number, and 1 or -1: all scales are multiplied by it, or divided.
        swaps: the last two dimensions are exchanged in the end.
        zeros: a zero point for each block.
        groups: which block of a row each column belongs to, where this is not told by its place.
    """

    values: Whole
    scales: Whole
    shape: tuple[int, ...]
    unit: tuple[int, ...]
    code: Code
    has_exponents: bool = False
    overall: tuple[Whole, int] | None = None
    swaps: bool = False
    zeros: Zeros | None = None
    groups: Whole | None = None

    kind: ClassVar[str] = "scaled"

    @property
    def keys(self) -> tuple[str, ...]:
        overall = None if self.overall is None else self.overall[0]
        zeros = None if self.zeros is None else self.zeros.values
        further = (part.key for part in (overall, zeros, self.groups) if part is not None)
        return (self.values.key, self.scales.key, *further)

    def moved(self, to: Callable[[str], str]) -> Scaled:
        def there(part: Whole) -> Whole:
            return Whole(to(part.key))

        return replace(
            self,
            values=there(self.values),
            scales=there(self.scales),
            overall=None if self.overall is None else (there(self.overall[0]), self.overall[1]),
            zeros=None if self.zeros is None else replace(self.zeros, values=there(self.zeros.values)),
            groups=None if self.groups is None else there(self.groups),
        )


@dataclass(frozen=True, slots=True)
class Nested:
    """What scales that are bytes stand for.

    Attributes:
        scales: what 256 of them are scaled by.
        offset: is added to all.
        numbers: of the 256 bytes.
    """

    scales: Whole
    offset: float
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FourBits:
    """Elements of four bits as bitsandbytes packs them, times the scales of their blocks.

    Attributes:
        values: the packed bytes, row by row.
        scales: one for each block.
        shape: of the elements.
        block: elements in a row with one scale; blocks go on from row to row, and the last may be smaller.
        form: what four bits stand for.
        dtype: that numbers had before they were packed.
        nested: where scales are bytes, what these stand for.
    """

    values: Whole
    scales: Whole
    shape: tuple[int, ...]
    block: int
    form: Form4
    dtype: DType
    nested: Nested | None = None

    kind: ClassVar[str] = "four bits"

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.values.key, self.scales.key, *([] if self.nested is None else [self.nested.scales.key]))

    def moved(self, to: Callable[[str], str]) -> FourBits:
        nested = None if self.nested is None else replace(self.nested, scales=Whole(to(self.nested.scales.key)))
        return replace(self, values=Whole(to(self.values.key)), scales=Whole(to(self.scales.key)), nested=nested)


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """A weight (out, in) of integers in words of 32 bits, less zero points, times scales of groups of inputs.

    Attributes:
        values: bytes of words: of eight outputs each, in AWQ's order (in, out / 8); or, with ``in_rows``, of
            inputs (in * bits / 32, out).
        zeros: bytes of words (groups, out * bits / 32).
        scales: (groups, out).
        shape: of the weight.
        group: so many inputs have one scale.
        dtype: of the scales, to which products are rounded.
        bits: of an integer.
        in_rows: words go along the inputs.
        is_less_one: zero points are stored less 1.
        numbers: the group of each input, where it is another than its place says.
    """

    values: Whole
    zeros: Whole
    scales: Whole
    shape: tuple[int, int]
    group: int
    dtype: DType
    bits: int = 4
    in_rows: bool = False
    is_less_one: bool = False
    numbers: Whole | None = None

    kind: ClassVar[str] = "grouped"

    @property
    def keys(self) -> tuple[str, ...]:
        beside = () if self.numbers is None else (self.numbers.key,)
        return (self.values.key, self.zeros.key, self.scales.key, *beside)

    def moved(self, to: Callable[[str], str]) -> GroupedIntegers:
        values, zeros, scales = (Whole(to(item.key)) for item in (self.values, self.zeros, self.scales))
        numbers = None if self.numbers is None else Whole(to(self.numbers.key))
        return replace(self, values=values, zeros=zeros, scales=scales, numbers=numbers)
