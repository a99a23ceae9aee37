"""torch in words of ours: its accelerators, its dtypes, and those of its unexported names that others may ask for.

*Accelerators*, whoever makes them: CUDA's and ROCm's, Intel's (xpu), Huawei's (npu). torch has one module for each
kind (``torch.get_device_module``), with streams, events and memory under the same names. Of other kinds (mps, say)
shards and copies are not known to work: who asks for one is refused, and who asks for none computes on the CPU.

*Modules*: what they are, what is registered, what a new parameter takes after. *Sharded parameters*: what FSDP2
keeps of one, and the memory it wants for it; what a placement splits; which groups of parameters it gathers, and
when; how it forgets a pass. *Process groups*: where they met, where their objects travel, and that one is never
destroyed. *Files*, laid out before there are values, and many tensors at once, in few kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import PlacementError
from shardwise.models._torch_private import (
    Gather,
    adopt_sharded,
    buffers_of,
    computing_dtypes,
    copy_all,
    default_store,
    dropout_of,
    forget_pass,
    fsdp_params,
    gather_zeros,
    is_compiled_in_place,
    is_forked_from_cuda,
    is_offloaded,
    keep_forever,
    modules_in,
    multiply,
    normalises_over_rows,
    object_device,
    original_class,
    padded_size,
    parameters_in,
    parameters_of,
    pins_memory,
    save_without_data,
    seeing_gathers,
    sets_grad_dtype,
    sharded_as,
    splitting_dim,
    stored_at,
    take_after,
    walk,
    without_padding,
    writes_to,
)
from shardwise.tensors import DType

__all__ = [
    "KINDS",
    "Gather",
    "accelerator",
    "adopt_sharded",
    "backend_of",
    "both_backends",
    "buffers_of",
    "computing_dtypes",
    "copy_all",
    "default_store",
    "dropout_of",
    "forget_pass",
    "free_memory",
    "from_torch",
    "fsdp_params",
    "gather_zeros",
    "has_collectives",
    "in_memory",
    "is_compiled_in_place",
    "is_forked_from_cuda",
    "is_offloaded",
    "keep_forever",
    "memory_in_use",
    "module_of",
    "modules_in",
    "multiply",
    "normalises_over_rows",
    "object_device",
    "original_class",
    "padded_size",
    "parameters_in",
    "parameters_of",
    "pins_memory",
    "save_without_data",
    "saved_dtype",
    "seeing_gathers",
    "sets_grad_dtype",
    "settle",
    "sharded_as",
    "splitting_dim",
    "stored_at",
    "take_after",
    "to_torch",
    "walk",
    "without_padding",
    "writes_to",
]

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


_TO_TORCH: dict[DType, torch.dtype] = {
    DType.BOOL: torch.bool,
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.U16: torch.uint16,
    DType.I16: torch.int16,
    DType.U32: torch.uint32,
    DType.I32: torch.int32,
    DType.U64: torch.uint64,
    DType.I64: torch.int64,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E4M3FNUZ: torch.float8_e4m3fnuz,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E5M2FNUZ: torch.float8_e5m2fnuz,
    DType.F8_E8M0: torch.float8_e8m0fnu,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
    DType.C64: torch.complex64,
}
_FROM_TORCH = {torch_dtype: dtype for dtype, torch_dtype in _TO_TORCH.items()}


def to_torch(dtype: DType) -> torch.dtype:
    """The torch dtype of a stored dtype of whole bytes; a :class:`KeyError` for the smaller ones."""
    return _TO_TORCH[dtype]


def in_memory(dtype: torch.dtype) -> DType:
    """The dtype of a tensor that goes into no file: ``OTHER`` where safetensors has none for it."""
    return _FROM_TORCH.get(dtype, DType.OTHER)


def from_torch(dtype: torch.dtype, fqn: str) -> DType:
    """The safetensors dtype of a model's tensor.

    Raises:
        PlacementError: when safetensors has no such dtype.
    """
    if dtype not in _FROM_TORCH:
        raise PlacementError(f"{fqn} is {dtype}, which safetensors cannot hold")
    return _FROM_TORCH[dtype]


def saved_dtype(dtype: DType, target: torch.dtype | None) -> DType:
    """What a tensor is saved in when ``target`` is asked for.

    Floating-point numbers of at least 16 bits follow it; narrower ones, integers and bools stay what they are.
    """
    is_cast = target is not None and dtype.kind == "float" and dtype.bits >= 16
    return from_torch(target, "dtype") if is_cast and target is not None else dtype
