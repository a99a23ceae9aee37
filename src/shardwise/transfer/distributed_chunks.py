"""Chunks of tensors in files of torch.distributed.checkpoint: planning, staging, writing, metadata.

In a folder of ``torch.distributed.checkpoint`` every rank writes its own file: chunk after chunk, each a box of a
tensor in the format of ``torch.save``, then its values that are not tensors. Each of the ranks that hold a
replicated tensor writes a part of it, or one of them all of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint import metadata as dcp

from shardwise.core.errors import ShardingError
from shardwise.core.layout import locate_box
from shardwise.core.tensors import Box, ByteRange, DType, Strided, numel
from shardwise.files.distributed import MAX_METADATA_BYTES
from shardwise.files.folders import temporary_folder
from shardwise.files.join_entries import METADATA
from shardwise.files.local_reader import LocalReader
from shardwise.files.storage import StorageWriter
from shardwise.files.torch_files import KnownArchives, read_torch_tensor
from shardwise.fsdp.named_tensors import local_boxes, raw_bytes, strided_view
from shardwise.fsdp.torch_private import (
    copy_all,
    from_torch_or_other,
    make_storage_info,
    release_pinned_memory,
    save_without_data,
)
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
    with temporary_folder() as folder:
        place = folder / "archive"
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


@dataclass(slots=True)
class TensorsPlan:
    """The tensors of a checkpoint, and the chunks of files, in order.

    Attributes:
        tensors: path, shape and dtype of each tensor, by key.
        by_rank: the chunks of a rank's file, by rank. On the first rank, which writes ``.metadata``, of all ranks,
            and on another of itself.
        aliases: further names of tensors that have several, with the keys of their first ones.
        metadata: of the last save, which :func:`build_metadata` uses again.
    """

    tensors: Mapping[str, tuple[StatePath, tuple[int, ...], torch.dtype]]
    by_rank: Mapping[int, tuple[ArchivedChunk, ...]]
    aliases: Mapping[StatePath, str]
    metadata: MetadataTemplate | None = None

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
    rank: int,
    num_ranks: int,
    buffers: Collection[str] = (),
    aliases: Mapping[StatePathT, StatePathT] | None = None,
) -> TensorsPlan:
    """Distribute the tensors over the ranks' files. Return the files of all on the first rank, else its own file.

    Args:
        tensors: by path, DTensors or full tensors.
        boxes: of each tensor, by key and rank. Together they are all of it.
        rank: this rank.
        num_ranks: the number of ranks, each of which has a file.
        buffers: keys of tensors that the first rank that holds them writes, see [Note: Patchworks] in
            ``transfer/replicas.py``.
        aliases: further names of tensors, with their first ones.
    """
    files: dict[int, list[ArchivedChunk]] = {each: [] for each in (range(num_ranks) if rank == 0 else [rank])}
    planned: dict[str, tuple[StatePath, tuple[int, ...], torch.dtype]] = {}
    in_turn = shares_in_turn((boxes[flat_key(path)], tensor.dtype.itemsize) for path, tensor in tensors.items())
    for (path, tensor), shares in zip(tensors.items(), in_turn, strict=True):
        key, shape, dtype = flat_key(path), tuple(tensor.shape), tensor.dtype
        if from_torch_or_other(dtype) is DType.OTHER:
            raise ShardingError(
                f"{key}: is {dtype}, which a checkpoint cannot hold. If it is a buffer, register it with "
                "persistent=False"
            )
        planned[key] = path, shape, dtype
        if key in buffers:
            shares = first_holder_shares(boxes[key])
        if not numel(shape):  # one rank writes the empty tensor
            shares = ((Box.whole(shape),), *((),) * (num_ranks - 1))
        for of_rank, chunks in files.items():
            for box in shares[of_rank]:
                start = _align(chunks[-1].stop) if chunks else 0
                chunks.append(ArchivedChunk(key, box, dtype, start))
    return TensorsPlan(
        planned,
        {of_rank: tuple(chunks) for of_rank, chunks in files.items()},
        {path: flat_key(first) for path, first in (aliases or {}).items()},
    )


@dataclass(frozen=True, slots=True)
class MetadataTemplate:
    """The file ``.metadata`` with placeholders for the numbers that differ between saves of one plan.

    [Note: One pickle for many saves]
    The file has an entry for each chunk of each rank: 3.5 million for a model of 405 billion parameters with AdamW
    on 1,024 ranks, which take a minute to pickle. All of them are as in the last checkpoint. Only the values that
    are not tensors have other sizes. So the file is pickled once, with numbers of eight bytes for the offset and
    the length of each value, and each save writes its own over these bytes. It is kept between saves (330 MB then).

    Attributes:
        files: names of the ranks' files.
        names: paths of the values in each rank's file, in order.
        content: the pickle.
        places: of each value, in order: the bytes of the pickle at which its offset and its length begin.
    """

    files: Sequence[str]
    names: Sequence[Sequence[StatePath]]
    content: bytes
    places: Sequence[tuple[int, int]]


_PLACEHOLDER = 1 << 62
"""The first of consecutive numbers, each larger than any offset in a file, that are pickled in eight bytes."""

_LONG1 = pickle.LONG1 + b"\x08"
"""What is before a number of eight bytes in a pickle."""


def build_metadata(plan: TensorsPlan, values: Sequence[Mapping[StatePathT, int]], number: int = 0) -> bytes:
    """Return the file ``.metadata``. On the first rank.

    A tensor with several names is listed under each of them, because torch requests all of them. Its bytes are
    stored once.

    Args:
        plan: of the tensors.
        values: the values of each rank that are not tensors, with their bytes, in order.
        number: of the save, in the names of its files.

    Raises:
        ShardingError: it would be larger than readers accept.
    """
    files = [data_file(rank, number) for rank in plan.by_rank]
    names = [list(sizes) for sizes in values]
    if plan.metadata is None or (plan.metadata.files, plan.metadata.names) != (files, names):
        plan.metadata = _pickle_metadata(plan, files, names)
    content = bytearray(plan.metadata.content)
    places = iter(plan.metadata.places)
    # Values that are not tensors follow the chunks in a rank's file, without gaps.
    for rank, sizes in enumerate(values):
        position = plan.nbytes(rank)
        for nbytes in sizes.values():
            offset_at, length_at = next(places)
            content[offset_at : offset_at + 8] = position.to_bytes(8, "little")
            content[length_at : length_at + 8] = nbytes.to_bytes(8, "little")
            position += nbytes
    return bytes(content)


@gc_disabled()
def _pickle_metadata(
    plan: TensorsPlan, files: Sequence[str], names: Sequence[Sequence[StatePath]]
) -> MetadataTemplate:
    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    paths: dict[str, StatePath] = {}
    places: dict[dcp.MetadataIndex, object] = {}
    chunks: dict[str, list[dcp.ChunkStorageMetadata]] = {key: [] for key in plan.tensors}
    # Equal boxes and names are one object, which is pickled once.
    described_boxes: dict[Box, dcp.ChunkStorageMetadata] = {}
    for rank, file in enumerate(files):
        for chunk in plan.by_rank[rank]:
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
    placeholder = _PLACEHOLDER
    for file, paths_in_file in zip(files, names, strict=True):
        for path in paths_in_file:
            key = flat_key(path)
            described[key], paths[key] = dcp.BytesStorageMetadata(), path
            places[dcp.MetadataIndex(key)] = make_storage_info(file, placeholder, placeholder + 1)
            placeholder += 2
    content = pickle.dumps(dcp.Metadata(described, paths, places, version=_FORMAT_VERSION))
    if len(content) > MAX_METADATA_BYTES:
        raise ShardingError(
            f"{METADATA}: would have {len(content)} bytes for {len(places)} entries in the files of {len(files)} "
            f"ranks, {MAX_METADATA_BYTES} is the limit for reading it. Save from fewer ranks, or fewer tensors "
            "(the model without its optimizer)"
        )
    # Searched for from the last one on, since values are pickled in this order.
    starts: list[int] = []
    for number in range(_PLACEHOLDER, placeholder):
        code = _LONG1 + number.to_bytes(8, "little")
        starts.append(content.index(code, starts[-1] if starts else 0) + len(_LONG1))
    return MetadataTemplate(files, names, content, list(zip(starts[::2], starts[1::2], strict=True)))


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
