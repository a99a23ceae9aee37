"""Memory and threads of a rank: memory for meta tensors, free memory, worker threads.

Tensors get memory at every place where a model registers them. Workers stop together when one of them fails.

[Note: Threads of a forked process] A forked process inherits torch's pool of threads, without its threads. The
first operation of each new thread replaces such a pool, without a lock: of several that begin at once, some find
none, and torch 2.13 fails with "Invalid thread pool!". So one thread is the first, before any other starts. It is a
thread of its own, because the calling thread has often computed before the fork, and does not look at the pool
again. ``torch.set_num_threads`` would replace the pool as well, but it also changes settings of the whole process,
those of MKL among them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.errors import ConfigError
from shardwise.core.machine import GROUPS, OWN_GROUP, control_groups, number_in, read_text
from shardwise.core.reports import Available
from shardwise.files.storage import ReadPolicy
from shardwise.fsdp import torch_private
from shardwise.fsdp.named_tensors import TensorRef, computing_device, local_tensor
from shardwise.fsdp.torch_private import copy_attributes


def compute_device(held: Sequence[TensorRef], default: torch.device | None) -> torch.device:
    """Return the device that a model computes on: that of its mesh, otherwise ``default``, otherwise the CPU.

    Unsharded tensors (buffers, full parameters) belong there too.
    """
    for item in held:
        if isinstance(item.tensor, DTensor):
            # The first DTensor decides: the meshes of a model are of one kind of device.
            return computing_device(item.tensor)
    return default or torch.device("cpu")


def staging_device(held: Sequence[TensorRef], tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of staging buffers: the mesh's, otherwise that of the tensors with values."""
    live = next((tensor for tensor in tensors if not tensor.is_meta), None)
    return compute_device(held, None if live is None else local_tensor(live).device)


FsdpParams: TypeAlias = Mapping[nn.Parameter, Any]
"""FSDP2's ``FSDPParam`` of each parameter that it shards. Keys are parameters before they are materialized."""


def target_devices(
    held: Sequence[TensorRef], fsdp_params: FsdpParams, device: torch.device
) -> dict[str, torch.device]:
    """Return the device of each tensor by FQN, or the device that it will be materialized on."""
    return {item.fqn: _get_device(item, fsdp_params, device) for item in held}


def _get_device(item: TensorRef, fsdp_params: FsdpParams, device: torch.device) -> torch.device:
    if not item.tensor.is_meta:
        return item.local.device
    fsdp_param = _find_fsdp_param(item, fsdp_params)
    return torch.device("cpu") if fsdp_param is not None and torch_private.is_offloaded(fsdp_param) else device


def _find_fsdp_param(item: TensorRef, fsdp_params: FsdpParams) -> Any:
    return fsdp_params.get(item.tensor) if isinstance(item.tensor, nn.Parameter) else None


def materialize(
    held: Sequence[TensorRef], fsdp_params: FsdpParams, device: torch.device
) -> dict[str, torch.Tensor]:
    """Allocate uninitialized memory of this rank's shard for every meta tensor. Other tensors are unchanged.

    ``fsdp_params`` belong to the model. A parameter that is not among them is in no FSDP2 group. Returns this
    rank's local tensors, by FQN. Parameters become new objects, shared ones one object everywhere, with their
    ``requires_grad`` and attributes. Memory: this rank's shards.
    """
    return {item.fqn: _allocate(item, fsdp_params, device) if item.tensor.is_meta else item.local for item in held}


def _allocate(item: TensorRef, fsdp_params: FsdpParams, device: torch.device) -> torch.Tensor:
    """Replace a tensor on meta by one with uninitialized memory. Return its local tensor."""
    tensor, fsdp_param = item.tensor, _find_fsdp_param(item, fsdp_params)
    device = _get_device(item, fsdp_params, device)
    if fsdp_param is None:
        local = torch.empty_like(local_tensor(tensor), device=device)
    else:
        # FSDP2 gathers shards of one size, that of rank 0. So memory is padded, and the parameter is a view of it.
        size, pins = torch_private.padded_size(fsdp_param), torch_private.pins_memory(fsdp_param)
        padded = torch.empty(size, dtype=tensor.dtype, device=device, pin_memory=pins)
        local = torch_private.zero_padding(fsdp_param, padded)
    new = torch_private.make_dtensor_like(tensor, local) if isinstance(tensor, DTensor) else local
    if not isinstance(tensor, nn.Parameter):
        item.install(new)
        return local
    # A parameter on meta cannot get memory in place: it is replaced at every place that registers it.
    parameter = new if isinstance(new, nn.Parameter) else nn.Parameter(new, requires_grad=tensor.requires_grad)
    copy_attributes(parameter, tensor)
    item.install(parameter)
    # After install(): FSDP2 takes the parameter that is set on its modules.
    if fsdp_param is not None:
        torch_private.adopt_sharded(fsdp_param, parameter)
    return local


def offloads_shards(fsdp_params: FsdpParams) -> bool:
    """Return whether sharded parameters are on the CPU although the mesh is of another device."""
    return any(torch_private.is_offloaded(fsdp_param) for fsdp_param in fsdp_params.values())


_MEMINFO = Path("/proc/meminfo")


def available_memory(device: torch.device) -> Available:
    """Return free memory of the host and of the accelerator in bytes, or None if unknown.

    For an accelerator, this includes memory that torch has reserved and not given to a tensor. For the host: memory
    available without swapping, limited by the control groups of this process.
    """
    device_bytes = None if device.type == "cpu" else torch_private.free_memory(device)
    return Available(device_bytes, host_memory())


def host_memory(meminfo: Path = _MEMINFO, own_group: Path = OWN_GROUP, groups: Path = GROUPS) -> int | None:
    """Return free bytes of the machine, or of a control group that limits this process further. None if unknown."""
    # Each enclosing group may be the one that is nearly full, and so may the machine.
    free_bytes = [_free_bytes(group) for group in control_groups(own_group, groups)]
    for line in read_text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free_bytes.append(int(value.split()[0]) * 1024)  # in KiB
    return min((free for free in free_bytes if free is not None), default=None)


def _free_bytes(group: Path) -> int | None:
    most, used = number_in(group / "memory.max"), number_in(group / "memory.current")
    if most is None or used is None:
        return None
    statistics = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
    cache = sum(int(statistics.get(name, 0)) for name in ("inactive_file", "active_file"))
    return max(0, most - used + cache)  # usage counts the page cache, which is reclaimed before memory runs out


_PAGE_BYTES: Final = 4096


def require_budget(budget_bytes: int) -> None:
    """Raise for a budget that is smaller than a page.

    Raises:
        ConfigError: naming it.
    """
    if not isinstance(budget_bytes, int):
        raise ConfigError(f"budget_bytes={budget_bytes!r} is not a whole number of bytes. Pass one, as in 1 << 30")
    if budget_bytes < _PAGE_BYTES:
        raise ConfigError(f"budget_bytes={budget_bytes}: is less than a page. Pass at least {_PAGE_BYTES}")


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable automatic garbage collection during the block.

    The many objects of a plan trigger collections, each of which traverses all objects of torch and transformers:
    a quarter of a second, to find nothing. Not for blocks that read, or wait for more than the ranks' messages.
    """
    # Nested blocks, and a caller that has disabled it, must find it as they left it.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def trim_heap() -> None:
    """Return freed host memory to the system, which glibc keeps below blocks that are still in use."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@cache
def renew_thread_pool() -> None:
    """Give torch a pool of threads, if this process was forked. Called before threads start that touch tensors.

    It costs 0.1 ms, once in a process. See [Note: Threads of a forked process].
    """
    thread = threading.Thread(target=torch.get_num_threads, name="shardwise-first")
    thread.start()
    thread.join()


os.register_at_fork(after_in_child=renew_thread_pool.cache_clear)


Task = TypeVar("Task")
Buffer = TypeVar("Buffer")
P = ParamSpec("P")

_CHECK_INTERVAL_S = 0.1


def count_computing_workers(policy: ReadPolicy, processors: int) -> int:
    """Return the number of workers that compute at once: as many as read if reads cross a network."""
    return policy.concurrency if policy.is_remote else max(1, min(policy.concurrency, processors))


@dataclass
class WorkerPool(Generic[Task, Buffer]):
    """Threads, each with a buffer of its own, that take tasks in their order.

    The threads are daemons, unlike those of :class:`concurrent.futures.ThreadPoolExecutor`, which the interpreter
    joins at its end: one that hangs in a read of a dead file system does not keep the process alive.

    Args:
        function: function of a task and a buffer, run on the thread of the buffer.
        buffers: one for each thread.
        check: called periodically by the waiting thread. An exception of it ends the work.
    """

    function: Callable[[Task, Buffer], None]
    buffers: Sequence[Buffer]
    check: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: bool = False
    _failure: BaseException | None = None
    _at_work: int = 0

    def __post_init__(self) -> None:
        self._finished = threading.Condition(self._lock)

    def run(self, tasks: Sequence[Task]) -> None:
        """Carry out all tasks. The first error is raised after the other workers have finished their current tasks.

        When ``check`` raises, the workers are not waited for.
        """
        renew_thread_pool()  # before the threads, which may compute with torch
        pending = iter(tasks)
        buffers = self.buffers[: max(1, min(len(self.buffers), len(tasks)))]
        self._at_work = len(buffers)
        threads: list[threading.Thread] = []
        for number, buffer in enumerate(buffers):
            name = f"shardwise-worker-{number}"
            threads.append(threading.Thread(target=self._serve, args=(pending, buffer), name=name, daemon=True))
        try:
            for thread in threads:
                thread.start()  # may raise, and those that run must end then
            with self._finished:
                while self._at_work:
                    # With a timeout: check() runs, and Ctrl-C is raised, also while a worker hangs in a read.
                    self._finished.wait(_CHECK_INTERVAL_S)
                    if self.check is not None:
                        self.check()
        finally:
            # After an exception of check() or Ctrl-C, workers end with their current tasks, which nobody awaits.
            self._stop = True
        for thread in threads:
            thread.join()  # its buffer is freed before others are allocated
        if self._failure is not None:
            raise self._failure

    def _serve(self, pending: object, buffer: Buffer) -> None:
        try:
            while not self._stop:
                with self._lock:
                    # One iterator for all workers: an iterator must not be advanced by two threads at once.
                    task: Task | None = next(pending, None)  # type: ignore[call-overload]
                if task is None:
                    break
                self.function(task, buffer)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error  # the first one counts
                self._stop = True
        # Also after an error, so that run() does not wait for this worker.
        with self._finished:
            self._at_work -= 1
            self._finished.notify_all()


@contextmanager
def in_background(function: Callable[P, object], *args: P.args, **keywords: P.kwargs) -> Iterator[None]:
    """Run a function on another thread during the block. The block ends after it, with its error if it raised."""
    renew_thread_pool()
    with ThreadPoolExecutor(1, "shardwise-background") as pool:
        outcome = pool.submit(function, *args, **keywords)
        yield
    outcome.result()  # not reached if the block raised: its error counts
