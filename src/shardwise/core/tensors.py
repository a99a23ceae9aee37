"""Boxes of tensors and their strided memory, byte ranges, dtypes, and low-bit encodings, without torch."""

from __future__ import annotations

import enum
import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.core.errors import ConfigError


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
    """Return sorted ranges that cover all ``ranges``, with gaps of at most ``max_gap_bytes`` closed."""
    joined: list[ByteRange] = []
    for item in sorted(ranges):
        if joined and item.start - joined[-1].stop <= max_gap_bytes:
            joined[-1] = ByteRange(joined[-1].start, max(joined[-1].stop, item.stop))
        else:
            joined.append(item)
    return joined


def gaps(runs: Iterable[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges of ``nbytes`` bytes that no run covers."""
    # Runs 10..20 and 15..30 of 40 bytes leave 0..10 and 30..40.
    uncovered: list[tuple[int, int]] = []
    position = 0
    for start, stop in [*sorted(runs), (nbytes, nbytes)]:
        if start > position:
            uncovered.append((position, start))
        position = max(position, stop)
    return uncovered


def numel(sizes: Sequence[int]) -> int:
    """Return the number of elements of a tensor of these sizes (1 for a 0-d tensor)."""
    return math.prod(sizes)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of these sizes."""
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
        """Return the layout of a contiguous tensor of these sizes that starts at ``offset``."""
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
        """True if the elements are one run of memory, in iteration order."""
        # From the innermost dimension outwards. A dimension of one element may have any stride.
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
        """Return the box of all indices of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def between(cls, starts: Iterable[int], stops: Iterable[int]) -> Box:
        """Return the box of the indices from ``starts`` up to ``stops``, exclusive."""
        offsets = tuple(starts)
        return cls(offsets, tuple(stop - start for start, stop in zip(offsets, stops, strict=True)))

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index in each dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        return numel(self.sizes)

    def is_within(self, shape: Sequence[int]) -> bool:
        """Return whether every index of the box is an index of a tensor of this shape."""
        return len(shape) == len(self.sizes) and all(
            stop <= bound for stop, bound in zip(self.stops, shape, strict=True)
        )

    def narrow(self, dim: int, start: int, size: int) -> Box:
        """Return the box with the indices ``start <= i < start + size`` in one dimension."""
        offsets = (*self.offsets[:dim], start, *self.offsets[dim + 1 :])
        return Box(offsets, (*self.sizes[:dim], size, *self.sizes[dim + 1 :]))

    def intersect(self, other: Box) -> Box | None:
        """Return the common indices of two boxes of the same tensor, or None."""
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
    """Split a tensor into boxes, in order, each of which is contiguous in a row-major tensor.

    A box has at most ``max_numel`` elements, but at least one. A tensor without elements has no boxes.

    With ``shape`` (2, 5, 4) and ``max_numel`` 8, boxes have the sizes (1, 2, 4), (1, 2, 4), (1, 1, 4), twice.
    """
    return list(split_box(Box.whole(shape), (1,) * len(shape), max_numel)) if numel(shape) else []


def split_box(box: Box, unit: Sequence[int], most: int) -> Iterator[Box]:
    """Yield disjoint boxes that cover a box, in order, with at most ``most`` elements, or one unit.

    Outer dimensions are split first, so that boxes keep full rows, which are contiguous in files. With a box of
    sizes (4, 8), ``unit`` (2, 2) and ``most`` 16, boxes have the sizes (2, 8), twice.
    """
    for dim, (size, step) in enumerate(zip(box.sizes, unit, strict=True)):
        if box.numel > most and size > step:
            others = (*box.sizes[:dim], *box.sizes[dim + 1 :])
            rows = max(step, most // numel(others) // step * step)
            for start in range(0, size, rows):
                part = box.narrow(dim, box.offsets[dim] + start, min(rows, size - start))
                yield from split_box(part, unit, most)
            return
    yield box


def parse_size(size: int | str) -> int:
    """Convert a size such as "5GB" (powers of 1000, as on the hub), "1GiB" or 4096 to a number of bytes.

    Raises:
        ConfigError: it is not a size, or is less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", str(size).upper())
    nbytes = 0
    if match is not None:
        base = 1024 if match[3] else 1000
        exact = float(match[1]) * base ** " KMGT".index(match[2] or " ")
        nbytes = int(exact) if math.isfinite(exact) else 0
    if nbytes < 1:
        raise ConfigError(f"{size!r} is not a size of at least one byte. Pass bytes, or text such as 5GB")
    return nbytes


class DType(enum.Enum):
    """A stored element type: its safetensors name, bits per element, and kind.

    ``kind`` is one of "bool", "int", "float", "complex". Source of the names and widths: the safetensors
    format, ``Dtype`` in its Rust library.
    """

    BOOL = ("BOOL", 8, "bool")
    U8 = ("U8", 8, "int")
    I8 = ("I8", 8, "int")
    U16 = ("U16", 16, "int")
    I16 = ("I16", 16, "int")
    U32 = ("U32", 32, "int")
    I32 = ("I32", 32, "int")
    U64 = ("U64", 64, "int")
    I64 = ("I64", 64, "int")
    F4 = ("F4", 4, "float")
    F6_E2M3 = ("F6_E2M3", 6, "float")
    F6_E3M2 = ("F6_E3M2", 6, "float")
    F8_E4M3 = ("F8_E4M3", 8, "float")
    F8_E4M3FNUZ = ("F8_E4M3FNUZ", 8, "float")
    F8_E5M2 = ("F8_E5M2", 8, "float")
    F8_E5M2FNUZ = ("F8_E5M2FNUZ", 8, "float")
    F8_E8M0 = ("F8_E8M0", 8, "float")
    F16 = ("F16", 16, "float")
    BF16 = ("BF16", 16, "float")
    F32 = ("F32", 32, "float")
    F64 = ("F64", 64, "float")
    C64 = ("C64", 64, "complex")
    OTHER = ("OTHER", 8, "complex")
    """Any dtype of torch that files cannot hold."""

    def __init__(self, label: str, bits: int, kind: str) -> None:
        self.label = label
        self.bits = bits
        self.kind = kind

    @property
    def itemsize(self) -> int:
        """Bytes per element. Raises :class:`ValueError` for types smaller than a byte."""
        if self.bits % 8:
            raise ValueError(f"{self.label} elements are {self.bits} bits wide, not whole bytes")
        return self.bits // 8


def find_dtype(label: str) -> DType | None:
    """Return the dtype with this safetensors name, or None."""
    return _BY_LABEL.get(label)


def casts_safely(source: DType, target: DType) -> bool:
    """Return whether a cast keeps the kind of number: never float to int, complex to real, or anything to bool."""
    order = ("bool", "int", "float", "complex")
    return order.index(source.kind) <= order.index(target.kind)


def follows(source: DType, target: DType) -> bool:
    """Return whether a value of dtype ``source`` may be cast when it is set on a tensor of dtype ``target``.

    Floats of at least 16 bits may. Narrower floats need their scales, and integers are indices, counts or codes:
    these keep their dtype.
    """
    return source is target or (min(_rank(source), _rank(target)) > 0 and _rank(source) <= _rank(target))


def _rank(dtype: DType) -> int:
    if dtype is DType.OTHER or dtype.kind not in ("float", "complex") or dtype.bits < 16:
        return 0
    return 1 if dtype.kind == "float" else 2


_BY_LABEL = {dtype.label: dtype for dtype in DType if dtype is not DType.OTHER}


def _float8(exponent_bits: int, *, has_infinity: bool) -> tuple[float, ...]:
    """Return the values of the 256 codes of an 8-bit float of OCP (E4M3, E5M2)."""
    mantissa_bits = 7 - exponent_bits
    bias, top, steps = (1 << exponent_bits - 1) - 1, (1 << exponent_bits) - 1, 1 << mantissa_bits
    numbers = []
    for byte in range(128):  # the positive half: a sign, the exponent, the mantissa
        exponent, mantissa = divmod(byte, steps)
        if exponent == top and has_infinity:
            numbers.append(math.nan if mantissa else math.inf)
        elif exponent == top and mantissa == steps - 1:
            numbers.append(math.nan)
        elif exponent:
            numbers.append((1 + mantissa / steps) * 2.0 ** (exponent - bias))
        else:  # subnormal
            numbers.append(mantissa / steps * 2.0 ** (1 - bias))
    return (*numbers, *(-number for number in numbers))


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Code(enum.Enum):
    """Encoding of numbers in 4 or 8 bits. A byte holds two 4-bit codes, the first in its lower half."""

    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    E2M1 = "E2M1"
    """FP4 of OCP's microscaling formats."""
    INT8 = "INT8"
    """Two's complement."""
    OFFSET8 = "OFFSET8"
    """Offset binary, code 0 is the smallest number, as compressed-tensors packs integers."""
    OFFSET4 = "OFFSET4"

    @property
    def codebook(self) -> tuple[float, ...]:
        """Values of the 256 codes, or of the 16 codes of 4 bits."""
        return _CODEBOOKS[self]

    @property
    def per_byte(self) -> int:
        return 2 if len(self.codebook) == 16 else 1


_CODEBOOKS = {
    Code.F8_E4M3: _float8(4, has_infinity=False),
    Code.F8_E5M2: _float8(5, has_infinity=True),
    Code.E2M1: (*_E2M1, *(-number for number in _E2M1)),
    Code.INT8: (*map(float, range(128)), *map(float, range(-128, 0))),
    Code.OFFSET8: tuple(map(float, range(-128, 128))),
    Code.OFFSET4: tuple(map(float, range(-8, 8))),
}


_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_FP4_TWELFTHS = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)
_FP4 = struct.unpack("16f", struct.pack("16f", *(twelfths / 12 for twelfths in _FP4_TWELFTHS)))
"""Rounded to float32."""


class Form4(enum.Enum):
    """4-bit data type of bitsandbytes: sixteen values from -1 to 1, multiplied by the scale of a block.

    A byte holds two codes, the first in its upper half (in :class:`Code` it is in the lower half). ``value`` is
    the name in bitsandbytes.
    """

    NF4 = "nf4"
    """Quantiles of a normal distribution (Dettmers and others, "QLoRA", 2023, appendix E)."""
    FP4 = "fp4"
    """A sign, two bits of exponent, one of mantissa, in twelfths. Codes 0 and 8 are both 0."""

    @property
    def codebook(self) -> tuple[float, ...]:
        """Values of the 16 codes, as float32."""
        return _NF4 if self is Form4.NF4 else _FP4

    @property
    def per_byte(self) -> int:
        """Codes in a byte, the first of them in the upper half."""
        return 2


FourBitForm: TypeAlias = Form4 | Code
"""4-bit data types of a model's weights: those of bitsandbytes, and ``Code.E2M1``, the elements of MXFP4."""
