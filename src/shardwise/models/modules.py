"""Goes through the modules of a model: what they are, what is registered, what a new parameter takes after."""

from __future__ import annotations

from shardwise.models._torch_private import (
    buffers_of,
    dropout_of,
    is_compiled_in_place,
    modules_in,
    normalises_over_rows,
    original_class,
    parameters_in,
    parameters_of,
    sets_grad_dtype,
    take_after,
    walk,
    writes_to,
)

__all__ = [
    "buffers_of",
    "dropout_of",
    "is_compiled_in_place",
    "modules_in",
    "normalises_over_rows",
    "original_class",
    "parameters_in",
    "parameters_of",
    "sets_grad_dtype",
    "take_after",
    "walk",
    "writes_to",
]
