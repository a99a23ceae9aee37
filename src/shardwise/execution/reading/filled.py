"""Tensors that are being filled, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwise.execution.memory.copy_in import memory_of
from shardwise.execution.memory.host_memory import HostMemory
from shardwise.models.view import strided_view
from shardwise.tensors import Strided


@dataclass
class FilledTensors:
    """Tensors that are being filled, with their names; ``fresh`` is memory that some lie in, not touched yet."""

    tensors: Sequence[torch.Tensor]
    names: Sequence[str]
    fresh: HostMemory = field(default_factory=lambda: HostMemory([]))
    _memories: dict[int, memoryview] = field(default_factory=dict)

    def memory(self, target: int) -> memoryview:
        """The bytes of a tensor on the host."""
        if target not in self._memories:
            self._memories[target] = bytes_of(self.tensors[target])
        return self._memories[target]

    def touch(self, target: int, place: Strided) -> None:
        """What lies there is about to be written."""
        if self.tensors[target].device.type == "cpu":
            self.fresh.touch(*_span(self.tensors[target], place))

    def on_host(self, target: int, place: Strided) -> torch.Tensor | None:
        """What lies there, to be written; None on an accelerator."""
        tensor = self.tensors[target]
        if tensor.device.type != "cpu":
            return None
        self.touch(target, place)
        return strided_view(tensor, place)


def _span(tensor: torch.Tensor, place: Strided) -> tuple[int, int]:
    """The address of a place in a tensor, and the bytes from its first element to its last."""
    itemsize = tensor.element_size()
    return tensor.data_ptr() + place.offset * itemsize, (place.stop - place.offset) * itemsize


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The CPU memory of a tensor, from its first element to the end of its storage."""
    if tensor.is_contiguous():
        return memory_of(tensor.view(-1).view(torch.uint8))
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    return memory_of(torch.empty(0, dtype=torch.uint8).set_(storage, start, (storage.nbytes() - start,), (1,)))
