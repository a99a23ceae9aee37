"""Bytes from a storage into the memory of tensors: the copies of a plan, carried out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.conversion import Copy, Expression, Opaque, Stored, copies
from shardwise.execution.progress import Progress
from shardwise.formats import CheckpointIndex
from shardwise.layout import LocalBox
from shardwise.models.dtypes import to_torch
from shardwise.models.view import strided_view
from shardwise.storage import StorageReader
from shardwise.tensors import Box, Strided

_BLOCK_BYTES = 16 << 20
"""Staging for one strided or casting copy. Large enough for sequential reads, small enough for the cache."""

_READ_BYTES = 64 << 20
"""A direct read is told to the progress bar in parts of this size."""

_GAP_BYTES = 4096
"""Gaps up to this size are read over: storages read whole pages anyway."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A tensor to fill on this rank: its own tensor, the boxes it holds, and what they are made of."""

    fqn: str
    expression: Expression
    local: torch.Tensor
    boxes: tuple[LocalBox, ...]


@dataclass
class Placer:
    """Carries out copies one after the other, and counts the elements written by FQN."""

    reader: StorageReader
    index: CheckpointIndex
    budget_bytes: int
    progress: Progress
    written: dict[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    _staging: torch.Tensor | None = None

    def place(self, destinations: Iterable[Destination]) -> None:
        """Fill every destination. Memory: one staging block; for opaque leaves their inputs and outputs."""
        computed: dict[int, tuple[Opaque, list[Destination]]] = {}
        for item in destinations:
            if isinstance(item.expression, Opaque):
                computed.setdefault(id(item.expression.operation), (item.expression, []))[1].append(item)
            else:
                self._place(item, {})
        for leaf, items in computed.values():
            if any(item.boxes for item in items):
                outputs = self._evaluate(leaf)
                for item in items:
                    self._place(item, outputs)

    def values(self, expression: Expression, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A box of an expression as a new contiguous CPU tensor."""
        local = torch.empty(box.sizes, dtype=dtype)
        outputs = self._evaluate(expression) if isinstance(expression, Opaque) else {}
        self._place(Destination("", expression, local, (LocalBox(box, Strided.contiguous(box.sizes)),)), outputs)
        return local

    def _place(self, item: Destination, outputs: Mapping[str, torch.Tensor]) -> None:
        count = 0
        for part in item.boxes:
            for copy in copies(item.expression, part.box, part.local):
                if isinstance(copy.leaf, Opaque):
                    whole = outputs[copy.leaf.output].contiguous()
                    strided_view(item.local, copy.target).copy_(strided_view(whole, copy.source))
                else:
                    self._copy_stored(copy.leaf, copy, item.local)
                count += copy.numel
        self.written[item.fqn] = self.written.get(item.fqn, 0) + count

    def _copy_stored(self, leaf: Stored, copy: Copy, local: torch.Tensor) -> None:
        direct = (
            local.device.type == "cpu"
            and local.dtype == to_torch(leaf.dtype)
            and copy.source.is_contiguous
            and copy.target.is_contiguous
        )
        if direct:
            memory = _bytes_of(local)
            start = copy.target.offset * local.element_size()
            self._read(leaf, copy.source.offset, memory[start : start + copy.numel * local.element_size()])
            return
        itemsize = leaf.dtype.itemsize
        for block in copy.blocks(max(1, min(self.budget_bytes, _BLOCK_BYTES) // itemsize)):
            strided_view(local, block.target).copy_(self._stage(leaf, block.source))

    def _stage(self, leaf: Stored, source: Strided) -> torch.Tensor:
        """The elements of one block, as a view of the staging buffer with the block's sizes."""
        itemsize = leaf.dtype.itemsize
        span = source.stop - source.offset
        staging = self._staging_bytes(span * itemsize)
        values = staging.view(to_torch(leaf.dtype))
        run, outer_sizes, outer_strides = _runs(source)
        gap = (outer_strides[-1] - run) * itemsize if outer_strides else 0
        if gap <= _GAP_BYTES:
            self._read(leaf, source.offset, _memory(staging))
            return torch.as_strided(values, source.sizes, source.strides)
        memory = _memory(staging)
        width = run * itemsize
        for number, offset in enumerate(_offsets(source.offset, outer_sizes, outer_strides)):
            self._read(leaf, offset, memory[number * width : (number + 1) * width])
        return values[: source.numel].view(source.sizes)

    def _read(self, leaf: Stored, first: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the stored bytes from element ``first`` of a leaf on."""
        entry = self.index.entries[leaf.key]
        start = entry.start + first * leaf.dtype.itemsize
        for done in range(0, len(buffer), _READ_BYTES):
            part = buffer[done : done + _READ_BYTES]
            self.reader.read_into(entry.file, start + done, part)
            self.read_bytes += len(part)
            self.progress.advance(len(part))

    def _evaluate(self, leaf: Opaque) -> Mapping[str, Any]:
        inputs: list[torch.Tensor] = []
        for stored in leaf.inputs:
            whole = torch.empty(stored.shape, dtype=to_torch(stored.dtype))
            if whole.numel():
                self._read(stored, 0, _bytes_of(whole))
            inputs.append(whole)
        return leaf.operation(inputs)

    def _staging_bytes(self, nbytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8)
        return self._staging[:nbytes]


def opaque_bytes(leaf: Opaque) -> int:
    """Bytes of an opaque leaf's inputs as stored; evaluating it needs about twice as much."""
    return sum(_nbytes(stored) for stored in leaf.inputs)


def _nbytes(stored: Stored) -> int:
    return Strided.contiguous(stored.shape).numel * stored.dtype.itemsize


def _runs(source: Strided) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """(elements of each contiguous run, sizes and strides of what repeats it). Axes are sorted, widest first."""
    if source.sizes and source.strides[-1] == 1:
        return source.sizes[-1], source.sizes[:-1], source.strides[:-1]
    return 1, source.sizes, source.strides


def _offsets(first: int, sizes: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    if not sizes:
        yield first
        return
    for index in range(sizes[0]):
        yield from _offsets(first + index * strides[0], sizes[1:], strides[1:])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The CPU memory of a tensor, from its first element to the end of its storage."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, start, (storage.nbytes() - start,), (1,))
    return _memory(flat)


def _memory(flat: torch.Tensor) -> memoryview:
    array: Any = flat.numpy()
    return memoryview(array)
