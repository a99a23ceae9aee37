"""Dropout that follows from where a number is, not from what was drawn before.

[Note: Counted dropout] Whether an element is dropped is a hash of the tenant's seed, its window, the micro-batch in
the window, the layer, the row among the tenant's own (of all ranks), and the place in the row. So it is the same
when activations are recomputed, whoever else is in the batch, and on any number of ranks; and no random generator
of torch's is moved. The hash is splitmix64's; torch's int64 wraps around, and has no logical shift.
"""

from __future__ import annotations

import hashlib

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def key_of(*parts: object) -> int:
    """63 bits of whatever has a ``repr``."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def row_keys(key: int, first: int, count: int) -> torch.Tensor:
    """A key for each of some rows: (count,), int64, on the CPU."""
    return _mixed(key + torch.arange(first, first + count) * _GOLDEN)


def dropped(values: torch.Tensor, keys: torch.Tensor, site: int, probability: float) -> torch.Tensor:
    """Values with some of them 0 and the others scaled, as ``nn.Dropout`` has it in training.

    It is its own derivative: of a gradient it gives that of the values. ``values`` is (rows * n, width), ``keys``
    (rows,).
    """
    places = torch.arange(values.numel() // max(len(keys), 1), device=values.device)
    hashed = _mixed((keys.to(values.device) ^ site).unsqueeze(1) + places * _GOLDEN)
    kept = (_shifted(hashed, 33) >= int(probability * (1 << 31))).view(values.shape)
    return torch.where(kept, values / (1 - probability), 0.0)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, filled up with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
