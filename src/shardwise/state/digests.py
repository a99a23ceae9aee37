"""Digests of values that ranks compare, or that a checkpoint records."""

import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_PLAIN = (str, int, float, complex, bool, bytes, bytearray, type(None))


def compute_digest(value: object) -> str:
    """Return a digest that is equal for equal values, this rank's of a DTensor.

    Objects that are not plain data count by their class.
    """
    sha256 = hashlib.sha256()
    _digest(value, sha256)
    return sha256.hexdigest()[:32]


def _digest(value: Any, into: Any) -> None:
    # With types and brackets, so that 1, 1.0 and True differ, and [[1], 2] from [1, [2]].
    into.update(f"{type(value).__name__}(".encode())
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        into.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        value = value.detach().cpu().resolve_conj().resolve_neg()
        into.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            _digest(key, into)
            _digest(item, into)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest(item, into)
    elif isinstance(value, (set, frozenset)):
        for item in sorted(map(compute_digest, value)):  # a set has no order
            into.update(item.encode())
    elif isinstance(value, _PLAIN):
        into.update(repr(value).encode())
    into.update(b")")
