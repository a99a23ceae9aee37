"""Writes a rank's file of a ``torch.distributed.checkpoint`` from beginning to end, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from shardwise.execution.memory.copy_in import memory_of
from shardwise.execution.memory.host_memory import HostMemory
from shardwise.execution.reading.filled import bytes_of
from shardwise.execution.writing.chunk_plan import ArchivedChunk
from shardwise.execution.writing.sink import Sink
from shardwise.execution.writing.torch_out import envelope
from shardwise.layout import place_of
from shardwise.models.torch_words import copy_all
from shardwise.models.view import local_boxes, strided_view
from shardwise.storage.contract import StorageWriter
from shardwise.tensors import Strided, row_blocks

_ALIGNMENT = 64


class InPlace:
    """Chunks are read from the tensors while they are written; these must not change meanwhile.

    Memory: ``budget_bytes``, and that only for tensors that are strided, or on an accelerator.
    """

    def __init__(self, views: Mapping[ArchivedChunk, torch.Tensor], budget_bytes: int) -> None:
        self.block_bytes = budget_bytes // 2
        self._views = views

    def blocks(self, chunk: ArchivedChunk) -> Iterator[memoryview]:
        """The bytes of a chunk, in order."""
        view = self._views[chunk]
        if not view.numel():
            return
        if view.device.type == "cpu" and view.is_contiguous():
            yield bytes_of(view)[: view.nbytes]
            return
        for box in row_blocks(view.shape, max(1, self.block_bytes // view.element_size())):
            part = view[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
            yield bytes_of(part.to("cpu", memory_format=torch.contiguous_format, copy=True).contiguous())


class ChunkStaging:
    """Host memory for all chunks of a rank, used again by the next checkpoint; pinned with an accelerator.

    Memory: the bytes of this rank's chunks.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._places: dict[ArchivedChunk, tuple[int, int]] = {}
        self._views: Mapping[ArchivedChunk, torch.Tensor] = {}
        self._targets: list[torch.Tensor] = []

    def copy(self, views: Mapping[ArchivedChunk, torch.Tensor]) -> Staged:
        """Copy the chunks; the tensors may change as soon as this returns. These very views may be copied again."""
        devices = {view.device for view in views.values() if view.device.type != "cpu"}
        if views is not self._views:
            self._make_room(views, is_pinned=bool(devices))
        copy_all(self._targets, list(views.values()))
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        return Staged(self._memory, self._places)

    def _make_room(self, views: Mapping[ArchivedChunk, torch.Tensor], *, is_pinned: bool) -> None:
        places: dict[ArchivedChunk, tuple[int, int]] = {}
        total = 0
        for chunk, view in views.items():
            places[chunk] = total, total + view.nbytes
            total += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory.nbytes < total or (is_pinned and not self._memory.is_pinned()):
            if is_pinned:
                self._memory = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=True)
            else:
                fresh = HostMemory([total])
                self._memory = fresh.take((total,), torch.uint8)
                fresh.touch_rest()
        self._places, self._views = places, views
        self._targets = [
            self._memory[slice(*places[chunk])].view(view.dtype).view(view.shape) for chunk, view in views.items()
        ]


class Staged:
    """Chunks that have been copied."""

    block_bytes = 1 << 62

    def __init__(self, memory: torch.Tensor, places: Mapping[ArchivedChunk, tuple[int, int]]) -> None:
        self._memory = memory
        self._places = places

    def blocks(self, chunk: ArchivedChunk) -> Iterator[memoryview]:
        """The bytes of a chunk."""
        start, stop = self._places[chunk]
        if start < stop:
            yield memory_of(self._memory[start:stop])


def places_of(chunks: Sequence[ArchivedChunk], tensors: Mapping[str, torch.Tensor]) -> dict[ArchivedChunk, Strided]:
    """Where each chunk lies in this rank's own tensor."""
    held = {key: local_boxes(tensors[key], key) for key in dict.fromkeys(chunk.key for chunk in chunks)}
    nothing = Strided(0, (0,), (1,))
    return {chunk: place_of(chunk.box, held[chunk.key]) if chunk.box.numel else nothing for chunk in chunks}


def views_of(
    places: Mapping[ArchivedChunk, Strided], tensors: Mapping[str, torch.Tensor]
) -> dict[ArchivedChunk, torch.Tensor]:
    """The elements of each chunk in this rank's memory. ``tensors`` are its own."""
    return {chunk: strided_view(tensors[chunk.key], place) for chunk, place in places.items()}


class ChunkSource(Protocol):
    """Where the bytes of chunks come from.

    Attributes:
        block_bytes: the most that is asked for before what came is let go.
    """

    @property
    def block_bytes(self) -> int: ...

    def blocks(self, chunk: ArchivedChunk) -> Iterator[memoryview]: ...


class Onlooker(Protocol):
    """Is shown what is written, in the order of the file; the elements of chunks while they are written."""

    def begin(self) -> int:
        """The number of the next chunk."""
        ...

    def add(self, chunk: int, start: int, block: memoryview) -> None:
        """A block of a chunk, from its byte ``start`` on. May be called on another thread."""
        ...

    def add_around(self, content: bytes) -> None:
        """What lies around chunks."""
        ...

    def add_value(self, content: bytes) -> None:
        """A value that is no tensor."""
        ...


class Nobody:
    """Looks on at nothing."""

    def begin(self) -> int:
        return 0

    def add(self, chunk: int, start: int, block: memoryview) -> None:
        pass

    def add_around(self, content: bytes) -> None:
        pass

    def add_value(self, content: bytes) -> None:
        pass


class ChunkStream:
    """A file written from its beginning to its end, in requests as large as the storage likes them."""

    def __init__(
        self, writer: StorageWriter, file: str, check: Callable[[], None], onlooker: Onlooker | None = None
    ) -> None:
        self._onlooker: Onlooker = onlooker or Nobody()
        self._sink = Sink(writer, self._onlooker.add, check=check)
        self._request_bytes = writer.policy.request_bytes
        self._file = file
        self._position = 0
        self._pending: list[tuple[int | None, int, memoryview]] = []
        self._pending_nbytes = 0

    def write(self, chunks: Sequence[ArchivedChunk], source: ChunkSource, values: Sequence[bytes]) -> None:
        most = min(source.block_bytes, self._request_bytes)
        for chunk in chunks:
            around = envelope(chunk.box.sizes, chunk.dtype)
            self._add_around(bytes(chunk.start - self._position - self._pending_nbytes) + around.before)
            number, start = self._onlooker.begin(), 0
            for block in source.blocks(chunk):
                self._add(number, start, block)
                start += block.nbytes
                if self._pending_nbytes >= most:
                    self._flush()
            self._add_around(around.after)
        for content in values:
            self._add(None, 0, memoryview(content))
            self._onlooker.add_value(content)
        self._flush()

    def _add_around(self, content: bytes) -> None:
        self._add(None, 0, memoryview(content))
        self._onlooker.add_around(content)

    def _add(self, chunk: int | None, start: int, content: memoryview) -> None:
        self._pending.append((chunk, start, content))
        self._pending_nbytes += len(content)

    def _flush(self) -> None:
        self._sink.write(self._file, self._position, self._pending)
        self._position += self._pending_nbytes
        self._pending, self._pending_nbytes = [], 0
