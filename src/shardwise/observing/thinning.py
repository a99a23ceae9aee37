"""Fewer points of which none that stood out is lost: the least and the most of each part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


def extremes(values: Floats, parts: int) -> Places:
    """The places of the first value, the last one, and of the least and the most of each of as many equal parts.

    In order, at most ``2 * parts + 2``; all places where there are no more than that. NaN stands out nowhere.
    """
    count = len(values)
    if count <= 2 * parts + 2:
        return np.arange(count)
    each = -(-count // parts)
    padded = np.full(each * parts, np.nan)
    padded[:count] = values
    table = padded.reshape(parts, each)
    has_any = ~np.isnan(table).all(axis=1)
    starts, table = np.flatnonzero(has_any) * each, table[has_any]
    least = starts + np.nanargmin(table, axis=1)
    most = starts + np.nanargmax(table, axis=1)
    return np.unique(np.concatenate([[0], least, most, [count - 1]]))


def standing_out(columns: Sequence[Floats], most: int) -> Places:
    """The places of :func:`extremes` of any of these columns, in order, at most ``most`` of them."""
    parts = max(most // (2 * len(columns)) - 1, 1)
    return np.unique(np.concatenate([extremes(column, parts) for column in columns]))


def merged(start: Floats, stop: Floats, gap: float) -> tuple[Floats, Floats]:
    """Spans in order, of which those that are not further apart than ``gap`` are one."""
    if not len(start):
        return start, stop
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    is_first = np.concatenate([[True], start[1:] - reach[:-1] > gap])
    is_last = np.concatenate([is_first[1:], [True]])
    return start[is_first], reach[is_last]
