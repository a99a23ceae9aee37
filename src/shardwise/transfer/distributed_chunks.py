"""Chunks of tensors in files of torch.distributed.checkpoint: planning, staging, writing, metadata.

In a folder of ``torch.distributed.checkpoint`` every rank writes its own file: chunk after chunk, each a box of a
tensor in the format of ``torch.save``, then its values that are not tensors. Each of the ranks that hold a
replicated tensor writes a part of it, or one of them all of it.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint import metadata as dcp

from shardwise.core.errors import ShardingError
from shardwise.core.layout import locate_box
from shardwise.core.tensors import Box, ByteRange, Strided, numel
from shardwise.files.distributed import MAX_METADATA_BYTES
from shardwise.files.join_entries import METADATA
from shardwise.files.local_reader import LocalReader
from shardwise.files.storage import StorageWriter
from shardwise.files.torch_files import KnownArchives, read_torch_tensor
from shardwise.fsdp.named_tensors import local_boxes, raw_bytes, strided_view
from shardwise.fsdp.torch_private import copy_all, make_storage_info, release_pinned_memory, save_without_data
from shardwise.transfer.memory import gc_disabled
from shardwise.transfer.move_plan import Boxes, first_holder_shares, shares_in_turn
from shardwise.transfer.staging import HostStaging, as_memoryview, pinned_bytes, row_slices
from shardwise.transfer.workers import in_background

StatePath: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a value, as in ``("optimizer", "state", FQN, "step")``. Numbers are indices of lists."""

StatePathT = TypeVar("StatePathT", bound=StatePath)

_FORMAT_VERSION = "1.0.0"
"""The version that torch 2.11 to 2.13 write."""

_ALIGNMENT = 64
"""Of archives in a file, and of their tensors in them."""


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def data_file(rank: int, number: int = 0) -> str:
    """Return the name that torch gives to a rank's file."""
    return f"__{rank}_{number}.distcp"


def flat_key(path: StatePath) -> str:
    """Return torch's name for the value at this path."""
    return ".".join(map(str, path))


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
    # The archive depends on shape and dtype only. So one is written for each form, and its envelope used for
    # all chunks.
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        place = Path(folder, "archive")
        save_without_data(partial(torch.empty, shape, dtype=dtype), place)
        with LocalReader(folder) as reader:
            nbytes = reader.size(place.name)
            hole = read_torch_tensor(
                reader, place.name, ByteRange(0, nbytes), KnownArchives(), what=str(place)
            ).range
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
    """The tensors of a checkpoint, and the chunks of each rank's file, in order.

    ``aliases`` are further names of tensors that have several, with the keys of their first ones.
    """

    tensors: Mapping[str, tuple[StatePath, tuple[int, ...], torch.dtype]]
    by_rank: tuple[tuple[ArchivedChunk, ...], ...]
    aliases: Mapping[StatePath, str]

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(numel(shape) * dtype.itemsize for _, shape, dtype in self.tensors.values())

    def nbytes(self, rank: int) -> int:
        """Return the bytes of the tensors in a rank's file."""
        chunks = self.by_rank[rank]
        return chunks[-1].stop if chunks else 0


@gc_disabled()
def plan_tensors(
    tensors: Mapping[StatePathT, torch.Tensor],
    boxes: Mapping[str, tuple[Boxes, ...]],
    num_ranks: int,
    buffers: Collection[str] = (),
    aliases: Mapping[StatePathT, StatePathT] | None = None,
) -> TensorsPlan:
    """Distribute the tensors over the ranks' files.

    Args:
        tensors: by path, DTensors or full tensors.
        boxes: of each tensor, by key and rank. Together they are all of it.
        num_ranks: the number of ranks, each of which has a file.
        buffers: keys of tensors that the first rank that holds them writes, see [Note: Patchworks] in
            ``transfer/replicas.py``.
        aliases: further names of tensors, with their first ones.
    """
    # From the boxes of all ranks, so that each rank plans the files of all.
    ends = [0] * num_ranks  # of each rank's file, in bytes
    files: list[list[ArchivedChunk]] = [[] for _ in ends]
    planned: dict[str, tuple[StatePath, tuple[int, ...], torch.dtype]] = {}
    in_turn = shares_in_turn((boxes[flat_key(path)], tensor.dtype.itemsize) for path, tensor in tensors.items())
    for (path, tensor), shares in zip(tensors.items(), in_turn, strict=True):
        key, shape, dtype = flat_key(path), tuple(tensor.shape), tensor.dtype
        planned[key] = path, shape, dtype
        if key in buffers:
            shares = first_holder_shares(boxes[key])
        if not numel(shape):  # one rank writes the empty tensor
            shares = ((Box.whole(shape),), *((),) * (num_ranks - 1))
        for rank, rank_boxes in enumerate(shares):
            for box in rank_boxes:
                chunk = ArchivedChunk(key, box, dtype, _align(ends[rank]))
                ends[rank] = chunk.stop
                files[rank].append(chunk)
    return TensorsPlan(
        planned, tuple(map(tuple, files)), {path: flat_key(first) for path, first in (aliases or {}).items()}
    )


@gc_disabled()
def build_metadata(
    plan: TensorsPlan, values: Sequence[Mapping[StatePathT, int]], name: Callable[[int], str] = data_file
) -> bytes:
    """Return the file ``.metadata``.

    A tensor with several names is listed under each of them, because torch requests all of them. Its bytes are
    stored once.

    Args:
        plan: of the tensors.
        values: the values of each rank that are not tensors, with their bytes, in order.
        name: function of a rank that returns the name of its file.

    Raises:
        ShardingError: it would be larger than readers accept.
    """
    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    paths: dict[str, StatePath] = {}
    places: dict[dcp.MetadataIndex, object] = {}
    chunks: dict[str, list[dcp.ChunkStorageMetadata]] = {key: [] for key in plan.tensors}
    # Equal boxes and names are one object, which is pickled once.
    described_boxes: dict[Box, dcp.ChunkStorageMetadata] = {}
    names = [name(rank) for rank in range(len(plan.by_rank))]
    for file, archived in zip(names, plan.by_rank, strict=True):
        for chunk in archived:
            box = chunk.box
            if box not in described_boxes:
                described_boxes[box] = dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            index = dcp.MetadataIndex(chunk.key, box.offsets, len(chunks[chunk.key]))
            chunks[chunk.key].append(described_boxes[box])
            places[index] = make_storage_info(file, chunk.start, chunk.stop - chunk.start)
    for key, (path, shape, dtype) in plan.tensors.items():
        paths[key] = path
        described[key] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=dtype), torch.Size(shape), chunks[key]
        )
    # Aliases: the same places under a further name.
    indices: dict[str, list[dcp.MetadataIndex]] = {}
    for index in places:
        indices.setdefault(index.fqn, []).append(index)
    for path, first in plan.aliases.items():
        key = flat_key(path)
        described[key], paths[key] = described[first], path
        places |= {replace(index, fqn=key): places[index] for index in indices[first]}
    # Values that are not tensors follow the chunks in a rank's file, without gaps.
    for rank, sizes in enumerate(values):
        position = plan.nbytes(rank)
        for path, nbytes in sizes.items():
            key = flat_key(path)
            described[key], paths[key] = dcp.BytesStorageMetadata(), path
            places[dcp.MetadataIndex(key)] = make_storage_info(names[rank], position, nbytes)
            position += nbytes
    content = pickle.dumps(dcp.Metadata(described, paths, places, version=_FORMAT_VERSION))
    if len(content) > MAX_METADATA_BYTES:
        raise ShardingError(
            f"{METADATA}: would have {len(content)} bytes for {len(places)} entries in the files of {len(names)} "
            f"ranks, {MAX_METADATA_BYTES} is the limit for reading it. Save from fewer ranks, or fewer tensors "
            "(the model without its optimizer)"
        )
    return content


Views = Mapping[ArchivedChunk, torch.Tensor]
"""The elements of each of a rank's chunks, in its memory."""


def chunk_views(
    chunks: Sequence[ArchivedChunk], tensors: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]
) -> Views:
    """Return views of each chunk in this rank's memory. ``local`` are the local tensors of ``tensors``."""
    boxes = {key: local_boxes(tensors[key], key) for key in dict.fromkeys(chunk.key for chunk in chunks)}
    views: dict[ArchivedChunk, torch.Tensor] = {}
    for chunk in chunks:
        # One rank writes an empty tensor, which may have no box in its memory.
        place = locate_box(chunk.box, boxes[chunk.key]) if chunk.box.numel else Strided(0, (0,), (1,))
        views[chunk] = strided_view(local[chunk.key], place)
    return views


def pack_slabs(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack blocks of bytes into slabs whose sizes are powers of two.

    torch rounds pinned memory up to a power of two, so that one slab for all blocks might take twice their bytes.

    Returns:
        The bytes of each slab, and for each block its slab and the byte of it at which the block begins.

    Example: blocks of 5, 3 and 2 bytes are 10 in all. The first slab has 8 bytes, for 5 and 3, the second has 2.
    """
    slabs: list[int] = []
    used: list[int] = []
    places = [(0, 0)] * len(sizes)
    remaining = sum(sizes)
    # Largest blocks first, each into the first slab with room.
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size = sizes[number]
        slab = next((slab for slab, nbytes in enumerate(slabs) if nbytes - used[slab] >= size), len(slabs))
        if slab == len(slabs):
            # Rounded down, so that the rest gets a smaller slab, but large enough for this block.
            slabs.append(1 << max((size - 1).bit_length(), remaining.bit_length() - 1))
            used.append(0)
        places[number] = slab, used[slab]
        used[slab] += size
        remaining -= size
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
            self._views, self._copies = views, self._allocate(views, is_pinned=bool(devices))
        copy_all(list(self._copies.values()), list(views.values()))
        # Copies to pinned memory are queued. The caller may change the tensors, and read the copies, from now on.
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        return self._copies

    def release(self) -> None:
        """Free the memory, unless copies are in use."""
        is_pinned = any(slab.is_pinned() for slab in self._slabs)
        self._slabs, self._views, self._copies = [], {}, {}
        if is_pinned:
            release_pinned_memory()

    def _allocate(self, views: Views, *, is_pinned: bool) -> Views:
        sizes, places = pack_slabs([_align(view.nbytes) for view in views.values()])
        has_other_kind = any(slab.is_pinned() != is_pinned for slab in self._slabs)
        if has_other_kind or [slab.nbytes for slab in self._slabs] != sizes:
            self.release()  # before more is allocated
            self._slabs = [
                torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned) for size in sizes
            ]
        copies: dict[ArchivedChunk, torch.Tensor] = {}
        for (chunk, view), (slab, start) in zip(views.items(), places, strict=True):
            flat = self._slabs[slab][start : start + view.nbytes]
            copies[chunk] = flat.view(view.dtype).view(view.shape)
        return copies


def _is_plain(view: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor lie in host memory as they are written."""
    return view.device.type == "cpu" and view.is_contiguous()


@dataclass
class ChunkWriter:
    """Writes a rank's file from its beginning to its end.

    A caller can expect the following sequence:

    1. The caller creates the file with the size that the plan gives it.
    2. :meth:`write`, once: chunks at their planned places, then values, without a gap. Checksums are added on the
       way.
    3. The caller writes what follows (the checksums), and syncs the file.

    Attributes:
        writer: to the folder of the file, which exists.
        file: its name.
        check: called before each write. An exception of it ends the writing.
        add_checksum: called with all bytes and their places in the file, in order, on another thread.
    """

    writer: StorageWriter
    file: str
    check: Callable[[], None]
    add_checksum: Callable[[int, memoryview], object] | None = None
    _pending: list[memoryview] = field(default_factory=list)
    _pending_nbytes: int = 0
    _staged_nbytes: int = 0
    _end: int = 0

    def write(
        self, chunks: Sequence[ArchivedChunk], views: Views, values: Iterable[bytes], budget_bytes: int
    ) -> None:
        """Write chunks, then packed values that are not tensors.

        Memory: half of ``budget_bytes``, for tensors that are strided or on an accelerator. Pinned for the latter.

        Raises:
            StorageError: bytes could not be written.
        """
        # Staging no larger than what has to be copied: plain tensors are written from their own memory.
        copied = [view for view in views.values() if not _is_plain(view)]
        nbytes = pinned_bytes(budget_bytes // 2, sum(_align(view.nbytes) for view in copied))
        staging = HostStaging(nbytes, is_pinned=any(view.device.type != "cpu" for view in copied))
        for chunk in chunks:
            around = envelope(chunk.box.sizes, chunk.dtype)
            # The order of the file: padding, the head of the archive, the elements, the tail of the archive.
            self._add(bytes(chunk.start - self._end) + around.before)  # zeros up to the aligned start
            self._add_tensor(views[chunk], staging)
            self._add(around.after)
        for content in values:
            self._add(content)
        self._flush()

    def _add(self, content: bytes | memoryview) -> None:
        self._pending.append(memoryview(content))
        self._pending_nbytes += len(content)
        self._end += len(content)

    def _add_tensor(self, view: torch.Tensor, staging: HostStaging) -> None:
        """Add a tensor's bytes: its own memory if that is possible, otherwise staged copies of blocks."""
        if _is_plain(view) and view.numel():
            self._add_block(view)
            return
        for rows in row_slices(view.shape, staging.nbytes // view.element_size()):
            block = view[rows]
            # Pending bytes may be in the staging memory: written before it is used again.
            if self._staged_nbytes + block.nbytes > staging.nbytes:
                self._flush()
            staged = staging.stage(block, self._staged_nbytes)
            self._staged_nbytes += _align(block.nbytes)
            self._add_block(staged)

    def _add_block(self, block: torch.Tensor) -> None:
        self._add(as_memoryview(raw_bytes(block)))
        if self._pending_nbytes >= self.writer.policy.request_bytes:
            self._flush()

    def _flush(self) -> None:
        self.check()
        start = self._end - self._pending_nbytes
        # Checksums are computed while the storage writes the same bytes.
        with in_background(self._add_checksums, start):
            self.writer.write(self.file, start, self._pending)
        self._pending, self._pending_nbytes, self._staged_nbytes = [], 0, 0

    def _add_checksums(self, start: int) -> None:
        if self.add_checksum is None:
            return
        for content in self._pending:
            self.add_checksum(start, content)
            start += content.nbytes
