"""torch dtypes and their safetensors names."""

from __future__ import annotations

import torch

from shardwise.errors import PlacementError
from shardwise.tensors import DType

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
