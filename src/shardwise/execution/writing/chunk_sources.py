"""Brings chunks of tensors into host memory as bytes, piece by piece or all at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardwise.execution.memory.copy_in import memory_of
from shardwise.execution.memory.host_memory import HostMemory
from shardwise.execution.reading.filled import bytes_of
from shardwise.execution.writing.chunk_plan import ArchivedChunk
from shardwise.layout import place_of
from shardwise.models.at_once import copy_all
from shardwise.models.view import local_boxes, strided_view
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
