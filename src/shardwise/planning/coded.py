"""Expressions that dequantize weights from their stored tensors while these are read."""

from collections.abc import Callable
from typing import TypeAlias

from shardwise.conversion.dequantize import columns_in_words, decoded, dequantized, rows_in_words
from shardwise.conversion.expression import Expression, permute, reshape, slice_dim
from shardwise.conversion.packed import dequantized_rows, dequantized_scales
from shardwise.formats.coded import FourBits, GroupedIntegers, Scaled, Zeros
from shardwise.tensors import numel

LeafOf: TypeAlias = Callable[[str], Expression]
"""Returns the leaf for a stored tensor, by its name."""


def scaled(part: Scaled, leaf: LeafOf) -> Expression:
    """Build the expression ``(values - zero points) * scales``."""
    *outer, columns = part.shape
    values, per_byte = leaf(part.values.key), part.code.per_byte
    nbytes = -(-columns // per_byte)
    if numel(values.shape) != numel(outer) * nbytes:  # words that are filled in part
        values = slice_dim(values, len(outer), 0, nbytes)
    # Where the last byte has one element, the other one is made, too, and left out.
    whole, unit = nbytes * per_byte, part.unit
    made = dequantized(
        values,
        leaf(part.scales.key),
        (*outer, whole),
        unit if whole == columns else (*unit[:-1], max(unit[-1], whole)),
        part.code,
        has_exponents=part.has_exponents,
        overall=None if part.overall is None else (leaf(part.overall[0].key), part.overall[1]),
        zeros=None if part.zeros is None else _zeros(part, part.zeros, leaf),
        groups=None if part.groups is None else leaf(part.groups.key),
    )
    made = slice_dim(made, len(outer), 0, columns)
    *outer, rows, columns = range(len(part.shape)) if part.swaps else (0, 0)
    return permute(made, (*outer, columns, rows)) if part.swaps else made


def _zeros(part: Scaled, zeros: Zeros, leaf: LeafOf) -> Expression:
    """Build the zero points as decoded values, in the order of the scales."""
    stored = leaf(zeros.values.key)
    if not zeros.in_a_word:
        return stored
    *outer, words, nbytes = stored.shape
    groups, last = nbytes // 4, len(stored.shape)
    numbers = decoded(stored, (*outer, words, groups, zeros.in_a_word), part.code)
    rows = permute(numbers, (*range(last - 1), last, last - 1))
    every = reshape(rows, (*outer, words * zeros.in_a_word, groups))
    return slice_dim(every, last - 2, 0, part.shape[-2])


def four_bits(part: FourBits, leaf: LeafOf) -> Expression:
    """Dequantize packed 4-bit values, whose scales may be quantized themselves."""
    factors = leaf(part.scales.key)
    if part.nested is not None:
        factors = dequantized_scales(factors, leaf(part.nested.scales.key), part.nested.offset, part.nested.numbers)
    return dequantized_rows(leaf(part.values.key), factors, part.shape, part.form, part.block, part.dtype)


def grouped(part: GroupedIntegers, leaf: LeafOf) -> Expression:
    """Dequantize integers packed in words, with a scale and a zero point for each group of inputs."""
    values, zeros, scales = (leaf(item.key) for item in (part.values, part.zeros, part.scales))
    if not part.in_rows:
        return columns_in_words(values, zeros, scales, part.shape, part.group, part.dtype)
    return rows_in_words(
        values,
        zeros,
        scales,
        part.shape,
        part.group,
        part.dtype,
        bits=part.bits,
        is_less_one=part.is_less_one,
        numbers=None if part.numbers is None else leaf(part.numbers.key),
    )
