"""Files of torch, laid out before there are values: archives with room for tensors, and where chunks lie."""

from __future__ import annotations

from shardwise.models._torch_private import (
    save_without_data,
    stored_at,
)

__all__ = [
    "save_without_data",
    "stored_at",
]
