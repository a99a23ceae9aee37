"""An expression as many: one for each index of its first dimension."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.conversion.expression import Concat, Expression, Permute, Stack, concat, permute, stack


def rows_apart(expression: Expression) -> tuple[Expression, ...] | None:
    """Expressions of each index of the first dimension, without it, where they share no stored tensor.

    So stacked experts are those that they are stacked of. None where a stored tensor goes on from one index to the
    next, or may do so.
    """
    match expression:
        case Stack(sources, 0):
            return sources
        case Stack(sources, dim):
            rows = _of_each(sources)
            return None if rows is None else tuple(stack(row, dim - 1) for row in rows)
        case Concat(sources, dim) if dim > 0:
            rows = _of_each(sources)
            return None if rows is None else tuple(concat(row, dim - 1) for row in rows)
        case Permute(source, _, (0, *others)):
            found = rows_apart(source)
            return None if found is None else tuple(permute(row, [dim - 1 for dim in others]) for row in found)
    return None


def _of_each(sources: Iterable[Expression]) -> list[tuple[Expression, ...]] | None:
    """By index, what it is of each source."""
    rows: list[tuple[Expression, ...]] = []
    for source in sources:
        found = rows_apart(source)
        if found is None:
            return None
        rows.append(found)
    return list(zip(*rows, strict=True))
