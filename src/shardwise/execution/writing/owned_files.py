"""Writes files of one owner each, from beginning to end, with what all ranks give."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from shardwise.conversion import Expression
from shardwise.errors import ConfigError
from shardwise.execution.memory.copy_in import memory_of
from shardwise.execution.ranks.progress import Progress
from shardwise.execution.ranks.world import World
from shardwise.execution.states.assemble import assemble
from shardwise.execution.states.given_parts import Giver
from shardwise.execution.writing.sink import Sink, WrittenTensors
from shardwise.formats.safetensors_header import NewFile
from shardwise.models.torch_words import to_torch
from shardwise.planning.moves.assembly import Boxes, plan_assembly
from shardwise.planning.moves.parcels import ALIGNMENT_BYTES, Round, staged
from shardwise.planning.saves.save_plan import choose_owners, wanted_by_owners
from shardwise.storage.contract import StorageWriter
from shardwise.tensors import Box, contiguous_strides

_BUCKETS = 4
"""Sent, received, put together, and a copy of that on the host where it is put together on an accelerator."""


def write_by_owners(
    world: World,
    writer: StorageWriter,
    files: Sequence[NewFile],
    expressions: Mapping[str, Expression],
    giver: Giver,
    shares: Mapping[str, Sequence[Boxes]],
    *,
    budget_bytes: int,
    device: torch.device,
    progress: Progress,
) -> WrittenTensors:
    """Create, write and sync every file, each by one rank that gets what the others hold of it.

    For storages that take a file from one writer only. A file is written without a gap, its header first, and is
    complete when it has been synced. Files of different ranks are written side by side.

    Args:
        world: the ranks.
        writer: this rank's own, of the same folder on every rank.
        files: as laid out; the same on every rank. None of them is there yet.
        expressions: by key, over the model's tensors.
        giver: this rank's shares.
        shares: those of all ranks, by name of the model's tensors.
        budget_bytes: of memory that a rank may use.
        device: where buffers lie that are sent: of the kind that the process group's backend moves.
        progress: told of the bytes that this rank writes.

    Collective: yes.
    Memory: ``budget_bytes``.

    Raises:
        ConfigError: the budget is too small for so many ranks.
        StorageError: bytes could not be written; files may have been left in part.
        CheckpointError: (or a subclass) what befell one rank.

    Every error is the same on every rank.
    """
    bucket_bytes = budget_bytes // _BUCKETS - 2 * ALIGNMENT_BYTES * world.size
    if bucket_bytes < ALIGNMENT_BYTES:
        needed = _BUCKETS * ALIGNMENT_BYTES * (2 * world.size + 1)
        raise ConfigError(f"budget_bytes={budget_bytes} is too little for {world.size} ranks: {needed} at least")
    owners = choose_owners(files, world.size)
    streams = wanted_by_owners(files, owners, expressions, world.size)
    rounds = world.together(lambda: plan_assembly(streams, shares, world.size, bucket_bytes))
    own = [file for file, owner in zip(files, owners, strict=True) if owner == world.rank]
    dtypes = {entry.key: to_torch(entry.dtype) for file in files for entry in file.entries}
    memory = _RoundMemory(rounds, world.rank, dtypes, device)
    out = _OwnFiles(world, writer, own, progress)
    arrivals = assemble(world, rounds, giver, memory.room, dtypes, device)
    with contextlib.closing(arrivals):
        for items in arrivals:
            world.together(partial(out.write, memory.filled(items)))
    world.together(out.finish)
    return out.written


class _RoundMemory:
    """The memory in which this rank's boxes of a round are put together."""

    def __init__(
        self, rounds: Sequence[Round], rank: int, dtypes: Mapping[str, torch.dtype], device: torch.device
    ) -> None:
        self._rank = rank
        self._dtypes = dtypes
        largest = max(
            (sum(staged(self._nbytes(*block)) for block in self._own(items)) for items in rounds), default=0
        )
        self._memory = torch.empty(largest, dtype=torch.uint8, device=device)
        self._starts: dict[tuple[str, Box], int] = {}
        self._used = 0

    def room(self, key: str, box: Box) -> torch.Tensor:
        if (key, box) not in self._starts:
            self._starts[key, box] = self._used
            self._used += staged(self._nbytes(key, box))
        start = self._starts[key, box]
        return self._memory[start : start + self._nbytes(key, box)].view(self._dtypes[key])

    def filled(self, items: Round) -> list[tuple[str, Box, memoryview]]:
        """This rank's boxes of a complete round with their bytes. The memory is used again for the next."""
        host = memory_of(self._memory[: self._used].cpu())
        found = [
            (key, box, host[self._starts[key, box] :][: self._nbytes(key, box)]) for key, box in self._own(items)
        ]
        self._starts, self._used = {}, 0
        return found

    def _nbytes(self, key: str, box: Box) -> int:
        return box.numel * self._dtypes[key].itemsize

    def _own(self, items: Round) -> list[tuple[str, Box]]:
        own = (parcel for parcel in items.parcels if parcel.targets == (self._rank,))
        return list(dict.fromkeys((parcel.tensor, parcel.box) for parcel in own))


class _OwnFiles:
    """Writes this rank's files, one after the other."""

    def __init__(self, world: World, writer: StorageWriter, files: Sequence[NewFile], progress: Progress) -> None:
        self.written = WrittenTensors()
        self._sink = Sink(writer, self.written.add, check=world.check, bytes_by_file=self.written.bytes_by_file)
        self._writer = writer
        self._waiting = list(reversed(files))
        self._entries = {entry.key: entry for file in files for entry in file.entries}
        self._file: NewFile | None = None
        self._progress = progress

    def write(self, blocks: Sequence[tuple[str, Box, memoryview]]) -> None:
        """Boxes of tensors, which follow what has been written."""
        step = self._writer.policy.request_bytes
        for key, box, data in blocks:
            entry = self._entries[key]
            while self._file is None or self._file.name != entry.file:
                self._turn_to_next()
            strides = contiguous_strides(entry.shape)
            inside = entry.dtype.itemsize * sum(map(operator.mul, box.offsets, strides))
            for first in range(0, len(data), step):
                part = data[first : first + step]
                self._sink.write(entry.file, entry.start + inside + first, [(key, inside + first, part)])
                self._progress.advance(len(part))

    def finish(self) -> None:
        """Complete the last file, and those that hold no elements."""
        while self._waiting:
            self._turn_to_next()
        self._complete()

    def _turn_to_next(self) -> None:
        self._complete()
        self._file = file = self._waiting.pop()
        self._writer.create(file.name, file.nbytes)
        self._writer.write(file.name, 0, [memoryview(file.header)])

    def _complete(self) -> None:
        if self._file is not None:
            self._writer.sync(self._file.name)
            self._file = None
