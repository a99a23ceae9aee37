"""Bytes from a storage into the memory of tensors: the copies of a plan, carried out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.conversion import Copy, Expression, Opaque, Stored, copies, stored_dtype, stored_leaves
from shardwise.errors import StorageError
from shardwise.execution.host_memory import HostMemory
from shardwise.execution.landing import Landing, as_stored, landings, memory_of
from shardwise.execution.progress import Progress
from shardwise.execution.workers import Workers
from shardwise.execution.world import World
from shardwise.formats import CheckpointIndex
from shardwise.layout import LocalBox
from shardwise.models.dtypes import to_torch
from shardwise.models.view import strided_view
from shardwise.planning.schedule import ReadRequest, Segment, aligned, schedule, segments_of
from shardwise.planning.staging import staging_within
from shardwise.storage import PageCache, ReadPolicy, StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import Box, Strided, numel


@dataclass(frozen=True, slots=True)
class Destination:
    """A tensor to fill on this rank: what it is made of, the boxes it holds, its dtype, and where it is to be."""

    fqn: str
    expression: Expression
    boxes: tuple[LocalBox, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How destinations are filled: all that is decided before they have memory.

    Attributes:
        destinations: segments count them from 0.
        files: those that are read.
        batches: the requests of stored values, by device.
        computed: what conversions make, each with the numbers of the destinations that it fills.
    """

    destinations: tuple[Destination, ...]
    files: tuple[str, ...]
    batches: tuple[tuple[torch.device, tuple[ReadRequest, ...]], ...]
    computed: tuple[tuple[Opaque, tuple[int, ...]], ...]


def arrange(
    destinations: Iterable[Destination],
    index: CheckpointIndex,
    policy: ReadPolicy,
    budget_bytes: int,
    start_at: float = 0.0,
) -> Arrangement:
    """Decide how destinations are filled. Pure: reads nothing, and takes no memory for values.

    Args:
        destinations: those without boxes are left out.
        index: of the checkpoint.
        policy: of its storage.
        budget_bytes: for the staging of all workers together.
        start_at: with which fraction of the requests to begin, where all ranks ask the same remote storage.
    """
    items = tuple(item for item in destinations if item.boxes)
    leaves = (leaf for item in items for leaf in stored_leaves(item.expression))
    files = sorted({index.entries[leaf.key].file for leaf in leaves})
    computed: dict[int, tuple[Opaque, list[int]]] = {}
    on_device: dict[torch.device, list[tuple[int, Destination]]] = {}
    for number, item in enumerate(items):
        if isinstance(item.expression, Opaque):
            computed.setdefault(id(item.expression.operation), (item.expression, []))[1].append(number)
        else:
            on_device.setdefault(item.device, []).append((number, item))
    batches: list[tuple[torch.device, tuple[ReadRequest, ...]]] = []
    for device, group in on_device.items():
        is_on_host = device.type == "cpu"
        staging_bytes = staging_within(budget_bytes, policy.concurrency, on_device=not is_on_host).nbytes
        segments: list[tuple[str, Segment]] = []
        for number, item in group:
            for copy in _copies(item):
                assert isinstance(copy.leaf, Stored)
                entry = index.entries[copy.leaf.key]
                needs_staging = not is_on_host or item.dtype != to_torch(copy.leaf.dtype)
                segments += (
                    (entry.file, segment)
                    for segment in segments_of(
                        copy, number, entry, needs_staging=needs_staging, policy=policy, block_bytes=staging_bytes
                    )
                )
        requests = schedule(
            segments, policy, staging_bytes=staging_bytes, start_at=start_at if policy.is_remote else 0.0
        )
        batches.append((device, tuple(requests)))
    made = tuple((leaf, tuple(numbers)) for leaf, numbers in computed.values())
    return Arrangement(items, tuple(files), tuple(batches), made)


@dataclass
class Placer:
    """Carries out copies, and counts the elements written by FQN.

    ``budget_bytes`` bounds the staging of all workers together. ``identities`` are those that the files of a remote
    storage had when their headers were read.
    """

    reader: StorageReader
    index: CheckpointIndex
    budget_bytes: int
    progress: Progress
    world: World
    identities: Mapping[str, str] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def place(
        self, arrangement: Arrangement, tensors: Sequence[torch.Tensor], fresh: HostMemory | None = None
    ) -> None:
        """Fill the tensors (this rank's own), one for each destination. Memory: the budget.

        Of ``fresh`` memory that they lie in, what is about to be written is touched first.

        Raises:
            StorageError: bytes could not be read, or a file was replaced meanwhile.
        """
        before = identities_of(self.reader, arrangement.files, self.world.check)
        self._require_same(self.identities, before)
        self._place(arrangement, tensors, fresh or HostMemory([]))
        self._require_same(before, identities_of(self.reader, arrangement.files, self.world.check))

    def _require_same(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        changed = [file for file, identity in now.items() if before.get(file, identity) != identity]
        if changed:
            raise StorageError(
                f"{', '.join(shown(file) for file in changed[:5])} in {self.reader.root}: replaced or rewritten "
                f"while the checkpoint was being loaded (was {before[changed[0]]}, is {now[changed[0]]}); load "
                "again once nobody writes to it"
            )

    def _place(self, arrangement: Arrangement, tensors: Sequence[torch.Tensor], fresh: HostMemory) -> None:
        names = [item.fqn for item in arrangement.destinations]
        for device, requests in arrangement.batches:
            self._carry_out(requests, tensors, names, device, fresh)
        for leaf, numbers in arrangement.computed:
            outputs = self._evaluate(leaf)
            for number in numbers:
                self._place_computed(outputs, arrangement.destinations[number], tensors[number])

    def values(self, expression: Expression, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A box of an expression as a new contiguous CPU tensor."""
        return self.values_of([(expression, box, dtype)])[0]

    def values_of(self, wanted: Sequence[tuple[Expression, Box, torch.dtype]]) -> list[torch.Tensor]:
        """Boxes of expressions as new contiguous CPU tensors, read together."""
        cpu = torch.device("cpu")
        items = [
            Destination("", expression, (LocalBox(box, Strided.contiguous(box.sizes)),), dtype, cpu)
            for expression, box, dtype in wanted
        ]
        arrangement = arrange(items, self.index, self.reader.policy, self.budget_bytes, self.world.place)
        values = [torch.empty(box.sizes, dtype=dtype, device=cpu) for _, box, dtype in wanted]
        self._place(arrangement, values, HostMemory([]))
        return values

    def count(self, fqn: str, numel: int) -> None:
        """Note that elements of a tensor have been written."""
        self.written[fqn] = self.written.get(fqn, 0) + numel

    def _carry_out(
        self,
        requests: Sequence[ReadRequest],
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        device: torch.device,
        fresh: HostMemory,
    ) -> None:
        tools = landings(self.budget_bytes, self.reader.policy.concurrency, device)
        memories: dict[int, memoryview] = {}

        def memory(target: int) -> memoryview:
            if target not in memories:
                memories[target] = bytes_of(tensors[target])
            return memories[target]

        def carry_out(request: ReadRequest, landing: Landing) -> None:
            if device.type == "cpu":
                for segment in request.segments:
                    fresh.touch(*_span(tensors[segment.target], segment.copy.target))
            if not self._copy_from_cache(request, tensors):
                self._read_request(request, tensors, memory, landing)
            with self._lock:
                for segment in request.segments:
                    self.count(names[segment.target], segment.copy.numel)
                self.read_bytes += request.bytes.nbytes
                self.progress.advance(request.bytes.nbytes)

        try:
            Workers(carry_out, tools, self.world.check).run(requests)
        finally:  # whatever fails, nothing may be on its way to memory that is freed then
            for landing in tools:
                landing.finish()

    def _read_request(
        self,
        request: ReadRequest,
        tensors: Sequence[torch.Tensor],
        memory: Callable[[int], memoryview],
        landing: Landing,
    ) -> None:
        """Read one range: direct segments into the tensors' memory, the others, and gaps, into staging."""
        staged: list[tuple[Segment, int]] = []
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
                used += aligned(gap)
            if segment.is_direct:
                target = segment.copy.target.offset * tensors[segment.target].element_size()
                buffers.append(memory(segment.target)[target : target + segment.bytes.nbytes])
            else:
                assert staging is not None
                buffers.append(staging[used : used + segment.bytes.nbytes])
                staged.append((segment, used))
                used += aligned(segment.bytes.nbytes)
        self.reader.read_vectored(request.file, request.bytes.start, buffers)
        for segment, start in staged:
            landing.put(segment, start, tensors[segment.target])
        if staging is not None:
            landing.end()

    def _copy_from_cache(self, request: ReadRequest, tensors: Sequence[torch.Tensor]) -> bool:
        """What would be staged straight from the system's page cache, where it has it; False where it has not.

        A read through staging moves every byte twice; a strided one the unwanted ones too.
        """
        if not isinstance(self.reader, PageCache):
            return False
        if any(item.is_direct for item in request.segments):
            return False
        if any(tensors[item.target].device.type != "cpu" for item in request.segments):
            return False
        cached = self.reader.cached(request.file, request.bytes.start, request.bytes.stop)
        if cached is None:
            return False
        for segment in request.segments:
            first = segment.bytes.start - request.bytes.start
            if (request.bytes.start + first) % segment.dtype.itemsize:
                return False  # an unaligned view is no tensor
            stored = torch.frombuffer(cached, dtype=torch.uint8, count=segment.bytes.nbytes, offset=first)
            strided_view(tensors[segment.target], segment.copy.target).copy_(as_stored(stored, segment, 0))
        return True

    # Conversions that compute

    def _place_computed(self, outputs: Mapping[str, torch.Tensor], item: Destination, tensor: torch.Tensor) -> None:
        for copy in _copies(item):
            assert isinstance(copy.leaf, Opaque)
            whole = outputs[copy.leaf.output].contiguous()
            strided_view(tensor, copy.target).copy_(strided_view(whole, copy.source))
            self.count(item.fqn, copy.numel)

    def _evaluate(self, leaf: Opaque) -> Mapping[str, Any]:
        """The conversion's outputs, from its inputs whole."""
        wanted = [(source, Box.whole(source.shape), to_torch(stored_dtype(source))) for source in leaf.inputs]
        inputs = self.values_of(wanted)
        return leaf.operation(inputs)


def identities_of(reader: StorageReader, files: Sequence[str], check: Callable[[], None]) -> dict[str, str]:
    """The identity of each file, as many asked for at once as the storage allows. ``check`` is called meanwhile."""
    found: dict[str, str] = {}

    def identify(file: str, _: None) -> None:
        found[file] = reader.identity(file)

    Workers(identify, [None] * reader.policy.concurrency, check).run(files)
    return found


def _copies(item: Destination) -> list[Copy]:
    return [copy for part in item.boxes for copy in copies(item.expression, part.box, part.local)]


def opaque_bytes(leaf: Opaque) -> int:
    """Bytes of an opaque leaf's inputs as stored; evaluating it needs about twice as much."""
    return sum(numel(source.shape) * stored_dtype(source).itemsize for source in leaf.inputs)


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
