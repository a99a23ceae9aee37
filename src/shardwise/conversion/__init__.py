"""Expressions: which stored elements make up a box of a parameter. No torch, no files."""

from shardwise.conversion.bindings import Bindings
from shardwise.conversion.copies import Copy, copies, pieces
from shardwise.conversion.covering import covering_box, needed_boxes
from shardwise.conversion.expression import (
    Concat,
    Expression,
    Opaque,
    Permute,
    Reshape,
    Slice,
    Stack,
    Stored,
    concat,
    permute,
    reshape,
    skeleton,
    slice_dim,
    stack,
    stored_dtype,
    stored_leaves,
    substitute,
    view,
)

__all__ = [
    "Bindings",
    "Concat",
    "Copy",
    "Expression",
    "Opaque",
    "Permute",
    "Reshape",
    "Slice",
    "Stack",
    "Stored",
    "concat",
    "copies",
    "covering_box",
    "needed_boxes",
    "permute",
    "pieces",
    "reshape",
    "skeleton",
    "slice_dim",
    "stack",
    "stored_dtype",
    "stored_leaves",
    "substitute",
    "view",
]
