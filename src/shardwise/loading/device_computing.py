"""Reads whose blocks are computed on an accelerator, with the bits of the CPU. See [Note: Bits of devices]."""

from collections.abc import Sequence
from functools import cache, partial
from typing import cast

import torch

from shardwise.core.computed import ComputeTask, DeviceOperation
from shardwise.fsdp.named_tensors import strided_view
from shardwise.transfer.memory import WorkerPool
from shardwise.transfer.read import ReadExecutor, TargetTensors, get_inputs
from shardwise.transfer.read_items import SEGMENT_ALIGNMENT, ComputingShare
from shardwise.transfer.staging import DeviceStaging, HostStaging, staging_buffers

_NUMBERS = 1024
_SPREAD = 2_654_435_761
"""Multiples of it, as bits of float32, spread over all exponents and both signs."""


@cache
def matches_cpu_bitwise(device: torch.device) -> bool:
    """Return whether an accelerator's results are bitwise the CPU's. Tried once for each, which synchronizes it.

    Some flush subnormal numbers to zero, or divide approximately.
    """
    bits = torch.arange(_NUMBERS, dtype=torch.int64, device="cpu") * _SPREAD % (1 << 32) - (1 << 31)
    numbers = bits.to(torch.int32).view(torch.float32)
    staging = HostStaging(1 << 15, is_pinned=True)
    on_cpu = _compute_results(numbers)
    on_device = staging.stage(_compute_results(staging.stage(numbers).to(device)))
    # As integers: -0.0 equals 0.0 as a number, and not in its bits.
    return torch.equal(on_device.view(torch.int32), on_cpu.view(torch.int32))


def _compute_results(numbers: torch.Tensor) -> torch.Tensor:
    """Return results of each operation that blocks use, with 0 for NaN, as (operation, number)."""
    others = numbers.flip(0)
    results = [
        numbers * others,
        numbers - others,
        numbers / others,
        numbers.clamp(min=1e-38).reciprocal(),
        numbers.bfloat16().float(),
        numbers.half().float(),
    ]
    stacked = torch.stack(results)
    # The bits of a NaN are not defined: devices differ in them without being wrong.
    return torch.where(stacked.isnan(), 0, stacked)


class DeviceReadExecutor(ReadExecutor):
    """Executor that computes blocks on an accelerator where it has the CPU's bits."""

    def _compute_on_device(
        self,
        tasks: Sequence[ComputeTask],
        targets: TargetTensors,
        share: ComputingShare,
    ) -> Sequence[ComputeTask]:
        """Compute the blocks that an accelerator can compute. Return the tasks that the CPU has to compute.

        Inputs are sent to the device as they are stored. The values of all blocks are checked together.
        """
        device = targets.device
        if device.type == "cpu" or not matches_cpu_bitwise(device):
            return tasks
        fitting: list[ComputeTask] = []
        for_cpu: list[ComputeTask] = []
        for task in tasks:
            is_on_device = all(targets.tensors[move.target].device == device for move in task.moves)
            fits = task.fits_devices and is_on_device and task.block.nbytes <= share.most_bytes
            (fitting if fits else for_cpu).append(task)
        if not fitting:
            return for_cpu
        # One element for each task, on the device, so that the host waits once for all blocks and not for each.
        is_bad = torch.zeros(len(fitting), dtype=torch.bool, device=device)
        input_bytes = max(sum(box.numel * dtype.itemsize for _, box, dtype in get_inputs(task)) for task in fitting)
        most_bytes = max(SEGMENT_ALIGNMENT, input_bytes)
        buffers = staging_buffers(share.staging_bytes, self.reader.policy.concurrency, device, most_bytes)
        try:
            compute = partial(self._compute_block_on_device, targets, share, is_bad)
            WorkerPool(compute, buffers, self.world.check).run(list(enumerate(fitting)))
        finally:
            # Waits for the queued copies. Buffers may be freed, and is_bad read, only after it.
            for buffer in buffers:
                buffer.finish()
        is_bad_on_host: list[bool] = HostStaging(len(fitting), is_pinned=True).stage(is_bad).tolist()
        for task, has_failed in zip(fitting, is_bad_on_host, strict=True):
            if has_failed:
                for_cpu.append(task)
            else:
                self._count_outputs(task, targets)
        return for_cpu

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

    def _queue_block(
        self,
        task: ComputeTask,
        targets: TargetTensors,
        share: ComputingShare,
        buffer: DeviceStaging,
    ) -> torch.Tensor:
        """Read the inputs of a block and evaluate it. Return whether the CPU has to, as a tensor of the device."""
        plan, values = self._planned_values(get_inputs(task), share.staging_bytes, buffer.device, buffer.nbytes)
        inputs = TargetTensors(values, [""] * len(values))
        for _, requests in plan.batches:
            for request in requests:
                self._read(inputs, request, buffer)
        inner = ComputingShare.from_budget(share.staging_bytes, self.reader.policy.concurrency)
        # Inputs that are computed themselves are queued before the block that reads them.
        inner_is_bad = [self._queue_block(each, inputs, inner, buffer) for each in plan.computed]
        outputs, is_bad = evaluate_on_device(task, values, share.most_bytes)
        for move in task.moves:
            computed = strided_view(outputs[move.output].contiguous(), move.source)
            strided_view(targets.tensors[move.target], move.place).copy_(computed)
        return torch.stack([is_bad, *inner_is_bad]).any()


@torch.no_grad()
def evaluate_on_device(
    task: ComputeTask, values: Sequence[torch.Tensor], most_bytes: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the outputs of a block, and whether the CPU has to evaluate it. Waits for nothing."""
    outputs, is_bad = cast(DeviceOperation, task.operation).evaluate_on_device(task.block, values, most_bytes)
    return dict(outputs), is_bad
