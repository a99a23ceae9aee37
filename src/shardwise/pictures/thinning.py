"""Fewer points of which none that stood out is lost: the least and the most of each part."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.pictures.chart import Floats


def extremes(values: Floats, parts: int) -> npt.NDArray[np.intp]:
    """The places of the first value, the last one, and of the least and the most of each of as many equal parts.

    In order, at most ``2 * parts + 2``; all places where there are no more than that.
    """
    count = len(values)
    if count <= 2 * parts + 2:
        return np.arange(count)
    each = -(-count // parts)
    padded = np.full(each * parts, np.nan)
    padded[:count] = values
    table = padded.reshape(parts, each)
    table = table[~np.isnan(table).all(axis=1)]
    starts = np.arange(len(table)) * each
    least = starts + np.nanargmin(table, axis=1)
    most = starts + np.nanargmax(table, axis=1)
    return np.unique(np.concatenate([[0], least, most, [count - 1]]))


def merged(start: Floats, stop: Floats, gap: float) -> tuple[Floats, Floats]:
    """Spans in order, of which those that are not further apart than ``gap`` are one."""
    if not len(start):
        return start, stop
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    is_first = np.concatenate([[True], start[1:] - reach[:-1] > gap])
    is_last = np.concatenate([is_first[1:], [True]])
    return start[is_first], reach[is_last]
