"""Writes a save in one process, file after file, block after block, and commits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shardwise.conversion.computed import SmallestBlocks, computed_leaves
from shardwise.conversion.expression import Expression
from shardwise.errors import CoverageError
from shardwise.execution.committing import begin_save, commit_save, undo_save
from shardwise.execution.memory import memory_of, trim_heap
from shardwise.execution.reading import Placer
from shardwise.execution.write import Sink, WrittenTensors
from shardwise.models.torch_words import to_torch
from shardwise.planning.save_plan import Saved, SavePlan
from shardwise.report.names import in_bytes
from shardwise.storage.contract import StorageWriter
from shardwise.storage.names import shown
from shardwise.tensors import Box, DType, row_blocks


@dataclass(frozen=True, slots=True)
class Extent:
    """A row-major run of a tensor: it begins at byte ``inside`` of the tensor, and at byte ``start`` of a file."""

    key: str
    dtype: DType
    box: Box
    start: int
    inside: int

    @property
    def stop(self) -> int:
        return self.start + self.box.numel * self.dtype.itemsize


def extents(places: Iterable[tuple[int, Saved]], block_bytes: int) -> Iterator[list[Extent]]:
    """A file's tensors in their order, about ``block_bytes`` at a time.

    ``places`` are the bytes at which tensors begin, with these.
    """
    block: list[Extent] = []
    used = 0
    for start, (key, dtype, shape) in places:
        inside = 0
        for box in row_blocks(shape, max(1, block_bytes // dtype.itemsize)):
            nbytes = box.numel * dtype.itemsize
            if block and used + nbytes > block_bytes:
                yield block
                block, used = [], 0
            block.append(Extent(key, dtype, box, start + inside, inside))
            inside += nbytes
            used += nbytes
    if block:
        yield block


Part = tuple[str, Box]
"""A box of a tensor of the save, by its key."""

BLOCK_BYTES = 8 << 20
"""Of what is written at once. A few times this much is in memory."""

_KEPT_BYTES = 256 << 20
"""Written between two times that free memory is given back: memory that is given back has to be had anew."""


def stream_out(
    writer: StorageWriter,
    plan: SavePlan,
    values: Callable[[Sequence[Part]], Sequence[torch.Tensor]],
    *,
    companions: Mapping[str, bytes],
    check: Callable[[WrittenTensors], None],
    advance: Callable[[int], None],
    block_bytes: int = BLOCK_BYTES,
) -> WrittenTensors:
    """Write all files of a plan, then commit.

    Args:
        writer: to the folder of the save.
        plan: its files.
        values: the boxes asked for, each in the dtype of the plan, contiguous, on the CPU.
        companions: small files that belong to the save.
        check: called when all is written and nothing counts yet; what it raises gives the save up.
        advance: told of bytes as they are handed to the writer.
        block_bytes: of what is asked for, and written, at once.

    What was there before counts until the commit ([Note: One commit]); a save that fails removes what it has
    written.

    Memory: four blocks, and what ``values`` takes.

    Raises:
        StorageError: something could not be written.
    """
    written = WrittenTensors(dict.fromkeys(plan.entries, 0))
    sink = Sink(writer, written.add, bytes_by_file=written.bytes_by_file)
    begun = begin_save(writer, plan)
    try:
        for file in plan.files:
            writer.create(file.name, file.nbytes)
            writer.write(file.name, 0, [memoryview(file.header)])
            places = [(entry.start, (entry.key, entry.dtype, entry.shape)) for entry in file.entries]
            _write_ahead(sink, file.name, places, values, advance, block_bytes)
            writer.sync(file.name)
        check(written)
        commit_save(writer, plan, begun, companions, written.fingerprints)
    except BaseException:
        undo_save(writer, plan, begun)
        raise
    return written


def _write_ahead(
    sink: Sink,
    file: str,
    places: Iterable[tuple[int, Saved]],
    values: Callable[[Sequence[Part]], Sequence[torch.Tensor]],
    advance: Callable[[int], None],
    block_bytes: int,
) -> None:
    """Write tensors to their places in a file, in the order of these; a block is written while the next is made."""
    pending: Future[None] | None = None
    kept = 0
    with ThreadPoolExecutor(1) as pool:
        for block in extents(places, block_bytes):
            tensors = values([(extent.key, extent.box) for extent in block])
            if pending is not None:
                pending.result()
            pending = pool.submit(_write_extents, sink, file, block, tensors)
            nbytes = sum(tensor.nbytes for tensor in tensors)
            advance(nbytes)
            del tensors
            kept += nbytes
            if kept >= _KEPT_BYTES:
                trim_heap()
                kept = 0
        if pending is not None:
            pending.result()


def _write_extents(sink: Sink, file: str, extents: Sequence[Extent], tensors: Sequence[torch.Tensor]) -> None:
    """Put boxes of tensors, which are on the CPU and contiguous, where they belong in a file.

    What lies side by side is one run.
    """
    run: list[tuple[str | None, int, memoryview]] = []
    start = stop = 0
    for extent, tensor in zip(extents, tensors, strict=True):
        if run and extent.start != stop:
            sink.write(file, start, run)
            run = []
        start = start if run else extent.start
        run.append((extent.key, extent.inside, memory_of(tensor.contiguous().view(-1).view(torch.uint8))))
        stop = extent.stop
    if run:
        sink.write(file, start, run)


COMPUTED_BYTES = 512 << 20
"""Of what a conversion that computes may take at once: its inputs and outputs."""


@dataclass
class Outgoing:
    """The tensors of a save, box by box.

    ``made`` has the dtype of each, and what it is made of, by key, in the order of the save; leaves are what
    ``placer`` reads.
    """

    made: Mapping[str, tuple[DType, Expression]]
    placer: Placer

    def tensors(self) -> list[Saved]:
        """Key, dtype and shape of all, in order."""
        return [(key, dtype, expression.shape) for key, (dtype, expression) in self.made.items()]

    def require_bounded(self) -> None:
        """What is computed needs no more than :data:`COMPUTED_BYTES` at once.

        Raises:
            CoverageError: naming a tensor that does.
        """
        blocks = SmallestBlocks()
        for key, (_, expression) in self.made.items():
            for leaf in computed_leaves(expression):
                if (nbytes := blocks.nbytes(leaf)) > COMPUTED_BYTES:
                    raise CoverageError(
                        f"{shown(key)} is made by {leaf.operation.label} of {len(leaf.sources)} tensors, of which "
                        f"{in_bytes(nbytes)} would be needed at once, and {in_bytes(COMPUTED_BYTES)} is the limit; "
                        "do this with transformers, or PEFT, in memory"
                    )

    def values(self, parts: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Boxes of the save's tensors, in the dtype in which they are saved.

        Memory: a few times the boxes.
        """
        made = [(self.made[key], box) for key, box in parts]
        return self.placer.values_of([(expression, box, to_torch(dtype)) for (dtype, expression), box in made])
