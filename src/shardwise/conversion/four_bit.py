"""Computes weights in 4 bits as bitsandbytes has them, and their scales in a byte each.

[Note: Four bits] A weight is ``[rows, width]`` (experts: ``[..., rows, width]``), and ``width`` is whole blocks of
``block`` elements. So no block crosses a row, and any rows are quantized as they are among all others. The scale of
a block is its greatest magnitude. The bits are those of bitsandbytes 0.50 on a CPU, whose arithmetic this is
(``quantize_4bit`` in ``bitsandbytes/backends/default/ops.py``), all of it in float32::

    absmax = max(|x|)                       # exact
    v      = x * (1 / max(absmax, 1e-38))   # multiplied by the reciprocal, not divided
    code   = order[number of bounds < v]    # see Form4

bitsandbytes clamps ``v`` to [-1, 1], which no bound lies outside of, so that it changes no code.

The number of bounds is looked up: ``v + 768`` in float32 has the *place* of ``v``, the nearest 16,384th, in its
lower 16 bits. Rounding keeps the order, so that a number whose place is above that of a bound is above it, and one
whose place is below is not. Where places are equal, for one element in a thousand, the numbers are compared. These
are fewer passes than fifteen compares (``benchmarks/four_bit.py``).

[Note: Nested scales] All scales of a weight, in one row, less their mean (``offset``), are in blocks of 256. Each
scale is one of 256 numbers from -1 to 1 (:func:`dynamic_numbers`) times the greatest magnitude of its block. Blocks
continue from row to row, so a part of the scales needs the offset and the maxima of the full tensor: 4 bytes for
256 scales.

The bits are those of bitsandbytes 0.50 on an x86 CPU (``quantize_4bit(compress_statistics=True)``, whose
``quantize_blockwise`` is ``quantize_cpu`` of its ``csrc/cpu_ops.cpp``). It looks up the number for the nearest of
65,536 places, which is not always the nearest number. The mean is torch's, whose last bit depends on how many
threads share in the sum: it is taken once, for all ranks.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.tensors import Code, DType, Form4, FourBitForm

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""How many elements may have one scale."""

CHUNK = 1 << 17
"""Elements at a time: few enough for the cache or nearly so, enough that calls, of which there are some 70 us for a
chunk, cost little. Whole blocks of every size."""

_SETTLED = 1 << 12
"""Elements at a time that are compared with the bounds."""

_SCRATCH_BYTES = 10
"""For each element of a chunk: its magnitude (a comparison, a pair), itself as float32, its code, its scale."""

_SHIFT = 768.0
_SHIFT_BITS = 0x44400000
"""Of a float32 whose last bit is worth 2^-14, as those of all numbers within 256 of it are."""

_PLACES = 1 << 16
_UNSURE = 16
"""In place of a code: numbers that have this place may have one of several."""

_SMALLEST = np.float32(1e-38)
"""A smaller scale counts as this one where it is divided by."""

_BITS: dict[DType, tuple[type[np.unsignedinteger[Any]], int]] = {
    DType.F32: (np.uint32, 0x7FFFFFFF),
    DType.BF16: (np.uint16, 0x7FFF),
    DType.F16: (np.uint16, 0x7FFF),
}
"""The integers that hold a dtype's bits, and those of its magnitude. Magnitudes compare as their bits do."""


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a weight's codes, two in a byte."""
    return (*shape[:-1], shape[-1] // 2)


def scales_shape(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """Return the shape of a weight's scales."""
    return (*shape[:-1], shape[-1] // block)


def raw_scales_shape(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """Return the shape of the bytes of a weight's scales."""
    return (*shape[:-1], 4 * (shape[-1] // block))


def fits_blocks(shape: Sequence[int], block: int) -> bool:
    """Return whether a weight of this shape is made of whole blocks within its rows."""
    return len(shape) >= 2 and block in BLOCKS and shape[-1] > 0 and shape[-1] % block == 0


def scales_in(raw: Any) -> Any:
    """Return bytes ``[..., 4 n]`` as a float32 view ``[..., n]``."""
    return raw.view(raw.new_empty(0).float().dtype)


def scratch_bytes(elements: int) -> int:
    """Return the scratch bytes that :func:`quantize_rows` needs for this number of elements."""
    return _SCRATCH_BYTES * min(elements, CHUNK)


def quantize_rows(values: Any, block: int, form: Form4, packed_out: Any, absmax_out: Any) -> tuple[int, ...]:
    """Write the codes and the scales of rows to their places.

    ``values``: CPU tensor ``[..., width]`` in float32, bfloat16 or float16. ``packed_out``: uint8
    ``[..., width / 2]``. ``absmax_out``: float32 ``[..., width / block]``. All are contiguous. Takes
    :func:`scratch_bytes` besides. May be called by several threads at once.

    Returns:
        Which rows have values that are not finite, counted over all outer dimensions. Their output is undefined.

    Raises:
        ValueError: of shapes, dtypes or a block that do not go together.
    """
    _check(values, block, packed_out, absmax_out)
    dtype = _dtype_of(values)
    flat, packed = values.detach().view(-1), packed_out.detach().view(-1).numpy()
    absmax = absmax_out.detach().view(-1).numpy()
    stored = _bits_of(flat, dtype)
    scratch = _Scratch(flat, dtype, block, form)
    with np.errstate(all="ignore"):  # what is not finite is found by its scale
        for start in range(0, stored.size, CHUNK):
            stop = min(start + CHUNK, stored.size)
            scratch.quantize(
                flat[start:stop],
                stored[start:stop],
                packed[start // 2 : stop // 2],
                absmax[start // block : stop // block],
            )
    blocks = np.flatnonzero(~np.isfinite(absmax))
    return tuple(np.unique(blocks // (values.shape[-1] // block)).tolist())


class _Scratch:
    """Memory for one chunk, and the operations on it. Operations that are slow in numpy use methods of tensors."""

    def __init__(self, values: Any, dtype: DType, block: int, form: Form4) -> None:
        count, none = min(CHUNK, values.numel()), values.new_empty(0)
        self.dtype, self.block, self.form = dtype, block, form
        self.magnitudes = (none.int() if dtype is DType.F32 else none.short()).new_empty(count)
        self.numbers = none.float().new_empty(count)
        self.places = self.numbers.view(none.int().dtype)
        self.factors = self.numbers.new_empty(count // block)
        beside = self.magnitudes.numpy().view(np.uint8)[:count]  # once scales are known
        self.is_unsure, self.pairs = beside.view(np.bool_), beside.view(np.uint16)
        self.codes = _codes_by_place(form, none)

    def quantize(
        self, values: Any, stored: NDArray[Any], packed: NDArray[np.uint8], absmax: NDArray[np.float32]
    ) -> None:
        """``values``, and their bits, are as many as a chunk has, or fewer, whole blocks."""
        count = stored.size
        magnitudes, numbers, factors = self.magnitudes[:count], self.numbers[:count], self.factors[: absmax.size]
        bits, mask = _BITS[self.dtype]
        np.bitwise_and(stored, mask, out=magnitudes.numpy().view(bits))
        _widen(magnitudes.view(-1, self.block).amax(1).numpy().view(bits), self.dtype, absmax)
        dividing = factors.numpy()
        np.divide(np.float32(1), np.maximum(absmax, _SMALLEST), out=dividing)
        numbers.copy_(values)
        numbers.view(-1, self.block).mul_(factors.unsqueeze(1))
        numbers.add_(_SHIFT)
        places = self.places[:count].bitwise_and_(_PLACES - 1)
        codes = self.codes.index_select(0, places).numpy()
        self._settle(codes, stored, dividing)
        self._pack(codes, packed)

    def _settle(self, codes: NDArray[np.uint8], stored: NDArray[Any], factors: NDArray[np.float32]) -> None:
        """Compare values in an interval that contains a bound with the bound."""
        bounds, order = _ordered(self.form)
        found = np.flatnonzero(np.greater_equal(codes, _UNSURE, out=self.is_unsure[: codes.size]))
        for start in range(0, found.size, _SETTLED):
            unsure = found[start : start + _SETTLED]
            numbers = np.empty(unsure.size, np.float32)
            _widen(stored[unsure], self.dtype, numbers)
            np.multiply(numbers, factors[unsure // self.block], out=numbers)
            codes[unsure] = order[np.searchsorted(bounds, numbers)]

    def _pack(self, codes: NDArray[np.uint8], packed: NDArray[np.uint8]) -> None:
        """Two in a byte, the first in the upper half. Of two bytes as one number the first is the lower."""
        both, second = codes.view(np.uint16), self.pairs[: packed.size]
        np.right_shift(both, 8, out=second)
        np.left_shift(both, 4, out=both)
        np.bitwise_or(both, second, out=both)
        np.copyto(packed, both, casting="unsafe")


@cache
def _ordered(form: Form4) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The bounds, ascending, and the codes between them."""
    return np.array(form.bounds, np.float32), np.array(form.order, np.uint8)


def _codes_by_place(form: Form4, none: Any) -> Any:
    """Return a code for each interval, or :data:`_UNSURE`, as uint8. ``none`` is any CPU tensor."""
    if form not in _tables:
        bounds, order = _ordered(form)
        of_bounds = (bounds + np.float32(_SHIFT)).view(np.int32) - _SHIFT_BITS
        signed = np.arange(-_PLACES // 2, _PLACES // 2)
        codes = order[np.searchsorted(of_bounds, signed)]
        codes[np.isin(signed, of_bounds)] = _UNSURE
        by_place = np.empty_like(codes)
        by_place[signed % _PLACES] = codes
        _tables[form] = none.byte().new_tensor(by_place.tolist())
    return _tables[form]


_tables: dict[Form4, Any] = {}


def dequantize_rows(packed: Any, absmax: Any, block: int, form: FourBitForm, out: Any) -> None:
    """Dequantize codes and scales: a product in float32, rounded once to the dtype of ``out``.

    ``packed``: uint8 CPU tensor ``[..., width / 2]``. ``absmax``: float32 ``[..., width / block]``. ``out``:
    ``[..., width]`` in float32, bfloat16 or float16. All are contiguous. Takes a quarter of a MiB besides.

    Bitwise ``dequantize_4bit`` of bitsandbytes on a CPU, but for numbers below 2^-126, which its bfloat16 code for
    AVX512 takes for zeros.

    Raises:
        ValueError: of shapes, dtypes or a block that do not go together.
    """
    _check(out, block, packed, absmax)
    _dtype_of(out)
    keys, scales, flat = packed.detach().view(-1).numpy(), absmax.detach().view(-1).numpy(), out.detach().view(-1)
    numbers = absmax.new_empty(min(CHUNK, flat.numel()))
    products = numbers.numpy()
    for start in range(0, flat.numel(), CHUNK):
        stop = min(start + CHUNK, flat.numel())
        part = products[: stop - start]
        np.take(_pairs(form), keys[start // 2 : stop // 2], out=part.view(np.uint64), mode="clip")
        by_block = part.reshape(-1, block)
        with np.errstate(all="ignore"):  # what overflows is infinite
            np.multiply(by_block, scales[start // block : stop // block, None], out=by_block)
        flat[start:stop].copy_(numbers[: stop - start])


def _check(numbers: Any, block: int, packed: Any, absmax: Any) -> None:
    shape = tuple(numbers.shape)
    if not shape or block not in BLOCKS or shape[-1] % block:
        raise ValueError(f"{shape} is not rows of whole blocks of {block} (one of {BLOCKS})")
    if tuple(packed.shape) != packed_shape(shape) or packed.dtype != packed.new_empty(0).byte().dtype:
        raise ValueError(f"codes of {shape} are uint8 {packed_shape(shape)}, not {_told(packed)}")
    if tuple(absmax.shape) != scales_shape(shape, block) or absmax.dtype != absmax.new_empty(0).float().dtype:
        raise ValueError(f"scales of {shape} are float32 {scales_shape(shape, block)}, not {_told(absmax)}")
    if not all(tensor.is_contiguous() for tensor in (numbers, packed, absmax)):
        raise ValueError(f"numbers of {shape}, their codes and scales are contiguous")


def _told(tensor: Any) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _dtype_of(values: Any) -> DType:
    none = values.new_empty(0)
    found = {none.float().dtype: DType.F32, none.bfloat16().dtype: DType.BF16, none.half().dtype: DType.F16}
    if values.dtype not in found:
        raise ValueError(f"weights in 4 bits are made of float32, bfloat16 and float16, not of {values.dtype}")
    return found[values.dtype]


def _bits_of(values: Any, dtype: DType) -> NDArray[Any]:
    """Return the bits of a contiguous tensor as a flat view, because numpy has no bfloat16."""
    none = values.new_empty(0)
    integers = none.int() if dtype is DType.F32 else none.short()
    found: NDArray[Any] = values.detach().view(-1).view(integers.dtype).numpy().view(_BITS[dtype][0])
    return found


def _widen(stored: NDArray[Any], dtype: DType, out: NDArray[np.float32]) -> None:
    """Bits as the float32 that they stand for."""
    if dtype is DType.BF16:
        np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, stored.view(np.float32 if dtype is DType.F32 else np.float16))


@cache
def _pairs(form: FourBitForm) -> NDArray[np.uint64]:
    """Two float32 in a row, by the byte that stands for them."""
    numbers = np.array(form.numbers, np.float32)
    halves = [np.repeat(numbers, 16), np.tile(numbers, 16)]
    return np.stack(halves[::-1] if isinstance(form, Code) else halves, axis=1).view(np.uint64).reshape(-1)


NESTED_BLOCK = 256
"""How many scales have one greatest magnitude."""

_NESTED_PLACES = 65536


def nest(absmax: Any) -> tuple[Any, Any, Any]:
    """All scales of a weight (CPU, float32, finite, any shape) in a byte each.

    Returns:
        Codes (uint8, the same shape), greatest magnitudes (float32, ``[ceil(n / 256)]``), offset (float32, no
        dimensions).

    Raises:
        ValueError: these are no such scales, or there are none.
    """
    offset = offset_of(absmax)
    return *nest_about(absmax, offset), offset


def offset_of(absmax: Any) -> Any:
    """The mean of all scales of a weight, as torch takes it with as many threads as it has now."""
    _check_scales(absmax)
    if not absmax.numel():
        raise ValueError("there are no scales to average")
    return absmax.detach().reshape(-1).mean()


def nest_about(absmax: Any, offset: Any) -> tuple[Any, Any]:
    """:func:`nest` about an offset that was taken before: codes and greatest magnitudes."""
    _check_scales(absmax)
    moved = (absmax.detach().reshape(-1) - offset).numpy()
    nested = absmax.new_empty(-(-moved.size // NESTED_BLOCK))
    np.maximum.reduceat(np.abs(moved), np.arange(0, moved.size, NESTED_BLOCK), out=nested.numpy())
    return nested_codes(absmax, 0, nested, offset), nested


def nested_codes(absmax: Any, start: int, nested: Any, offset: Any) -> Any:
    """The codes of some scales of a weight, the first of which is its ``start``-th.

    ``nested`` and ``offset`` are those of the whole weight. The codes have the shape of ``absmax``.
    """
    _check_scales(absmax)
    moved = (absmax.detach().reshape(-1) - offset).numpy()
    greatest = _by_scale(nested, start, moved.size)
    with np.errstate(all="ignore"):  # the reciprocal of a subnormal may be infinite
        values = np.clip(moved * (np.float32(1) / greatest), np.float32(-1), np.float32(1))
        places = (values + np.float32(1)) * np.float32(0.5) * np.float32(_NESTED_PLACES - 1) + np.float32(0.5)
    found = _nested_codes_by_place()[np.nan_to_num(places, nan=0.0).astype(np.uint16)]
    found[greatest == 0] = 0
    codes = absmax.new_empty(0).byte().new_empty(absmax.shape)
    codes.view(-1).numpy()[:] = found
    return codes


def _check_scales(absmax: Any) -> None:
    if absmax.dtype != absmax.new_empty(0).float().dtype or not absmax.isfinite().all():
        raise ValueError(f"scales are float32 and finite; these are {absmax.dtype}, or not finite")


def _by_scale(nested: Any, start: int, count: int) -> NDArray[np.float32]:
    """For each of ``count`` scales the greatest magnitude of its block."""
    found: NDArray[np.float32] = nested.detach().numpy()[np.arange(start, start + count) // NESTED_BLOCK]
    return found


def dynamic_numbers() -> tuple[float, ...]:
    """The 256 numbers, ascending, all float32 (Dettmers, "8-bit optimizers via block-wise quantization", 2021).

    Return the dynamic map: for each power of ten from 1e-6 to 1, the midpoints of 1, 2, 4, ... 64 equal parts of
    the range from a tenth of it to itself, with both signs, and 0 and 1. These are those of ``create_dynamic_map``
    of bitsandbytes where torch's ``linspace`` rounds once for a product and a sum, as it does on x86 from AVX2 on.
    """
    return tuple(_dynamic_numbers().tolist())


@cache
def _dynamic_numbers() -> NDArray[np.float32]:
    found = [np.array([0, 1], np.float32)]
    for power in range(7):
        edges = _linspace(np.float32(0.1), np.float32(1), 2**power + 1)
        middles = np.float32(10.0 ** (power - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        found += [middles, -middles]
    return np.sort(np.concatenate(found))


def _linspace(first: np.float32, last: np.float32, count: int) -> NDArray[np.float32]:
    """Return equally spaced values like torch: counted from the nearer end, with product and sum rounded once."""
    step = np.float64((last - first) / np.float32(count - 1))
    places = np.arange(count, dtype=np.float64)
    from_first, from_last = first + step * places, last - step * (count - 1 - places)
    return np.where(places < count // 2, from_first, from_last).astype(np.float32)


@cache
def _nested_codes_by_place() -> NDArray[np.uint8]:
    """For each of 65,536 places from -1 to 1, how many middles between two numbers are smaller."""
    numbers = _dynamic_numbers()
    middles = np.float32(0.5) * (numbers[:-1] + numbers[1:])
    places = np.float32(-1) + np.arange(_NESTED_PLACES, dtype=np.float32) * np.float32(2) / np.float32(
        _NESTED_PLACES - 1
    )
    return np.searchsorted(middles, places).astype(np.uint8)
