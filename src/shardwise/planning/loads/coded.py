"""Numbers in few bits as expressions: they are made of what is stored while it is read."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.conversion import Expression, permute
from shardwise.conversion.dequantise import dequantised
from shardwise.conversion.grouped import columns_in_words, rows_in_words
from shardwise.conversion.packed import unnested, unpacked
from shardwise.formats.coded import FourBits, Grouped, Scaled


def scaled(part: Scaled, leaf: Callable[[str], Expression]) -> Expression:
    """Elements times scales."""
    made = dequantised(
        leaf(part.values.key),
        leaf(part.scales.key),
        part.shape,
        part.unit,
        part.code,
        has_exponents=part.has_exponents,
        overall=None if part.overall is None else (leaf(part.overall[0].key), part.overall[1]),
    )
    *outer, rows, columns = range(len(part.shape)) if part.swaps else (0, 0)
    return permute(made, (*outer, columns, rows)) if part.swaps else made


def four_bits(part: FourBits, leaf: Callable[[str], Expression]) -> Expression:
    """Packed numbers, with scales that may be packed themselves."""
    factors = leaf(part.scales.key)
    if part.nested is not None:
        factors = unnested(factors, leaf(part.nested.scales.key), part.nested.offset, part.nested.numbers)
    return unpacked(leaf(part.values.key), factors, part.shape, part.form, part.block, part.dtype)


def grouped(part: Grouped, leaf: Callable[[str], Expression]) -> Expression:
    """Integers in words, with scales and zero points of groups of inputs."""
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
