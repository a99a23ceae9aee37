"""Records the fingerprints of a checkpoint's files, in a small file beside them.

[Note: Every byte is told of] A data file is runs of bytes: elements of tensors, of which the file of fingerprints
has one each, added up in parts ([Note: Sectors]); values that are no tensors, each with a digest; and what
lies around these (archives' directories, padding), with one digest for all of it. The digest of the file itself is
among the facts, as that of ``.metadata`` is, and the facts have one of themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

from shardwise.errors import FormatError
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.chunk_plan import ArchivedChunk
from shardwise.tensors.fingerprint import MODULUS, sector_fingerprint

MAX_FINGERPRINTS_BYTES: Final = 256 << 20
"""What is longer is none: of some five million chunks."""

_FORMAT: Final = "shardwise checkpoint fingerprints 1"
_WORD_BYTES = 8
_MESSAGE_BYTES = 1 << 19


class FingerprintedRun(NamedTuple):
    """Bytes ``start .. stop`` of a file, and the fingerprint (16 hexadecimal digits) or digest (64) of them."""

    start: int
    stop: int
    mark: str

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FileFingerprints:
    """What was written into one data file.

    Attributes:
        tensors: runs of elements, with fingerprints, in order; empty ones are left out.
        values: what is no tensor, with digests, in order.
        around: a digest of all other bytes, in order.
    """

    tensors: tuple[FingerprintedRun, ...]
    values: tuple[FingerprintedRun, ...]
    around: str

    def gaps(self, nbytes: int) -> list[tuple[int, int]]:
        """Where the bytes lie that are in no run, of a file of so many."""
        runs = sorted([*self.tensors, *self.values], key=lambda run: run.start)
        edges = [(0, 0), *((run.start, run.stop) for run in runs), (nbytes, nbytes)]
        return [(stop, start) for (_, stop), (start, _) in pairwise(edges) if stop < start]


FingerprintsByFile: TypeAlias = Mapping[str, FileFingerprints]


def hexadecimal(mark: int) -> str:
    """A fingerprint as it is written down."""
    return f"{mark:016x}"


def digest(content: bytes | memoryview) -> str:
    """Of a value."""
    return hashlib.sha256(content).hexdigest()


@dataclass
class Fingerprinter:
    """Takes down what a rank writes, in the order of the file. Blocks of tensors may be added by another thread."""

    sums: list[int] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    _around: Any = field(default_factory=hashlib.sha256)

    def begin(self) -> int:
        """The number of the next chunk."""
        self.sums.append(0)
        return len(self.sums) - 1

    def add(self, chunk: int, start: int, block: memoryview) -> None:
        """A block of a chunk, from its byte ``start`` on."""
        self.sums[chunk] = (self.sums[chunk] + sector_fingerprint(block, start)) % MODULUS

    def add_around(self, content: bytes) -> None:
        self._around.update(content)

    def add_value(self, content: bytes) -> None:
        self.values.append(digest(content))

    def told(self) -> Fingerprinted:
        """All of it, 8 bytes for a chunk."""
        words = b"".join(value.to_bytes(_WORD_BYTES) for value in self.sums)
        return Fingerprinted(words, tuple(self.values), self._around.hexdigest())


@dataclass(frozen=True, slots=True)
class Fingerprinted:
    """What a rank tells of the file it wrote: fingerprints of its chunks, digests of its values and of the rest."""

    words: bytes
    values: tuple[str, ...]
    around: str

    def marks(self, chunks: Sequence[ArchivedChunk], end: int, values: Sequence[int]) -> FileFingerprints:
        """``end`` is where the values begin, which have these bytes each."""
        words = (self.words[at : at + _WORD_BYTES].hex() for at in range(0, len(self.words), _WORD_BYTES))
        tensors = tuple(
            FingerprintedRun(chunk.data_start, chunk.data_stop, word)
            for chunk, word in zip(chunks, words, strict=True)
            if chunk.box.numel
        )
        runs: list[FingerprintedRun] = []
        for nbytes, mark in zip(values, self.values, strict=True):
            runs.append(FingerprintedRun(end, end + nbytes, mark))
            end += nbytes
        return FileFingerprints(tensors, tuple(runs), self.around)


def told_to_first(world: World, own: Fingerprinted) -> list[Fingerprinted]:
    """What each rank tells, by rank, on the first rank; on the others nothing. Collective: yes.

    In messages small enough for a store: ranks that meet beside a training take part in no collective.
    """
    others: list[Fingerprinted] = []

    def longest(told: Sequence[tuple[int, Fingerprinted]]) -> int:
        others.extend(other for _, other in told)
        return max(nbytes for nbytes, _ in told)

    end = world.all_reduce(lambda: (len(own.words), replace(own, words=b"")), longest)
    words = [bytearray() for _ in others]
    for start in range(0, end, _MESSAGE_BYTES):
        parts = world.to_first(partial(_part, own.words, start))
        for found, part in zip(words, parts, strict=True):
            found += part
    return [replace(told, words=bytes(found)) for told, found in zip(others, words, strict=True)]


def _part(words: bytes, start: int) -> bytes:
    return words[start : start + _MESSAGE_BYTES]


def to_bytes(files: FingerprintsByFile) -> bytes:
    """The content of the file."""

    def rows(runs: Sequence[FingerprintedRun]) -> list[list[int | str]]:
        return [[run.start, run.stop, run.mark] for run in runs]

    content = {
        name: {"tensors": rows(marks.tensors), "values": rows(marks.values), "around": marks.around}
        for name, marks in files.items()
    }
    return json.dumps({"format": _FORMAT, "files": content}, separators=(",", ":")).encode()


def from_bytes(content: bytes, sizes: Mapping[str, int], what: str) -> FingerprintsByFile:
    """What was written into the files of these sizes. ``what`` names the file.

    Raises:
        FormatError: it is no such file, or tells of other files, or of bytes that they do not have.
    """
    try:
        found = json.loads(content)
        if found["format"] != _FORMAT or found["files"].keys() != sizes.keys():
            raise ValueError
        return {
            name: FileFingerprints(_runs(item["tensors"], 16), _runs(item["values"], 64), _mark(item["around"], 64))
            for name, item in found["files"].items()
            if _is_in_order(item, sizes[name])
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{what}: does not tell of the files of this checkpoint; it is damaged, or another's"
        ) from error


def _is_in_order(item: Any, nbytes: int) -> bool:
    spans = sorted((start, stop) for start, stop, _ in [*item["tensors"], *item["values"]])
    if not all(type(edge) is int for span in spans for edge in span):
        raise ValueError
    edges = [0, *(edge for span in spans for edge in span), nbytes]
    if any(one > other for one, other in pairwise(edges)) or any(start == stop for start, stop in spans):
        raise ValueError
    return True


def _runs(rows: Any, digits: int) -> tuple[FingerprintedRun, ...]:
    found = tuple(FingerprintedRun(start, stop, _mark(mark, digits)) for start, stop, mark in rows)
    return tuple(sorted(found, key=lambda run: run.start))


def _mark(mark: Any, digits: int) -> str:
    if type(mark) is not str or len(mark) != digits or set(mark) - set("0123456789abcdef"):
        raise ValueError
    return mark
