"""Copies bytes from a buffer into a tensor: directly on the host, through pinned memory on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shardwise.models.torch_words import module_of, to_torch
from shardwise.models.view import strided_view
from shardwise.planning.loads.schedule import Segment, staging_within
from shardwise.tensors import Strided


class Landing(Protocol):
    """One worker's staging memory and what it does with the bytes in it."""

    def begin(self) -> memoryview:
        """The staging memory for the next request; what was staged before may still be on its way."""
        ...

    def put(self, segment: Segment, start: int, tensor: torch.Tensor) -> None:
        """Copy a segment, read to byte ``start`` of the staging memory, into its place in the tensor."""
        ...

    def end(self) -> None:
        """Everything of this request has been put."""
        ...

    def finish(self) -> None:
        """Wait until all that was put is there."""
        ...


class HostLanding:
    """Staging for tensors in host memory. Memory: ``nbytes``, from the first request on that stages anything."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._staging: torch.Tensor | None = None

    def begin(self) -> memoryview:
        if self._staging is None:
            self._staging = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
        return memory_of(self._staging)

    def put(self, segment: Segment, start: int, tensor: torch.Tensor) -> None:
        assert self._staging is not None
        strided_view(tensor, segment.copy.target).copy_(as_stored(self._staging, segment, start))

    def end(self) -> None:
        pass

    def finish(self) -> None:
        pass


class DeviceLanding:
    """Staging for tensors on an accelerator: two pinned slabs in turn, and a stream of its own.

    Made by the thread that made the tensors, or last wrote to them: what it has asked of the device comes first.

    While one slab is on its way to the device, the next request is read into the other. What only has to be moved
    is moved straight into the tensor; what must be cast or is strided goes to a slab on the device first, and is
    cast there. Memory: two times ``nbytes``, pinned, and as much again on the device for what is cast or strided.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._module = module_of(device)
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))
        self._pinned: list[torch.Tensor] = []
        self._on_device: list[torch.Tensor] = []
        self._sent: list[Any] = []
        self._turn = 0

    def begin(self) -> memoryview:
        if not self._pinned:
            with self._module.device(self._device):  # a thread begins at the first one of the machine
                self._pinned = [
                    torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
                ]
                self._sent = [self._module.Event() for _ in range(2)]
        self._turn = 1 - self._turn
        self._sent[self._turn].synchronize()
        return memory_of(self._pinned[self._turn])

    def put(self, segment: Segment, start: int, tensor: torch.Tensor) -> None:
        copy = segment.copy
        with self._module.stream(self._stream):
            source = as_stored(self._pinned[self._turn], segment, start)
            target = strided_view(tensor, copy.target)
            if copy.source.is_contiguous and copy.target.is_contiguous and source.dtype == target.dtype:
                target.copy_(source, non_blocking=True)
                return
            if not self._on_device:
                with self._module.device(self._device):
                    self._on_device = [
                        torch.empty(self._nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)
                    ]
            part = slice(start, start + segment.bytes.nbytes)
            slab = self._on_device[self._turn]
            slab[part].copy_(self._pinned[self._turn][part], non_blocking=True)
            target.copy_(as_stored(slab, segment, start))

    def end(self) -> None:
        self._sent[self._turn].record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


def as_stored(staging: torch.Tensor, segment: Segment, start: int) -> torch.Tensor:
    """The elements of a segment that lies at byte ``start`` of a buffer, in the order of its copy."""
    source, dtype = segment.copy.source, to_torch(segment.dtype)
    values = staging[start : start + segment.bytes.nbytes].view(dtype)
    return strided_view(values, Strided(0, source.sizes, source.strides))


def landings(budget_bytes: int, concurrency: int, device: torch.device) -> Sequence[Landing]:
    """At most ``concurrency`` landings for tensors on a device, that stage together within the budget."""
    staging = staging_within(budget_bytes, concurrency, on_device=device.type != "cpu")
    if device.type == "cpu":
        return [HostLanding(staging.nbytes) for _ in range(staging.workers)]
    return [DeviceLanding(staging.nbytes, device) for _ in range(staging.workers)]


def memory_of(flat: torch.Tensor) -> memoryview:
    """The bytes of a flat CPU tensor."""
    array: Any = flat.numpy()
    return memoryview(array)
