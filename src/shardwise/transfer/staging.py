"""Staging buffers of a rank, between files, host memory and accelerators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final, TypeAlias

import torch

from shardwise.core.tensors import Strided, row_blocks
from shardwise.fsdp.named_tensors import strided_view
from shardwise.fsdp.torch_private import accelerator_module, to_torch
from shardwise.transfer.file_requests import Segment, plan_staging


class HostStaging:
    """Staging buffer of one worker in host memory, pinned for tensors of an accelerator.

    For each request: :meth:`begin`, a read into the returned bytes, :meth:`put` for each staged segment,
    :meth:`end`. :meth:`finish` after the last one.

    Memory: ``nbytes`` (a power of two if pinned, since torch rounds up to one), from the first use on.
    """

    def __init__(self, nbytes: int, *, is_pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._is_pinned = is_pinned

    @cached_property
    def buffer(self) -> torch.Tensor:
        """The buffer, as flat bytes."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned)

    def stage(self, values: torch.Tensor, start: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a row-major copy of a tensor at byte ``start`` of the buffer, cast to ``dtype`` if given."""
        dtype = values.dtype if dtype is None else dtype
        flat = self.buffer[start : start + values.numel() * dtype.itemsize]
        return flat.view(dtype).view(values.shape).copy_(values)

    def begin(self) -> memoryview:
        """Return the buffer for the bytes of the next request."""
        return as_memoryview(self.buffer)

    def put(self, segment: Segment, start: int, tensor: torch.Tensor) -> None:
        """Copy a segment, read to byte ``start`` of the buffer, into its place in the tensor."""
        strided_view(tensor, segment.copy.target).copy_(as_stored(self.buffer, segment, start))

    def copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Copy values to a tensor of the same shape, cast to its dtype."""
        target.copy_(values)

    def end(self) -> None:
        """Mark the end of a request: all of its segments have been put."""

    def finish(self) -> None:
        """Wait for all copies."""


class DeviceStaging:
    """Staging of one worker for tensors on an accelerator: two pinned buffers in turn, and a stream.

    The stream is its own (``is_side``), or the current one of the thread. Created on the thread that made or last
    wrote the tensors, so that the device's queue is in order.

    While one buffer is copied to the device, the next request is read into the other. Bytes that are only moved
    are copied straight into the tensor. Those that are cast or strided go to a buffer on the device first. Memory:
    two times ``nbytes``, pinned, and as much again on the device for tensors that are cast or strided.
    """

    def __init__(self, nbytes: int, device: torch.device, *, is_side: bool = True) -> None:
        self.nbytes = nbytes
        self._pinned = HostStaging(nbytes, is_pinned=True), HostStaging(nbytes, is_pinned=True)
        self.device = device
        self._module = accelerator_module(device)
        self._stream = current = self._module.current_stream(device)
        if is_side:
            self._stream = self._module.Stream(device)
            # The tensors' memory may still be in use on the current stream, on which they were made.
            self._stream.wait_stream(current)
        self._on_device: list[torch.Tensor] = []  # as large as the pinned buffers, from their first use on
        self._copied: list[Any] = []  # events: the copies out of each pinned buffer have ended
        self._turn = 0

    def begin(self) -> memoryview:
        # Two buffers in turn: this request is read into one, while the other is copied to the device.
        self._turn = 1 - self._turn
        with self._module.device(self.device):  # a new thread's current device is device 0
            if not self._copied:
                self._copied = [self._module.Event() for _ in self._pinned]
            # Before the caller writes to this buffer: the copies of two requests ago may still read from it.
            self._copied[self._turn].synchronize()
            return self._pinned[self._turn].begin()

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Have the block's work on the device done after the copies, in memory of this buffer's stream."""
        with self._module.device(self.device), self._module.stream(self._stream):
            yield

    def put(self, segment: Segment, start: int, tensor: torch.Tensor) -> None:
        copy = segment.copy
        with self.queued():
            pinned = self._pinned[self._turn].buffer
            source = as_stored(pinned, segment, start)
            target = strided_view(tensor, copy.target)
            if copy.source.is_contiguous and copy.target.is_contiguous and source.dtype == target.dtype:
                target.copy_(source, non_blocking=True)
                return
            # Not target.copy_(source): torch copies strided or cast values from the host through pageable memory,
            # and waits. On the device, the second copy follows the first in the order of the stream.
            if not self._on_device:
                for _ in self._pinned:
                    self._on_device.append(torch.empty(self.nbytes, dtype=torch.uint8, device=self.device))
            span = slice(start, start + segment.bytes.nbytes)
            buffer = self._on_device[self._turn]
            buffer[span].copy_(pinned[span], non_blocking=True)
            target.copy_(as_stored(buffer, segment, start))

    def end(self) -> None:
        # After the last copy of the request, so that begin() waits for all of them.
        self._copied[self._turn].record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()

    def copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Copy values to a tensor of the same shape, between host and device through the buffers.

        Host values are cast to the target's dtype on the host. Values that come to the host have arrived.
        """
        is_to_device = values.device.type == "cpu"
        if is_to_device == (target.device.type == "cpu"):  # both on the host, or both on the device
            target.copy_(values)
            return
        # Bytes in the buffer: to the device in the target's dtype, to the host in the dtype of the values.
        # The copy between host and device is of equal dtypes, and so a plain copy of bytes. The cast is on the
        # host: before it on the way to the device, after it on the way back.
        staged = target if is_to_device else values
        for rows in row_slices(target.shape, self.nbytes // staged.element_size()):
            self.begin()
            with self.queued():
                pinned = self._pinned[self._turn]
                if is_to_device:
                    target[rows].copy_(pinned.stage(values[rows], dtype=target.dtype), non_blocking=True)
                else:
                    # stage() waits for the device, so the values have arrived when the host copies them on.
                    target[rows].copy_(pinned.stage(values[rows]))
            self.end()


StagingBuffer: TypeAlias = HostStaging | DeviceStaging
"""Staging buffer of one worker of a load."""


def row_slices(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices of blocks of a tensor of this shape, in order, each of at most ``most`` elements (at least 1).

    Each block is one run of a row-major tensor.
    """
    for box in row_blocks(shape, max(1, most)):
        yield tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))


def pinned_bytes(budget_bytes: int, needed_bytes: int) -> int:
    """Return the size of a pinned buffer, a power of two: at least the needed bytes if the budget allows it.

    Example: 5 needed bytes are 8, or 4 within a budget of 7.
    """
    return 1 << (min(budget_bytes, max(1, 2 * needed_bytes - 1)).bit_length() - 1)


def as_stored(staging: torch.Tensor, segment: Segment, start: int) -> torch.Tensor:
    """Return the elements of a segment at byte ``start`` of a buffer, in the order of its copy."""
    # The segment was read from its first byte on, so its source starts at element 0 of these values.
    source, dtype = segment.copy.source, to_torch(segment.dtype)
    values = staging[start : start + segment.bytes.nbytes].view(dtype)
    return strided_view(values, Strided(0, source.sizes, source.strides))


def staging_buffers(
    budget_bytes: int, concurrency: int, device: torch.device, max_request_bytes: int | None = None
) -> Sequence[StagingBuffer]:
    """Return at most ``concurrency`` staging buffers for tensors on a device, together within the budget.

    On an accelerator they are no larger than ``max_request_bytes``, the most that one request stages, rounded up to
    a power of two.
    """
    staging = plan_staging(budget_bytes, concurrency, on_device=device.type != "cpu")
    if device.type == "cpu":
        return [HostStaging(staging.nbytes) for _ in range(staging.workers)]
    nbytes = staging.nbytes
    if max_request_bytes is not None:
        nbytes = min(nbytes, 1 << max(max_request_bytes - 1, 0).bit_length())
    return [DeviceStaging(nbytes, device) for _ in range(staging.workers)]


_UPLOAD_BYTES: Final = 2 << 20


def upload_buffer(device: torch.device, budget_bytes: int) -> StagingBuffer:
    """Return a buffer for copies to a device or from it, in the order of its current stream.

    Memory: at most 2 MiB, from the first such copy on.
    """
    if device.type == "cpu":
        return HostStaging(0)
    staging = plan_staging(min(budget_bytes, _UPLOAD_BYTES), 1, on_device=True)
    return DeviceStaging(staging.nbytes, device, is_side=False)


def as_memoryview(flat: torch.Tensor) -> memoryview:
    """Return the bytes of a flat CPU tensor."""
    array: Any = flat.numpy()
    return memoryview(array)
