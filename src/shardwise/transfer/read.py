"""Reads the requests of a plan and places their bytes in the memory of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

import torch
from tqdm import tqdm

from shardwise.core.computed import Computed, ComputeTask, Copy, DeviceOperation, compute_tasks, copies_and_computed
from shardwise.core.errors import StorageError
from shardwise.core.expression import Expression, iter_stored_leaves
from shardwise.core.layout import LocalBox
from shardwise.core.machine import processor_count
from shardwise.core.regions import Region
from shardwise.core.tensors import Box, Strided
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.storage import ReadPolicy, StorageReader
from shardwise.files.urls import shown
from shardwise.fsdp.named_tensors import strided_view
from shardwise.fsdp.torch_private import to_torch
from shardwise.ranks.world import World
from shardwise.transfer.device_computing import matches_cpu_bitwise
from shardwise.transfer.file_requests import (
    SEGMENT_ALIGNMENT,
    ComputingShare,
    FileRequest,
    Segment,
    align,
    iter_segments,
    max_staged_bytes,
    plan_requests,
    plan_staging,
)
from shardwise.transfer.staging import DeviceStaging, HostStaging, StagingBuffer, as_memoryview, staging_buffers
from shardwise.transfer.workers import WorkerPool, count_computing_workers

ExpressionBox: TypeAlias = tuple[Expression, Box, torch.dtype]
"""A box of an expression, and the dtype that its values are returned in."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A tensor to fill on this rank: its expression, the boxes that this rank holds, its dtype, and its device."""

    fqn: str
    expression: Expression
    boxes: tuple[LocalBox, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Plan of reads: every decision that is made before the targets have memory.

    Attributes:
        items: the tensors to fill. Segments refer to them by index (``target``).
        files: the files that are read.
        batches: the requests of stored values, by device.
        computed: tasks for the blocks of values that are computed from stored ones.
    """

    items: tuple[ReadItem, ...]
    files: tuple[str, ...]
    batches: tuple[tuple[torch.device, tuple[FileRequest, ...]], ...]
    computed: tuple[ComputeTask, ...]


def plan_reads(
    requested: Iterable[ReadItem],
    index: CheckpointIndex,
    policy: ReadPolicy,
    budget_bytes: int,
    start_at: float = 0.0,
    staged_bytes: int | None = None,
) -> ReadPlan:
    """Decide how tensors are filled. Pure: reads nothing, and takes no memory for values.

    Args:
        requested: the tensors to fill. Those without boxes are left out.
        index: index of the checkpoint.
        policy: read policy of its storage.
        budget_bytes: memory for the staging of all workers together.
        start_at: position in the requests at which to start, as a fraction, so that ranks do not all request the
            same part of a remote storage.
        staged_bytes: the size of a worker's staging buffer, if it is smaller than the budget allows.
    """
    items = tuple(item for item in requested if item.boxes)
    leaves = (leaf for item in items for leaf in iter_stored_leaves(item.expression))
    files = sorted({index.entries[leaf.key].file for leaf in leaves})
    computed: list[tuple[int, Computed, Region]] = []
    copied: dict[torch.device, list[tuple[int, Copy]]] = {item.device: [] for item in items}
    # Everything is a copy of stored values or computed from them. Copies are by device, which decides the staging.
    for target, item in enumerate(items):
        for piece in item.boxes:
            copies, regions = copies_and_computed(item.expression, piece.box, piece.local)
            copied[item.device] += ((target, copy) for copy in copies)
            computed += ((target, leaf, region) for leaf, region in regions)
    # One batch for each device: requests of one batch share staging buffers of one kind.
    batches: list[tuple[torch.device, tuple[FileRequest, ...]]] = []
    for device, device_copies in copied.items():
        is_on_host = device.type == "cpu"
        staging = plan_staging(budget_bytes, policy.concurrency, on_device=not is_on_host)
        nbytes = staging.nbytes if staged_bytes is None else min(staged_bytes, staging.nbytes)
        segments: list[tuple[str, Segment]] = []
        for target, copy in device_copies:
            entry = index.entries[copy.leaf.key]
            needs_staging = not is_on_host or items[target].dtype != to_torch(copy.leaf.dtype)
            for segment in iter_segments(
                copy, target, entry, needs_staging=needs_staging, policy=policy, block_bytes=nbytes
            ):
                segments.append((entry.file, segment))
        start = start_at if policy.is_remote else 0.0
        requests = plan_requests(segments, policy, staging_bytes=nbytes, start_at=start)
        batches.append((device, tuple(requests)))
    # Blocks of computed values are cut so small that all workers can compute at once within the budget.
    max_block_bytes = ComputingShare.from_budget(budget_bytes, policy.concurrency).max_block_bytes
    return ReadPlan(items, tuple(files), tuple(batches), tuple(compute_tasks(computed, max_block_bytes)))


@dataclass
class ReadExecutor:
    """Executes plans of reads, and counts the written elements of each tensor, by FQN.

    ``budget_bytes`` bounds the staging of all workers together. ``identities`` are the identities of the files of a
    remote storage when their headers were read. ``processors`` is the number of CPUs that this rank may use.

    A caller can expect the following sequence, on each rank and without communication:

    1. :func:`plan_reads` decides what is read and computed. Then the targets get memory.
    2. :meth:`read_into`, for one plan or for several in turn:

       a. The identities of the files are compared with ``identities``.
       b. Workers read the requests, into the targets or through staging, device by device.
       c. Blocks that are computed from stored values follow.
       d. The identities are compared again, with those of step a. If a file was replaced, this is an error.
    3. ``written`` has the number of elements written by FQN, for the audit ("" for :meth:`read_values` and inputs).
       ``read_bytes`` has the bytes of all requests, gaps and inputs of blocks included, for the report.

    :meth:`read_values` may come at any time: it returns values in memory of their own, and compares no identities.
    The caller opens the reader, and closes it afterwards.
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
    _last_block: tuple[object, Mapping[str, torch.Tensor]] | None = None
    """Key and outputs of the last block computed alone, for a request that needs it and follows at once."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read_into(self, plan: ReadPlan, tensors: Sequence[torch.Tensor]) -> None:
        """Read a plan into this rank's own tensors, one for each of ``plan.items``. Memory: the budget.

        Raises:
            StorageError: bytes could not be read, or a file was replaced meanwhile.
        """
        # Two comparisons: with the files whose headers were read, and after the read with those that were there
        # before it.
        before = read_identities(self.reader, plan.files, self.world.check)
        self._require_unchanged(self.identities, before)
        try:
            self._execute(plan, tensors, self.budget_bytes)
        finally:
            self._last_block = None  # frees the memory of the last block
        self._require_unchanged(before, read_identities(self.reader, plan.files, self.world.check))

    def _require_unchanged(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        changed = [file for file, identity in now.items() if before.get(file, identity) != identity]
        if changed:
            raise StorageError(
                f"{', '.join(shown(file) for file in changed[:5])} in {self.reader.root}: replaced or rewritten "
                f"while the checkpoint was being loaded (was {before[changed[0]]}, is {now[changed[0]]}). Load "
                "again when no process writes to it"
            )

    def _execute(self, plan: ReadPlan, tensors: Sequence[torch.Tensor], budget_bytes: int) -> None:
        targets = TargetTensors(tensors, [item.fqn for item in plan.items])
        # The outputs of the last block are freed before the reads, unless this plan uses them.
        if self._last_block is not None and all(task.key != self._last_block[0] for task in plan.computed):
            self._last_block = None
        for device, requests in plan.batches:
            # Large enough for each request: plan_reads cut them for this budget, concurrency and kind of device.
            max_request_bytes = max_staged_bytes(requests)
            buffers = staging_buffers(budget_bytes, self.reader.policy.concurrency, device, max_request_bytes)
            try:
                # Each thread calls self._read_and_count(targets, request, its buffer).
                WorkerPool(partial(self._read_and_count, targets), buffers, self.world.check).run(requests)
            finally:  # also after an error: copies in progress use memory that is freed next
                for buffer in buffers:
                    buffer.finish()
        if plan.computed:
            self._compute(plan.computed, targets, budget_bytes)

    def read_values(self, boxes: Sequence[ExpressionBox], budget_bytes: int | None = None) -> list[torch.Tensor]:
        """Return boxes of expressions as new contiguous CPU tensors, read together."""
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        # The boxes are new tensors without names, which no audit looks at.
        plan, values = self._plan_values(boxes, budget)
        self._execute(plan, values, budget)
        return values

    def _plan_values(
        self,
        boxes: Sequence[ExpressionBox],
        budget_bytes: int,
        device: torch.device = _CPU,
        staged_bytes: int | None = None,
    ) -> tuple[ReadPlan, list[torch.Tensor]]:
        """Return the reads of boxes of expressions, and uninitialized memory for them."""
        items: list[ReadItem] = []
        values: list[torch.Tensor] = []
        for expression, box, dtype in boxes:
            whole = LocalBox(box, Strided.contiguous(box.sizes))
            items.append(ReadItem("", expression, (whole,), dtype, device))
            values.append(torch.empty(box.sizes, dtype=dtype, device=device))
        start_at = self.world.rank / self.world.size
        plan = plan_reads(items, self.index, self.reader.policy, budget_bytes, start_at, staged_bytes)
        return plan, values

    def count(self, fqn: str, numel: int) -> None:
        """Add to the number of elements of a tensor that have been written."""
        self.written[fqn] = self.written.get(fqn, 0) + numel

    def _read_and_count(self, targets: TargetTensors, request: FileRequest, buffer: StagingBuffer) -> None:
        self._read_request(request, targets, buffer)
        with self._lock:
            for segment in request.segments:
                self.count(targets.names[segment.target], segment.copy.numel)
            self.read_bytes += request.bytes.nbytes
            if self.progress is not None:
                self.progress.update(request.bytes.nbytes)

    def _read_request(self, request: FileRequest, targets: TargetTensors, buffer: StagingBuffer) -> None:
        """Read one range: direct segments into the tensors' memory, other segments and gaps into staging."""
        # One read covers the request. Gaps between segments land in staging too, and are not looked at.
        staged: list[tuple[Segment, int]] = []
        views: list[memoryview] = []
        staging: memoryview | None = None
        position, used = request.bytes.start, 0
        for segment in request.segments:
            gap = segment.bytes.start - position
            position = segment.bytes.stop
            if staging is None and (gap or not segment.is_direct):
                staging = buffer.begin()
            if gap:
                assert staging is not None
                views.append(staging[used : used + gap])
                used += align(gap)
            if segment.is_direct:
                # In bytes. The target's offset is in elements of the tensor's memory.
                start = segment.copy.target.offset * targets.tensors[segment.target].element_size()
                # Zero copy: the storage writes into the tensor's own memory.
                views.append(targets.memory(segment.target)[start : start + segment.bytes.nbytes])
            else:
                assert staging is not None
                views.append(staging[used : used + segment.bytes.nbytes])
                staged.append((segment, used))
                used += align(segment.bytes.nbytes)
        # One call: direct segments are in place afterwards, the others in staging memory.
        self.reader.read_vectored(request.file, request.bytes.start, views)
        for segment, start in staged:
            buffer.put(segment, start, targets.tensors[segment.target])
        if staging is not None:
            buffer.end()

    def _compute(self, tasks: Sequence[ComputeTask], targets: TargetTensors, budget_bytes: int) -> None:
        """Compute blocks, and copy them to the target tensors. An accelerator computes those that it can.

        Blocks that fit into the budget together are computed by separate workers. Larger ones are computed alone,
        and their inputs read by all workers. Pinned buffers for copies to an accelerator are half of the staging.
        """
        policy = self.reader.policy
        share = ComputingShare.from_budget(budget_bytes, policy.concurrency)
        tasks = self._compute_on_device(tasks, targets, share)
        if not tasks:
            return
        device = targets.device
        # On an accelerator the outputs need staging, too.
        staging_bytes = share.staging_bytes if device.type == "cpu" else share.staging_bytes // 2
        max_output_bytes = max(task.block.nbytes for task in tasks)
        outputs = staging_buffers(staging_bytes, policy.concurrency, device, max_output_bytes)
        small = [task for task in tasks if task.block.nbytes <= share.max_block_bytes]
        alone = [task for task in tasks if task.block.nbytes > share.max_block_bytes]
        try:
            # Small blocks first, each on one worker. Then large ones, each read by all workers.
            if len(small) > 1:
                inputs = staging_buffers(staging_bytes, policy.concurrency, _CPU)
                pairs = list(zip(inputs, outputs, strict=False))[: count_computing_workers(policy, self.processors)]
                compute = partial(self._compute_block, targets, staging_bytes)
                WorkerPool(compute, pairs, self.world.check).run(small)
            else:
                alone += small
            for task in alone:
                self.world.check()
                if self._last_block is None or self._last_block[0] != task.key:
                    self._last_block = None  # freed before memory of the next is allocated
                    self._last_block = task.key, self._compute_alone(task, staging_bytes)
                self._copy_outputs(task, self._last_block[1], targets, outputs[0])
                self._count_outputs(task, targets)
        finally:
            for buffer in outputs:
                buffer.finish()

    @torch.no_grad()
    def _compute_alone(self, task: ComputeTask, budget_bytes: int) -> Mapping[str, torch.Tensor]:
        values = self.read_values(get_inputs(task), budget_bytes)
        self._last_block = None  # read_values() has set it, if the inputs were computed from a block
        return task.evaluate(values)

    @torch.no_grad()
    def _compute_block(
        self,
        targets: TargetTensors,
        budget_bytes: int,
        task: ComputeTask,
        buffers: tuple[StagingBuffer, StagingBuffer],
    ) -> None:
        """Compute one block on a worker thread. ``budget_bytes`` bounds the inputs of all workers together."""
        inputs, computed = self._read_inputs(task, budget_bytes, _CPU, buffers[0])
        # Inputs that are computed themselves get half of the budget of this level, so that nesting is bounded.
        inputs_bytes = ComputingShare.from_budget(budget_bytes, self.reader.policy.concurrency).staging_bytes
        for inner in computed:
            self._compute_block(inputs, inputs_bytes, inner, buffers)
        self._copy_outputs(task, task.evaluate(inputs.tensors), targets, buffers[1])
        self._count_outputs(task, targets)

    def _read_inputs(
        self, task: ComputeTask, budget_bytes: int, device: torch.device, buffer: StagingBuffer
    ) -> tuple[TargetTensors, Sequence[ComputeTask]]:
        """Return memory for the inputs of a block, with those that are stored, and the tasks of the others."""
        # Requests fit into the buffer, also those of a block within a block, whose budget may suggest larger ones.
        plan, values = self._plan_values(get_inputs(task), budget_bytes, device, buffer.nbytes)
        inputs = TargetTensors(values, [""] * len(values))
        for _, requests in plan.batches:
            for request in requests:
                self._read_and_count(inputs, request, buffer)
        return inputs, plan.computed

    def _compute_on_device(
        self,
        tasks: Sequence[ComputeTask],
        targets: TargetTensors,
        share: ComputingShare,
    ) -> Sequence[ComputeTask]:
        """Compute the blocks that an accelerator can, with the CPU's bits. Return those that are left for the CPU.

        Inputs go from the files to the device as they are stored. The values of all blocks are checked together.
        """
        device = targets.device
        if device.type == "cpu" or not matches_cpu_bitwise(device):
            return tasks
        # A block stays on the CPU if it is computed by an operation without device code, has a target
        # elsewhere, or is too large for the concurrent workers.
        on_device: list[ComputeTask] = []
        on_host: list[ComputeTask] = []
        for task in tasks:
            is_target = all(targets.tensors[move.target].device == device for move in task.moves)
            if task.fits_devices and is_target and task.block.nbytes <= share.max_block_bytes:
                on_device.append(task)
            else:
                on_host.append(task)
        if not on_device:
            return on_host
        # One flag for each block, set by the device. Reading a flag would wait for the device, so all are read
        # at the end.
        is_bad = torch.zeros(len(on_device), dtype=torch.bool, device=device)
        input_bytes = [sum(box.numel * dtype.itemsize for _, box, dtype in get_inputs(task)) for task in on_device]
        max_input_bytes = max(SEGMENT_ALIGNMENT, *input_bytes)
        buffers = staging_buffers(share.staging_bytes, self.reader.policy.concurrency, device, max_input_bytes)
        try:
            compute = partial(self._compute_block_on_device, targets, share, is_bad)
            WorkerPool(compute, buffers, self.world.check).run(list(enumerate(on_device)))
        finally:  # also after an error: work in progress uses memory that is freed next
            for buffer in buffers:
                buffer.finish()
        # One copy to the host for all blocks, after the streams of all workers have finished.
        bad: list[bool] = HostStaging(len(on_device), is_pinned=True).stage(is_bad).tolist()
        for task, needs_host in zip(on_device, bad, strict=True):
            if needs_host:
                on_host.append(task)
            else:
                self._count_outputs(task, targets)
        return on_host

    def _compute_block_on_device(
        self,
        targets: TargetTensors,
        share: ComputingShare,
        is_bad: torch.Tensor,
        numbered: tuple[int, ComputeTask],
        buffer: DeviceStaging,
    ) -> None:
        """Queue one block on a worker thread, and set its element of ``is_bad`` if the CPU has to compute it."""
        number, task = numbered
        with buffer.queued():
            is_bad[number].copy_(self._queue_block(task, targets, share, buffer))

    @torch.no_grad()
    def _queue_block(
        self,
        task: ComputeTask,
        targets: TargetTensors,
        share: ComputingShare,
        buffer: DeviceStaging,
    ) -> torch.Tensor:
        """Read the inputs of a block and evaluate it. Return whether the CPU has to, as a tensor of the device."""
        inputs, computed = self._read_inputs(task, share.staging_bytes, buffer.device, buffer)
        inner = ComputingShare.from_budget(share.staging_bytes, self.reader.policy.concurrency)
        # Inputs that are themselves computed come first, on the same stream.
        inner_bad = [self._queue_block(each, inputs, inner, buffer) for each in computed]
        operation = cast(DeviceOperation, task.operation)
        outputs, is_bad = operation.evaluate_on_device(task.block, inputs.tensors, share.max_block_bytes)
        self._copy_outputs(task, outputs, targets, buffer)
        return torch.stack([is_bad, *inner_bad]).any()

    def _copy_outputs(
        self, task: ComputeTask, outputs: Mapping[str, torch.Tensor], targets: TargetTensors, buffer: StagingBuffer
    ) -> None:
        """Copy the outputs of a block to their places."""
        for move in task.moves:
            values = strided_view(outputs[move.output].contiguous(), move.source)
            buffer.copy(values, strided_view(targets.tensors[move.target], move.place))

    def _count_outputs(self, task: ComputeTask, targets: TargetTensors) -> None:
        with self._lock:
            for move in task.moves:
                self.count(targets.names[move.target], move.place.numel)


def get_inputs(task: ComputeTask) -> list[ExpressionBox]:
    """Return the boxes that a block is computed from."""
    inputs = zip(task.inputs, task.block.inputs, strict=True)
    return [(source, box, to_torch(source.dtype)) for source, box in inputs]


def read_identities(
    reader: StorageReader, files: Sequence[str], check: Callable[[], None] | None = None
) -> dict[str, str]:
    """Return the identity of each file, requested as concurrently as the storage allows.

    ``check`` is called while the requests run.
    """
    identities: dict[str, str] = {}

    def identify(file: str, _: None) -> None:
        identities[file] = reader.identity(file)

    WorkerPool(identify, [None] * reader.policy.concurrency, check).run(files)
    return identities


@dataclass
class TargetTensors:
    """Tensors that are being filled, with their names."""

    tensors: Sequence[torch.Tensor]
    names: Sequence[str]
    _memories: dict[int, memoryview] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The accelerator of the tensors, or else the CPU."""
        return next((tensor.device for tensor in self.tensors if tensor.device.type != "cpu"), _CPU)

    def memory(self, target: int) -> memoryview:
        """Return the bytes of a tensor on the host."""
        if target not in self._memories:
            self._memories[target] = storage_bytes(self.tensors[target])
        return self._memories[target]


def storage_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the CPU memory of a tensor, from its first element to the end of its storage."""
    if tensor.is_contiguous():
        return as_memoryview(tensor.view(-1).view(torch.uint8))
    # Strided tensors: a flat view of the bytes of their storage, gaps between their elements included.
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    return as_memoryview(torch.empty(0, dtype=torch.uint8).set_(storage, start, (storage.nbytes() - start,), (1,)))
