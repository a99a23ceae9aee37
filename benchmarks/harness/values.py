"""Whether sharded models hold the same values, and whether all of them are in memory."""

import hashlib
import math
import resource
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_PAGE_BYTES = resource.getpagesize()
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_MODULUS = 1 << 64
_BLOCK = 1 << 20
"""Elements that are multiplied by the same table of random numbers."""


def local_tensors(model: nn.Module) -> list[torch.Tensor]:
    """This rank's parts of all parameters and buffers, each once, without empty ones."""
    tensors: dict[int, torch.Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.is_meta:
            raise RuntimeError("a tensor is still on meta")
        if local.numel():
            tensors.setdefault(local.data_ptr(), local)
    return list(tensors.values())


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def write_to_pages(model: nn.Module) -> None:
    """Write to every page of this rank's tensors on the host, without changing a value.

    Until then a loader may have left values in a mapped file. (On a device, values are where they are used.)
    """
    for tensor in local_tensors(model):
        if tensor.device.type == "cpu":
            # Not the whole storage: that of a mapped file may be much larger than the tensor.
            start = tensor.storage_offset() * tensor.element_size()
            span = torch.empty(0, dtype=torch.uint8)
            span.set_(tensor.untyped_storage(), start, (span_bytes(tensor),))
            span[::_PAGE_BYTES].bitwise_xor_(0)
            span[-1:].bitwise_xor_(0)


def sum_values(model: nn.Module) -> dict[str, tuple[str, bool, int]]:
    """By name: dtype and shape, whether it is sharded, and a sum over its elements.

    Each element's bits are multiplied by a number of its place. The sums of all shards, modulo 2**64, do not depend
    on how a tensor is sharded. Adapters are left out, because each loader draws its own.
    """
    sums = {}
    for fqn, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if ".lora_" in fqn:
            continue
        name = fqn.removeprefix("base_model.model.").replace(".base_layer.", ".")
        data, offsets = tensor.detach(), (0,) * tensor.dim()
        is_sharded = isinstance(data, DTensor)
        if is_sharded:
            _, offsets = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
            data = data.to_local()
        value = _sum_box(data.cpu(), tuple(tensor.shape), offsets) if data.numel() else 0
        sums[name] = (f"{tensor.dtype} {tuple(tensor.shape)}", is_sharded, value)
    return sums


def _sum_box(local: torch.Tensor, shape: tuple[int, ...], offsets: Sequence[int]) -> int:
    """The sum over a box of a tensor of ``shape`` that begins at ``offsets``."""
    if not local.dim():
        local, shape, offsets = local.reshape(1), (1,), (0,)
    array = local.contiguous().view(_UNSIGNED[local.element_size()]).numpy()
    # Dims behind the last one that is cut are contiguous in the whole tensor.
    outer = next((dim for dim in reversed(range(local.dim())) if local.shape[dim] != shape[dim]), 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    total = 0
    for index in np.ndindex(array.shape[:outer]):
        start = begin + sum(place * stride for place, stride in zip(index, strides, strict=False))
        total += _sum_run(array[index].reshape(-1), start)
    return total % _MODULUS


def _sum_run(elements: Any, first: int) -> int:
    """The sum over contiguous elements of which the first is at place ``first`` of the whole tensor."""
    total = done = 0
    while done < len(elements):
        block, column = divmod(first + done, _BLOCK)
        part = elements[done : done + _BLOCK - column].astype(np.uint64)
        of_block = int.from_bytes(hashlib.blake2b(block.to_bytes(8, "big"), digest_size=8).digest(), "big")
        total += int(np.dot(part, _weights()[column : column + len(part)])) + of_block * int(part.sum())
        done += len(part)
    return total


@cache
def _weights() -> Any:
    generator = np.random.Generator(np.random.PCG64(20))
    return generator.integers(0, _MODULUS, size=_BLOCK, dtype=np.uint64) | np.uint64(1)


def join_sums(ranks: Sequence[Mapping[str, tuple[str, bool, int]]]) -> dict[str, str]:
    """Checksums of whole tensors by name. One that is whole on every rank, and differs, has none in common."""
    joined = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        parts = [rank.get(name, ("missing", False, 0)) for rank in ranks]
        values = [value for _, _, value in parts]
        if parts[0][1]:
            values = [sum(values) % _MODULUS]
        joined[name] = " ".join([parts[0][0], *(f"{value:016x}" for value in dict.fromkeys(values))])
    return joined


def compare(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """ "same", or what differs."""
    names = sorted(first.keys() | other.keys())
    different = [name for name in names if first.get(name) != other.get(name)]
    return f"{len(different)} of {len(names)} differ, such as {different[0]}" if different else "same"
