"""Chooses which bytes are compared between copies of a checkpoint on several machines."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, assert_never

from shardwise.errors import ConfigError
from shardwise.formats.checkpoint_index import CheckpointIndex, TensorEntry

BLOCK_BYTES = 4096
_PIECE_BYTES = 16 << 20
_MOST_SAMPLED_BYTES = 256 << 20
"""Of all tensors together, but for the first and the last block of each."""
_MOST_FRAME_BYTES = 100_000_008
"""The longest header there is; beyond that, what is around the tensors of a file is not a header."""


@dataclass(frozen=True, slots=True)
class SampledBlocks:
    """Sizes, headers, and some blocks of every tensor: the first, the last, and some between, always the same ones.

    Another model, another training or another conversion differs nearly everywhere and is found; a few changed
    numbers in a large tensor may not be.
    """

    blocks_per_tensor: int = 8

    def __post_init__(self) -> None:
        if self.blocks_per_tensor < 2:
            raise ConfigError(f"blocks_per_tensor={self.blocks_per_tensor}: the first and the last are two")


@dataclass(frozen=True, slots=True)
class WholeFiles:
    """Every byte of every file. Each copy is read once more, shared out among the ranks that have it."""


CompareCopies: TypeAlias = SampledBlocks | WholeFiles


@dataclass(frozen=True, slots=True)
class ComparedBytes:
    """Bytes of a file that are compared as one; ``key`` is the tensor's, "" for what is around the tensors."""

    file: str
    key: str
    ranges: tuple[tuple[int, int], ...]


def portions(index: CheckpointIndex, compare: CompareCopies) -> list[ComparedBytes]:
    """What is compared, in the same order for every copy."""
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in index.entries.values():
        by_file[entry.file].append(entry)
    match compare:
        case SampledBlocks(blocks_per_tensor):
            affordable = _MOST_SAMPLED_BYTES // BLOCK_BYTES // max(1, len(index.entries))
            count = max(2, min(blocks_per_tensor, affordable))
            return [
                portion
                for file, nbytes in sorted(index.files.items())
                for portion in _sampled(file, nbytes, by_file[file], count)
            ]
        case WholeFiles():
            return [
                portion
                for file, nbytes in sorted(index.files.items())
                for portion in _whole(file, nbytes, by_file[file])
            ]
        case _:
            assert_never(compare)


def _sampled(file: str, nbytes: int, entries: Sequence[TensorEntry], count: int) -> Iterator[ComparedBytes]:
    first = min((entry.start for entry in entries), default=nbytes)
    last = max((entry.stop for entry in entries), default=nbytes)
    around = ((0, min(first, _MOST_FRAME_BYTES)), (max(last, nbytes - _MOST_FRAME_BYTES), nbytes))
    yield ComparedBytes(file, "", tuple((start, stop) for start, stop in around if start < stop))
    for entry in entries:
        if blocks := _blocks(entry, count):
            yield ComparedBytes(file, entry.key, blocks)


def _blocks(entry: TensorEntry, count: int) -> tuple[tuple[int, int], ...]:
    """The first block, the last, and one somewhere in each of as many equal parts between as there may be."""
    nbytes = entry.stop - entry.start
    if nbytes <= count * BLOCK_BYTES:
        return ((entry.start, entry.stop),) if nbytes else ()
    drawn = hashlib.blake2b(entry.key.encode("utf-8", "surrogatepass"), digest_size=64).digest()
    parts = count - 2
    edges = [BLOCK_BYTES + part * (nbytes - 2 * BLOCK_BYTES) // max(1, parts) for part in range(parts + 1)]
    starts = [0]
    for number, (low, high) in enumerate(pairwise(edges)):
        room = max(1, high - low - BLOCK_BYTES + 1)
        at = 8 * (number % 8)
        starts.append(low + int.from_bytes(drawn[at : at + 8]) % room)
    starts.append(nbytes - BLOCK_BYTES)
    return tuple((entry.start + start, entry.start + start + BLOCK_BYTES) for start in starts)


def _whole(file: str, nbytes: int, entries: Sequence[TensorEntry]) -> Iterator[ComparedBytes]:
    starting = {entry.start: entry.key for entry in reversed(entries) if entry.start < entry.stop}
    edges = sorted({0, nbytes, *starting, *(entry.stop for entry in entries)})
    key, end = "", 0
    ends = {entry.key: entry.stop for entry in entries}
    for start, stop in pairwise(edges):
        if start in starting:
            key = starting[start]
            end = ends[key]
        for begin in range(start, stop, _PIECE_BYTES):
            yield ComparedBytes(file, key if start < end else "", ((begin, min(stop, begin + _PIECE_BYTES)),))
