"""One GPU: rates of the machine, and two ways of loading."""

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import meter
from benchmarks.checkpoints import Shape, write

_REPEATS = 5
_BLOCK_BYTES = 256 << 20


def measure(root: Path, shape: Shape) -> dict[str, float] | str:
    """Rates in GB/s, times in seconds, medians; or why there are none."""
    import torch

    if not torch.cuda.is_available():
        return "unmeasured: no GPU"
    folder, warm_up = write(shape, root), write(shape.tiny(), root)
    meter.warm_cache(meter.files_of(folder))
    found: dict[str, list[float]] = {}
    for _ in range(_REPEATS):
        for what in (_rates, _shardwise, _transformers):
            for name, value in _in_fresh_process(what, str(folder), str(warm_up)).items():
                found.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    roof = min(medians["page cache GB/s"], medians["pinned to device GB/s"])
    medians["shardwise / roof"] = medians["shardwise s"] / (shape.nbytes / 1e9 / roof)
    medians["shardwise / transformers"] = medians["shardwise s"] / medians["transformers s"]
    return medians


def _in_fresh_process(function: Any, folder: str, warm_up: str) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(function, folder, warm_up, theirs))
    process.start()
    theirs.close()
    value: dict[str, float] = ours.recv()
    process.join()
    return value


def _call(function: Any, folder: str, warm_up: str, pipe: Connection) -> None:
    pipe.send(function(folder, warm_up))


def _rates(folder: str, warm_up: str) -> dict[str, float]:
    import torch

    pinned = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    device.copy_(pinned)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(8):
        device.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    copied = 8 * _BLOCK_BYTES / (time.perf_counter() - start) / 1e9
    done = 0
    start = time.perf_counter()
    for path in meter.files_of(Path(folder)):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(memoryview(pinned.numpy())):
                done += count
    return {"pinned to device GB/s": copied, "page cache GB/s": done / (time.perf_counter() - start) / 1e9}


def _shardwise(folder: str, warm_up: str) -> dict[str, float]:
    import torch

    import shardwise

    options = shardwise.options.LoadOptions(device=torch.device("cuda"), progress=False)
    return {"shardwise s": _timed(lambda path: shardwise.from_pretrained(path, options=options), folder, warm_up)}


def _transformers(folder: str, warm_up: str) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    return {"transformers s": _timed(lambda path: load(path, dtype="auto", device_map="cuda"), folder, warm_up)}


def _timed(load: Any, folder: str, warm_up: str) -> float:
    import torch

    load(warm_up)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model = load(folder)
    for parameter in model.parameters():
        parameter.data.view(-1)[:1].add_(0)
    torch.cuda.synchronize()
    return time.perf_counter() - start
