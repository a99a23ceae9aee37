"""One process writes a save, file after file, block after block, and lets it count in the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from shardwise.errors import FormatError, StorageError
from shardwise.execution.landing import memory_of
from shardwise.execution.stored import StoredTensors
from shardwise.formats import CheckpointIndex, NewFile
from shardwise.formats.strict_json import parse_object
from shardwise.models.dtypes import to_torch
from shardwise.planning.save_plan import INDEX_FILE, SINGLE_FILE, SavePlan
from shardwise.storage import StorageWriter
from shardwise.tensors import Box, row_blocks
from shardwise.tensors.fingerprint import fingerprint

Part = tuple[str, Box]
"""A box of a tensor of the save, by its key."""

BLOCK_BYTES = 32 << 20
"""Of what is written at once. A few times this much is in memory."""


@dataclass
class Streamed:
    """What has been written: fingerprints of all tensors, by key ([Note: Fingerprints])."""

    fingerprints: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, key: str, data: memoryview, start: int) -> None:
        self.fingerprints[key] = (self.fingerprints.get(key, 0) + fingerprint(data, start)) & (1 << 64) - 1
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
    streamed = Streamed()
    created: list[str] = []
    try:
        with ThreadPoolExecutor(1) as pool:
            for file in plan.files:
                writer.create(file.name, file.nbytes)
                created.append(file.name)
                _write_file(writer, file, values, streamed, pool, block_bytes, advance)
                writer.sync(file.name)
        check(streamed)
    except BaseException:
        for name in created:
            with contextlib.suppress(StorageError):
                writer.remove(name)
        raise
    commit(writer, plan, companions)
    return Streamed({key: streamed.fingerprints.get(key, 0) for key in plan.entries}, streamed.nbytes)


def commit(writer: StorageWriter, plan: SavePlan, companions: Mapping[str, bytes]) -> None:
    """Let a written and synced save count, in one step; then remove the files of the one it replaces.

    Raises:
        StorageError: the save that counts is the old one, or the new one, whole, but not both.
    """
    older = weights_in(writer)
    writer.sync_names()
    for name, content in companions.items():
        writer.replace(name, content)
    if plan.index is None:
        (file,), (name,) = plan.files, plan.names
        writer.rename(file.name, name)
    else:
        writer.replace(INDEX_FILE, plan.index)
    for name in sorted(older - set(plan.names) - ({INDEX_FILE} if plan.index is not None else set())):
        writer.remove(name)
    writer.sync_names()


def weights_in(writer: StorageWriter) -> set[str]:
    """The files of the save that counts in a folder: those named by its index, the index, the single file."""
    present = set(writer.list())
    found = present & {SINGLE_FILE, INDEX_FILE}
    content = writer.read(INDEX_FILE) if INDEX_FILE in present else None
    if content is not None:
        with contextlib.suppress(FormatError):  # not an index of ours; it is replaced all the same
            named = parse_object(content, what=INDEX_FILE).get("weight_map")
            values = named.values() if isinstance(named, dict) else ()
            found |= {name for name in values if isinstance(name, str) and name in present}
    return found


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
    if pending is not None:
        pending.result()


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


def fingerprints_of(
    stored: StoredTensors, index: CheckpointIndex, block_bytes: int = BLOCK_BYTES
) -> dict[str, int]:
    """Of every tensor of a checkpoint, by key. Memory: a block."""
    found = Streamed()
    for item in index.tensors():
        dtype, place = to_torch(item.dtype), 0
        for box in row_blocks(item.shape, max(1, block_bytes // item.dtype.itemsize)):
            (value,) = stored.values_of([(item.key, box, dtype)])
            found.add(item.key, memory_of(value.view(-1).view(torch.uint8)), place)
            place += value.nbytes
        found.fingerprints.setdefault(item.key, 0)
    return found.fingerprints


def as_json(content: Mapping[str, object]) -> bytes:
    """A small file, as transformers writes its own."""
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
