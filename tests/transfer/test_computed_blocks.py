"""Computed blocks: in memory for the next request only, and one inside of another."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file

from shardwise.core.computed import Computed, ComputedBlock, FullOperation, split_aligned
from shardwise.core.expression import Expression, Stored
from shardwise.core.layout import LocalBox
from shardwise.core.tensors import Box, DType, Strided
from shardwise.files.local_reader import LocalReader
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.ranks.world import World
from shardwise.saving.merge_steps import create_executor
from shardwise.transfer.read import ReadExecutor, ReadItem, plan_reads

SHAPE = (1024,)


class Doubled(FullOperation):
    """Doubles a tensor. Counts the blocks in memory before each computation, by any of these operations."""

    made: ClassVar[list[weakref.ref[torch.Tensor]]] = []
    before: ClassVar[list[int]] = []

    @classmethod
    def in_memory(cls) -> int:
        return sum(block() is not None for block in cls.made)

    def evaluate(self, block: ComputedBlock, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        self.before.append(self.in_memory())
        found = 2 * values[0]
        self.made.append(weakref.ref(found))
        return {"out": found}


def double(source: Expression) -> Computed:
    return Computed(Doubled("doubled", (SHAPE,), {"out": SHAPE}, 1 << 40), "out", SHAPE, DType.F32, (source,))


def test_a_block_is_freed_once_no_request_follows_that_needs_it(tmp_path: Path) -> None:
    save_file({"a": torch.ones(SHAPE)}, tmp_path / "model.safetensors")
    stored, whole = Stored("a", SHAPE, DType.F32), Box.whole(SHAPE)
    four = double(double(stored))
    with LocalReader(tmp_path) as reader:
        executor = create_executor(reader, open_checkpoint(reader))
        assert executor.read_values([(four, whole, torch.float32)])[0].tolist() == [4.0] * 1024
        assert Doubled.before == [0, 0], "the inner block is freed before the outer one is computed"
        assert executor.read_values([(four, Box((5,), (2,)), torch.float32)])[0].tolist() == [4.0] * 2
        assert len(Doubled.before) == 2, "the next part of a block needs no new computation"
        executor.read_values([(stored, whole, torch.float32)])
        assert Doubled.in_memory() == 0
        part = LocalBox(whole, Strided.contiguous(SHAPE))
        target = ReadItem("x", four, (part,), torch.float32, torch.device("cpu"))
        executor.read_into(plan_reads([target], executor.index, reader.policy, 1 << 20), [torch.empty(SHAPE)])
        assert Doubled.in_memory() == 0


@dataclass(frozen=True)
class Plus:
    """Adds a number, in blocks of columns or of elements."""

    addend: int
    step: tuple[int, int]
    label: str = "plus"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        for box in split_aligned(requested["out"], (1000, 512), self.step, max_block_bytes // 8):
            yield ComputedBlock((box,), {"out": box}, 8 * box.numel)

    def evaluate(self, _block: ComputedBlock, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"out": values[0] + self.addend}


def test_the_inputs_of_a_block_within_a_block_fit_into_the_buffer_of_its_worker(tmp_path: Path) -> None:
    """Of 1,800,000 bytes 3 workers stage 299,968 each. For half of the budget there is 1 worker, with 449,984."""
    stored = torch.arange(512_000.0).view(1000, 512)
    save_file({"a": stored}, tmp_path / "model.safetensors")
    whole = Box.whole((1000, 512))
    inner = Computed(Plus(1, (1, 1)), "out", (1000, 512), DType.F32, (Stored("a", (1000, 512), DType.F32),))
    outer = Computed(Plus(2, (1000, 1)), "out", (1000, 512), DType.F32, (inner,))
    part = LocalBox(whole, Strided.contiguous(whole.sizes))
    item = ReadItem("x", outer, (part,), torch.float32, torch.device("cpu"))
    with LocalReader(tmp_path) as reader:
        executor = ReadExecutor(reader, open_checkpoint(reader), 1_800_000, World(0, 1))
        loaded = torch.empty(1000, 512)
        executor.read_into(plan_reads([item], executor.index, reader.policy, executor.budget_bytes), [loaded])
    assert torch.equal(loaded, stored + 3)
