"""What FSDP2 keeps of a parameter that it has sharded, and the memory it wants for it; what a placement splits."""

from __future__ import annotations

from shardwise.models._torch_private import (
    adopt_sharded,
    fsdp_params,
    is_offloaded,
    padded_size,
    pins_memory,
    sharded_as,
    splitting_dim,
    without_padding,
)

__all__ = [
    "adopt_sharded",
    "fsdp_params",
    "is_offloaded",
    "padded_size",
    "pins_memory",
    "sharded_as",
    "splitting_dim",
    "without_padding",
]
