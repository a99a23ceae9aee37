"""Writes tensors from memory to a storage: the requests of a save, files by their owners, and chunks.

In a folder of ``torch.distributed.checkpoint`` every rank writes a file of its own, chunk after chunk, each a
tensor's box as ``torch.save`` writes it; then its values that are no tensors. Replicated tensors are written by one
of their ranks, in parts or in turns.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.conversion.expression import Expression
from shardwise.execution.memory import Ahead, Workers, as_stored, collected_later, memory_of
from shardwise.execution.moving import Exchange, TensorFacts, held_by_rank
from shardwise.execution.reading import bytes_of
from shardwise.execution.replicas import Giver, runs_of
from shardwise.execution.world import Progress, World
from shardwise.formats.contract import TensorEntry
from shardwise.formats.safetensors_files import NewFile
from shardwise.formats.torch_files import read_torch_tensor
from shardwise.layout import place_of
from shardwise.models.torch_words import copy_all, save_without_data, settle, stored_at, to_torch
from shardwise.models.view import local_boxes, strided_view
from shardwise.planning.fingerprints import MODULUS, fingerprint
from shardwise.planning.load_memory import ReadRequest, Segment, Staging, aligned
from shardwise.planning.moves import Boxes, Round, plan_rounds, shares_by_rank, shares_of_first
from shardwise.planning.save_plan import choose_owners, wanted_by_owners
from shardwise.storage.contract import StorageReader, StorageWriter
from shardwise.storage.reading import LocalReader
from shardwise.tensors import Box, ByteRange, Strided, contiguous_strides, numel

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
                self.progress.advance(request.bytes.nbytes)

        Workers(carry_out, self._desks(), self.world.check).run(requests)

    def finish(self, requests: Sequence[ReadRequest], created: Collection[str] = ()) -> None:
        """Make what these requests wrote durable.

        Files that this rank ``created`` are synced in any case: their sizes are not durable before.
        """
        files = sorted({*created, *(request.file for request in requests)})

        def sync() -> None:
            for file in files:
                self.writer.sync(file)

        Ahead(sync).value(self.world.check)

    def require_same(self, reader: StorageReader, requests: Sequence[ReadRequest]) -> list[str]:
        """Read everything back; the keys of tensors of which other bytes came than memory holds.

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


@dataclass
class WrittenTensors:
    """What has been written: fingerprints of tensors by key ([Note: Fingerprints]), and their bytes by file."""

    fingerprints: dict[str, int] = field(default_factory=dict)
    bytes_by_file: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_file.values())

    def add(self, key: str, start: int, data: memoryview) -> None:
        """Bytes of a tensor, from its byte ``start`` on."""
        self.fingerprints[key] = (self.fingerprints.get(key, 0) + fingerprint(data, start)) % MODULUS


class Sink:
    """Writes runs of bytes into files of a folder; what is in a run is looked at while it is written.

    One thread writes at a time.

    Args:
        writer: to the folder.
        seen: is shown the bytes of tensors in the order of a run: a tensor's name, the byte of it at which they
            begin, and they themselves. Perhaps on a thread of its own.
        check: called before a run and after; what it raises ends the writing.
        bytes_by_file: in which bytes of tensors are counted.
    """

    def __init__(
        self,
        writer: StorageWriter,
        seen: Callable[[str, int, memoryview], object] = lambda name, first, data: None,
        *,
        check: Callable[[], None] = lambda: None,
        bytes_by_file: dict[str, int] | None = None,
    ) -> None:
        self.writer = writer
        self._seen = seen
        self._check = check
        self._bytes_by_file = {} if bytes_by_file is None else bytes_by_file

    def write(self, file: str, start: int, run: Sequence[tuple[str | None, int, memoryview]]) -> None:
        """Put these bytes at byte ``start`` of a file, one after the other; those without a name are no tensor's.

        Raises:
            StorageError: they could not be written.
        """
        self._check()
        buffers = [data for _, _, data in run]
        named = [(name, first, data) for name, first, data in run if name is not None]

        def show() -> None:
            for item in named:
                self._seen(*item)

        showing = Ahead(show)
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
    giver: Giver,
    shares: Mapping[str, Sequence[Boxes]],
    *,
    budget_bytes: int,
    device: torch.device,
    progress: Progress,
) -> WrittenTensors:
    """Create, write and sync every file, each by one rank that gets what the others hold of it.

    For storages that take a file from one writer only. A file is written without a gap, its header first, and is
    complete when it has been synced. Files of different ranks are written side by side.

    Args:
        world: the ranks.
        writer: this rank's own, of the same folder on every rank.
        files: as laid out; the same on every rank. None of them is there yet.
        expressions: by key, over the model's tensors.
        giver: this rank's shares.
        shares: those of all ranks, by name of the model's tensors.
        budget_bytes: of memory that a rank may use.
        device: where buffers lie that are sent: of the kind that the process group's backend moves.
        progress: told of the bytes that this rank writes.

    Collective: yes.
    Memory: ``budget_bytes``.

    Raises:
        StorageError: bytes could not be written; files may have been left in part.
        CheckpointError: (or a subclass) what befell one rank.

    Every error is the same on every rank.
    """
    owners = choose_owners(files, world.size)
    streams = wanted_by_owners(files, owners, expressions, world.size)
    rounds = world.together(lambda: plan_rounds(streams, shares, budget_bytes // _BUCKETS))
    own = [file for file, owner in zip(files, owners, strict=True) if owner == world.rank]
    dtypes = {entry.key: to_torch(entry.dtype) for file in files for entry in file.entries}
    out = OwnFiles(world, writer, own, progress.advance)
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
            world.together(partial(write, blocks))
    world.together(out.finish)
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
        """Boxes of tensors, which follow what has been written."""
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


Way = TypeVar("Way", bound=tuple[str | int, ...])
"""What leads to a value of a checkpoint, as in ``("optimizer", "state", FQN, "step")``; numbers lead into lists."""

_NO_OTHERS: Mapping[Any, Any] = MappingProxyType({})

_VERSION = "1.0.0"
"""Of the format, as torch 2.11 to 2.13 note it."""

_ALIGNMENT = 64
"""Where archives begin in a file, as their tensors do in them."""


def data_file(rank: int, number: int = 0) -> str:
    """The file of what a rank wrote, by the name that torch gives such files."""
    return f"__{rank}_{number}.distcp"


def key_of(way: tuple[str | int, ...]) -> str:
    """The name that torch gives to what lies at the end of this way."""
    return ".".join(map(str, way))


class Envelope(NamedTuple):
    """The bytes of an archive before and after those of its tensor."""

    before: bytes
    after: bytes


@lru_cache(maxsize=4096)
def envelope(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """Return the bytes around a contiguous tensor of this shape in an archive of its own.

    torch writes them, into a file with a hole in place of the tensor's bytes. The checksum in them is that of
    nothing; torch does not look at it.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        place = Path(folder, "archive")
        save_without_data(lambda: torch.empty(shape, dtype=dtype), place)
        with LocalReader(folder) as reader:
            nbytes = reader.size(place.name)
            hole = read_torch_tensor(reader, place.name, ByteRange(0, nbytes), {}, what=str(place)).range
            return Envelope(reader.read(place.name, 0, hole.start), reader.read(place.name, hole.stop, nbytes))


@dataclass(frozen=True, slots=True)
class ArchivedChunk:
    """A box of a tensor, and where its archive lies in the file of the rank that writes it."""

    key: str
    box: Box
    dtype: torch.dtype
    start: int

    @property
    def stop(self) -> int:
        around = envelope(self.box.sizes, self.dtype)
        return self.start + len(around.before) + self.box.numel * self.dtype.itemsize + len(around.after)


@dataclass(frozen=True, slots=True)
class TensorsPlan:
    """The tensors of a checkpoint, and the chunks of each rank's file, in their order there.

    ``others`` are further names of tensors that have several, with the keys of their first ones.
    """

    tensors: Mapping[str, tuple[tuple[str | int, ...], tuple[int, ...], torch.dtype]]
    by_rank: tuple[tuple[ArchivedChunk, ...], ...]
    others: Mapping[tuple[str | int, ...], str]

    @property
    def state_bytes(self) -> int:
        """Of all tensors."""
        return sum(numel(shape) * dtype.itemsize for _, shape, dtype in self.tensors.values())

    def nbytes(self, rank: int) -> int:
        """Of a rank's file, up to what is no tensor."""
        chunks = self.by_rank[rank]
        return chunks[-1].stop if chunks else 0


@collected_later()
def plan_tensors(
    tensors: Mapping[Way, tuple[tuple[int, ...], torch.dtype]],
    told: Sequence[Mapping[str, TensorFacts]],
    buffers: Collection[str] = (),
    others: Mapping[Way, Way] = _NO_OTHERS,
) -> TensorsPlan:
    """Deal the tensors out to the ranks. ``told`` is what each rank holds, by key.

    ``buffers`` are keys of tensors that the first rank writes which holds them, see [Note: Patchworks]; ``others``
    are further names of tensors, with their first ones.

    Raises:
        DisagreementError: the ranks have different tensors.
        PlacementError: together they do not hold all of one.
    """
    held = held_by_rank(told)
    ends = [0] * len(told)
    files: list[list[ArchivedChunk]] = [[] for _ in told]
    found: dict[str, tuple[tuple[str | int, ...], tuple[int, ...], torch.dtype]] = {}
    for number, (path, (shape, dtype)) in enumerate(tensors.items()):
        key = key_of(path)
        found[key] = path, shape, dtype
        boxes = held[key]
        shares = shares_of_first(boxes) if key in buffers else shares_by_rank(boxes, number, dtype.itemsize)
        if not numel(shape):  # somebody has to say that there is nothing
            shares = ((Box.whole(shape),), *((),) * (len(told) - 1))
        _lay_out(key, dtype, shares, files, ends)
    return TensorsPlan(found, tuple(map(tuple, files)), {path: key_of(first) for path, first in others.items()})


def _lay_out(
    key: str, dtype: torch.dtype, shares: Sequence[Boxes], files: list[list[ArchivedChunk]], ends: list[int]
) -> None:
    for rank, boxes in enumerate(shares):
        for box in boxes:
            chunk = ArchivedChunk(key, box, dtype, -(-ends[rank] // _ALIGNMENT) * _ALIGNMENT)
            ends[rank] = chunk.stop
            files[rank].append(chunk)


@collected_later()
def metadata_of(
    plan: TensorsPlan, values: Sequence[Mapping[Way, int]], name: Callable[[int], str] = data_file
) -> bytes:
    """The file ``.metadata``. ``values`` are what each rank stores that is no tensor, with its bytes, in order.

    ``name`` is that of the file of a rank. A tensor of several names is in it under each, since torch asks for all
    of them; its bytes are there once.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        for key, (_, shape, dtype) in plan.tensors.items()
    }
    paths: dict[str, tuple[str | int, ...]] = {key: path for key, (path, _, _) in plan.tensors.items()}
    places: dict[MetadataIndex, object] = {}
    for rank, chunks in enumerate(plan.by_rank):
        for chunk in chunks:
            tensor = described[chunk.key]
            assert isinstance(tensor, TensorStorageMetadata)
            index = MetadataIndex(chunk.key, chunk.box.offsets, len(tensor.chunks))
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes)))
            places[index] = stored_at(name(rank), chunk.start, chunk.stop - chunk.start)
    chunks_of: dict[str, list[MetadataIndex]] = {}
    for index in places:
        chunks_of.setdefault(index.fqn, []).append(index)
    for path, first in plan.others.items():
        key = key_of(path)
        described[key], paths[key] = described[first], path
        places |= {replace(index, fqn=key): places[index] for index in chunks_of[first]}
    for rank, sizes in enumerate(values):
        position = plan.nbytes(rank)
        for path, nbytes in sizes.items():
            key = key_of(path)
            described[key] = BytesStorageMetadata()
            paths[key] = path
            places[MetadataIndex(key)] = stored_at(name(rank), position, nbytes)
            position += nbytes
    metadata = Metadata(described, paths, places, version=_VERSION)
    return pickle.dumps(metadata)


# Writing


Views = Mapping[ArchivedChunk, torch.Tensor]
"""The elements of each of a rank's chunks, in its memory."""


def views_of(
    chunks: Sequence[ArchivedChunk], tensors: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]
) -> Views:
    """Views of each chunk in this rank's memory. ``tensors`` may be DTensors, whose own parts are ``local``."""
    held = {key: local_boxes(tensors[key], key) for key in dict.fromkeys(chunk.key for chunk in chunks)}
    nothing = Strided(0, (0,), (1,))
    places = {chunk: place_of(chunk.box, held[chunk.key]) if chunk.box.numel else nothing for chunk in chunks}
    return {chunk: strided_view(local[chunk.key], place) for chunk, place in places.items()}


class ChunkStaging:
    """Host memory for copies of all chunks of a rank, reused by the next checkpoint; pinned for an accelerator."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: Views = {}
        self._copies: Views = {}

    def copy(self, views: Views) -> Views:
        """Return copies of the chunks; the tensors may change as soon as this returns.

        Memory: the bytes of the chunks.
        """
        devices = {view.device for view in views.values() if view.device.type != "cpu"}
        if views is not self._views:
            self._views, self._copies = views, self._laid_out(views, is_pinned=bool(devices))
        copy_all(list(self._copies.values()), list(views.values()))
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        return self._copies

    def _laid_out(self, views: Views, *, is_pinned: bool) -> Views:
        starts: dict[ArchivedChunk, int] = {}
        total = 0
        for chunk, view in views.items():
            starts[chunk] = total
            total += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory.nbytes < total or (is_pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        return {
            chunk: self._memory[starts[chunk] : starts[chunk] + view.nbytes].view(view.dtype).view(view.shape)
            for chunk, view in views.items()
        }


def write_chunks(
    sink: Sink,
    file: str,
    chunks: Sequence[ArchivedChunk],
    views: Views,
    values: Sequence[bytes],
    budget_bytes: int,
) -> int:
    """Write chunks, then values, from the beginning of a file on; return where they end.

    The sink is shown all bytes by the name "", with their places in the file.

    Memory: ``budget_bytes``, for tensors that are strided or on an accelerator.
    """
    stream = _ChunkStream(sink, file)
    for chunk in chunks:
        around = envelope(chunk.box.sizes, chunk.dtype)
        stream.add(memoryview(bytes(chunk.start - stream.end) + around.before))
        for block in _blocks(views[chunk], budget_bytes // 2):
            stream.add(block)
            if stream.pending_nbytes >= min(budget_bytes // 2, sink.writer.policy.request_bytes):
                stream.flush()
        stream.add(memoryview(around.after))
    for content in values:
        stream.add(memoryview(content))
    stream.flush()
    return stream.end


def _blocks(view: torch.Tensor, block_bytes: int) -> Iterator[memoryview]:
    """The bytes of a tensor in order: itself where it is contiguous in host memory, else copies of blocks."""
    is_plain = view.device.type == "cpu" and view.is_contiguous()
    for run in runs_of(view, view.nbytes if is_plain else block_bytes):
        yield memory_of(run.cpu())


class _ChunkStream:
    """A file written from its beginning to its end."""

    def __init__(self, sink: Sink, file: str) -> None:
        self._sink = sink
        self._file = file
        self._pending: list[memoryview] = []
        self.pending_nbytes = 0
        self.end = 0

    def add(self, content: memoryview) -> None:
        self._pending.append(content)
        self.pending_nbytes += content.nbytes
        self.end += content.nbytes

    def flush(self) -> None:
        start = position = self.end - self.pending_nbytes
        run: list[tuple[str | None, int, memoryview]] = []
        for part in self._pending:
            run.append(("", position, part))
            position += len(part)
        self._sink.write(self._file, start, run)
        self._pending, self.pending_nbytes = [], 0
