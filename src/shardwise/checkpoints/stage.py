"""Chunks as bytes in host memory: where the tensors lie, copied piece by piece, or all of them copied at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardwise.checkpoints.plan import Chunk
from shardwise.execution.host_memory import HostMemory
from shardwise.execution.landing import memory_of
from shardwise.execution.place import bytes_of
from shardwise.execution.sharing import place_of
from shardwise.models.view import local_boxes, local_tensor, strided_view
from shardwise.tensors import row_blocks

_ALIGNMENT = 64


class InPlace:
    """Chunks are read from the tensors while they are written; these must not change meanwhile.

    Memory: ``budget_bytes``, and that only for tensors that are strided, or on an accelerator.
    """

    def __init__(self, chunks: Sequence[Chunk], tensors: Mapping[str, torch.Tensor], budget_bytes: int) -> None:
        self.block_bytes = budget_bytes // 2
        self._views = dict(zip(chunks, _views(chunks, tensors), strict=True))

    def blocks(self, chunk: Chunk) -> Iterator[memoryview]:
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


class Staging:
    """Host memory for all chunks of a rank, used again by the next checkpoint; pinned with an accelerator.

    Memory: the bytes of this rank's chunks.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copy(self, chunks: Sequence[Chunk], tensors: Mapping[str, torch.Tensor]) -> Staged:
        """Copy the chunks; the tensors may change as soon as this returns."""
        views = _views(chunks, tensors)
        starts: list[int] = []
        total = 0
        for view in views:
            starts.append(total)
            total += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = {view.device for view in views if view.device.type != "cpu"}
        if self._memory.nbytes < total or (devices and not self._memory.is_pinned()):
            self._memory = (
                torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=True)
                if devices
                else HostMemory([total]).take((total,), torch.uint8)
            )
        for start, view in zip(starts, views, strict=True):
            target = self._memory[start : start + view.nbytes].view(view.dtype).view(view.shape)
            target.copy_(view, non_blocking=True)
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        ends = [start + view.nbytes for start, view in zip(starts, views, strict=True)]
        return Staged(self._memory, dict(zip(chunks, zip(starts, ends, strict=True), strict=True)))


class Staged:
    """Chunks that have been copied."""

    block_bytes = 1 << 62

    def __init__(self, memory: torch.Tensor, places: Mapping[Chunk, tuple[int, int]]) -> None:
        self._memory = memory
        self._places = places

    def blocks(self, chunk: Chunk) -> Iterator[memoryview]:
        """The bytes of a chunk."""
        start, stop = self._places[chunk]
        if start < stop:
            yield memory_of(self._memory[start:stop])


def _views(chunks: Sequence[Chunk], tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The elements of each chunk in this rank's memory."""
    views: list[torch.Tensor] = []
    for chunk in chunks:
        tensor = tensors[chunk.key]
        if not chunk.box.numel:
            views.append(torch.empty(chunk.box.sizes, dtype=chunk.dtype))
            continue
        views.append(strided_view(local_tensor(tensor), place_of(chunk.box, local_boxes(tensor, chunk.key))))
    return views
