"""Modules of a model gone through, what is registered in them, and what a new parameter takes from an old one."""

from __future__ import annotations

from shardwise.models._torch_private import (
    modules_in,
    original_class,
    parameters_in,
    parameters_of,
    sets_grad_dtype,
    take_after,
    walk,
)

__all__ = [
    "modules_in",
    "original_class",
    "parameters_in",
    "parameters_of",
    "sets_grad_dtype",
    "take_after",
    "walk",
]
