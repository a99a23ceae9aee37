"""4-bit quantization of weights, and 8-bit quantization of their scales, bitwise as in bitsandbytes.

[Note: Four bits] A weight is ``[rows, width]`` (experts: ``[..., rows, width]``), and ``width`` is a multiple of
``block``. So no block crosses a row, and rows are quantized independently. The scale of a block is its largest
magnitude. The arithmetic is that of bitsandbytes 0.50 on a CPU (``quantize_4bit`` in
``bitsandbytes/backends/default/ops.py``), all of it in float32::

    absmax = max(|x|)                       # exact
    v      = x * (1 / max(absmax, 1e-38))   # multiplied by the reciprocal, not divided
    code   = order[number of bounds < v]    # bounds: midpoints between values in ascending order

bitsandbytes clamps ``v`` to [-1, 1], which changes no code, because all bounds are inside.

The number of bounds is looked up in a table: the lower 16 bits of ``v + 768`` in float32 are the *index* of ``v``
rounded to a multiple of 2^-14. Rounding is monotonic, so a value with a larger index than a bound is above it, and
one with a smaller index is below. If the indices are equal, as for one element in a thousand, the numbers are
compared. That takes fewer passes than fifteen comparisons (``benchmarks/results/four-bit-places-2026-11-23.md``).

[Note: Nested scales] The scales of a weight, flattened, minus their mean (``offset``), are in blocks of 256. Each
is stored as one of 256 numbers from -1 to 1 (:func:`dynamic_codebook`) times the largest magnitude of its block.
Blocks continue from row to row, so a part of the scales needs the offset and the magnitudes of the full tensor: 4
bytes for 256 scales.

The arithmetic is that of bitsandbytes 0.50 on an x86 CPU (``quantize_4bit(compress_statistics=True)``, whose
``quantize_blockwise`` is ``quantize_cpu`` of its ``csrc/cpu_ops.cpp``). It rounds to one of 65,536 values, and
looks up the number for it, which is not always the nearest number. The mean is torch's, whose last bit depends on
the number of
threads: it is computed once, for all ranks.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.computed import cast, table_for
from shardwise.core.tensors import DType, Form4

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes of bitsandbytes."""

CHUNK = 1 << 17
"""Elements processed at once: about a core's cache, and enough that the overhead of calls, some 70 us for a chunk,
is small. A multiple of every block size."""

_COMPARED = 1 << 12
"""Elements that are compared with the bounds at once."""

_SCRATCH_BYTES = 10
"""For each element of a chunk: its magnitude (later a comparison, or a pair), float32 value, code, and scale."""

_SHIFT = 768.0
_SHIFT_BITS = 0x44400000
"""The float32 ``_SHIFT``. The last bit of all numbers within 256 of it is worth 2^-14."""

_INDICES = 1 << 16
_AMBIGUOUS = 16
"""In place of a code: numbers with this index have one of several codes."""

_SMALLEST = np.float32(1e-38)
"""The least divisor."""

_BITS: dict[DType, tuple[type[np.unsignedinteger[Any]], int]] = {
    DType.F32: (np.uint32, 0x7FFFFFFF),
    DType.BF16: (np.uint16, 0x7FFF),
    DType.F16: (np.uint16, 0x7FFF),
}
"""Unsigned integers of a dtype's width, and the mask of its magnitude. Magnitudes compare like their bits."""


def scales_in(raw: Any) -> Any:
    """Return bytes ``[..., 4 n]`` as a float32 view ``[..., n]``."""
    return raw.view(cast(raw.new_empty(0), DType.F32).dtype)


def scratch_bytes(elements: int) -> int:
    """Return the scratch bytes that :func:`quantize_rows` needs for this number of elements."""
    return _SCRATCH_BYTES * min(elements, CHUNK)


def quantize_rows(
    values: Any, dtype: DType, block: int, form: Form4, packed_out: Any, absmax_out: Any
) -> tuple[int, ...]:
    """Quantize rows. All tensors are contiguous and on the CPU. May be called by several threads at once.

    Memory: :func:`scratch_bytes`.

    Args:
        values: ``[..., width]``, whose width is a multiple of ``block``.
        dtype: of the values, F32, BF16 or F16.
        block: elements of a row with one scale, one of :data:`BLOCKS`.
        form: 4-bit data type.
        packed_out: receives the codes, uint8 ``[..., width / 2]``.
        absmax_out: receives the scales, float32 ``[..., width / block]``.

    Returns:
        The rows with values that are not finite, numbered over all outer dimensions. Their output is undefined.
    """
    # (8, 128) in blocks of 64: 1024 values, 512 packed bytes, 16 scales, all flat, since no block crosses a row
    flat, packed = values.detach().view(-1), packed_out.detach().view(-1).numpy()
    absmax = absmax_out.detach().view(-1).numpy()
    stored = _view_bits(flat, dtype)
    scratch = _Scratch(flat, dtype, block, form)
    with np.errstate(all="ignore"):  # values that are not finite are found by their scales
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


def quantize_rows_on_device(
    values: Any, block: int, form: Form4, packed_out: Any, absmax_out: Any, at_once: int
) -> Any:
    """Quantize rows on an accelerator like :func:`quantize_rows`, without a table, and without waiting.

    Memory: ``_SCRATCH_BYTES`` for each of ``at_once`` elements, which are whole blocks.

    Returns:
        A tensor that is true if all values are finite.
    """
    bounds, order = bounds_and_order(form)
    numbers_of_order = table_for(tuple(order.tolist()), DType.U8, values)
    flat, packed, absmax = values.view(-1), packed_out.view(-1), absmax_out.view(-1)
    for start in range(0, flat.numel(), at_once):
        part = flat[start : start + at_once].view(-1, block)  # (blocks, block)
        scales = absmax[start // block :][: part.shape[0]]
        scales.copy_(part.abs().amax(1))
        numbers = part.float() * scales.clamp(min=float(_SMALLEST)).reciprocal().unsqueeze(1)
        # The number of bounds below each value, by 15 comparisons, which are exact on any device.
        codes = cast(numbers > float(bounds[0]), DType.U8)
        for bound in bounds[1:].tolist():
            codes.add_(numbers > bound)
        del numbers  # before more memory is taken
        codes = numbers_of_order.index_select(0, codes.view(-1).int()).view(-1, 2)
        packed[start // 2 :][: codes.shape[0]].copy_((codes[:, 0] << 4) | codes[:, 1])
    return absmax.isfinite().all()


class _Scratch:
    """Memory for one chunk, and the operations on it, by methods of tensors if numpy's are slow."""

    def __init__(self, values: Any, dtype: DType, block: int, form: Form4) -> None:
        # Allocated once, and reused for each chunk. Several names are views of one memory, used one after the
        # other.
        count, none = min(CHUNK, values.numel()), values.new_empty(0)
        self.dtype, self.block, self.form = dtype, block, form
        self.magnitudes = (none.int() if dtype is DType.F32 else none.short()).new_empty(count)
        self.numbers = none.float().new_empty(count)
        self.indices = self.numbers.view(none.int().dtype)
        self.factors = self.numbers.new_empty(count // block)
        reused = self.magnitudes.numpy().view(np.uint8)[:count]  # magnitudes are not needed once scales are known
        self.is_ambiguous, self.pairs = reused.view(np.bool_), reused.view(np.uint16)
        self.codes = _code_table(form, none)

    def quantize(
        self, values: Any, stored: NDArray[Any], packed: NDArray[np.uint8], absmax: NDArray[np.float32]
    ) -> None:
        """Quantize at most a chunk of ``values``, whole blocks. ``stored`` are their bits."""
        count = stored.size
        magnitudes, numbers, factors = self.magnitudes[:count], self.numbers[:count], self.factors[: absmax.size]
        # The largest magnitude of each block: the sign is masked, and integers are compared in place of floats.
        bits, mask = _BITS[self.dtype]
        np.bitwise_and(stored, mask, out=magnitudes.numpy().view(bits))
        _widen(magnitudes.view(-1, self.block).amax(1).numpy().view(bits), self.dtype, absmax)
        # Multiplied by the reciprocal, as bitsandbytes does. A division would round differently.
        reciprocals = factors.numpy()
        np.divide(np.float32(1), np.maximum(absmax, _SMALLEST), out=reciprocals)
        numbers.copy_(values)
        numbers.view(-1, self.block).mul_(factors.unsqueeze(1))
        # From here on ``indices`` are the bits of the same memory: see [Note: Four bits].
        numbers.add_(_SHIFT)
        indices = self.indices[:count].bitwise_and_(_INDICES - 1)
        codes = self.codes.index_select(0, indices).numpy()
        self._resolve(codes, stored, reciprocals)
        self._pack(codes, packed)

    def _resolve(self, codes: NDArray[np.uint8], stored: NDArray[Any], factors: NDArray[np.float32]) -> None:
        """Compute ambiguous codes by comparing values with the bounds."""
        # About one element in a thousand is compared with all bounds.
        bounds, order = bounds_and_order(self.form)
        ambiguous = np.flatnonzero(np.greater_equal(codes, _AMBIGUOUS, out=self.is_ambiguous[: codes.size]))
        for start in range(0, ambiguous.size, _COMPARED):
            positions = ambiguous[start : start + _COMPARED]
            numbers = np.empty(positions.size, np.float32)
            _widen(stored[positions], self.dtype, numbers)
            np.multiply(numbers, factors[positions // self.block], out=numbers)
            codes[positions] = order[np.searchsorted(bounds, numbers)]

    def _pack(self, codes: NDArray[np.uint8], packed: NDArray[np.uint8]) -> None:
        """Pack two codes, of which the first is the lower byte of an integer, with the first in the upper half."""
        pairs, second = codes.view(np.uint16), self.pairs[: packed.size]
        np.right_shift(pairs, 8, out=second)
        np.left_shift(pairs, 4, out=pairs)
        np.bitwise_or(pairs, second, out=pairs)
        np.copyto(packed, pairs, casting="unsafe")


@cache
def bounds_and_order(form: Form4) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the midpoints between values, ascending, and the codes in the order of their values.

    These are ``_get_4bit_quantize_bounds`` of bitsandbytes 0.50.
    """
    numbers = np.array(form.codebook, np.float64)
    order = np.argsort(numbers, kind="stable")
    return ((numbers[order[:-1]] + numbers[order[1:]]) / 2).astype(np.float32), order.astype(np.uint8)


def _code_table(form: Form4, none: Any) -> Any:
    """Return the code of each index, or :data:`_AMBIGUOUS`, as uint8. ``none`` is any CPU tensor."""
    if form not in _tables:
        bounds, order = bounds_and_order(form)
        # An index between those of two bounds determines the code. The index of a bound does not.
        of_bounds = (bounds + np.float32(_SHIFT)).view(np.int32) - _SHIFT_BITS  # the index of each bound
        signed = np.arange(-_INDICES // 2, _INDICES // 2)
        codes = order[np.searchsorted(of_bounds, signed)]
        codes[np.isin(signed, of_bounds)] = _AMBIGUOUS
        table = np.empty_like(codes)
        table[signed % _INDICES] = codes  # the lower 16 bits of a negative index
        _tables[form] = none.byte().new_tensor(table.tolist())
    return _tables[form]


_tables: dict[Form4, Any] = {}


def _view_bits(values: Any, dtype: DType) -> NDArray[Any]:
    """Return the bits of a contiguous tensor as a flat view, because numpy has no bfloat16."""
    none = values.new_empty(0)
    integers = none.int() if dtype is DType.F32 else none.short()  # integers of the same width
    bits: NDArray[Any] = values.detach().view(-1).view(integers.dtype).numpy().view(_BITS[dtype][0])
    return bits


def _widen(stored: NDArray[Any], dtype: DType, out: NDArray[np.float32]) -> None:
    """Convert bits of a dtype to float32."""
    if dtype is DType.BF16:
        np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, stored.view(np.float32 if dtype is DType.F32 else np.float16))


NESTED_BLOCK = 256
"""Scales with one second-level scale."""

_NESTED_INDICES = 65536


def compute_offset(absmax: Any) -> Any:
    """Return the mean of all scales of a weight, float32 without dimensions.

    Raises:
        ValueError: they are not finite float32, or there are none.
    """
    if absmax.dtype != cast(absmax.new_empty(0), DType.F32).dtype or not absmax.isfinite().all():
        raise ValueError(f"scales are float32 and finite; these are {absmax.dtype}, or not finite")
    if not absmax.numel():
        raise ValueError("there are no scales to average")
    return absmax.detach().reshape(-1).mean()


def compute_nested_scales(absmax: Any, offset: Any) -> Any:
    """Return the largest magnitudes of the blocks of all scales of a weight, float32 ``[ceil(n / 256)]``.

    See [Note: Nested scales]. ``absmax`` are on the CPU, finite float32 (see :func:`compute_offset`), in any shape.
    """
    centered = (absmax.detach().reshape(-1) - offset).numpy()
    nested = absmax.new_empty(-(-centered.size // NESTED_BLOCK))
    np.maximum.reduceat(np.abs(centered), np.arange(0, centered.size, NESTED_BLOCK), out=nested.numpy())
    return nested


def compute_nested_codes(absmax: Any, start: int, nested: Any, offset: Any) -> Any:
    """Return the codes of some scales of a weight, beginning with its ``start``-th, in the shape of ``absmax``.

    ``nested`` and ``offset`` are those of the full weight, whose scales are finite (see :func:`compute_offset`).
    """
    centered = (absmax.detach().reshape(-1) - offset).numpy()
    # Blocks are counted from the first scale of the full weight, of which these are a part.
    greatest = nested.detach().numpy()[np.arange(start, start + centered.size) // NESTED_BLOCK]
    with np.errstate(all="ignore"):  # the reciprocal of a subnormal may be infinite
        values = np.clip(centered * (np.float32(1) / greatest), np.float32(-1), np.float32(1))
        indices = (values + np.float32(1)) * np.float32(0.5) * np.float32(_NESTED_INDICES - 1) + np.float32(0.5)
    flat_codes = _nested_code_table()[np.nan_to_num(indices, nan=0.0).astype(np.uint16)]
    flat_codes[greatest == 0] = 0
    codes = cast(absmax.new_empty(0), DType.U8).new_empty(absmax.shape)
    codes.view(-1).numpy()[:] = flat_codes
    return codes


@cache
def dynamic_codebook() -> tuple[float, ...]:
    """Return the 256 values of dynamic quantization, ascending, all of them float32.

    For each power of ten from 1e-6 to 1, these are the midpoints of 1, 2, 4, ... 64 equal parts of the range from a
    tenth of it to itself, with both signs, and 0 and 1 (Dettmers, "8-bit optimizers via block-wise quantization",
    2021). They equal ``create_dynamic_map`` of bitsandbytes if torch's ``linspace`` uses fused multiply-add, as it
    does on x86 with AVX2.
    """
    values = [np.array([0, 1], np.float32)]
    for power in range(7):
        # 2**power midpoints of equal parts of [0.1, 1], scaled: 1 for 1e-6, 64 for 1.
        edges = _linspace(np.float32(0.1), np.float32(1), 2**power + 1)
        middles = np.float32(10.0 ** (power - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += [middles, -middles]
    return tuple(np.sort(np.concatenate(values)).tolist())


def _linspace(first: np.float32, last: np.float32, count: int) -> NDArray[np.float32]:
    """Return equally spaced values like torch: from the nearer end, with a fused multiply-add."""
    step = np.float64((last - first) / np.float32(count - 1))
    places = np.arange(count, dtype=np.float64)
    from_first, from_last = first + step * places, last - step * (count - 1 - places)
    return np.where(places < count // 2, from_first, from_last).astype(np.float32)


@cache
def _nested_code_table() -> NDArray[np.uint8]:
    """Return the code for each of 65,536 values from -1 to 1."""
    numbers = np.array(dynamic_codebook(), np.float32)
    middles = np.float32(0.5) * (numbers[:-1] + numbers[1:])
    steps = np.arange(_NESTED_INDICES, dtype=np.float32) * np.float32(2) / np.float32(_NESTED_INDICES - 1)
    return np.searchsorted(middles, np.float32(-1) + steps).astype(np.uint8)
