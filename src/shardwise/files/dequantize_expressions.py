"""Expressions that dequantize weights from their stored tensors while these are read."""

from collections.abc import Callable
from typing import TypeAlias

from shardwise.core.expression import Expression, permute, reshape, slice_dim
from shardwise.core.tensors import numel
from shardwise.files.coded import FourBits, Scaled, Zeros
from shardwise.files.dequantize import decode, dequantize
from shardwise.files.packed import dequantize_scales

LeafOf: TypeAlias = Callable[[str], Expression]
"""Returns the leaf for a stored tensor, by its key."""


def dequantize_scaled(coded: Scaled, leaf: LeafOf) -> Expression:
    """Build the expression ``(values - zero points) * scales``."""
    # Each step is a node over the stored entries: cut off padding, dequantize, cut off the last code,
    # transpose.
    *outer, columns = coded.shape
    values, per_byte = leaf(coded.values.key), coded.code.per_byte
    nbytes = -(-columns // per_byte)
    # 9 columns of 4 bits are two words (8 bytes), of which 5 bytes are used.
    if numel(values.shape) != numel(outer) * nbytes:
        values = slice_dim(values, len(outer), 0, nbytes)
    # If the last byte has one element, its second one is computed as well, and cut off in the end. This element
    # must not begin a block of its own, for which there is no scale.
    padded, unit = nbytes * per_byte, coded.unit
    if padded != columns:
        unit = (*unit[:-1], max(unit[-1], padded))
    overall = zeros = groups = None
    if coded.overall is not None:
        scale, power = coded.overall
        overall = leaf(scale.key), power
    if coded.zeros is not None:
        zeros = _unpack_zeros(coded, coded.zeros, leaf)
    if coded.groups is not None:
        groups = leaf(coded.groups.key)
    dequantized = dequantize(
        values,
        leaf(coded.scales.key),
        (*outer, padded),
        unit,
        coded.code,
        has_exponents=coded.has_exponents,
        overall=overall,
        zeros=zeros,
        groups=groups,
    )
    dequantized = slice_dim(dequantized, len(outer), 0, columns)
    if not coded.swaps:
        return dequantized
    *dims, row_dim, column_dim = range(len(coded.shape))
    return permute(dequantized, (*dims, column_dim, row_dim))


def _unpack_zeros(coded: Scaled, zeros: Zeros, leaf: LeafOf) -> Expression:
    """Build the zero points as decoded values, in the order of the scales.

    compressed-tensors packs the zero points of eight rows of one group into a word of 4-bit codes: (words of rows,
    groups) become (words, groups, 8), then (words, 8, groups), then (rows, groups).
    """
    stored = leaf(zeros.values.key)
    if not zeros.in_a_word:
        return stored
    *outer, words, nbytes = stored.shape
    groups = nbytes // 4  # a word has 4 bytes
    last = len(stored.shape)  # the last dimension of ``values``, which has one more than ``stored``
    values = decode(stored, (*outer, words, groups, zeros.in_a_word), coded.code)
    rows = permute(values, (*range(last - 1), last, last - 1))
    all_rows = reshape(rows, (*outer, words * zeros.in_a_word, groups))
    return slice_dim(all_rows, last - 2, 0, coded.shape[-2])  # without the rows that fill the last word


def dequantize_four_bits(coded: FourBits, leaf: LeafOf) -> Expression:
    """Dequantize packed 4-bit values, whose scales may be quantized themselves."""
    factors = leaf(coded.scales.key)
    if coded.nested is not None:
        factors = dequantize_scales(
            factors, leaf(coded.nested.scales.key), coded.nested.offset, coded.nested.codebook
        )
    # (8, 128) in blocks of 64 is computed as it is, and (8, 96) as (768,), in which blocks cross rows. An odd
    # number of elements is padded by one, which begins no block of its own, because blocks are even.
    *outer, columns = coded.shape if coded.shape[-1] % coded.block == 0 else (numel(coded.shape),)
    padded = columns + columns % 2
    unit = (*(1 for _ in outer), coded.block)
    weights = dequantize(leaf(coded.values.key), factors, (*outer, padded), unit, coded.form, dtype=coded.dtype)
    return reshape(slice_dim(weights, len(outer), 0, columns), coded.shape)
