"""Ranges of bytes that copies are read by, many at once, and the requests that they are joined to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.conversion import Copy
from shardwise.formats.checkpoint_index import TensorEntry
from shardwise.planning.loads.schedule import aligned, firsts_of_requests, segments_of
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import numel

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Ranges ``starts <= i < stops`` of bytes; ``staged`` is what each takes of staging memory.

    ``strided`` is 1 for those that are not wanted whole. Places count along all files, one after the other, with a
    distance between them. ``needed_bytes`` are wanted of all of them together: inside of a range there may be gaps,
    to be read over.
    """

    starts: Numbers
    stops: Numbers
    staged: Numbers
    strided: Numbers
    needed_bytes: int

    @classmethod
    def all_of(cls, parts: list[Segments]) -> Segments:
        """Those of all parts."""
        none = [np.zeros(0, np.int64)]
        return cls(
            np.concatenate([part.starts for part in parts] or none),
            np.concatenate([part.stops for part in parts] or none),
            np.concatenate([part.staged for part in parts] or none),
            np.concatenate([part.strided for part in parts] or none),
            sum(part.needed_bytes for part in parts),
        )

    def moved(self, places: Numbers) -> Segments:
        """The same at every one of ``places``."""
        count = len(places)
        if len(self.starts) == 1:  # in most cases: a copy of contiguous bytes
            starts, stops = places + self.starts, places + self.stops
            staged, strided = np.full(count, self.staged[0]), np.full(count, self.strided[0])
        else:
            starts = np.add.outer(places, self.starts).ravel()
            stops = np.add.outer(places, self.stops).ravel()
            staged, strided = np.tile(self.staged, count), np.tile(self.strided, count)
        return Segments(starts, stops, staged, strided, self.needed_bytes * len(places))


def within_leaf(copy: Copy, policy: ReadPolicy, block_bytes: int, *, needs_staging: bool) -> Segments:
    """The segments of one copy, counted from the first byte of its leaf."""
    leaf = copy.leaf
    nbytes = numel(leaf.shape) * leaf.dtype.itemsize
    entry = TensorEntry(leaf.key, leaf.dtype, leaf.shape, "", 0, nbytes)
    found = list(segments_of(copy, 0, entry, needs_staging=needs_staging, policy=policy, block_bytes=block_bytes))
    return Segments(
        np.asarray([segment.bytes.start for segment in found], np.int64),
        np.asarray([segment.bytes.stop for segment in found], np.int64),
        np.asarray([0 if segment.is_direct else aligned(segment.bytes.nbytes) for segment in found], np.int64),
        np.asarray([segment.is_strided for segment in found], np.int64),
        stored_bytes(copy),
    )


def stored_bytes(copy: Copy) -> int:
    """Of the elements that a copy takes."""
    return copy.numel * copy.leaf.dtype.itemsize


def requests(segments: Segments, policy: ReadPolicy, staging_bytes: int) -> tuple[Numbers, Numbers]:
    """(starts, stops) of the requests that :func:`~shardwise.planning.loads.schedule.schedule` makes of them."""
    order = np.argsort(segments.starts, kind="stable")
    starts = segments.starts[order]
    if (starts[1:] == starts[:-1]).any():
        order = np.lexsort((segments.stops, segments.starts))
    ordered = Segments(
        segments.starts[order],
        segments.stops[order],
        segments.staged[order],
        segments.strided[order],
        segments.needed_bytes,
    )
    return joined(ordered, np.zeros(len(order), bool), policy, staging_bytes)


def joined(
    ordered: Segments, begins: npt.NDArray[np.bool_], policy: ReadPolicy, staging_bytes: int
) -> tuple[Numbers, Numbers]:
    """(starts, stops) of the requests of lists of segments, each in order, one after the other.

    Where ``begins``, a list does. Most segments lie alone: they are requests as they are.
    """
    starts, stops, staged, strided = ordered.starts, ordered.stops, ordered.staged, ordered.strided
    if not len(starts):
        return starts, stops
    gaps = starts[1:] - stops[:-1]
    apart = begins[1:] | (gaps < 0) | (gaps > policy.max_gap_bytes) | (strided[1:] != strided[:-1])
    if apart.all():
        return starts, stops
    begins = np.concatenate(([True], apart))
    alone = begins & np.concatenate((apart, [True]))
    near = ~alone
    some = Segments(starts[near], stops[near], staged[near], strided[near], ordered.needed_bytes)
    more = _joined_near(some, begins[near], policy, staging_bytes)
    return np.concatenate((starts[alone], more[0])), np.concatenate((stops[alone], more[1]))


def _joined_near(
    ordered: Segments, begins: npt.NDArray[np.bool_], policy: ReadPolicy, staging_bytes: int
) -> tuple[Numbers, Numbers]:
    """(starts, stops) of the requests of groups of two segments or more that lie near each other.

    Where ``begins``, a group does. Most are side by side and few: these are joined all at once, others one by one.
    """
    starts, stops, staged, strided = ordered.starts, ordered.stops, ordered.staged, ordered.strided
    first = np.flatnonzero(begins)
    last = np.concatenate((first[1:], [len(starts)])) - 1
    lengths = stops[last] - starts[first]
    # Side by side: no gap is left over when all that is asked for is taken from the length.
    is_dense = np.add.reduceat(stops - starts, first) == lengths
    fits = (lengths <= policy.request_bytes) & (np.add.reduceat(staged, first) <= staging_bytes)
    whole = is_dense & fits
    joined = [(starts[first[whole]], stops[last[whole]])]
    for begin, end in zip(first[~whole].tolist(), last[~whole].tolist(), strict=True):
        part = slice(begin, end + 1)
        firsts = firsts_of_requests(
            starts[part].tolist(),
            stops[part].tolist(),
            staged[part].tolist(),
            strided[part].tolist(),
            policy,
            staging_bytes=staging_bytes,
        )
        joined.append((starts[part][firsts], stops[part][[*(number - 1 for number in firsts[1:]), -1]]))
    return np.concatenate([found[0] for found in joined]), np.concatenate([found[1] for found in joined])
