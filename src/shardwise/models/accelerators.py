"""Accelerators, whoever makes them: CUDA's and ROCm's, Intel's (xpu), Huawei's (npu), by what torch has of each.

torch has one module for each kind (``torch.get_device_module``), with streams, events and memory under the same
names. Of other kinds (mps, say) shards and copies are not known to work: who asks for one is refused, and who asks
for none computes on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import PlacementError
from shardwise.models._torch_private import is_forked_from_cuda as is_forked_from_cuda

KINDS = ("cuda", "xpu", "npu")


def accelerator() -> torch.device | None:
    """The kind of accelerator that is here; None where there is none, or none of a known kind."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found if found is not None and found.type in KINDS else None


def module_of(device: torch.device) -> Any:
    """torch's module for a kind of accelerator.

    Raises:
        PlacementError: it is not of a known kind.
    """
    if device.type not in KINDS:
        raise PlacementError(
            f"device {device}: tensors are brought to the CPU, and to accelerators of these kinds: "
            f"{', '.join(KINDS)}; load on the CPU and move the model afterwards"
        )
    return torch.get_device_module(device.type)


def backend_of(kind: torch.device) -> str:
    """The backend of collectives on an accelerator: nccl, xccl, hccl."""
    return dist.get_default_backend_for_device(kind.type)


def both_backends(kind: torch.device) -> str:
    """Of a process group for tensors on the host and on an accelerator."""
    return f"cpu:gloo,{kind.type}:{backend_of(kind)}"


def has_collectives(kind: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a process group (None: the default one) works on tensors of an accelerator."""
    return backend_of(kind) in str(dist.get_backend_config(group))


def free_memory(device: torch.device) -> int:
    """Bytes on an accelerator that can be had: free, or kept by torch for tensors to come."""
    module = module_of(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + int(kept)


def memory_in_use(device: torch.device) -> tuple[int, int, int]:
    """Bytes of an accelerator: in tensors of this process, kept by torch for them, taken by whomever.

    Nothing before this process has used it, which asking would begin.
    """
    module = module_of(device)
    if not module.is_initialized():
        return 0, 0, 0
    free, total = module.mem_get_info(device)
    return int(module.memory_allocated(device)), int(module.memory_reserved(device)), int(total - free)


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until these tensors have the values that this thread has asked for: other threads have other streams."""
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            module_of(device).current_stream(device).synchronize()
