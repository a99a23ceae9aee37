"""Ranges of bytes that copies are read by, many at once, and the requests that they are joined to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.conversion import Copy
from shardwise.formats.entries import TensorEntry
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
    def all_of(cls, parts: Sequence[Segments]) -> Segments:
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
        starts = np.add.outer(places, self.starts).ravel()
        stops = np.add.outer(places, self.stops).ravel()
        staged, strided = np.tile(self.staged, len(places)), np.tile(self.strided, len(places))
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


@dataclass(frozen=True, slots=True)
class ManyRequests:
    """Ranges of bytes that several owners ask for, each with the number of its owner."""

    starts: Numbers
    stops: Numbers
    owners: Numbers

    @classmethod
    def of(cls, ranges: Sequence[tuple[Numbers, Numbers]]) -> ManyRequests:
        """Those of each owner: (starts, stops)."""
        starts = [found for found, _ in ranges]
        owners = np.repeat(np.arange(len(ranges)), [len(found) for found in starts])
        return cls(np.concatenate(starts), np.concatenate([found for _, found in ranges]), owners)

    @classmethod
    def all_of(cls, parts: Sequence[ManyRequests]) -> ManyRequests:
        """Those of all parts, of the same owners."""
        return cls(
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.stops for part in parts]),
            np.concatenate([part.owners for part in parts]),
        )

    def told(self, count: int) -> tuple[list[int], list[int]]:
        """(bytes, how many requests) of each of ``count`` owners."""
        nbytes = np.zeros(count, np.int64)
        np.add.at(nbytes, self.owners, self.stops - self.starts)
        return nbytes.tolist(), np.bincount(self.owners, minlength=count).tolist()


def requests_of_each(lists: Sequence[Segments], end: int, policy: ReadPolicy, staging_bytes: int) -> ManyRequests:
    """The requests that :func:`~shardwise.planning.loads.schedule.schedule` makes of each list by itself.

    ``end`` is behind all places, by more than a gap that is read over: the lists are put one behind the other.
    """
    owners = np.repeat(np.arange(len(lists)), [len(own.starts) for own in lists])
    together = Segments.all_of(lists)
    starts, stops = together.starts + owners * end, together.stops + owners * end
    order = np.argsort(starts, kind="stable")
    ordered = starts[order]
    if (ordered[1:] == ordered[:-1]).any():
        order = np.lexsort((stops, starts))
    segments = Segments(starts[order], stops[order], together.staged[order], together.strided[order], 0)
    starts, stops = joined(segments, np.zeros(len(order), bool), policy, staging_bytes)
    owners = starts // end if len(starts) else starts
    return ManyRequests(starts - owners * end, stops - owners * end, owners)


def joined(
    ordered: Segments, begins: npt.NDArray[np.bool_], policy: ReadPolicy, staging_bytes: int
) -> tuple[Numbers, Numbers]:
    """(starts, stops) of the requests of lists of segments, each in order, one after the other.

    Where ``begins``, a list does. Most segments lie alone, or side by side with few others: these are joined all at
    once, and the others one by one.
    """
    starts, stops, staged, strided = ordered.starts, ordered.stops, ordered.staged, ordered.strided
    if not len(starts):
        return starts, stops
    gaps = starts[1:] - stops[:-1]
    apart = begins[1:] | (gaps < 0) | (gaps > policy.max_gap_bytes) | (strided[1:] != strided[:-1])
    first = np.flatnonzero(np.concatenate(([True], apart)))
    last = np.concatenate((first[1:], [len(starts)])) - 1
    lengths = stops[last] - starts[first]
    # Side by side: no gap is left over when all that is asked for is taken from the length.
    is_dense = np.add.reduceat(stops - starts, first) == lengths
    fits = (lengths <= policy.request_bytes) & (np.add.reduceat(staged, first) <= staging_bytes)
    whole = (first == last) | (is_dense & fits)
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
