"""One load on an accelerator, and the rates that bound it: what ``benchmarks/gpu_parts.py`` has ranks do."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import meter
from benchmarks.place import own_device, synchronize
from benchmarks.training import quieten

ARMS = ("shardwise", "transformers", "dcp")
_BLOCK_BYTES = 256 << 20


def rates(folder: str, block_bytes: int = _BLOCK_BYTES) -> dict[str, Any]:
    """GB/s of one rank by what moves the bytes; or why it cannot be measured."""
    import torch

    device = own_device()
    pinned = torch.empty(block_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    pageable = torch.ones(block_bytes, dtype=torch.uint8)
    target = torch.empty(block_bytes, dtype=torch.uint8, device=device)
    found: dict[str, Any] = {
        "pinned to device": _rate(target, pinned),
        "pageable to device": _rate(target, pageable),
        "device to pinned": _rate(pinned, target),
    }
    files = meter.files_of(Path(folder))
    meter.warm_cache(files)
    done, start = 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(memoryview(pinned.numpy())):
                done += count
    found["page cache to pinned"] = done / (time.perf_counter() - start) / 1e9
    found["cuFile to device"] = _by_cufile(files, target)
    return found


def _rate(target: Any, source: Any, times: int = 8) -> float:
    target.copy_(source)
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    synchronize()
    return times * source.nbytes / (time.perf_counter() - start) / 1e9


def _by_cufile(files: list[Path], target: Any) -> float | str:
    """GB/s of cuFile (GPUDirect Storage) from files that are not in the page cache."""
    import os

    from torch.cuda import gds

    if target.device.type != "cuda":
        return f"unmeasured: the device is {target.device}"
    try:
        meter.drop_cache(files)
        done, start = 0, time.perf_counter()
        for path in files:
            file, size = gds.GdsFile(str(path), os.O_RDONLY), path.stat().st_size
            for offset in range(0, size - target.numel() + 1, target.numel()):
                file.load_storage(target.untyped_storage(), offset)
                done += target.numel()
        synchronize()
        return done / (time.perf_counter() - start) / 1e9
    except Exception as error:  # no driver, no support in the file system
        return f"unmeasured: {type(error).__name__}: {error}"[:300]


def load(arm: str, folder: str, warm_up: str) -> dict[str, float]:
    """Seconds of one load from the page cache by shardwise or a peer, and peak memory. Collective: yes."""
    import torch.distributed as dist
    from benchmarks.arms import ARMS as LOADERS
    from benchmarks.arms import Request

    quieten()
    LOADERS[arm](Request(Path(warm_up)))
    if dist.get_rank() == 0:
        meter.warm_cache(meter.files_of(Path(folder)))
    with Peak() as peak:
        dist.barrier()
        start = time.perf_counter()
        model = LOADERS[arm](Request(Path(folder))).model
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            assert local.device.type == own_device().type, f"{arm} left a tensor on {local.device}"
            local.detach().view(-1)[:1].add_(0)
        synchronize()
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_bytes": peak.nbytes}


def load_computed(folder: str, warm_up: str, packs: bool, on_device: bool) -> float:
    """Seconds of a load of FP8, or that packs to NF4, computed on the device or the host. Collective: yes."""
    import torch.distributed as dist

    import shardwise
    from shardwise.execution import device_computing

    quieten()
    form = shardwise.options.Nf4() if packs else "dequantize"
    with mock.patch.object(device_computing, "matches_cpu_bitwise", return_value=on_device):
        shardwise.from_pretrained(warm_up, dtype="bfloat16", quantization=form)
        if dist.get_rank() == 0:
            meter.warm_cache(meter.files_of(Path(folder)))
        dist.barrier()
        start = time.perf_counter()
        shardwise.from_pretrained(folder, dtype="bfloat16", quantization=form)
        synchronize()
        return time.perf_counter() - start


class Peak:
    """The highest memory of the block: ``max_memory_allocated`` of an accelerator, else growth of the process."""

    nbytes = 0

    def __enter__(self) -> "Peak":
        import torch

        self._module: Any = None
        if own_device().type != "cpu":
            self._module = torch.get_device_module(own_device().type)
            self._module.reset_peak_memory_stats()
        else:
            self._watch = meter.MemoryWatch().__enter__()
        return self

    def __exit__(self, *told: Any) -> None:
        if self._module is not None:
            synchronize()
            self.nbytes = self._module.max_memory_allocated()
        else:
            self._watch.__exit__(*told)
            self.nbytes = self._watch.growth
