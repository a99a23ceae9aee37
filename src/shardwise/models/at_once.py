"""Many tensors at once, in few kernels."""

from __future__ import annotations

from shardwise.models._torch_private import (
    copy_all,
    multiply,
)

__all__ = [
    "copy_all",
    "multiply",
]
