"""Blocks that are computed alone are kept for the next request only."""

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from shardwise.conversion.computed import Computed, FullOperation
from shardwise.conversion.expression import Expression, Stored
from shardwise.engines.offline import create_executor
from shardwise.execution.reading import ReadTarget, plan_reads
from shardwise.formats.opening import open_checkpoint
from shardwise.layout import LocalBox
from shardwise.storage.reading import LocalReader
from shardwise.tensors import Box, DType, Strided

SHAPE = (1024,)


class Doublings:
    """Makes nodes that double a tensor, and counts the blocks in memory before each computation."""

    def __init__(self) -> None:
        self.blocks: list[weakref.ref[torch.Tensor]] = []
        self.before: list[int] = []

    @property
    def in_memory(self) -> int:
        return sum(block() is not None for block in self.blocks)

    def of(self, source: Expression) -> Computed:
        operation = FullOperation("doubled", (SHAPE,), {"out": SHAPE}, self._double, 1 << 40)
        return Computed(operation, "out", SHAPE, DType.F32, (source,))

    def _double(self, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        self.before.append(self.in_memory)
        found = 2 * values[0]
        self.blocks.append(weakref.ref(found))
        return {"out": found}


def test_a_block_is_freed_once_no_request_follows_that_needs_it(tmp_path: Path) -> None:
    save_file({"a": torch.ones(SHAPE)}, tmp_path / "model.safetensors")
    stored, doublings, whole = Stored("a", SHAPE, DType.F32), Doublings(), Box.whole(SHAPE)
    four = doublings.of(doublings.of(stored))
    with LocalReader(tmp_path) as reader:
        executor = create_executor(reader, open_checkpoint(reader))
        assert executor.values(four, whole, torch.float32).tolist() == [4.0] * 1024
        assert doublings.before == [0, 0], "the inner block is freed before the outer one is computed"
        assert executor.values(four, Box((5,), (2,)), torch.float32).tolist() == [4.0] * 2
        assert len(doublings.before) == 2, "the next part of a block needs no new computation"
        executor.values(stored, whole, torch.float32)
        assert doublings.in_memory == 0
        part = LocalBox(whole, Strided.contiguous(SHAPE))
        target = ReadTarget("x", four, (part,), torch.float32, torch.device("cpu"))
        executor.place(plan_reads([target], executor.index, reader.policy, 1 << 20), [torch.empty(SHAPE)])
        assert doublings.in_memory == 0
