"""One process writes a save, file after file, block after block, and lets it count in the end."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shardwise.execution.committing import begin_save, commit_save, undo_save
from shardwise.execution.landing import memory_of
from shardwise.formats import NewFile
from shardwise.planning.save_plan import SavePlan
from shardwise.storage import StorageWriter
from shardwise.tensors import Box, row_blocks
from shardwise.tensors.fingerprint import MODULUS, fingerprint

Part = tuple[str, Box]
"""A box of a tensor of the save, by its key."""

BLOCK_BYTES = 8 << 20
"""Of what is written at once. A few times this much is in memory."""

_KEPT_BYTES = 256 << 20
"""Written between two times that free memory is given back: memory that is given back has to be had anew."""


@dataclass
class Streamed:
    """What has been written: fingerprints of all tensors, by key ([Note: Fingerprints])."""

    fingerprints: dict[str, int]
    nbytes: int = 0

    def add(self, key: str, data: memoryview, start: int) -> None:
        self.fingerprints[key] = (self.fingerprints[key] + fingerprint(data, start)) % MODULUS
        self.nbytes += data.nbytes


def stream_out(
    writer: StorageWriter,
    plan: SavePlan,
    values: Callable[[Sequence[Part]], Sequence[torch.Tensor]],
    *,
    companions: Mapping[str, bytes],
    check: Callable[[Streamed], None],
    advance: Callable[[int], None],
    block_bytes: int = BLOCK_BYTES,
) -> Streamed:
    """Write all files of a plan, then commit.

    Args:
        writer: to the folder of the save.
        plan: its files.
        values: the boxes asked for, each in the dtype of the plan, contiguous, on the CPU.
        companions: small files that belong to the save.
        check: called when all is written and nothing counts yet; what it raises gives the save up.
        advance: told of bytes as they are handed to the writer.
        block_bytes: of what is asked for, and written, at once.

    What was there before counts until the commit ([Note: One commit]); a save that fails removes what it has
    written.

    Memory: four blocks, and what ``values`` takes.

    Raises:
        StorageError: something could not be written.
    """
    streamed = Streamed(dict.fromkeys(plan.entries, 0))
    begun = begin_save(writer, plan)
    try:
        with ThreadPoolExecutor(1) as pool:
            for file in plan.files:
                writer.create(file.name, file.nbytes)
                _write_file(writer, file, values, streamed, pool, block_bytes, advance)
                writer.sync(file.name)
        check(streamed)
        commit_save(writer, plan, begun, companions, streamed.fingerprints)
    except BaseException:
        undo_save(writer, plan, begun)
        raise
    return streamed


def _write_file(
    writer: StorageWriter,
    file: NewFile,
    values: Callable[[Sequence[Part]], Sequence[torch.Tensor]],
    streamed: Streamed,
    pool: ThreadPoolExecutor,
    block_bytes: int,
    advance: Callable[[int], None],
) -> None:
    """The header and all tensors, from the first byte to the last; a block is written while the next is made."""
    writer.write(file.name, 0, [memoryview(file.header)])
    position = len(file.header)
    pending: Future[None] | None = None
    kept = 0

    def write(start: int, parts: Sequence[tuple[Part, int]], tensors: Sequence[torch.Tensor]) -> None:
        buffers = [memory_of(tensor.contiguous().view(-1).view(torch.uint8)) for tensor in tensors]
        writer.write(file.name, start, buffers)
        for ((key, _), inside), buffer in zip(parts, buffers, strict=True):
            streamed.add(key, buffer, inside)

    for batch in _batches(file, block_bytes):
        tensors = values([part for part, _ in batch])
        if pending is not None:
            pending.result()
        pending = pool.submit(write, position, batch, tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        position += nbytes
        advance(nbytes)
        del tensors
        kept += nbytes
        if kept >= _KEPT_BYTES:
            _give_back()
            kept = 0
    if pending is not None:
        pending.result()


def _give_back() -> None:
    """Free memory to the system: what lasts lies between blocks that come and go, and would keep their holes."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _batches(file: NewFile, block_bytes: int) -> Iterator[list[tuple[Part, int]]]:
    """Boxes in the order of the file's bytes, with their place in their tensor, about a block of them at a time."""
    batch: list[tuple[Part, int]] = []
    used = 0
    for entry in file.entries:
        inside = 0
        for box in row_blocks(entry.shape, max(1, block_bytes // entry.dtype.itemsize)):
            nbytes = box.numel * entry.dtype.itemsize
            if batch and used + nbytes > block_bytes:
                yield batch
                batch, used = [], 0
            batch.append(((entry.key, box), inside))
            used += nbytes
            inside += nbytes
    if batch:
        yield batch
