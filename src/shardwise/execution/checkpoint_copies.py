"""Compares the copies of a checkpoint that ranks open, if they do not open the same files.

[Note: One checkpoint] The first rank reads the headers for all, so a rank on another machine that has another file
under the same path would silently read wrong numbers. Every rank therefore tells which file it opens: boot of the
machine, device, inode, size and time of change. Ranks for which these are equal read the same bytes. If there are
several copies, the first rank of each compares sizes, headers and the first and last block of every tensor.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence

from shardwise.errors import DisagreementError
from shardwise.execution.reading import identities_of
from shardwise.execution.world import World
from shardwise.formats.contract import CheckpointIndex
from shardwise.report.names import shown_ranks
from shardwise.storage.contract import FilePlaces, StorageReader
from shardwise.storage.machine import process_space
from shardwise.storage.names import shown

_BLOCK_BYTES = 4096
_MOST_HEADER_BYTES = 100_000_008


def require_one_checkpoint(
    world: World, reader: StorageReader, index: CheckpointIndex
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Refuse copies that differ between ranks. Return the identities of this rank's files, and lines for a report.

    See [Note: One checkpoint]. Collective: yes.

    Raises:
        DisagreementError: naming a file, the ranks, and whether sizes, headers or values differ.
        StorageError: a file is missing, or cannot be read.
    """
    files = sorted(index.files)
    identities: dict[str, str] = {}

    def place() -> bytes:
        if isinstance(reader, FilePlaces):
            identities.update({file: reader.identity(file) for file in files})
        return _digest(place_of(reader, file).encode(errors="surrogatepass") for file in files)

    told = world.each(place)
    firsts = [told.index(place) for place in told]
    if not any(firsts):
        return identities, ()

    def look() -> list[tuple[object, ...]]:
        if not identities:
            identities.update(identities_of(reader, files, world.check))
        return [_facts(world, reader, index, file) for file in files] if world.rank in firsts else []

    def compare(facts: Sequence[Sequence[tuple[object, ...]]]) -> None:
        for number, file in enumerate(files):
            for place, word in enumerate(("size", "header", "values of tensors")):
                ranks = [
                    rank
                    for rank, first in enumerate(firsts)
                    if facts[first][number][place] != facts[0][number][place]
                ]
                if ranks:
                    raise DisagreementError(
                        f"{shown(file)} in {index.root}: its {word} on rank {shown_ranks(ranks)} is not that on "
                        "rank 0; copy the checkpoint anew to the machines of these ranks, or put it on a file "
                        "system that all machines share"
                    )

    world.all_reduce(look, compare)
    count = len(set(firsts))
    return identities, (
        f"the ranks read {count} copies of the checkpoint, whose sizes, headers and samples are equal",
    )


def place_of(reader: StorageReader, file: str) -> str:
    """Return a text that two ranks have in common only if they read the same bytes.

    For a remote storage that is its root: the identities of its files, which mean the same on every rank, are
    compared with those that the first rank saw whenever something is read.
    """
    if isinstance(reader, FilePlaces):
        return reader.place(file)
    if reader.policy.is_remote:
        return f"at {reader.root}"
    return f"in process {os.getpid()} of {process_space()}"


def _facts(world: World, reader: StorageReader, index: CheckpointIndex, file: str) -> tuple[object, ...]:
    """Return size, digest of the header, and digest of blocks of the tensors of a file."""
    nbytes, size = index.files[file], reader.size(file)
    if size != nbytes:
        return size, b"", b""
    entries = [entry for entry in index.entries.values() if entry.file == file]
    first = min((entry.start for entry in entries), default=nbytes)
    last = max((entry.stop for entry in entries), default=nbytes)
    header = [(0, min(first, _MOST_HEADER_BYTES)), (max(last, nbytes - _MOST_HEADER_BYTES), nbytes)]
    blocks = [
        part
        for entry in entries
        for part in (
            (entry.start, min(entry.start + _BLOCK_BYTES, entry.stop)),
            (max(entry.start, entry.stop - _BLOCK_BYTES), entry.stop),
        )
    ]

    def read(ranges: Iterable[tuple[int, int]]) -> Iterable[bytes]:
        for start, stop in ranges:
            world.check()
            yield reader.read(file, start, stop)

    return size, _digest(read(header)), _digest(read(blocks))


def _digest(parts: Iterable[bytes]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part + b"\n")
    return found.digest()
