"""Chunks of tensors in files of torch.distributed.checkpoint: plans, layout, writing, metadata.

In a folder of ``torch.distributed.checkpoint`` every rank writes its own file: chunk after chunk, each a box of a
tensor in the format of ``torch.save``, then its values that are not tensors. Replicated tensors are written by one
of their ranks, in parts or in turns.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

from shardwise.execution.checksums import runs_of
from shardwise.execution.memory import collected_later, memory_of
from shardwise.execution.tensor_facts import TensorFacts, held_by_rank
from shardwise.execution.write import Sink
from shardwise.formats.torch_files import read_torch_tensor
from shardwise.layout import place_of
from shardwise.models.torch_api import copy_all, save_without_data, stored_at
from shardwise.models.view import local_boxes, strided_view
from shardwise.planning.moves import Boxes, shares_by_rank, shares_of_first
from shardwise.storage.reading import LocalReader
from shardwise.tensors import Box, ByteRange, Strided, numel

Way = TypeVar("Way", bound=tuple[str | int, ...])
"""What leads to a value of a checkpoint, as in ``("optimizer", "state", FQN, "step")``; numbers lead into lists."""


_NO_OTHERS: Mapping[Any, Any] = MappingProxyType({})


_VERSION = "1.0.0"
"""Of the format, as torch 2.11 to 2.13 note it."""


_ALIGNMENT = 64
"""Where archives begin in a file, as their tensors do in them."""


def data_file(rank: int, number: int = 0) -> str:
    """Return the name that torch gives to a rank's file."""
    return f"__{rank}_{number}.distcp"


def key_of(way: tuple[str | int, ...]) -> str:
    """Return torch's name for the value at the end of this path."""
    return ".".join(map(str, way))


class Envelope(NamedTuple):
    """The bytes of an archive before and after those of its tensor."""

    before: bytes
    after: bytes


@lru_cache(maxsize=4096)
def envelope(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """Return the bytes around a contiguous tensor of this shape in an archive of its own.

    torch writes them, into a file with a hole in place of the tensor's bytes. Their checksum field is that of empty
    content, which torch does not check.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        place = Path(folder, "archive")
        save_without_data(partial(torch.empty, shape, dtype=dtype), place)
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
        """Bytes of all tensors."""
        return sum(numel(shape) * dtype.itemsize for _, shape, dtype in self.tensors.values())

    def nbytes(self, rank: int) -> int:
        """Return the bytes of the tensors in a rank's file."""
        chunks = self.by_rank[rank]
        return chunks[-1].stop if chunks else 0


@collected_later()
def plan_tensors(
    tensors: Mapping[Way, tuple[tuple[int, ...], torch.dtype]],
    told: Sequence[Mapping[str, TensorFacts]],
    buffers: Collection[str] = (),
    others: Mapping[Way, Way] = _NO_OTHERS,
) -> TensorsPlan:
    """Deal the tensors out to the ranks. ``told`` has the tensors that each rank holds, by key.

    ``buffers`` are keys of tensors that the first rank that holds them writes, see [Note: Patchworks]. ``others``
    are further names of tensors, with their first ones.

    Raises:
        RankMismatchError: the ranks have different tensors.
        ShardingError: together they do not hold all of one.
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
    """The file ``.metadata``.

    ``values`` are the values of each rank that are not tensors, with their bytes, in order.

    ``name`` is that of the file of a rank. A tensor with several names is listed under each of them, because torch
    requests all of them. Its bytes are stored once.
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


def slabs_of(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Deal blocks of bytes to slabs whose sizes are powers of two.

    torch rounds pinned memory up to a power of two, so that one slab for all blocks might take twice their bytes.

    Returns:
        The bytes of each slab, and for each block its slab and the byte of it at which the block begins.
    """
    slabs: list[int] = []
    used: list[int] = []
    places = [(0, 0)] * len(sizes)
    left = sum(sizes)
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size = sizes[number]
        slab = next((slab for slab, nbytes in enumerate(slabs) if nbytes - used[slab] >= size), len(slabs))
        if slab == len(slabs):
            slabs.append(1 << max((size - 1).bit_length(), left.bit_length() - 1))
            used.append(0)
        places[number] = slab, used[slab]
        used[slab] += size
        left -= size
    return slabs, places


class ChunkStaging:
    """Host memory for copies of all chunks of a rank, reused between checkpoints, pinned for an accelerator."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._views: Views = {}
        self._copies: Views = {}

    def copy(self, views: Views) -> Views:
        """Return copies of the chunks. The tensors may change as soon as this returns.

        Memory: the bytes of the chunks, in slabs of powers of two.
        """
        devices = {view.device for view in views.values() if view.device.type != "cpu"}
        if views is not self._views:
            self._views, self._copies = views, self._laid_out(views, is_pinned=bool(devices))
        copy_all(list(self._copies.values()), list(views.values()))
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        return self._copies

    def _laid_out(self, views: Views, *, is_pinned: bool) -> Views:
        sizes, places = slabs_of([-(-view.nbytes // _ALIGNMENT) * _ALIGNMENT for view in views.values()])
        if [slab.nbytes for slab in self._slabs] != sizes or any(
            slab.is_pinned() != is_pinned for slab in self._slabs
        ):
            self._slabs = []  # freed before more is taken
            self._slabs = [
                torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned) for size in sizes
            ]
        return {
            chunk: self._slabs[slab][start : start + view.nbytes].view(view.dtype).view(view.shape)
            for (chunk, view), (slab, start) in zip(views.items(), places, strict=True)
        }


def write_chunks(
    sink: Sink,
    file: str,
    chunks: Sequence[ArchivedChunk],
    views: Views,
    values: Sequence[bytes],
    budget_bytes: int,
) -> int:
    """Write chunks, then values, from the start of a file. Return their end.

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
    """Yield the bytes of a tensor in order.

    The tensor itself if it is contiguous in host memory, otherwise copies of blocks.
    """
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
