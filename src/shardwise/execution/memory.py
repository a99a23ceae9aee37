"""Memory and threads of a rank: memory for meta tensors, staging buffers, free memory, worker threads.

Tensors get memory at every place where a model registers them. Workers stop together when one of them fails.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.models import torch_api
from shardwise.models.torch_api import module_of, take_after, to_torch
from shardwise.models.view import TensorRef, local_tensor, strided_view
from shardwise.planning.load_memory import Available, Segment, staging_within
from shardwise.storage.contract import ReadPolicy
from shardwise.storage.machine import GROUPS, OWN_GROUP, control_groups, number_in, text_of
from shardwise.tensors import Strided


def home_of(held: Sequence[TensorRef], default: torch.device | None) -> torch.device:
    """Return the device that a model computes on: that of its mesh, otherwise ``default``, otherwise the CPU.

    Unsharded tensors (buffers, full parameters) belong there too.
    """
    for item in held:
        if isinstance(item.tensor, DTensor):
            kind = item.tensor.device_mesh.device_type
            if kind == "cpu":
                return torch.device("cpu")
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return default or torch.device("cpu")


def staging_device(held: Sequence[TensorRef], tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of staging buffers: the mesh's, otherwise that of the tensors with values."""
    live = next((tensor for tensor in tensors if not tensor.is_meta), None)
    return home_of(held, None if live is None else local_tensor(live).device)


Managers: TypeAlias = Mapping[nn.Parameter, Any]
"""FSDP2's own object for each parameter that it shards."""


def fsdp_param_groups_of(model: nn.Module) -> Managers:
    """Return the parameters that FSDP2 manages. Valid for meta tensors until they are materialized."""
    return torch_api.fsdp_params(model)


def devices_of(held: Sequence[TensorRef], managers: Managers, home: torch.device) -> dict[str, torch.device]:
    """Return the device of each tensor by FQN, or the device that it will be materialized on."""
    return {
        item.fqn: _WantedMemory.of(item, managers, home).device
        if item.tensor.is_meta
        else local_tensor(item.tensor).device
        for item in held
    }


def materialize(held: Sequence[TensorRef], managers: Managers, home: torch.device) -> dict[str, torch.Tensor]:
    """Allocate uninitialized memory of this rank's shard for every meta tensor. Real tensors are unchanged.

    ``managers`` belong to the model. A parameter that is not among them is in no FSDP2 group. Returns this rank's
    own tensors, by FQN. Parameters become new objects, shared ones one object everywhere, with their
    ``requires_grad`` and attributes. Memory: this rank's shards.
    """
    found = {item.fqn: local_tensor(item.tensor) for item in held if not item.tensor.is_meta}
    wanted = [_WantedMemory.of(item, managers, home) for item in held if item.tensor.is_meta]
    return found | {item.item.fqn: item.fulfil() for item in wanted}


@dataclass(frozen=True, slots=True)
class _WantedMemory:
    """A tensor on meta, and the memory it is to have: ``size`` is padded where FSDP2 wants it so."""

    item: TensorRef
    manager: Any
    size: tuple[int, ...]
    device: torch.device
    is_pinned: bool

    @classmethod
    def of(cls, item: TensorRef, managers: Managers, home: torch.device) -> _WantedMemory:
        tensor = item.tensor
        manager = managers.get(tensor) if isinstance(tensor, nn.Parameter) else None
        if manager is None:
            return cls(item, None, tuple(local_tensor(tensor).shape), home, is_pinned=False)
        device = torch.device("cpu") if torch_api.is_offloaded(manager) else home
        pins = torch_api.pins_memory(manager)
        return cls(item, manager, torch_api.padded_size(manager), device, is_pinned=pins)

    def fulfil(self) -> torch.Tensor:
        """Install a tensor with memory, this rank's own part of it."""
        tensor = self.item.tensor
        if self.manager is not None:
            fresh = torch.empty(self.size, dtype=tensor.dtype, device=self.device, pin_memory=self.is_pinned)
        else:
            fresh = torch.empty_like(local_tensor(tensor), device=self.device)
        if self.manager is not None:
            fresh = torch_api.without_padding(self.manager, fresh)
        made = torch_api.sharded_as(tensor, fresh) if isinstance(tensor, DTensor) else fresh
        if not isinstance(tensor, nn.Parameter):
            self.item.install(made)
            return fresh
        parameter = (
            made if isinstance(made, nn.Parameter) else nn.Parameter(made, requires_grad=tensor.requires_grad)
        )
        take_after(parameter, tensor)
        self.item.install(parameter)
        if self.manager is not None:
            torch_api.adopt_sharded(self.manager, parameter)
        return fresh


def offloads_shards(managers: Managers) -> bool:
    """Return whether sharded parameters live on the CPU although the mesh is of another device."""
    return any(torch_api.is_offloaded(manager) for manager in managers.values())


class HostStaging:
    """Staging for tensors in host memory. Memory: ``nbytes``, from the first request on that stages anything."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._staging: torch.Tensor | None = None

    def begin(self) -> memoryview:
        """Return staging memory for the next request. Earlier copies may still be in progress."""
        if self._staging is None:
            self._staging = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
        return memory_of(self._staging)

    def put(self, segment: Segment, start: int, tensor: torch.Tensor) -> None:
        """Copy a segment, read to byte ``start`` of the staging memory, into its place in the tensor."""
        assert self._staging is not None
        strided_view(tensor, segment.copy.target).copy_(as_stored(self._staging, segment, start))

    def end(self) -> None:
        """Everything of this request has been put."""

    def finish(self) -> None:
        """Wait until all that was put is there."""


class DeviceStaging:
    """Staging for tensors on an accelerator: two pinned slabs in turn, and a stream of its own.

    Created on the thread that made or last wrote the tensors, so that the device's queue is in order.

    While one slab is on its way to the device, the next request is read into the other. Bytes that are only moved
    are copied straight into the tensor. Those that are cast or strided go to a slab on the device first. Memory:
    two times ``nbytes``, pinned, and as much again on the device for tensors that are cast or strided.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._module = module_of(device)
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))
        self._pinned: list[torch.Tensor] = []
        self._on_device: list[torch.Tensor] = []
        self._sent: list[Any] = []
        self._turn = 0

    def begin(self) -> memoryview:
        if not self._pinned:
            with self._module.device(self._device):  # a thread begins at the first one of the machine
                self._pinned = [
                    torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
                ]
                self._sent = [self._module.Event() for _ in range(2)]
        self._turn = 1 - self._turn
        self._sent[self._turn].synchronize()
        return memory_of(self._pinned[self._turn])

    def put(self, segment: Segment, start: int, tensor: torch.Tensor) -> None:
        copy = segment.copy
        with self._module.stream(self._stream):
            source = as_stored(self._pinned[self._turn], segment, start)
            target = strided_view(tensor, copy.target)
            if copy.source.is_contiguous and copy.target.is_contiguous and source.dtype == target.dtype:
                target.copy_(source, non_blocking=True)
                return
            if not self._on_device:
                with self._module.device(self._device):
                    self._on_device = [
                        torch.empty(self._nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)
                    ]
            part = slice(start, start + segment.bytes.nbytes)
            slab = self._on_device[self._turn]
            slab[part].copy_(self._pinned[self._turn][part], non_blocking=True)
            target.copy_(as_stored(slab, segment, start))

    def end(self) -> None:
        self._sent[self._turn].record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


Landing: TypeAlias = HostStaging | DeviceStaging
"""Staging memory of one worker, and what it does with the bytes in it."""


def as_stored(staging: torch.Tensor, segment: Segment, start: int) -> torch.Tensor:
    """The elements of a segment that lies at byte ``start`` of a buffer, in the order of its copy."""
    source, dtype = segment.copy.source, to_torch(segment.dtype)
    values = staging[start : start + segment.bytes.nbytes].view(dtype)
    return strided_view(values, Strided(0, source.sizes, source.strides))


def staging_buffers(
    budget_bytes: int, concurrency: int, device: torch.device, most_bytes: int | None = None
) -> Sequence[Landing]:
    """Return at most ``concurrency`` landings for tensors on a device, that stage together within the budget.

    On an accelerator their slabs are no larger than ``most_bytes``, the most that one request stages, rounded up to
    a power of two.
    """
    staging = staging_within(budget_bytes, concurrency, on_device=device.type != "cpu")
    if device.type == "cpu":
        return [HostStaging(staging.nbytes) for _ in range(staging.workers)]
    nbytes = staging.nbytes if most_bytes is None else min(staging.nbytes, 1 << max(most_bytes - 1, 0).bit_length())
    return [DeviceStaging(nbytes, device) for _ in range(staging.workers)]


def memory_of(flat: torch.Tensor) -> memoryview:
    """The bytes of a flat CPU tensor."""
    array: Any = flat.numpy()
    return memoryview(array)


_MEMINFO = Path("/proc/meminfo")


def available_memory(home: torch.device) -> Available:
    """Return free memory of the host and of the accelerator in bytes, or None if unknown.

    For an accelerator, this includes memory that torch has reserved and not given to a tensor. For the host: memory
    available without swapping, limited by the control groups of this process.
    """
    device_bytes = None
    if home.type != "cpu":
        from shardwise.models.torch_api import free_memory

        device_bytes = free_memory(home)
    return Available(device_bytes, host_memory())


def host_memory(meminfo: Path = _MEMINFO, own_group: Path = OWN_GROUP, groups: Path = GROUPS) -> int | None:
    """Return free bytes of the machine, or of a control group that limits this process further. None if unknown."""
    found = [_room(group) for group in control_groups(own_group, groups)]
    for line in text_of(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found.append(int(value.split()[0]) * 1024)
    return min((room for room in found if room is not None), default=None)


def _room(group: Path) -> int | None:
    most, used = number_in(group / "memory.max"), number_in(group / "memory.current")
    if most is None or used is None:
        return None
    statistics = dict(line.split() for line in text_of(group / "memory.stat").splitlines())
    cache = sum(int(statistics.get(name, 0)) for name in ("inactive_file", "active_file"))
    return max(0, most - used + cache)  # the page cache gives way


_PAGE_BYTES: Final = 4096


def require_budget(budget_bytes: int) -> None:
    """Raise for a budget, of any call, that no page goes into.

    Raises:
        ConfigError: naming it.
    """
    if not isinstance(budget_bytes, (int, float)):
        raise ConfigError(f"budget_bytes={budget_bytes!r} is not a number of bytes. Pass one, as in 1 << 30")
    if budget_bytes < _PAGE_BYTES:
        raise ConfigError(f"budget_bytes={budget_bytes} is less than a page ({_PAGE_BYTES})")


@contextmanager
def collected_later() -> Iterator[None]:
    """For the time of the block, no search for unreachable cycles begins by itself.

    The objects of a plan set searches off by their number, and each of these walks over all that torch and
    transformers have made: a quarter of a second, to find nothing. Nothing that waits or reads belongs in here.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def trim_heap() -> None:
    """Return freed host memory to the system, which glibc keeps if a block that lasts lies behind it."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


Task = TypeVar("Task")
Tool = TypeVar("Tool")

_LOOK_S = 0.1
"""How often the waiting thread looks whether there is a reason to leave."""


def computing(policy: ReadPolicy, processors: int) -> int:
    """Return the number of workers that compute at once: as many as read if reads cross a network."""
    return policy.concurrency if policy.is_remote else max(1, min(policy.concurrency, processors))


@dataclass
class WorkerPool(Generic[Task, Tool]):
    """Threads, each with a tool of its own, that take tasks in their order.

    The threads are daemons: one that hangs in a read of a dead file system does not keep the process alive.

    Args:
        carry_out: function of a task and a tool, run on a thread that has the tool.
        tools: one for each thread.
        check: called periodically by the waiting thread. An exception of it ends the work.
    """

    carry_out: Callable[[Task, Tool], None]
    tools: Sequence[Tool]
    check: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: bool = False
    _failure: BaseException | None = None
    _at_work: int = 0

    def __post_init__(self) -> None:
        self._finished = threading.Condition(self._lock)

    def run(self, tasks: Sequence[Task]) -> None:
        """Carry out all tasks. The first error is raised after the other workers have finished their current tasks.

        When ``check`` raises, nobody is waited for.
        """
        pending = iter(tasks)
        tools = self.tools[: max(1, min(len(self.tools), len(tasks)))]
        self._at_work = len(tools)
        for number, tool in enumerate(tools):
            threading.Thread(
                target=self._serve, args=(pending, tool), name=f"shardwise-worker-{number}", daemon=True
            ).start()
        try:
            with self._finished:
                while self._at_work:
                    self._finished.wait(_LOOK_S)
                    if self.check is not None:
                        self.check()
        finally:
            self._stop = True
        if self._failure is not None:
            raise self._failure

    def _serve(self, pending: object, tool: Tool) -> None:
        try:
            while not self._stop:
                with self._lock:
                    task: Task | None = next(pending, None)  # type: ignore[call-overload]
                if task is None:
                    break
                self.carry_out(task, tool)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
                self._stop = True
        with self._finished:
            self._at_work -= 1
            self._finished.notify_all()


class Prefetch(Generic[Task]):
    """The value of a function that a thread of its own has begun to work out.

    The thread is a daemon, as those of :class:`WorkerPool` are.
    """

    def __init__(self, function: Callable[[], Task]) -> None:
        self._function = function
        self._value: list[Task] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="shardwise-ahead", daemon=True)
        self._thread.start()

    def value(self, check: Callable[[], None]) -> Task:
        """Wait for the value, or raise the function's error. ``check`` is called meanwhile."""
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            check()
        if self._failure is not None:
            raise self._failure
        return self._value[0]

    def _work(self) -> None:
        try:
            self._value.append(self._function())
        except BaseException as error:
            self._failure = error
