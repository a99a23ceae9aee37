"""Reads the requests of a plan and places their bytes in the memory of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from tqdm import tqdm

from shardwise.conversion.computed import (
    Computed,
    ComputeTask,
    Copy,
    OutputMove,
    compute_tasks,
    copies_and_computed,
)
from shardwise.conversion.expression import Expression, stored_leaves
from shardwise.conversion.regions import Region
from shardwise.errors import StorageError
from shardwise.execution.memory import Landing, WorkerPool, computing, memory_of, staging_buffers
from shardwise.execution.world import World
from shardwise.formats.contract import CheckpointIndex
from shardwise.layout import LocalBox
from shardwise.models.torch_api import to_torch
from shardwise.models.view import strided_view
from shardwise.planning import load_memory
from shardwise.storage.contract import ReadPolicy, StorageReader
from shardwise.storage.machine import processor_count
from shardwise.storage.names import shown
from shardwise.tensors import Box, Strided


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """A tensor to fill on this rank: its expression, the boxes that this rank holds, its dtype, and its memory."""

    fqn: str
    expression: Expression
    boxes: tuple[LocalBox, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ReadSchedule:
    """Schedule of reads: every decision that is made before the targets have memory.

    Attributes:
        destinations: segments count them from 0.
        files: those that are read.
        batches: the requests of stored values, by device.
        computed: the blocks that are computed.
    """

    destinations: tuple[ReadTarget, ...]
    files: tuple[str, ...]
    batches: tuple[tuple[torch.device, tuple[load_memory.ReadRequest, ...]], ...]
    computed: tuple[ComputeTask, ...]


def plan_reads(
    destinations: Iterable[ReadTarget],
    index: CheckpointIndex,
    policy: ReadPolicy,
    budget_bytes: int,
    start_at: float = 0.0,
) -> ReadSchedule:
    """Decide how destinations are filled. Pure: reads nothing, and takes no memory for values.

    Args:
        destinations: those without boxes are left out.
        index: of the checkpoint.
        policy: of its storage.
        budget_bytes: for the staging of all workers together.
        start_at: fraction of the requests to start with, so that ranks do not all request the same part of a remote
            storage.
    """
    items = tuple(item for item in destinations if item.boxes)
    leaves = (leaf for item in items for leaf in stored_leaves(item.expression))
    files = sorted({index.entries[leaf.key].file for leaf in leaves})
    computed: list[tuple[int, Computed, Region]] = []
    on_device: dict[torch.device, list[tuple[int, ReadTarget]]] = {}
    for number, item in enumerate(items):
        on_device.setdefault(item.device, []).append((number, item))
    batches: list[tuple[torch.device, tuple[load_memory.ReadRequest, ...]]] = []
    for device, group in on_device.items():
        is_on_host = device.type == "cpu"
        staging_bytes = load_memory.staging_within(
            budget_bytes, policy.concurrency, on_device=not is_on_host
        ).nbytes
        segments: list[tuple[str, load_memory.Segment]] = []
        for number, item in group:
            copied: list[Copy] = []
            for part in item.boxes:
                more, made = copies_and_computed(item.expression, part.box, part.local)
                copied += more
                computed += ((number, found.leaf, found.region) for found in made)
            for copy in copied:
                entry = index.entries[copy.leaf.key]
                needs_staging = not is_on_host or item.dtype != to_torch(copy.leaf.dtype)
                segments += (
                    (entry.file, segment)
                    for segment in load_memory.segments_of(
                        copy, number, entry, needs_staging=needs_staging, policy=policy, block_bytes=staging_bytes
                    )
                )
        requests = load_memory.schedule(
            segments, policy, staging_bytes=staging_bytes, start_at=start_at if policy.is_remote else 0.0
        )
        batches.append((device, tuple(requests)))
    most_bytes = load_memory.ComputingShare.of(budget_bytes, policy.concurrency).most_bytes
    return ReadSchedule(items, tuple(files), tuple(batches), tuple(compute_tasks(computed, most_bytes)))


@dataclass
class ReadExecutor:
    """Carries out copies, and counts the elements written by FQN.

    ``budget_bytes`` bounds the staging of all workers together. ``identities`` are those that the files of a remote
    storage had when their headers were read. ``processors`` are those that this rank has to compute with.
    """

    reader: StorageReader
    index: CheckpointIndex
    budget_bytes: int
    world: World
    identities: Mapping[str, str] = field(default_factory=dict)
    processors: int = field(default_factory=processor_count)
    progress: tqdm | None = None
    written: dict[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    _last: tuple[object, Mapping[str, torch.Tensor]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, arrangement: ReadSchedule, tensors: Sequence[torch.Tensor]) -> None:
        """Fill the tensors (this rank's own), one for each destination. Memory: the budget.

        Raises:
            StorageError: bytes could not be read, or a file was replaced meanwhile.
        """
        before = identities_of(self.reader, arrangement.files, self.world.check)
        self._require_same(self.identities, before)
        self._place(arrangement, tensors, self.budget_bytes)
        self._require_same(before, identities_of(self.reader, arrangement.files, self.world.check))

    def _require_same(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        changed = [file for file, identity in now.items() if before.get(file, identity) != identity]
        if changed:
            raise StorageError(
                f"{', '.join(shown(file) for file in changed[:5])} in {self.reader.root}: replaced or rewritten "
                f"while the checkpoint was being loaded (was {before[changed[0]]}, is {now[changed[0]]}). Load "
                "again when no process writes to it"
            )

    def _place(self, arrangement: ReadSchedule, tensors: Sequence[torch.Tensor], budget_bytes: int) -> None:
        filling = FilledTensors(tensors, [item.fqn for item in arrangement.destinations])
        for device, requests in arrangement.batches:
            self._carry_out(requests, filling, device, budget_bytes)
        self._compute(arrangement.computed, filling, budget_bytes)

    def values(self, expression: Expression, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A box of an expression as a new contiguous CPU tensor."""
        return self.values_of([(expression, box, dtype)])[0]

    def values_of(self, wanted: Sequence[tuple[Expression, Box, torch.dtype]]) -> list[torch.Tensor]:
        """Boxes of expressions as new contiguous CPU tensors, read together."""
        return self._values_within(self.budget_bytes, wanted)

    def _values_within(
        self, budget_bytes: int, wanted: Sequence[tuple[Expression, Box, torch.dtype]]
    ) -> list[torch.Tensor]:
        arrangement, values = self._arranged(budget_bytes, wanted)
        self._place(arrangement, values, budget_bytes)
        return values

    def _arranged(
        self, budget_bytes: int, wanted: Sequence[tuple[Expression, Box, torch.dtype]]
    ) -> tuple[ReadSchedule, list[torch.Tensor]]:
        cpu = torch.device("cpu")
        items = [
            ReadTarget("", expression, (LocalBox(box, Strided.contiguous(box.sizes)),), dtype, cpu)
            for expression, box, dtype in wanted
        ]
        arrangement = plan_reads(
            items, self.index, self.reader.policy, budget_bytes, self.world.rank / self.world.size
        )
        return arrangement, [torch.empty(box.sizes, dtype=dtype, device=cpu) for _, box, dtype in wanted]

    def count(self, fqn: str, numel: int) -> None:
        """Note that elements of a tensor have been written."""
        self.written[fqn] = self.written.get(fqn, 0) + numel

    def _carry_out(
        self,
        requests: Sequence[load_memory.ReadRequest],
        filling: FilledTensors,
        device: torch.device,
        budget_bytes: int,
    ) -> None:
        most_bytes = load_memory.most_staged(requests)
        tools = staging_buffers(budget_bytes, self.reader.policy.concurrency, device, most_bytes)
        try:
            WorkerPool(partial(self._answer, filling), tools, self.world.check).run(requests)
        finally:  # whatever fails, nothing may be on its way to memory that is freed then
            for landing in tools:
                landing.finish()

    def _answer(self, filling: FilledTensors, request: load_memory.ReadRequest, landing: Landing) -> None:
        self._read_request(request, filling, landing)
        with self._lock:
            for segment in request.segments:
                self.count(filling.names[segment.target], segment.copy.numel)
            self.read_bytes += request.bytes.nbytes
            if self.progress is not None:
                self.progress.update(request.bytes.nbytes)

    def _read_request(self, request: load_memory.ReadRequest, filling: FilledTensors, landing: Landing) -> None:
        """Read one range: direct segments into the tensors' memory, the others, and gaps, into staging."""
        staged: list[tuple[load_memory.Segment, int]] = []
        buffers: list[memoryview] = []
        staging: memoryview | None = None
        position, used = request.bytes.start, 0
        for segment in request.segments:
            gap = segment.bytes.start - position
            position = segment.bytes.stop
            if gap or not segment.is_direct:
                staging = landing.begin() if staging is None else staging
            if gap:
                assert staging is not None
                buffers.append(staging[used : used + gap])
                used += load_memory.aligned(gap)
            if segment.is_direct:
                target = segment.copy.target.offset * filling.tensors[segment.target].element_size()
                buffers.append(filling.memory(segment.target)[target : target + segment.bytes.nbytes])
            else:
                assert staging is not None
                buffers.append(staging[used : used + segment.bytes.nbytes])
                staged.append((segment, used))
                used += load_memory.aligned(segment.bytes.nbytes)
        self.reader.read_vectored(request.file, request.bytes.start, buffers)
        for segment, start in staged:
            landing.put(segment, start, filling.tensors[segment.target])
        if staging is not None:
            landing.end()

    # What is computed

    def _compute(self, made: Sequence[ComputeTask], filling: FilledTensors, budget_bytes: int) -> None:
        """Blocks that fit into the budget together are computed by separate workers.

        Larger ones are computed alone and read by all workers.
        """
        policy = self.reader.policy
        share = load_memory.ComputingShare.of(budget_bytes, policy.concurrency)
        small = [item for item in made if item.block.nbytes <= share.most_bytes]
        alone = [item for item in made if item.block.nbytes > share.most_bytes]
        if len(small) > 1:
            tools = staging_buffers(share.staging_bytes, policy.concurrency, torch.device("cpu"))
            tools = tools[: computing(policy, self.processors)]
            WorkerPool(partial(self._make, filling, share.staging_bytes), tools, self.world.check).run(small)
        else:
            alone += small
        for item in alone:
            self.world.check()
            if self._last is None or self._last[0] != item.key:
                self._last = None  # its memory goes before that of the next is taken
                values = self._values_within(share.staging_bytes, _inputs_of(item))
                self._last = item.key, evaluate(item, values)
            move(item.moves, self._last[1], filling)
            self._count_moved(item, filling)

    def _make(self, filling: FilledTensors, budget_bytes: int, item: ComputeTask, landing: Landing) -> None:
        """Compute one item on a worker thread. ``budget_bytes`` bounds the inputs of all workers together."""
        arrangement, values = self._arranged(budget_bytes, _inputs_of(item))
        inner = FilledTensors(values, [""] * len(values))
        for _, requests in arrangement.batches:
            for request in requests:
                self._answer(inner, request, landing)
        inputs_bytes = load_memory.ComputingShare.of(budget_bytes, self.reader.policy.concurrency).staging_bytes
        for made in arrangement.computed:
            self._make(inner, inputs_bytes, made, landing)
        move(item.moves, evaluate(item, values), filling)
        self._count_moved(item, filling)

    def _count_moved(self, item: ComputeTask, filling: FilledTensors) -> None:
        with self._lock:
            for part in item.moves:
                self.count(filling.names[part.target], part.place.numel)


def _inputs_of(item: ComputeTask) -> list[tuple[Expression, Box, torch.dtype]]:
    return [
        (source, box, to_torch(source.dtype)) for source, box in zip(item.inputs, item.block.inputs, strict=True)
    ]


def identities_of(
    reader: StorageReader, files: Sequence[str], check: Callable[[], None] | None = None
) -> dict[str, str]:
    """Return the identity of each file, requested as concurrently as the storage allows.

    ``check`` is called meanwhile.
    """
    found: dict[str, str] = {}

    def identify(file: str, _: None) -> None:
        found[file] = reader.identity(file)

    WorkerPool(identify, [None] * reader.policy.concurrency, check).run(files)
    return found


@dataclass
class FilledTensors:
    """Tensors that are being filled, with their names."""

    tensors: Sequence[torch.Tensor]
    names: Sequence[str]
    _memories: dict[int, memoryview] = field(default_factory=dict)

    def memory(self, target: int) -> memoryview:
        """The bytes of a tensor on the host."""
        if target not in self._memories:
            self._memories[target] = bytes_of(self.tensors[target])
        return self._memories[target]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The CPU memory of a tensor, from its first element to the end of its storage."""
    if tensor.is_contiguous():
        return memory_of(tensor.view(-1).view(torch.uint8))
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    return memory_of(torch.empty(0, dtype=torch.uint8).set_(storage, start, (storage.nbytes() - start,), (1,)))


@torch.no_grad()
def evaluate(item: ComputeTask, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the values of a block in new memory."""
    return item.evaluate(values)


def move(moves: Sequence[OutputMove], outputs: Mapping[str, torch.Tensor], filling: FilledTensors) -> None:
    """Copy the outputs of a block to their places."""
    for part in moves:
        found = strided_view(outputs[part.output].contiguous(), part.source)
        strided_view(filling.tensors[part.target], part.place).copy_(found)
