"""What FSDP2 keeps of a parameter that it has sharded, and the memory it wants for it; what a placement splits.

Also which groups of parameters it gathers, and when; and how it forgets a pass.
"""

from __future__ import annotations

from shardwise.models._torch_private import (
    Gather,
    adopt_sharded,
    computing_dtypes,
    forget_pass,
    fsdp_params,
    gather_zeros,
    is_offloaded,
    padded_size,
    pins_memory,
    seeing_gathers,
    sharded_as,
    splitting_dim,
    without_padding,
)

__all__ = [
    "Gather",
    "adopt_sharded",
    "computing_dtypes",
    "forget_pass",
    "fsdp_params",
    "gather_zeros",
    "is_offloaded",
    "padded_size",
    "pins_memory",
    "seeing_gathers",
    "sharded_as",
    "splitting_dim",
    "without_padding",
]
