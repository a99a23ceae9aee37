"""Compares what is read of a checkpoint with what was written, while it is read, over all ranks.

A reader that sees every byte on its way works out fingerprints of what it brings, where it is still in the
processor's cache. A run of bytes that one rank has read whole it judges itself; of one that several ranks have
read in parts, the parts are added up ([Note: Sectors]). What was read in pieces that are no parts of a whole
(columns of a matrix, straight from the page cache) is read once more, by one of the ranks.
"""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from shardwise.checkpoints.fingerprints import FingerprintedRun, FingerprintsByFile, hexadecimal
from shardwise.errors import FormatError
from shardwise.execution.ranks.world import World
from shardwise.storage.reading.local import LocalReader
from shardwise.tensors.fingerprint import MODULUS, sector_fingerprint

BLOCK_BYTES = 4 << 20
"""What is read at once where nothing else says how much."""

_PIECE_BYTES = 1 << 20
"""What is read of a local file before it is looked at: it is in a cache of the processor's then. By measurement."""

_NEAR_BYTES = 1 << 14

_SHOWN = 5

RunNames: TypeAlias = Mapping[tuple[str, int], str]
"""What runs are called, by file and first byte."""


class SeenBytes(NamedTuple):
    """Bytes ``start .. stop`` of a run that have been read, and their fingerprint."""

    start: int
    stop: int
    mark: int


_NOTHING = SeenBytes(0, 0, 0)
"""Of a run that has been read in another way."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of it, on all ranks: bytes of tensors that were compared, and the runs that were not, by file."""

    nbytes: int
    passed: tuple[tuple[str, FingerprintedRun], ...]


@dataclass(frozen=True, slots=True)
class _WitnessWords:
    """What a rank tells the others, runs by number.

    Attributes:
        same: a byte for each run, 1: it has been read whole, and is what was written.
        other: those that are not.
        parts: what has been seen of those that have not been read whole.
    """

    same: bytes
    other: list[int]
    parts: dict[int, list[SeenBytes]]


@dataclass(frozen=True, slots=True)
class _WeighedRuns:
    """What all ranks have seen, runs by number: those that are other, to be read again, or seen by nobody."""

    other: set[int]
    again: list[int]
    passed: list[int]


class Witness(LocalReader):
    """A reader of the files of a checkpoint that takes down what it brings of the elements of tensors."""

    def __init__(self, root: str | os.PathLike[str], marks: FingerprintsByFile) -> None:
        super().__init__(root)
        self._marks = marks
        self._runs = [(file, run) for file, item in marks.items() for run in item.tensors]
        ends = list(accumulate(len(item.tensors) for item in marks.values()))
        self._first = dict(zip(marks, [0, *ends], strict=False))
        self._stops = {file: [run.stop for run in item.tensors] for file, item in marks.items()}
        self._seen: dict[int, list[SeenBytes]] = defaultdict(list)
        self._taking_down = threading.Lock()

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        found: list[tuple[int, SeenBytes]] = []
        most = self.policy.request_bytes if self.policy.is_remote else _PIECE_BYTES
        for piece in _pieces(buffers, most):
            super().read_vectored(file, start, piece)
            for content in piece:
                stop = start + content.nbytes
                for number in self._touched(file, start, stop):
                    run = self._runs[number][1]
                    first, last = max(start, run.start), min(stop, run.stop)
                    mark = sector_fingerprint(content[first - start : last - start], first - run.start)
                    found.append((number, SeenBytes(first - run.start, last - run.start, mark)))
                start = stop
        self._take_down(found)

    def cached(self, file: str, start: int, stop: int) -> memoryview | None:
        content = super().cached(file, start, stop)
        if content is not None:
            self._take_down([(number, _NOTHING) for number in self._touched(file, start, stop)])
        return content

    def require_around(self, files: Iterable[str]) -> None:
        """See that in these files what lies around tensors and values is what was written.

        Raises:
            FormatError: it is not.
        """
        for file in files:
            found = hashlib.sha256()
            memory = bytearray(BLOCK_BYTES)
            for gaps in _neighbours(self._marks[file].gaps(self.size(file))):
                at = gaps[0][0]
                for part in _blocks(self, file, at, gaps[-1][1], memory):
                    for start, stop in gaps:
                        found.update(part[max(0, start - at) : max(0, stop - at)])
                    at += part.nbytes
            if found.hexdigest() != self._marks[file].around:
                raise FormatError(
                    f"{self.root}/{file}: what lies around its tensors (their headers, padding) is not what was "
                    "written; the file is damaged: restore another checkpoint"
                )

    def require_sound(self, names: RunNames) -> None:
        """See that what has been read whole so far is what was written. Collective: no.

        Raises:
            FormatError: naming what is not.
        """
        self._refuse(self._told().other, names)

    def settle(self, world: World, names: RunNames, read: Callable[[], None]) -> Settled:
        """Compare all that the ranks have read, when each has read the last. Collective: yes.

        Raises:
            FormatError: naming what is not what was written, on every rank the same.
        """

        def tell() -> _WitnessWords:
            read()
            return self._told()

        weighed = world.all_reduce(tell, self._weighed)
        other = weighed.other
        if weighed.again:
            mine = weighed.again[world.rank :: world.size]
            memory = bytearray(BLOCK_BYTES)

            def reread() -> list[int]:
                return [n for n in mine if mark_of(self, *self._runs[n], memory) != self._runs[n][1].mark]

            other |= world.all_reduce(reread, lambda told: {number for found in told for number in found})
        self._refuse(sorted(other), names)
        passed = tuple(self._runs[number] for number in weighed.passed)
        nbytes = sum(run.nbytes for _, run in self._runs) - sum(run.nbytes for _, run in passed)
        return Settled(nbytes, passed)

    def _weighed(self, told: Sequence[_WitnessWords]) -> _WeighedRuns:
        """What all that was seen comes to, of every run."""
        same = [any(flags) for flags in zip(*(item.same for item in told), strict=True)]
        other = {number for item in told for number in item.other}
        again: list[int] = []
        parts = sorted({number for item in told for number in item.parts})
        for number in parts:
            run = self._runs[number][1]
            verdict = _verdict(run, [seen for item in told for seen in item.parts.get(number, ())])
            if verdict is False:
                other.add(number)
            elif verdict is None and not same[number]:
                again.append(number)
        known = set(parts)
        passed = [number for number, is_same in enumerate(same) if not is_same and number not in known]
        return _WeighedRuns(other, again, passed)

    def _touched(self, file: str, start: int, stop: int) -> range:
        """The numbers of the runs that have bytes in this range."""
        if start == stop or file not in self._first:
            return range(0)
        first, base = bisect_right(self._stops[file], start), self._first[file]
        last, end = base + first, base + len(self._stops[file])
        while last < end and self._runs[last][1].start < stop:
            last += 1
        return range(base + first, last)

    def _take_down(self, found: Sequence[tuple[int, SeenBytes]]) -> None:
        with self._taking_down:
            for number, seen in found:
                self._seen[number].append(seen)

    def _told(self) -> _WitnessWords:
        same, other, parts = bytearray(len(self._runs)), [], {}
        with self._taking_down:
            items = list(self._seen.items())
        for number, seen in items:
            verdict = _verdict(self._runs[number][1], seen)
            if verdict is None:
                parts[number] = _chained(seen)
            elif verdict:
                same[number] = 1
            else:
                other.append(number)
        return _WitnessWords(bytes(same), other, parts)

    def _refuse(self, bad: Sequence[int], names: RunNames) -> None:
        if not bad:
            return
        lines = [
            f"{names.get((file, run.start), 'a tensor')}: bytes {run.start}..{run.stop} of {file}"
            for file, run in (self._runs[number] for number in bad[:_SHOWN])
        ]
        lines += [f"... and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
        shown = "\n  ".join(lines)
        raise FormatError(
            f"{self.root}: is not what was written, and what has been restored of it must not be used:\n  {shown}\n"
            "The disk, or what copied the files, has damaged them; restore another checkpoint."
        )


def mark_of(reader: LocalReader, file: str, run: FingerprintedRun, memory: bytearray) -> str:
    """The fingerprint of a run, read into this memory block by block."""
    total, at = 0, 0
    for part in _blocks(reader, file, run.start, run.stop, memory):
        total += sector_fingerprint(part, at)
        at += part.nbytes
    return hexadecimal(total % MODULUS)


def _pieces(buffers: Sequence[memoryview], most: int) -> Iterator[list[memoryview]]:
    """The same memory, in lists of so many bytes at most."""
    piece: list[memoryview] = []
    room = most
    for buffer in buffers:
        content = buffer.cast("B")
        while content.nbytes:
            part, content = content[:room], content[room:]
            piece.append(part)
            room -= part.nbytes
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def _neighbours(gaps: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Ranges so near to each other that they are sooner read together than one by one; not more than a block."""
    group: list[tuple[int, int]] = []
    for start, stop in gaps:
        if group and (start - group[-1][1] > _NEAR_BYTES or stop - group[0][0] > BLOCK_BYTES):
            yield group
            group = []
        group.append((start, stop))
    if group:
        yield group


def _blocks(reader: LocalReader, file: str, start: int, stop: int, memory: bytearray) -> Iterator[memoryview]:
    """The bytes of a range, block by block, each in this memory until the next. No witness sees them."""
    for at in range(start, stop, len(memory)):
        part = memoryview(memory)[: min(len(memory), stop - at)]
        LocalReader.read_vectored(reader, file, at, (part,))
        yield part


def _chained(seen: Iterable[SeenBytes]) -> list[SeenBytes]:
    """Neighbours joined. Of parts that overlap, what begins first counts, the longest of them."""
    found: list[SeenBytes] = []
    for item in sorted(
        {item for item in seen if item.start < item.stop}, key=lambda item: (item.start, -item.stop)
    ):
        if found and item.start == found[-1].stop:
            found[-1] = SeenBytes(found[-1].start, item.stop, (found[-1].mark + item.mark) % MODULUS)
        elif not found or item.start > found[-1].stop:
            found.append(item)
    return found


def _verdict(run: FingerprintedRun, seen: Sequence[SeenBytes]) -> bool | None:
    """Whether a run is what was written; None where what was seen of it is not all of it."""
    if len(seen) == 1 and (seen[0].start, seen[0].stop) == (0, run.nbytes):
        return hexadecimal(seen[0].mark) == run.mark
    if len({(item.start, item.stop) for item in seen}) != len(set(seen)):
        return False  # the same bytes were read twice, and were not the same
    chained = _chained(seen)
    if len(chained) != 1 or (chained[0].start, chained[0].stop) != (0, run.nbytes):
        return None
    return hexadecimal(chained[0].mark) == run.mark
