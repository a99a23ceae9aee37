"""Tensors that are being filled, their bytes, and blocks that are computed to their places in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.conversion import ComputeTask, OutputMove, PlacingOperation
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


@torch.no_grad()
def evaluate(item: ComputeTask, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """What a block gives, in memory of its own."""
    return item.evaluate(values)


def move(moves: Sequence[OutputMove], outputs: Mapping[str, torch.Tensor], filling: FilledTensors) -> None:
    """Copy what a block has given to its places."""
    for part in moves:
        filling.touch(part.target, part.place)
        found = strided_view(outputs[part.output].contiguous(), part.source)
        strided_view(filling.tensors[part.target], part.place).copy_(found)


@torch.no_grad()
def evaluate_into_places(item: ComputeTask, values: Sequence[torch.Tensor], filling: FilledTensors) -> bool:
    """Have a block written by its operation; False where that cannot do it, or gives more than is wanted.

    An output of which all goes to one place in host memory is written there, any other to memory of its own in the
    dtype of its targets first.
    """
    operation, block = item.operation, item.block
    by_output: dict[str, list[OutputMove]] = {}
    for part in item.moves:
        by_output.setdefault(part.output, []).append(part)
    if not isinstance(operation, PlacingOperation) or by_output.keys() != block.gives.keys():
        return False
    dtypes = {name: {filling.tensors[part.target].dtype for part in moves} for name, moves in by_output.items()}
    if any(len(found) > 1 for found in dtypes.values()):
        return False
    outputs: dict[str, torch.Tensor] = {}
    beside: list[OutputMove] = []
    for name, moves in by_output.items():
        box = block.gives[name]
        place = moves[0].place_of_all(box) if len(moves) == 1 else None
        straight = None if place is None else filling.on_host(moves[0].target, place)
        if straight is None:
            straight = torch.empty(box.sizes, dtype=dtypes[name].pop(), device="cpu")
            beside += moves
        outputs[name] = straight
    item.evaluate_into(values, outputs)
    move(beside, outputs, filling)
    return True
