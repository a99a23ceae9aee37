"""The tensors of a checkpoint as expressions."""

from __future__ import annotations

from typing import assert_never

from shardwise.conversion import Expression, Stored, concat, dequantised, permute, view
from shardwise.conversion.packed import unnested, unpacked
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.composed import ComposedPart, FourBits, Joined, Scaled, View, Whole


def stored_tensors(index: CheckpointIndex) -> dict[str, Expression]:
    """The checkpoint's tensors by key, in file order: a leaf for each, or what composes it of leaves."""
    return {
        item.key: _expression(index, index.composed[item.key].part)
        if item.key in index.composed
        else Stored(item.key, item.shape, item.dtype)
        for item in index.tensors()
    }


def _expression(index: CheckpointIndex, part: ComposedPart) -> Expression:
    match part:
        case Whole(key):
            return _leaf(index, key)
        case View(key, strided):
            return view(_leaf(index, key), strided)
        case Joined(parts, dim):
            return concat([_expression(index, inner) for inner in parts], dim)
        case Scaled():
            return _scaled(index, part)
        case FourBits(values, scales, shape, block, form, dtype, nested):
            factors: Expression = _leaf(index, scales.key)
            if nested is not None:
                factors = unnested(factors, _leaf(index, nested.scales.key), nested.offset, nested.numbers)
            return unpacked(_leaf(index, values.key), factors, shape, form, block, dtype)
        case _:
            assert_never(part)


def _scaled(index: CheckpointIndex, part: Scaled) -> Expression:
    made = dequantised(
        _leaf(index, part.values.key),
        _leaf(index, part.scales.key),
        part.shape,
        part.unit,
        part.code,
        has_exponents=part.has_exponents,
        overall=None if part.overall is None else (_leaf(index, part.overall[0].key), part.overall[1]),
    )
    *outer, rows, columns = range(len(part.shape)) if part.swaps else (0, 0)
    return permute(made, (*outer, columns, rows)) if part.swaps else made


def _leaf(index: CheckpointIndex, key: str) -> Stored:
    entry = index.entries[key]
    return Stored(key, entry.shape, entry.dtype)
