"""Requires that all ranks read the same checkpoint.

[Note: One checkpoint] The first rank reads the headers for all, so a rank on another machine that has another file
under the same path would silently read wrong numbers. Every rank therefore reports the identity of each file it
opens: the machine's boot ID, device, inode, size and modification time. Ranks with equal identities read the same
bytes. If there are several copies, the first rank of each copy reads its sizes, its headers, and the first and last
block of every tensor, and these are compared. On a network file system each machine counts as a copy, though most
share one folder, and each block is a request. There the blocks are those of a few tensors of each file. Sizes and
headers, which have the names, dtypes, shapes and places of all tensors, are compared as elsewhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from shardwise.core.errors import RankMismatchError
from shardwise.core.formatting import format_ranks
from shardwise.core.machine import namespace_id
from shardwise.files.checkpoint_index import CheckpointIndex, TensorEntry, each
from shardwise.files.storage import FilePlaces, StorageReader
from shardwise.files.urls import shown
from shardwise.ranks.world import World
from shardwise.transfer.read import read_identities

_BLOCK_BYTES = 4096
"""Bytes at both ends of a tensor that are compared between copies of a checkpoint."""

_SAMPLED = 16
"""Tensors of each file that are compared if every read crosses a network."""

_MAX_HEADER_BYTES = 100_000_008
"""The largest header of a safetensors file, including the eight bytes of its length."""


def require_one_checkpoint(
    world: World, reader: StorageReader, index: CheckpointIndex
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Refuse copies that differ between ranks. Return the identities of this rank's files, and lines for a report.

    The identities are empty if they were not needed. See [Note: One checkpoint]. Collective: yes.

    Raises:
        RankMismatchError: naming a file, the ranks, and whether sizes, headers or values differ.
        StorageError: a file is missing, or cannot be read.
    """
    files = sorted(index.files)
    identities: dict[str, str] = {}

    with world.all_gather("identify files") as exchange:
        if isinstance(reader, FilePlaces):
            identities.update({file: reader.identity(file) for file in files})
        exchange.local = _digest(content_identity(reader, file).encode(errors="surrogatepass") for file in files)
    copies = exchange.result
    # By rank, the first rank that reads the same copy: (0, 0, 2, 2) for two machines of two ranks.
    firsts = [copies.index(copy) for copy in copies]
    # Everyone reads the files of rank 0, so there is nothing to compare.
    if not any(firsts):
        return identities, ()

    with world.all_reduce("sample tensors", partial(_compare_copies, world, index.root, files, firsts)) as exchange:
        # Before the samples are read, so that a later read detects a file that was replaced in between.
        if not identities:
            identities.update(read_identities(reader, files, world.check))
        # One rank reads for each copy. The others report an empty list.
        exchange.local = []
        if world.rank in firsts:
            entries: dict[str, list[TensorEntry]] = {file: [] for file in files}
            for entry in index.entries.values():
                entries[entry.file].append(entry)
            identify = partial(_file_identity, world, reader)
            exchange.local = each(reader, lambda file: identify(file, index.files[file], entries[file]), files)
    count = len(set(firsts))
    return identities, (
        f"the ranks read {count} copies of the checkpoint, whose sizes, headers and samples are equal",
    )


def _compare_copies(
    world: World,
    root: str,
    files: Sequence[str],
    firsts: Sequence[int],
    facts: Sequence[Sequence[tuple[object, ...]]],
) -> None:
    """Raise if copies differ. ``firsts`` has for each rank the first rank that reads the same copy."""
    for number, file in enumerate(files):
        for column, what in enumerate(("size", "header", "values of tensors")):
            expected = facts[0][number][column]
            ranks = [rank for rank, first in enumerate(firsts) if facts[first][number][column] != expected]
            if ranks:
                raise RankMismatchError(
                    f"{shown(file)} in {root}: its {what} on rank {format_ranks(ranks, world.global_ranks)} is not "
                    f"that on rank {world.global_ranks[0]}. Copy the checkpoint to the machines of these ranks "
                    "again, or put it on a file system that all machines share"
                )


def content_identity(reader: StorageReader, file: str) -> str:
    """Return a string that is equal on two ranks only if they read the same bytes.

    For remote storage, this is the root: the identities of its files are the same on every rank, and each read
    compares them with those that the first rank saw.
    """
    if isinstance(reader, FilePlaces):
        return reader.place(file)
    if reader.policy.is_remote:
        return f"at {reader.root}"
    return f"in process {os.getpid()} of {namespace_id('pid')}"


def _file_identity(
    world: World, reader: StorageReader, file: str, nbytes: int, entries: Sequence[TensorEntry]
) -> tuple[object, ...]:
    """Return size, digest of the header, and digest of blocks of the tensors of a file."""
    size = reader.size(file)
    # With another size, the places of the index may be beyond its end.
    if size != nbytes:
        return size, b"", b""
    # The header is all that precedes the first tensor, or follows the last one (archives have it at the end).
    first = min((entry.start for entry in entries), default=nbytes)
    last = max((entry.stop for entry in entries), default=nbytes)
    header = [(0, min(first, _MAX_HEADER_BYTES)), (max(last, nbytes - _MAX_HEADER_BYTES), nbytes)]
    blocks: list[tuple[int, int]] = []
    every = max(1, -(-len(entries) // _SAMPLED)) if reader.policy.is_remote else 1
    for entry in entries[::every]:
        blocks.append((entry.start, min(entry.start + _BLOCK_BYTES, entry.stop)))
        blocks.append((max(entry.start, entry.stop - _BLOCK_BYTES), entry.stop))
    return size, _digest(_contents(world, reader, file, header)), _digest(_contents(world, reader, file, blocks))


def _contents(world: World, reader: StorageReader, file: str, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    for start, stop in ranges:
        world.check()
        yield reader.read(file, start, stop)


def _digest(contents: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for content in contents:
        digest.update(content + b"\n")
    return digest.digest()
