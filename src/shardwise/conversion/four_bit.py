"""Weights in 4 bits, as bitsandbytes has them: each half byte a number from -1 to 1, times the scale of its block.

[Note: Four bits] A weight is ``[rows, width]`` (experts: ``[..., rows, width]``), and ``width`` is whole blocks of
``block`` elements. So no block crosses a row, and any rows are quantised as they are among all others. The scale of
a block is its greatest magnitude. The bits are those of bitsandbytes 0.50 on a CPU, whose arithmetic this is
(``quantize_4bit`` in ``bitsandbytes/backends/default/ops.py``), all of it in float32::

    absmax = max(|x|)                       # exact
    v      = x * (1 / max(absmax, 1e-38))   # multiplied by the reciprocal, not divided
    code   = order[number of bounds < v]    # see Form4

bitsandbytes clamps ``v`` to [-1, 1], which no bound lies outside of, so that it changes no code.

A compare of float32 takes numpy less than 0.1 ns an element, so that fifteen of them, in the cache, are as quick as
a table by the upper bits of ``v`` with one compare for what is ambiguous, and much quicker than a search
(``benchmarks/four_bit.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.tensors import DType, Form4

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""How many elements may have one scale."""

CHUNK = 1 << 16
"""Elements at a time: few enough for the cache, enough that calls cost nothing. Whole blocks of every size."""

_SCRATCH_BYTES = 12
"""For each element of a chunk: its magnitude, itself as float32, its rank, a comparison, a pair, its scale."""

_SMALLEST = np.float32(1e-38)
"""A smaller scale counts as this one where it is divided by."""

_BITS: dict[DType, tuple[type[np.unsignedinteger[Any]], int]] = {
    DType.F32: (np.uint32, 0x7FFFFFFF),
    DType.BF16: (np.uint16, 0x7FFF),
    DType.F16: (np.uint16, 0x7FFF),
}
"""The integers that hold a dtype's bits, and those of its magnitude. Magnitudes compare as their bits do."""


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Of the codes of a weight of this shape, two in a byte."""
    return (*shape[:-1], shape[-1] // 2)


def scales_shape(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """Of the scales of a weight of this shape."""
    return (*shape[:-1], shape[-1] // block)


def raw_scales_shape(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """Of the bytes of its scales."""
    return (*shape[:-1], 4 * (shape[-1] // block))


def fits_blocks(shape: Sequence[int], block: int) -> bool:
    """Whether a weight of this shape is made of whole blocks within its rows."""
    return len(shape) >= 2 and block in BLOCKS and shape[-1] > 0 and shape[-1] % block == 0


def scales_in(raw: Any) -> Any:
    """Bytes ``[..., 4 n]`` as the float32 ``[..., n]`` that they are; the same memory."""
    return raw.view(raw.new_empty(0).float().dtype)


def quantised_bytes(rows: int, width: int, block: int) -> int:
    """Of these rows of a weight: codes, and scales in float32."""
    return rows * (width // 2 + 4 * (width // block))


def nested_bytes(rows: int, width: int, block: int, whole_rows: int) -> int:
    """Of these rows of a weight of ``whole_rows``: codes, scales in bytes, and the scales of all scales."""
    scales = -(-whole_rows * (width // block) // 256)
    return rows * (width // 2 + width // block) + 4 * scales + 4


def scratch_bytes(elements: int) -> int:
    """What :func:`quantise_rows` takes of memory besides what it is given, for so many elements."""
    return _SCRATCH_BYTES * min(elements, CHUNK)


def quantise_rows(values: Any, block: int, form: Form4, packed_out: Any, absmax_out: Any) -> tuple[int, ...]:
    """Put the codes and the scales of rows where they belong.

    ``values``: CPU tensor ``[..., width]`` in float32, bfloat16 or float16. ``packed_out``: uint8
    ``[..., width / 2]``. ``absmax_out``: float32 ``[..., width / block]``. All are contiguous. Takes
    :func:`scratch_bytes` besides. May be called by several threads at once.

    Returns:
        Which rows have values that are not finite, counted over all outer dimensions. What is written for
        these means nothing.

    Raises:
        ValueError: of shapes, dtypes or a block that do not go together.
    """
    _check(values, block, packed_out, absmax_out)
    dtype = _dtype_of(values)
    stored, packed = _bits_of(values, dtype), packed_out.detach().view(-1).numpy()
    absmax = absmax_out.detach().view(-1).numpy()
    count = min(CHUNK, stored.size)
    scratch = _Scratch(dtype, count, block)
    with np.errstate(all="ignore"):  # what is not finite is found by its scale
        for start in range(0, stored.size, CHUNK):
            stop = min(start + CHUNK, stored.size)
            scratch.quantise(
                stored[start:stop], packed[start // 2 : stop // 2], absmax[start // block : stop // block], form
            )
    blocks = np.flatnonzero(~np.isfinite(absmax))
    return tuple(np.unique(blocks // (values.shape[-1] // block)).tolist())


class _Scratch:
    """Memory for one chunk, and what is done with it."""

    def __init__(self, dtype: DType, count: int, block: int) -> None:
        self.dtype, self.block = dtype, block
        bits, self.mask = _BITS[dtype]
        self.magnitudes = np.empty(count, bits)
        self.numbers = np.empty(count, np.float32)
        self.ranks = np.empty(count, np.uint8)
        self.above = np.empty(count, np.bool_)
        self.pairs = np.empty(count // 2, np.uint16)
        self.starts = np.arange(0, count, block)

    def quantise(
        self, stored: NDArray[Any], packed: NDArray[np.uint8], absmax: NDArray[np.float32], form: Form4
    ) -> None:
        """``stored`` are bits of ``count`` values or fewer, whole blocks."""
        count = stored.size
        magnitudes, numbers = self.magnitudes[:count], self.numbers[:count]
        np.bitwise_and(stored, self.mask, out=magnitudes)
        _widen(np.maximum.reduceat(magnitudes, self.starts[: absmax.size]), self.dtype, absmax)
        factors = np.divide(np.float32(1), np.maximum(absmax, _SMALLEST))
        _widen(stored, self.dtype, numbers)
        by_block = numbers.reshape(-1, self.block)
        np.multiply(by_block, factors[:, None], out=by_block)
        self._pack(self._ranked(numbers, form), packed)
        if form is Form4.FP4:
            np.take(_codes_by_ranks(form), packed.copy(), out=packed, mode="clip")

    def _ranked(self, numbers: NDArray[np.float32], form: Form4) -> NDArray[np.uint8]:
        """How many bounds each number is above."""
        ranks, above = self.ranks[: numbers.size], self.above[: numbers.size]
        first, *others = (np.float32(bound) for bound in form.bounds)
        np.greater(numbers, first, out=ranks.view(np.bool_))
        for bound in others:
            np.greater(numbers, bound, out=above)
            np.add(ranks, above.view(np.uint8), out=ranks)
        return ranks

    def _pack(self, ranks: NDArray[np.uint8], packed: NDArray[np.uint8]) -> None:
        """Two in a byte, the first in the upper half. Of two bytes as one number the first is the lower."""
        both, second = ranks.view(np.uint16), self.pairs[: packed.size]
        np.right_shift(both, 8, out=second)
        np.left_shift(both, 4, out=both)
        np.bitwise_or(both, second, out=both)
        np.copyto(packed, both, casting="unsafe")


def dequantise_rows(packed: Any, absmax: Any, block: int, form: Form4, out: Any) -> None:
    """What codes and scales stand for: a product in float32, rounded once to the dtype of ``out``.

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
    """The bits of a contiguous tensor, flat; the same memory. numpy has no bfloat16."""
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
def _codes_by_ranks(form: Form4) -> NDArray[np.uint8]:
    """Two codes in a byte, by their two ranks in a byte."""
    return np.array([first << 4 | second for first in form.order for second in form.order], np.uint8)


@cache
def _pairs(form: Form4) -> NDArray[np.uint64]:
    """Two float32 in a row, by the byte that stands for them."""
    numbers = np.array(form.numbers, np.float32)
    return np.stack([np.repeat(numbers, 16), np.tile(numbers, 16)], axis=1).view(np.uint64).reshape(-1)
