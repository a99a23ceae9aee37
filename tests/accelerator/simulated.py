"""A simulated accelerator under the name ``npu``, for code that is to run on GPUs.

``begin`` registers it with torch for the rest of a process. A process that has ``environment`` begins with it by
itself, and so does every process that it starts, as with a vendor's extension of torch.

Device memory is memory of the host. Copies, fills and collectives are carried out late, on streams that are threads
(``native/runtime.h``), so that a missing wait gives wrong values. It computes with the CPU's kernels, and what it
computes has the CPU's bits. It does not show kernels, NCCL or speed.
"""

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "npu"
_DEVICES, _DELAY = "SIMULATED_DEVICES", "SIMULATED_DELAY_US"
PLUGIN = Path(__file__).with_name("plugin")

DELAY_US = 300
"""Microseconds by which copies are late on ranks that tests start: long beside what the host does meanwhile."""

native: Any = None
"""The library, after ``begin``."""


def environment(*, devices: int = 1, delay_us: int = 0) -> dict[str, str]:
    """Return variables of the environment with which ``import torch`` also brings the accelerator.

    torch loads it as an entry point of the group ``torch.backends``, which the folder ``plugin`` declares.
    """
    root = Path(__file__).parents[2]
    paths = [str(PLUGIN), str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        _DEVICES: str(devices),
        _DELAY: str(delay_us),
    }


def begin() -> None:
    """Register the accelerator with torch. Calls after the first do nothing."""
    global native
    if native is not None:
        return
    from tests.accelerator.build import NAME as LIBRARY
    from tests.accelerator.build import build

    spec = importlib.util.spec_from_file_location(LIBRARY, build())
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    native.set_devices(int(os.environ.get(_DEVICES, "1")))
    native.set_delay(int(os.environ.get(_DELAY, "0")))
    torch.utils.rename_privateuse1_backend(NAME)
    sys.modules[f"torch.{NAME}"] = module = _device_module()
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    _register_operations()
    _register_collectives()


def counters() -> dict[str, int]:
    """Return what has been counted in this process, by the names in ``native/runtime.h``."""
    found: dict[str, int] = native.counters()
    return found


@contextlib.contextmanager
def counting() -> Iterator[dict[str, int]]:
    """After the block, the dict has by how much each counter grew in it."""
    before, found = counters(), {}
    yield found
    found.update({name: value - before[name] for name, value in counters().items()})


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """In the block nothing begins on the stream that is current at its beginning and at its end."""
    device = native.current_device()
    native.pause_stream(device)
    try:
        yield
    finally:
        native.resume_stream(device)


def _index(device: Any = None) -> int:
    """Return the number of a device: of the current one where there is none in it."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return int(native.current_device()) if index is None else index


class _Device:
    """``torch.npu.device``: the current device, for the time of a block."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = native.current_device()
        native.set_device(self._index)

    def __exit__(self, *error: object) -> None:
        native.set_device(self._before)


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0) -> "_Stream":
        made: _Stream = super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)
        return made


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "_Event":
        made: _Event = super().__new__(cls, device=NAME, enable_timing=False)
        return made

    def record(self, stream: Any = None) -> None:
        super().record(_current_stream() if stream is None else stream)


def _current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = _current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _default_stream(device: Any = None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(kind))


def _device_bytes(device: Any = None) -> int:
    return counters()["device_bytes"]


def _memory_info(device: Any = None) -> tuple[int, int]:
    return native.memory() - _device_bytes(), native.memory()


def _manual_seed_all(seed: int) -> None:
    for device in range(native.device_count()):
        native.default_generator(device).manual_seed(seed)


def _device_module() -> types.ModuleType:
    """``torch.npu``, with the names that torch.cuda has."""
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        device=_Device,
        Stream=_Stream,
        Event=_Event,
        stream=_stream,
        current_stream=_current_stream,
        default_stream=_default_stream,
        current_device=native.current_device,
        set_device=lambda device: native.set_device(_index(device)),
        device_count=native.device_count,
        is_available=lambda: native.device_count() > 0,
        is_initialized=native.is_initialized,
        _is_in_bad_fork=native.is_in_bad_fork,
        _lazy_init=lambda: None,
        synchronize=lambda device=None: native.synchronize(_index(device)),
        mem_get_info=_memory_info,
        memory_allocated=_device_bytes,
        memory_reserved=_device_bytes,
        max_memory_allocated=lambda device=None: counters()["device_peak"],
        reset_peak_memory_stats=lambda device=None: native.reset_peaks(),
        empty_cache=lambda: None,
        get_device_name=lambda device=None: "simulated",
        manual_seed=lambda seed: native.default_generator(native.current_device()).manual_seed(seed),
        manual_seed_all=_manual_seed_all,
        get_rng_state=lambda device=None: native.default_generator(_index(device)).get_state(),
        set_rng_state=lambda state, device=None: native.default_generator(_index(device)).set_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
        _sleep=native.sleep_on_stream,
    )
    return module


def _histogram(tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:  # noqa: A002
    """Of integers, too, and without a wait, as CUDA's: models count the tokens of each expert by it."""
    assert min < max, "otherwise CUDA waits for the least and the greatest value"
    flat = tensor.flatten()
    counted = ((flat >= min) & (flat <= max)).to(tensor.dtype)
    places = ((flat.float() - min) * (bins / (max - min))).long().clamp(0, bins - 1)
    return torch.zeros(bins, dtype=tensor.dtype, device=tensor.device).index_add_(0, places, counted)


_operations = torch.library.Library("aten", "IMPL")


def _register_operations() -> None:
    # Tensors of the CPU and of CUDA may become each other's `.data`; so may these.
    _operations.impl("_has_compatible_shallow_copy_type", lambda tensor, source: True, "PrivateUse1")
    _operations.impl("histc", _histogram, "PrivateUse1")


def _register_collectives() -> None:
    import torch.distributed as dist

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)
        return native.make_backend(rank, size, gloo)

    dist.Backend.register_backend("hccl", make, devices=[NAME])
