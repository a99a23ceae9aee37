"""Process groups of torch: where they met, where their objects travel, and that one is never destroyed."""

from __future__ import annotations

from shardwise.models._torch_private import (
    default_store,
    keep_forever,
    object_device,
)

__all__ = [
    "default_store",
    "keep_forever",
    "object_device",
]
