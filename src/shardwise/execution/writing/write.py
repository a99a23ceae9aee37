"""Writes the requests of a save from the memory of tensors to a storage."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardwise.execution.memory.copy_in import as_stored, memory_of
from shardwise.execution.ranks.progress import Progress
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.filled import bytes_of
from shardwise.execution.reading.workers import Ahead, Workers
from shardwise.formats.checkpoint_index import TensorEntry
from shardwise.models.torch_words import settle
from shardwise.models.view import strided_view
from shardwise.planning.loads.schedule import ReadRequest, Segment, Staging, aligned
from shardwise.storage.contract import StorageReader, StorageWriter
from shardwise.tensors.fingerprint import MODULUS, fingerprint

_READ_BACK_BYTES = 4 << 20


@dataclass
class Emitter:
    """Writes what this rank holds, and adds up fingerprints by key (see [Note: Fingerprints]).

    ``tensors`` are this rank's own, by the numbers that segments have. ``written_bytes`` counts by file.
    """

    writer: StorageWriter
    entries: Mapping[str, TensorEntry]
    tensors: Sequence[torch.Tensor]
    staging: Staging
    progress: Progress
    world: World
    written_bytes: dict[str, int] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, requests: Sequence[ReadRequest]) -> None:
        """Carry out these requests; what they wrote is not durable yet. Memory: the staging.

        Where writes wait for the disk, fingerprints are added up meanwhile; else :meth:`finish` does, while a sync
        waits for it.

        Raises:
            StorageError: bytes could not be written.
        """

        def carry_out(request: ReadRequest, desk: _WorkerStaging) -> None:
            buffers = self._buffers(request, desk)
            if self.writer.policy.is_direct:
                self._add(request, buffers)
            self.writer.write(request.file, request.bytes.start, buffers)
            with self._lock:
                done = self.written_bytes.get(request.file, 0)
                self.written_bytes[request.file] = done + request.bytes.nbytes
                self.progress.advance(request.bytes.nbytes)

        Workers(carry_out, self._desks(), self.world.check).run(requests)

    def finish(self, requests: Sequence[ReadRequest], created: Collection[str] = ()) -> None:
        """Make what these requests wrote durable; all fingerprints of it are added up then.

        Files that this rank ``created`` are synced in any case: their sizes are not durable before.
        """
        files = sorted({*created, *(request.file for request in requests)})

        def sync() -> None:
            for file in files:
                self.writer.sync(file)

        def add(request: ReadRequest, desk: _WorkerStaging) -> None:
            self._add(request, self._buffers(request, desk))

        synced = Ahead(sync)
        if not self.writer.policy.is_direct:
            Workers(add, self._desks(), self.world.check).run(requests)
        synced.value(self.world.check)

    def require_same(self, reader: StorageReader, requests: Sequence[ReadRequest]) -> list[str]:
        """Read everything back; the keys of tensors of which other bytes came than memory holds.

        Memory: the staging, and 4 MiB for each of its workers.
        """
        differing: set[str] = set()

        def compare(request: ReadRequest, desk: _WorkerStaging) -> None:
            stored: Any = np.empty(min(_READ_BACK_BYTES, request.bytes.nbytes), dtype=np.uint8)
            first, known, place = 0, 0, 0  # bytes of the request: what is in ``stored``, and what comes next
            for segment, buffer in zip(request.segments, self._buffers(request, desk), strict=True):
                wanted = np.frombuffer(buffer, dtype=np.uint8)
                while len(wanted):
                    if place == known:
                        first, known = known, min(known + len(stored), request.bytes.nbytes)
                        room = memoryview(stored[: known - first])
                        reader.read_into(request.file, request.bytes.start + first, room)
                    part = stored[place - first : min(known, place + len(wanted)) - first]
                    if not np.array_equal(part, wanted[: len(part)]):
                        differing.add(segment.copy.leaf.key)
                    wanted = wanted[len(part) :]
                    place += len(part)

        Workers(compare, self._desks(), self.world.check).run(requests)
        return sorted(differing)

    def _desks(self) -> list[_WorkerStaging]:
        is_pinned = any(tensor.device.type != "cpu" for tensor in self.tensors)
        settle(self.tensors)
        return [_WorkerStaging(self.staging.nbytes, is_pinned=is_pinned) for _ in range(self.staging.workers)]

    def _buffers(self, request: ReadRequest, desk: _WorkerStaging) -> list[memoryview]:
        """The bytes of a request, segment by segment."""
        buffers: list[memoryview] = []
        used = 0
        for segment in request.segments:
            tensor = self.tensors[segment.target]
            if segment.is_direct:
                start = segment.copy.target.offset * tensor.element_size()
                buffer = bytes_of(tensor)[start : start + segment.bytes.nbytes]
            else:
                buffer = desk.stage(segment, used, tensor)
                used += aligned(segment.bytes.nbytes)
            buffers.append(buffer)
        return buffers

    def _add(self, request: ReadRequest, buffers: Sequence[memoryview]) -> None:
        found: list[tuple[str, int]] = []
        for segment, buffer in zip(request.segments, buffers, strict=True):
            key = segment.copy.leaf.key
            found.append((key, fingerprint(buffer, segment.bytes.start - self.entries[key].start)))
        with self._lock:
            for key, value in found:
                self.sums[key] = (self.sums.get(key, 0) + value) % MODULUS


class _WorkerStaging:
    """One worker's staging memory. Memory: ``nbytes``, from the first use on; pinned for tensors of a GPU."""

    def __init__(self, nbytes: int, *, is_pinned: bool) -> None:
        self._nbytes = nbytes
        self._is_pinned = is_pinned
        self._staging: torch.Tensor | None = None

    def stage(self, segment: Segment, start: int, tensor: torch.Tensor) -> memoryview:
        """Put a segment's elements at byte ``start``, cast to the dtype in which they are saved."""
        if self._staging is None:
            self._staging = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned)
        as_stored(self._staging, segment, start).copy_(strided_view(tensor, segment.copy.target))
        return memory_of(self._staging)[start : start + segment.bytes.nbytes]
