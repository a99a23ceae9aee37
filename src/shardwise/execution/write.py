"""Writes tensors from memory to a storage: the requests of a save, and files by their owners."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from tqdm import tqdm

from shardwise.conversion.expression import Expression
from shardwise.execution.memory import Prefetch, WorkerPool, as_stored, memory_of
from shardwise.execution.moving import Exchange
from shardwise.execution.reading import bytes_of
from shardwise.execution.replicas import ShardSender
from shardwise.execution.world import World
from shardwise.formats.contract import TensorEntry
from shardwise.formats.safetensors_files import NewFile
from shardwise.models.torch_api import settle, to_torch
from shardwise.models.view import strided_view
from shardwise.planning.fingerprints import MODULUS, fingerprint
from shardwise.planning.load_memory import ReadRequest, Segment, Staging, aligned
from shardwise.planning.moves import Boxes, Round, plan_rounds
from shardwise.planning.save_plan import choose_owners, wanted_by_owners
from shardwise.storage.contract import StorageReader, StorageWriter
from shardwise.tensors import Box, contiguous_strides

_READ_BACK_BYTES = 4 << 20


@dataclass
class Emitter:
    """Writing of this rank's tensors, with fingerprints by key (see [Note: Fingerprints]).

    ``tensors`` are this rank's own, by the numbers that segments have. ``written_bytes`` counts by file.
    """

    writer: StorageWriter
    entries: Mapping[str, TensorEntry]
    tensors: Sequence[torch.Tensor]
    staging: Staging
    progress: tqdm
    world: World
    written_bytes: dict[str, int] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, requests: Sequence[ReadRequest]) -> None:
        """Carry out these requests, without making them durable. Memory: the staging.

        Raises:
            StorageError: bytes could not be written.
        """

        def carry_out(request: ReadRequest, desk: _WorkerStaging) -> None:
            buffers = self._buffers(request, desk)
            self._add(request, buffers)
            self.writer.write(request.file, request.bytes.start, buffers)
            with self._lock:
                done = self.written_bytes.get(request.file, 0)
                self.written_bytes[request.file] = done + request.bytes.nbytes
                self.progress.update(request.bytes.nbytes)

        WorkerPool(carry_out, self._desks(), self.world.check).run(requests)

    def finish(self, requests: Sequence[ReadRequest], created: Collection[str] = ()) -> None:
        """Make the bytes of these requests durable.

        Files that this rank ``created`` are synced in any case: their sizes are not durable before.
        """
        files = sorted({*created, *(request.file for request in requests)})

        def sync() -> None:
            for file in files:
                self.writer.sync(file)

        Prefetch(sync).value(self.world.check)

    def require_same(self, reader: StorageReader, requests: Sequence[ReadRequest]) -> list[str]:
        """Read everything back. Return the keys of tensors whose bytes differ from memory.

        Memory: the staging, and 4 MiB for each of its workers.
        """
        differing: set[str] = set()

        def compare(request: ReadRequest, desk: _WorkerStaging) -> None:
            for segment, buffer in zip(request.segments, self._buffers(request, desk), strict=True):
                for first in range(0, len(buffer), _READ_BACK_BYTES):
                    wanted = buffer[first : first + _READ_BACK_BYTES]
                    start = segment.bytes.start + first
                    if reader.read(request.file, start, start + len(wanted)) != wanted:
                        differing.add(segment.copy.leaf.key)

        WorkerPool(compare, self._desks(), self.world.check).run(requests)
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
    """One worker's staging memory. Memory: ``nbytes`` from the first use on, pinned for tensors of a GPU."""

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


@dataclass
class WrittenTensors:
    """Fingerprints of the written tensors by key ([Note: Fingerprints]), and their bytes by file."""

    fingerprints: dict[str, int] = field(default_factory=dict)
    bytes_by_file: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_file.values())

    def add(self, key: str, start: int, data: memoryview) -> None:
        """Bytes of a tensor, from its byte ``start`` on."""
        self.fingerprints[key] = (self.fingerprints.get(key, 0) + fingerprint(data, start)) % MODULUS


def _unseen(name: str, first: int, data: memoryview) -> None:
    pass


def _unchecked() -> None:
    pass


class Sink:
    """Writer of runs of bytes into files of a folder. The bytes are checksummed as they are written.

    One thread writes at a time.

    Args:
        writer: to the folder.
        seen: is shown the bytes of tensors in the order of a run: a tensor's name, the byte of it at which they
            begin, and they themselves. Perhaps on a thread of its own.
        check: called before and after each run. An exception of it ends the writing.
        bytes_by_file: in which bytes of tensors are counted.
    """

    def __init__(
        self,
        writer: StorageWriter,
        seen: Callable[[str, int, memoryview], object] = _unseen,
        *,
        check: Callable[[], None] = _unchecked,
        bytes_by_file: dict[str, int] | None = None,
    ) -> None:
        self.writer = writer
        self._seen = seen
        self._check = check
        self._bytes_by_file = {} if bytes_by_file is None else bytes_by_file

    def write(self, file: str, start: int, run: Sequence[tuple[str | None, int, memoryview]]) -> None:
        """Write these bytes from byte ``start`` of a file on, one after the other.

        Those without a name belong to no tensor.

        Raises:
            StorageError: they could not be written.
        """
        self._check()
        buffers = [data for _, _, data in run]
        named = [(name, first, data) for name, first, data in run if name is not None]

        def show() -> None:
            for item in named:
                self._seen(*item)

        showing = Prefetch(show)
        self.writer.write(file, start, buffers)
        showing.value(self._check)
        nbytes = sum(len(data) for _, _, data in named)
        self._bytes_by_file[file] = self._bytes_by_file.get(file, 0) + nbytes


_BUCKETS = 3
"""Sent and received, put together, and a copy of that on the host where it is put together on an accelerator."""


def write_by_owners(
    world: World,
    writer: StorageWriter,
    files: Sequence[NewFile],
    expressions: Mapping[str, Expression],
    giver: ShardSender,
    shares: Mapping[str, Sequence[Boxes]],
    *,
    budget_bytes: int,
    device: torch.device,
    progress: tqdm,
) -> WrittenTensors:
    """Create, write and sync every file, each on one rank that receives the other ranks' parts.

    For storages that take a file from one writer only. A file is written without a gap, its header first, and is
    complete when it has been synced. Files of different ranks are written side by side.

    Args:
        world: the ranks.
        writer: this rank's own, of the same folder on every rank.
        files: the planned files, the same on every rank. None of them is there yet.
        expressions: by key, over the model's tensors.
        giver: this rank's shares.
        shares: those of all ranks, by name of the model's tensors.
        budget_bytes: of memory that a rank may use.
        device: where buffers lie that are sent: of the kind that the process group's backend moves.
        progress: updated with the bytes that this rank writes.

    Collective: yes.
    Memory: ``budget_bytes``.

    Raises:
        StorageError: bytes could not be written. Files may be incomplete.
        CheckpointError: (or a subclass) the failure of one rank.

    Every error is the same on every rank.
    """
    owners = choose_owners(files, world.size)
    streams = wanted_by_owners(files, owners, expressions, world.size)
    rounds = world.run_all(plan_rounds, streams, shares, budget_bytes // _BUCKETS)
    own = [file for file, owner in zip(files, owners, strict=True) if owner == world.rank]
    dtypes = {entry.key: to_torch(entry.dtype) for file in files for entry in file.entries}
    out = OwnFiles(world, writer, own, progress.update)
    arrived: dict[tuple[str, Box], torch.Tensor] = {}

    def room(key: str, box: Box) -> torch.Tensor:
        if (key, box) not in arrived:
            arrived[key, box] = torch.empty(box.numel, dtype=dtypes[key], device=device)
        return arrived[key, box]

    def write(blocks: Round) -> None:
        mine = [(block.key, block.box) for block in blocks if block.targets == (world.rank,)]
        out.write([(key, box, memory_of(arrived.pop((key, box)).cpu().view(torch.uint8))) for key, box in mine])

    arrivals = Exchange(world, rounds, giver.share, room, dtypes, device).run()
    with contextlib.closing(arrivals):
        for blocks in arrivals:
            world.run_all(partial(write, blocks))
    world.run_all(out.finish)
    return out.written


class OwnFiles:
    """Writes this rank's files, one after the other. ``advance`` is called with bytes that have been written."""

    def __init__(
        self, world: World, writer: StorageWriter, files: Sequence[NewFile], advance: Callable[[int], None]
    ) -> None:
        self.written = WrittenTensors({entry.key: 0 for file in files for entry in file.entries})
        self._sink = Sink(writer, self.written.add, check=world.check, bytes_by_file=self.written.bytes_by_file)
        self._writer = writer
        self._waiting = list(reversed(files))
        self._entries = {entry.key: entry for file in files for entry in file.entries}
        self._file: NewFile | None = None
        self._advance = advance

    def write(self, blocks: Sequence[tuple[str, Box, memoryview]]) -> None:
        """Write boxes of tensors that continue the previous ones."""
        step = self._writer.policy.request_bytes
        for key, box, data in blocks:
            entry = self._entries[key]
            while self._file is None or self._file.name != entry.file:
                self._turn_to_next()
            strides = contiguous_strides(entry.shape)
            inside = entry.dtype.itemsize * sum(map(operator.mul, box.offsets, strides))
            for first in range(0, len(data), step):
                part = data[first : first + step]
                self._sink.write(entry.file, entry.start + inside + first, [(key, inside + first, part)])
                self._advance(len(part))

    def finish(self) -> None:
        """Complete the last file, and those that hold no elements."""
        while self._waiting:
            self._turn_to_next()
        self._complete()

    def _turn_to_next(self) -> None:
        self._complete()
        self._file = file = self._waiting.pop()
        self._writer.create(file.name, file.nbytes)
        self._writer.write(file.name, 0, [memoryview(file.header)])

    def _complete(self) -> None:
        if self._file is not None:
            self._writer.sync(self._file.name)
            self._file = None


# Writing
