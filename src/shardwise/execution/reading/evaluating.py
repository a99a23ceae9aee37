"""Evaluates blocks of what is computed, to the places that their values have in the tensors that are filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwise.conversion import ComputeTask, OutputMove, PlacingOperation
from shardwise.execution.reading.filled import FilledTensors
from shardwise.models.view import strided_view


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
    operation.evaluate_into(block, values, outputs)
    move(beside, outputs, filling)
    return True
