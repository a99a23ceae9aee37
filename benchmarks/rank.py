"""One load, measured on one rank. Runs in a fresh process; see :func:`measure`."""

import cProfile
import gc
import io
import pstats
import resource
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from benchmarks import caps, meter
from benchmarks.arms import ARMS, Request
from benchmarks.ballast import Ballast
from benchmarks.meter import MemoryWatch, Usage
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_PAGE = resource.getpagesize()
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        arm: its name in ``ARMS``.
        folder: the checkpoint.
        warm_up: a tiny checkpoint of the same architecture, loaded first by the same processes.
        cold: drop the checkpoint from the page cache before the clock starts; otherwise it is read into it.
        lora: put an adapter on all linear layers, too.
        backed_bytes: memory of each rank to make sure of; see :mod:`benchmarks.ballast`. 0: the machine as it is.
        watched: have a process beside each rank that samples its memory.
        patience_s: how long to wait for a moment in which the machine does nothing else.
        wants_priority: run before everybody else on the machine, if that is permitted.
        cap_bytes: what each rank may allocate from then on, enforced by the kernel; None for no limit.
        profile: profile the load on rank 0 (the times are then not comparable).
    """

    arm: str
    folder: str
    warm_up: str
    dtype: str = "auto"
    replicas: int = 1
    lora: bool = False
    cold: bool = False
    backed_bytes: int = 0
    watched: bool = True
    patience_s: float = 0.0
    wants_priority: bool = False
    cap_bytes: int | None = None
    profile: bool = False


def measure(job: Job) -> dict[str, Any]:
    """Load once, with the clock from a barrier until every page of every parameter has been written to.

    Collective: yes, over all ranks.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    load = ARMS[job.arm]
    request = Request(Path(job.folder), job.dtype, job.replicas, job.lora)
    first = load(replace(request, folder=Path(job.warm_up)))
    dirty(first.model)
    del first
    gc.collect()
    files = meter.files_of(request.folder)
    cached = None
    dist.barrier()
    if dist.get_rank() == 0:
        meter.drop_cache(files) if job.cold else meter.warm_cache(files)
        cached = meter.cached_fraction(files)
        meter.wait_for_quiet(job.patience_s)
    priority = job.wants_priority and meter.take_priority()
    dist.barrier()
    # What takes a second finds what was free a moment ago; planning a LoRA takes longer, on a processor for two.
    held = Ballast(job.backed_bytes, job.backed_bytes) if job.lora and job.backed_bytes else nullcontext()
    if job.backed_bytes and not job.lora:
        meter.back_memory(job.backed_bytes, dist.barrier)
    group = None if job.cap_bytes is None else caps.enter(job.cap_bytes)
    profiler = cProfile.Profile() if job.profile and dist.get_rank() == 0 else None
    dist.barrier()
    watch = MemoryWatch() if job.watched else nullcontext()
    dist.barrier()
    level = meter.anonymous_bytes()
    with watch as memory, held:
        dist.barrier()
        before, busy = Usage.now(), meter.machine_busy_s()
        start = meter.timestamp()
        if profiler is not None:
            profiler.enable()
        loaded = load(request)
        if profiler is not None:
            profiler.disable()
        returned = meter.timestamp()
        dirty(loaded.model)
        stop = meter.timestamp()
        used, busy = Usage.now().since(before), meter.machine_busy_s() - busy
    local_bytes = sum(_span_bytes(tensor) for tensor in _locals(loaded.model))
    return {
        "rank": dist.get_rank(),
        "start": start,
        "returned": returned,
        "stop": stop,
        "usage": vars(used),
        "machine_busy_s": busy,
        "priority": priority,
        "growth_bytes": meter.anonymous_bytes() - level if memory is None else memory.growth,
        "local_bytes": local_bytes,
        "memory_samples": 0 if memory is None else memory.samples,
        "cached_fraction": cached,
        "cap": group,
        "facts": dict(loaded.facts),
        "sums": sums(loaded.model),
        "profile": None if profiler is None else _profile(profiler),
    }


def dirty(model: nn.Module) -> None:
    """Write to every page of every parameter and buffer, leaving its value as it is."""
    for tensor in _locals(model):
        # Of the storage only what belongs to the tensor: that of a mapped file may be much larger.
        start, nbytes = tensor.storage_offset() * tensor.element_size(), _span_bytes(tensor)
        span = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (nbytes,))
        span[::_PAGE].bitwise_xor_(0)
        span[-1:].bitwise_xor_(0)


def _locals(model: nn.Module) -> list[torch.Tensor]:
    """The local tensor of each parameter and buffer, each once, empty ones left out."""
    found: dict[int, torch.Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.is_meta:
            raise RuntimeError("the arm left a tensor on meta")
        if local.numel():
            found.setdefault(local.data_ptr(), local)
    return list(found.values())


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def sums(model: nn.Module) -> dict[str, tuple[str, str, int, int]]:
    """By name: shape and dtype, placement, checksum of the local elements, and which copy of them this rank holds.

    The checksums of one copy, summed over the ranks, do not depend on the sharding.
    """
    found: dict[str, tuple[str, str, int, int]] = {}
    for called, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if ".lora_" in called:  # each loader draws its own
            continue
        name = called.removeprefix("base_model.model.").replace(".base_layer.", ".")
        data = tensor.detach()
        what, shape = f"{tuple(data.shape)} {data.dtype}", tuple(data.shape)
        if not isinstance(data, DTensor):
            found[name] = (what, "whole", _sum(data, shape, (0,) * data.dim()), dist.get_rank())
            continue
        mesh, placements = data.device_mesh, data.placements
        _, offsets = compute_local_shape_and_global_offset(data.shape, mesh, placements)
        copy = 0
        for axis, placement in enumerate(placements):
            if placement.is_replicate():
                copy = copy * mesh.size(axis) + mesh.get_local_rank(axis)
        local = data.to_local()
        value = _sum(local, shape, tuple(offsets)) if local.numel() else 0
        found[name] = (what, ", ".join(map(str, placements)), value, copy)
    return found


def _sum(local: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """The checksum of a box of a tensor of ``shape`` that begins at ``offsets``."""
    if not local.dim():
        local, shape, offsets = local.reshape(1), (1,), (0,)
    array = local.contiguous().view(_BITS[local.element_size()]).numpy()
    # The widest part that is contiguous in the whole tensor: all dims behind the first one that is cut.
    outer = next((dim for dim in reversed(range(local.dim())) if local.shape[dim] != shape[dim]), 0)
    rows = array.reshape(-1, *array.shape[outer:])
    total = 0
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    leading = local.shape[:outer]
    for number, row in enumerate(rows):
        first, left = base, number
        for dim in range(outer - 1, -1, -1):
            left, place = divmod(left, leading[dim])
            first += place * strides[dim]
        total += meter.checksum(row.reshape(-1), first)
    return total & ((1 << 64) - 1)


def _profile(profiler: cProfile.Profile) -> str:
    text = io.StringIO()
    found = pstats.Stats(profiler, stream=text).strip_dirs()
    found.sort_stats("cumulative").print_stats(70)
    found.sort_stats("tottime").print_stats(30)
    return text.getvalue()
