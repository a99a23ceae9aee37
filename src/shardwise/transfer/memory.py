"""Memory of a rank: devices and storage of tensors, free memory, garbage collection."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from shardwise.core.errors import ConfigError
from shardwise.core.machine import GROUPS, OWN_GROUP, control_groups, number_in, read_text
from shardwise.core.reports import Available
from shardwise.fsdp import torch_private
from shardwise.fsdp.named_tensors import TensorRef, computing_device, local_tensor
from shardwise.fsdp.torch_private import copy_attributes, share_hooks


def get_model_device(refs: Sequence[TensorRef], default: torch.device | None) -> torch.device:
    """Return the device that a model computes on: that of its mesh, otherwise ``default``, otherwise the CPU.

    Unsharded tensors (buffers, full parameters) belong there too.
    """
    for item in refs:
        if isinstance(item.tensor, DTensor):
            # The first DTensor decides: the meshes of a model are of one kind of device.
            return computing_device(item.tensor)
    return default or torch.device("cpu")


def staging_device(refs: Sequence[TensorRef], tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of staging buffers: the mesh's, otherwise that of the tensors with values."""
    live = next((tensor for tensor in tensors if not tensor.is_meta), None)
    return get_model_device(refs, None if live is None else local_tensor(live).device)


FsdpParams: TypeAlias = Mapping[nn.Parameter, Any]
"""FSDP2's ``FSDPParam`` of each parameter that it shards. Keys are parameters before they are materialized."""


def target_device(item: TensorRef, fsdp_params: FsdpParams, device: torch.device) -> torch.device:
    """Return the device of a tensor, or the device that it will be materialized on."""
    if not item.tensor.is_meta:
        return item.local.device
    fsdp_param = _find_fsdp_param(item, fsdp_params)
    return torch.device("cpu") if fsdp_param is not None and torch_private.is_offloaded(fsdp_param) else device


def _find_fsdp_param(item: TensorRef, fsdp_params: FsdpParams) -> Any:
    return fsdp_params.get(item.tensor) if isinstance(item.tensor, nn.Parameter) else None


@torch.inference_mode(False)  # other threads write to the memory, and parameters may be trained
def materialize(
    refs: Sequence[TensorRef], fsdp_params: FsdpParams, device: torch.device
) -> dict[str, torch.Tensor]:
    """Allocate uninitialized memory of this rank's shard for every meta tensor. Other tensors are unchanged.

    ``fsdp_params`` belong to the model. A parameter that is not among them is in no FSDP2 group. Returns this
    rank's local tensors, by FQN. Parameters keep their attributes and hooks, and are the same objects where torch
    can swap them. Memory: this rank's shards.
    """
    return {item.fqn: _allocate(item, fsdp_params, device) if item.tensor.is_meta else item.local for item in refs}


def _allocate(item: TensorRef, fsdp_params: FsdpParams, device: torch.device) -> torch.Tensor:
    """Replace a tensor on meta by one with uninitialized memory. Return its local tensor."""
    tensor, fsdp_param = item.tensor, _find_fsdp_param(item, fsdp_params)
    device = target_device(item, fsdp_params, device)
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
    parameter = new if isinstance(new, nn.Parameter) else nn.Parameter(new, requires_grad=tensor.requires_grad)
    copy_attributes(parameter, tensor)
    share_hooks(parameter, tensor)
    try:
        swap_tensors(tensor, parameter)
        parameter = tensor
    except RuntimeError:  # nn.LSTM has weak references to it, or a graph of autograd has it
        item.install(parameter)
    # Afterwards: FSDP2 takes the parameter that is set on its modules.
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
