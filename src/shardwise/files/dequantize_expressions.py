"""Expressions that dequantize weights from their stored tensors while these are read."""

from collections.abc import Callable
from typing import TypeAlias

from shardwise.core.expression import Expression, permute, reshape, slice_dim
from shardwise.core.tensors import numel
from shardwise.files.coded import FourBits, Scaled, Zeros
from shardwise.files.dequantize import decode, dequantize
from shardwise.files.packed import dequantize_packed_rows, dequantize_scales

LeafOf: TypeAlias = Callable[[str], Expression]
"""Returns the leaf for a stored tensor, by its name."""


def scaled(coded: Scaled, leaf: LeafOf) -> Expression:
    """Build the expression ``(values - zero points) * scales``."""
    *outer, columns = coded.shape
    values, per_byte = leaf(coded.values.key), coded.code.per_byte
    nbytes = -(-columns // per_byte)
    if numel(values.shape) != numel(outer) * nbytes:  # words that are filled in part
        values = slice_dim(values, len(outer), 0, nbytes)
    # Where the last byte has one element, the other one is made, too, and left out.
    whole, unit = nbytes * per_byte, coded.unit
    dequantized = dequantize(
        values,
        leaf(coded.scales.key),
        (*outer, whole),
        unit if whole == columns else (*unit[:-1], max(unit[-1], whole)),
        coded.code,
        has_exponents=coded.has_exponents,
        overall=None if coded.overall is None else (leaf(coded.overall[0].key), coded.overall[1]),
        zeros=None if coded.zeros is None else _zeros(coded, coded.zeros, leaf),
        groups=None if coded.groups is None else leaf(coded.groups.key),
    )
    dequantized = slice_dim(dequantized, len(outer), 0, columns)
    *outer, rows, columns = range(len(coded.shape)) if coded.swaps else (0, 0)
    return permute(dequantized, (*outer, columns, rows)) if coded.swaps else dequantized


def _zeros(coded: Scaled, zeros: Zeros, leaf: LeafOf) -> Expression:
    """Build the zero points as decoded values, in the order of the scales."""
    stored = leaf(zeros.values.key)
    if not zeros.in_a_word:
        return stored
    *outer, words, nbytes = stored.shape
    groups, last = nbytes // 4, len(stored.shape)
    values = decode(stored, (*outer, words, groups, zeros.in_a_word), coded.code)
    rows = permute(values, (*range(last - 1), last, last - 1))
    all_rows = reshape(rows, (*outer, words * zeros.in_a_word, groups))
    return slice_dim(all_rows, last - 2, 0, coded.shape[-2])


def four_bits(coded: FourBits, leaf: LeafOf) -> Expression:
    """Dequantize packed 4-bit values, whose scales may be quantized themselves."""
    factors = leaf(coded.scales.key)
    if coded.nested is not None:
        factors = dequantize_scales(
            factors, leaf(coded.nested.scales.key), coded.nested.offset, coded.nested.codebook
        )
    return dequantize_packed_rows(
        leaf(coded.values.key), factors, coded.shape, coded.form, coded.block, coded.dtype
    )
