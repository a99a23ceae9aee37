"""Scales in a byte each: double quantisation, as bitsandbytes has it.

[Note: Nested scales] All scales of a weight, in one row, less their mean (``offset``), are in blocks of 256. Each
scale is one of 256 numbers from -1 to 1 (:func:`dynamic_numbers`) times the greatest magnitude of its block. Blocks
go on from row to row, so that a part of the scales needs the offset and the greatest magnitudes of the whole:
4 bytes for 256 scales.

The bits are those of bitsandbytes 0.50 on an x86 CPU (``quantize_4bit(compress_statistics=True)``, whose
``quantize_blockwise`` is ``quantize_cpu`` of its ``csrc/cpu_ops.cpp``). It looks up the number for the nearest of
65,536 places, which is not always the nearest number. The mean is torch's, whose last bit depends on how many
threads share in the sum: it is taken once, for all ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

NESTED_BLOCK = 256
"""How many scales have one greatest magnitude."""

_PLACES = 65536


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
    _check(absmax)
    if not absmax.numel():
        raise ValueError("there are no scales to take the mean of")
    return absmax.detach().reshape(-1).mean()


def nest_about(absmax: Any, offset: Any) -> tuple[Any, Any]:
    """:func:`nest` about an offset that was taken before: codes and greatest magnitudes."""
    _check(absmax)
    moved = (absmax.detach().reshape(-1) - offset).numpy()
    nested = absmax.new_empty(-(-moved.size // NESTED_BLOCK))
    np.maximum.reduceat(np.abs(moved), np.arange(0, moved.size, NESTED_BLOCK), out=nested.numpy())
    return nested_codes(absmax, 0, nested, offset), nested


def nested_codes(absmax: Any, start: int, nested: Any, offset: Any) -> Any:
    """The codes of some scales of a weight, the first of which is its ``start``-th.

    ``nested`` and ``offset`` are those of the whole weight. The codes have the shape of ``absmax``.
    """
    _check(absmax)
    moved = (absmax.detach().reshape(-1) - offset).numpy()
    greatest = _by_scale(nested, start, moved.size)
    with np.errstate(all="ignore"):  # the reciprocal of a subnormal may be infinite
        values = np.clip(moved * (np.float32(1) / greatest), np.float32(-1), np.float32(1))
        places = (values + np.float32(1)) * np.float32(0.5) * np.float32(_PLACES - 1) + np.float32(0.5)
    found = _codes_by_place()[np.nan_to_num(places, nan=0.0).astype(np.uint16)]
    found[greatest == 0] = 0
    codes = absmax.new_empty(0).byte().new_empty(absmax.shape)
    codes.view(-1).numpy()[:] = found
    return codes


def unnest(codes: Any, start: int, nested: Any, offset: Any) -> Any:
    """The scales (float32) that codes stand for, the first of which is the weight's ``start``-th."""
    scales = codes.new_empty(0).float().new_empty(codes.shape)
    flat = scales.view(-1).numpy()
    np.take(_numbers(), codes.detach().reshape(-1).numpy(), out=flat, mode="clip")
    np.multiply(flat, _by_scale(nested, start, flat.size), out=flat)
    return scales.add_(offset)


def _check(absmax: Any) -> None:
    if absmax.dtype != absmax.new_empty(0).float().dtype or not absmax.isfinite().all():
        raise ValueError(f"scales are float32 and finite; these are {absmax.dtype}, or not finite")


def _by_scale(nested: Any, start: int, count: int) -> NDArray[np.float32]:
    """For each of ``count`` scales the greatest magnitude of its block."""
    found: NDArray[np.float32] = nested.detach().numpy()[np.arange(start, start + count) // NESTED_BLOCK]
    return found


def dynamic_numbers() -> tuple[float, ...]:
    """The 256 numbers, ascending, all float32 (Dettmers, "8-bit optimizers via block-wise quantization", 2021).

    For each power of ten from 1e-6 to 1, the middles of 1, 2, 4, ... 64 equal parts of what lies between a tenth of
    it and itself, with both signs; 0; 1. These are those of ``create_dynamic_map`` of bitsandbytes where torch's
    ``linspace`` rounds once for a product and a sum, as it does on x86 from AVX2 on.
    """
    return tuple(_numbers().tolist())


@cache
def _numbers() -> NDArray[np.float32]:
    found = [np.array([0, 1], np.float32)]
    for power in range(7):
        edges = _linspace(np.float32(0.1), np.float32(1), 2**power + 1)
        middles = np.float32(10.0 ** (power - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        found += [middles, -middles]
    return np.sort(np.concatenate(found))


def _linspace(first: np.float32, last: np.float32, count: int) -> NDArray[np.float32]:
    """As torch has it: counted from the nearer end; product and sum are rounded once."""
    step = np.float64((last - first) / np.float32(count - 1))
    places = np.arange(count, dtype=np.float64)
    from_first, from_last = first + step * places, last - step * (count - 1 - places)
    return np.where(places < count // 2, from_first, from_last).astype(np.float32)


@cache
def _codes_by_place() -> NDArray[np.uint8]:
    """For each of 65,536 places from -1 to 1, how many middles between two numbers are smaller."""
    numbers = _numbers()
    middles = np.float32(0.5) * (numbers[:-1] + numbers[1:])
    places = np.float32(-1) + np.arange(_PLACES, dtype=np.float32) * np.float32(2) / np.float32(_PLACES - 1)
    return np.searchsorted(middles, places).astype(np.uint8)
