"""Writes tensors from memory to a storage: the requests of a save, and files by their owners."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from tqdm import tqdm

from shardwise.core.tensors import Box, contiguous_strides
from shardwise.files.checkpoint_index import TensorEntry
from shardwise.files.safetensors_files import NewFile
from shardwise.files.storage import StorageReader, StorageWriter
from shardwise.fsdp.named_tensors import raw_bytes, strided_view
from shardwise.fsdp.torch_private import synchronize_streams, to_torch
from shardwise.ranks.world import World
from shardwise.saving.plan import assign_owners, plan_moves_to_owners
from shardwise.saving.prepare import PreparedSave
from shardwise.transfer.file_requests import FileRequest, Staging, align
from shardwise.transfer.fingerprints import MODULUS, fingerprint
from shardwise.transfer.memory import staging_device
from shardwise.transfer.move import ShardExchange
from shardwise.transfer.move_plan import plan_rounds
from shardwise.transfer.read import storage_bytes
from shardwise.transfer.replicas import ShardSender
from shardwise.transfer.staging import HostStaging, as_memoryview, as_stored, pinned_bytes
from shardwise.transfer.workers import WorkerPool, in_background

_READ_BACK_BYTES = 4 << 20


@dataclass
class WrittenTensors:
    """Fingerprints of tensors that are written, or read back, by key, and their bytes by file.

    Several threads may add at once.
    """

    fingerprints: dict[str, int] = field(default_factory=dict)
    bytes_by_file: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_file.values())

    def add(self, key: str, start: int, data: memoryview) -> None:
        """Add bytes of a tensor, from its byte ``start`` on, to its fingerprint."""
        value = fingerprint(data, start)  # without the lock, which others wait for
        with self._lock:
            self.fingerprints[key] = (self.fingerprints.get(key, 0) + value) % MODULUS


@dataclass
class ShardWriter:
    """Writer of this rank's tensors, with fingerprints by key.

    See [Note: Fingerprints] in ``transfer/fingerprints.py``. ``tensors`` are this rank's own: a segment's
    ``target`` is an index into them.

    A caller can expect the following sequence:

    1. The first rank locks the folder, and creates the files with their headers.
    2. :meth:`write`, on each rank: the bytes of its requests are written, and fingerprints added up.
    3. :meth:`finish`, on each rank, when all have written: the bytes are durable, and on the rank that has created
       the files their sizes are.
    4. :meth:`require_same`, if the save is to be verified, when all have finished.
    5. Ranks add up what they have ``written``. The first commits the files if every byte was written once.

    If a file has one writer (:func:`write_by_owners`), that takes the place of 1 (the files), 2 and 3.
    """

    writer: StorageWriter
    entries: Mapping[str, TensorEntry]
    tensors: Sequence[torch.Tensor]
    staging: Staging
    progress: tqdm
    world: World
    written: WrittenTensors = field(default_factory=WrittenTensors)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, requests: Sequence[FileRequest]) -> None:
        """Carry out these requests, without making them durable. Memory: the staging.

        Raises:
            StorageError: bytes could not be written.
        """
        WorkerPool(self._write_request, self._staging_buffers(), self.world.check).run(requests)

    def _write_request(self, request: FileRequest, staging: HostStaging) -> None:
        buffers = self._buffers(request, staging)
        for segment, buffer in zip(request.segments, buffers, strict=True):
            key = segment.copy.leaf.key
            self.written.add(key, segment.bytes.start - self.entries[key].start, buffer)
        self.writer.write(request.file, request.bytes.start, buffers)
        with self._lock:
            self.written.bytes_by_file[request.file] += request.bytes.nbytes
            self.progress.update(request.bytes.nbytes)

    def finish(self, requests: Sequence[FileRequest], created: Collection[str] = ()) -> None:
        """Make the bytes of these requests durable.

        Files that this rank ``created`` are synced in any case: their sizes are not durable before.
        """
        files = sorted({*created, *(request.file for request in requests)})
        WorkerPool(self._sync, [None], self.world.check).run(files)

    def _sync(self, file: str, _: None) -> None:
        self.writer.sync(file)

    def require_same(self, reader: StorageReader, requests: Sequence[FileRequest]) -> list[str]:
        """Read everything back. Return the keys of tensors whose bytes differ from memory.

        Memory: the staging, and 4 MiB for each of its workers.
        """
        differing: set[str] = set()
        compare = partial(self._compare, reader, differing)
        WorkerPool(compare, self._staging_buffers(), self.world.check).run(requests)
        return sorted(differing)

    def _compare(
        self, reader: StorageReader, differing: set[str], request: FileRequest, staging: HostStaging
    ) -> None:
        for segment, buffer in zip(request.segments, self._buffers(request, staging), strict=True):
            for first in range(0, len(buffer), _READ_BACK_BYTES):
                expected = buffer[first : first + _READ_BACK_BYTES]
                start = segment.bytes.start + first
                if reader.read(request.file, start, start + len(expected)) != expected:
                    differing.add(segment.copy.leaf.key)

    def _staging_buffers(self) -> list[HostStaging]:
        is_pinned = any(tensor.device.type != "cpu" for tensor in self.tensors)
        # Once for all workers: their streams do not wait for what computed the tensors.
        synchronize_streams(self.tensors)
        return [HostStaging(self.staging.nbytes, is_pinned=is_pinned) for _ in range(self.staging.workers)]

    def _buffers(self, request: FileRequest, staging: HostStaging) -> list[memoryview]:
        """Return the bytes of a request by segment, cast to the dtype in which they are saved."""
        buffers: list[memoryview] = []
        used = 0
        for segment in request.segments:
            # A direct segment is written from the tensor's own memory. Others are cast or copied to staging
            # memory first.
            tensor = self.tensors[segment.target]
            if segment.is_direct:
                start = segment.copy.target.offset * tensor.element_size()
                buffers.append(storage_bytes(tensor)[start : start + segment.bytes.nbytes])
            else:
                staged, values = as_stored(staging.buffer, segment, used), strided_view(tensor, segment.copy.target)
                if values.device.type != "cpu":
                    # Not by copy_: torch casts what it copies to the host there, in pageable memory.
                    values = values.to(staged.dtype)
                staged.copy_(values)
                buffers.append(as_memoryview(staging.buffer)[used : used + segment.bytes.nbytes])
                used += align(segment.bytes.nbytes)
        return buffers


_BUFFERS = 3
"""Of a round: the bytes sent and received, the boxes assembled from them, and their copy in pinned memory."""


def write_by_owners(
    world: World,
    writer: StorageWriter,
    prepared: PreparedSave,
    *,
    budget_bytes: int,
    progress: tqdm,
) -> WrittenTensors:
    """Create, write and sync every file, each on one rank that receives the other ranks' shards.

    For network file systems with ranks on several machines (``WritePolicy.block_bytes``). A file is written without
    a gap, its header first. Files of different ranks are written concurrently.

    Args:
        world: the ranks.
        writer: this rank's own, of the same folder on every rank.
        prepared: the save. None of its files exists yet.
        budget_bytes: of memory that a rank may use.
        progress: updated with the bytes that this rank writes.

    Collective: yes.
    Memory: ``budget_bytes``.

    Raises:
        StorageError: bytes could not be written. Files may be incomplete.
        CheckpointError: (or a subclass) the failure of one rank.

    Every error is the same on every rank.
    """
    # One stream of moves for each rank, so that each round has blocks for all owners, and all of them write at
    # once.
    files, tensors = prepared.plan.files, prepared.tensors
    owners = assign_owners(files, world.size)
    expressions = {key: output.expression for key, output in prepared.outputs.items()}
    streams = plan_moves_to_owners(files, owners, expressions, world.size)
    sender = ShardSender(
        {name: item for item in tensors for name in item.names}, prepared.shares.by_name, world.rank
    )
    device = staging_device(tensors, [item.tensor for item in tensors])
    buffer_bytes = budget_bytes // _BUFFERS
    with world.collective("plan the rounds"):
        rounds = plan_rounds(streams, sender.shares, buffer_bytes)
    local_files = [file for file, owner in zip(files, owners, strict=True) if owner == world.rank]
    dtypes = {entry.key: to_torch(entry.dtype) for file in files for entry in file.entries}
    out = LocalFiles(world, writer, local_files, progress, pinned_bytes(buffer_bytes, buffer_bytes))
    exchange = ShardExchange(world, rounds, sender.share, None, dtypes, device)
    with contextlib.closing(exchange.run()) as arrivals:
        for blocks in arrivals:
            local_blocks = [(block.key, block.box) for block in blocks if block.targets == (world.rank,)]
            with world.collective("write files"):
                out.write([(*block, exchange.received.pop(block)) for block in local_blocks])
    with world.collective("flush files to disk"):
        out.finish()
    return out.written


class LocalFiles:
    """Writes this rank's files, one after the other, with fingerprints of their tensors.

    A caller can expect the following sequence:

    1. The folder is locked, and has none of the files.
    2. :meth:`write`, any number of times: blocks arrive in the order of the files, and in each without a gap. Where
       they reach the next file, the one before is synced, and the next is created with its header.
    3. :meth:`finish`: the last file is synced, after files without elements. ``written`` has the fingerprints.

    Args:
        world: the ranks.
        writer: to the folder.
        files: of this rank, in order.
        progress: updated with the bytes that are written.
        staging_bytes: pinned memory through which tensors on an accelerator are copied.
    """

    def __init__(
        self,
        world: World,
        writer: StorageWriter,
        files: Sequence[NewFile],
        progress: tqdm,
        staging_bytes: int = 0,
    ) -> None:
        self.written = WrittenTensors({entry.key: 0 for file in files for entry in file.entries})
        self._world = world
        self._writer = writer
        self._waiting = list(reversed(files))
        self._entries = {entry.key: entry for file in files for entry in file.entries}
        self._file: NewFile | None = None
        self._progress = progress
        self._staging = HostStaging(staging_bytes, is_pinned=True)

    def write(self, blocks: Sequence[tuple[str, Box, torch.Tensor]]) -> None:
        """Write values of boxes of tensors that continue the previous ones.

        Raises:
            StorageError: they could not be written.
        """
        for key, box, values in blocks:
            entry = self._entries[key]
            while self._file is None or self._file.name != entry.file:
                self._start_next()
            # The byte at which the box begins: boxes are contiguous runs of a row-major tensor.
            strides = contiguous_strides(entry.shape)
            start = entry.dtype.itemsize * sum(map(operator.mul, box.offsets, strides))
            self._write_values(entry, start, raw_bytes(values))

    def _write_values(self, entry: TensorEntry, start: int, values: torch.Tensor) -> None:
        """Write flat bytes from byte ``start`` of a tensor on. Their fingerprint is computed meanwhile."""
        # Host memory is written from where it is. Values on an accelerator go through pinned memory, piece by
        # piece.
        is_on_host = values.device.type == "cpu"
        step = self._writer.policy.request_bytes
        if not is_on_host:
            step = min(step, self._staging.nbytes)
        for chunk in values.split(step):
            self._world.check()
            if not is_on_host:
                chunk = self._staging.stage(chunk)
            data = as_memoryview(chunk)
            with in_background(self.written.add, entry.key, start, data):
                self._writer.write(entry.file, entry.start + start, [data])
            start += len(data)
            self.written.bytes_by_file[entry.file] += len(data)
            self._progress.update(len(data))

    def finish(self) -> None:
        """Complete the last file, and those that hold no elements."""
        while self._waiting:
            self._start_next()
        self._complete()

    def _start_next(self) -> None:
        self._complete()
        self._file = file = self._waiting.pop()
        self._writer.create(file.name, file.nbytes)
        self._writer.write(file.name, 0, [memoryview(file.header)])

    def _complete(self) -> None:
        if self._file is not None:
            self._writer.sync(self._file.name)
            self._file = None
