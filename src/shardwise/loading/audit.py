"""Checks of a load: each element is written once, buffers and ties are equal, all machines have one checkpoint.

[Note: One checkpoint] The first rank reads the headers for all, so a rank on another machine that has another file
under the same path would silently read wrong numbers. Every rank therefore reports the identity of each file it
opens: the machine's boot ID, device, inode, size and modification time. Ranks with equal identities read the same
bytes. If there are several copies, the first rank of each copy reads its sizes, its headers, and the first and last
block of every tensor, and these are compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from shardwise.core.errors import KeyMismatchError, RankMismatchError
from shardwise.core.expression import Expression
from shardwise.core.formatting import collapse, format_ranks
from shardwise.core.layout import TensorKind
from shardwise.core.machine import namespace_id
from shardwise.core.tensors import Box, DType, numel
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.storage import FilePlaces, StorageReader
from shardwise.files.urls import shown
from shardwise.fsdp.named_tensors import TensorRef, raw_bytes
from shardwise.fsdp.torch_private import to_torch
from shardwise.loading.plan import LoadPlan, Tie
from shardwise.ranks.world import World, repr_digest
from shardwise.transfer.checksums import checksums
from shardwise.transfer.read import ReadExecutor, read_identities


def audit(plan: LoadPlan, written: Mapping[str, int], on_meta: Sequence[str]) -> None:
    """Check that every element of this rank's parameters and persistent buffers was written exactly once.

    ``written`` counts elements by FQN. ``on_meta`` has the names of tensors without memory. A plan's copies never
    write an element twice (see [Note: Regions] in ``core/regions.py``), so equal counts mean full
    coverage.

    Raises:
        KeyMismatchError: naming the tensors that were not written in full, or that are still on meta.
    """
    wrong: list[str] = []
    for tensor in plan.layout.saved():
        # A tied name shares the storage of the name that is counted.
        if isinstance(plan.fills[tensor.fqn], Tie):
            continue
        count = written.get(tensor.fqn, 0)
        if count != tensor.local_numel:
            wrong.append(f"{tensor.fqn}: {count} of {tensor.local_numel} elements written")
    wrong += [f"{name}: still on meta" for name in on_meta]
    if wrong:
        shown = "\n  ".join(pattern for pattern, _ in collapse(wrong)[:20])
        raise KeyMismatchError(
            f"the model is incomplete after loading:\n  {shown}\n"
            "Register a tensor that is a plain attribute as a buffer, and pass buffers=... to compute it"
        )


def require_equal_buffers(world: World, refs: Sequence[TensorRef]) -> None:
    """Raise on every rank when a non-persistent buffer differs between ranks. Collective: yes.

    Raises:
        RankMismatchError: naming the buffers.
    """
    if world.size == 1:
        return
    buffers = {item.fqn: item.local for item in refs if item.kind is TensorKind.BUFFER}
    values = checksums(list(buffers.values()))
    sums: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {}
    for (name, tensor), value in zip(buffers.items(), values, strict=True):
        sums[name] = tuple(tensor.shape), tensor.dtype, value
    # One digest of each rank first. Names and checksums are exchanged only if these differ.
    # Sorted, because modules may register buffers in the order of a set.
    if world.all_reduce_object(repr_digest(sorted(sums.items())), world.find_mismatched) is None:
        return
    with world.broadcast("compare buffers") as exchange:
        if world.rank == 0:
            exchange.local = sums
    first = exchange.result
    differing = [name for name in {**first, **sums} if first.get(name) != sums.get(name)]
    # Each rank knows only its own differences from the first. All of them raise with the names of all.
    names = sorted(set().union(*world.all_gather_object(differing)))
    if names:
        raise RankMismatchError(
            f"non-persistent buffers differ between ranks: {', '.join(names[:20])}. Pass buffers=... with a "
            "callable that computes them"
        )


_BLOCK_NUMEL = 1 << 20
"""Elements of tied tensors that are compared at once."""


def find_unequal_tied(plan: LoadPlan, executor: ReadExecutor, rank: int, size: int) -> list[str]:
    """Return names of tensors whose other expressions differ from the first in this rank's part of the rows."""
    reads = plan.reads()
    unequal: list[str] = []
    for name, others in plan.duplicates.items():
        dtype = plan.layout.by_name[name].dtype
        first = reads[name].expression
        if not all(are_equal(first, other, dtype, executor, rank, size) for other in others):
            unequal.append(name)
    return unequal


def are_equal(
    first: Expression, second: Expression, dtype: DType, executor: ReadExecutor, rank: int, size: int
) -> bool:
    """Return whether two expressions have bitwise the same values as ``dtype``, in this rank's part of the rows.

    Blocks of rows are distributed over the ``size`` ranks, which together read each expression once.
    Memory: two blocks, each of about a million elements, or of one row if it is larger.
    """
    if first.shape != second.shape:
        return False
    rows = first.shape[0] if first.shape else 1
    # An embedding of shape (151936, 4096) has blocks of 256 rows. With 4 ranks, rank 1 compares the rows from 256,
    # 1280, 2304, ... on.
    step = max(1, _BLOCK_NUMEL // max(1, numel(first.shape[1:])))
    for start in range(rank * step, rows, size * step):
        # A tensor without dimensions is one block, which the first rank compares.
        box = Box((), ())
        if first.shape:
            box = Box((start, *[0] * (len(first.shape) - 1)), (min(step, rows - start), *first.shape[1:]))
        one, other = executor.read_values([(item, box, to_torch(dtype)) for item in (first, second)])
        if not torch.equal(raw_bytes(one), raw_bytes(other)):
            return False
    return True


_BLOCK_BYTES = 4096
"""Bytes at both ends of a tensor that are compared between copies of a checkpoint."""

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
            exchange.local = [_file_identity(world, reader, index, file) for file in files]
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


def _file_identity(world: World, reader: StorageReader, index: CheckpointIndex, file: str) -> tuple[object, ...]:
    """Return size, digest of the header, and digest of blocks of the tensors of a file."""
    nbytes, size = index.files[file], reader.size(file)
    # With another size, the places of the index may be beyond its end.
    if size != nbytes:
        return size, b"", b""
    # The header is all that precedes the first tensor, or follows the last one (archives have it at the end).
    entries = [entry for entry in index.entries.values() if entry.file == file]
    first = min((entry.start for entry in entries), default=nbytes)
    last = max((entry.stop for entry in entries), default=nbytes)
    header = [(0, min(first, _MAX_HEADER_BYTES)), (max(last, nbytes - _MAX_HEADER_BYTES), nbytes)]
    blocks: list[tuple[int, int]] = []
    for entry in entries:
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
