"""Blocks of an operation that writes to memory it is given: at once where that can be, and right where not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shardwise.conversion import Computed, ComputedBlock, Region, Stored, compute_tasks
from shardwise.execution.reading.filled import FilledTensors, evaluate, evaluate_into_places, move
from shardwise.tensors import Box, DType, Strided

SHAPE = (4, 6)


@dataclass(eq=False)
class Twice:
    """Its input, and the double of it; remembers the memory it was given."""

    label: str = "twice"
    written: list[int] = field(default_factory=list)

    def blocks(self, _wanted: Mapping[str, Sequence[Box]], _most_bytes: int) -> Iterator[ComputedBlock]:
        whole = Box.whole(SHAPE)
        yield ComputedBlock((whole,), {"once": whole, "twice": whole}, 0)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        return {"once": values[0], "twice": 2 * values[0]}

    def evaluate_into(self, block: ComputedBlock, values: Sequence[Any], outputs: Mapping[str, Any]) -> None:
        for name, value in self.evaluate(block, values).items():
            outputs[name].copy_(value)
            self.written.append(outputs[name].untyped_storage().data_ptr())


def regions(*boxes: Box) -> list[Region]:
    return [Region.of(box, Strided.contiguous(box.sizes)) for box in boxes]


WHOLE, ROWS = Box.whole(SHAPE), Box((1, 0), (2, 6))


@pytest.mark.parametrize(
    ("parts", "dtypes", "straight"),
    [
        ([("once", WHOLE), ("twice", WHOLE)], ["bfloat16", "float16"], [True, True]),
        ([("once", WHOLE), ("twice", ROWS)], ["bfloat16", "bfloat16"], [True, False]),
        ([("once", WHOLE), ("twice", ROWS), ("twice", WHOLE)], ["float32"] * 3, [True, False, False]),
        ([("once", WHOLE), ("twice", ROWS), ("twice", WHOLE)], ["float32", "float32", "bfloat16"], None),
        ([("once", WHOLE)], ["bfloat16"], None),
    ],
)
def test_what_goes_straight(parts, dtypes, straight):
    operation = Twice()
    source = Stored("w", SHAPE, DType.F32)
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    leaves = [
        (number, Computed(operation, output, SHAPE, DType.F32, (source,)), region)
        for number, ((output, _), region) in enumerate(zip(parts, regions(*(box for _, box in parts)), strict=True))
    ]
    (task,) = compute_tasks(leaves, 1 << 20)
    tensors = [
        torch.zeros(box.sizes, dtype=getattr(torch, dtype)) for (_, box), dtype in zip(parts, dtypes, strict=True)
    ]
    filling = FilledTensors(tensors, [""] * len(tensors))
    assert evaluate_into_places(task, [values], filling) is (straight is not None)
    if straight is None:
        assert operation.written == []
        move(task.moves, evaluate(task, [values]), filling)
    else:
        assert [tensor.untyped_storage().data_ptr() in operation.written for tensor in tensors] == straight
    for tensor, (output, box) in zip(tensors, parts, strict=True):
        rows = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
        assert torch.equal(tensor, ((1 if output == "once" else 2) * values)[rows].to(tensor.dtype))
