"""The tensors that a checkpoint stores, as expressions over its entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from shardwise.core.errors import ConfigError
from shardwise.core.expression import Expression, Stored, as_strided, concat
from shardwise.core.lazy_exports import import_object
from shardwise.files.checkpoint_index import CheckpointIndex, Composition, Joined, View, Whole

MakeNode: TypeAlias = Callable[[Any, Callable[[str], Expression]], Expression]
"""Makes the expression of a :class:`~shardwise.files.checkpoint_index.Coded` of one kind, given leaves by key."""

NODES: Final[dict[str, str]] = {
    "scaled": "shardwise.files.dequantize_expressions:dequantize_scaled",
    "four bits": "shardwise.files.dequantize_expressions:dequantize_four_bits",
}
"""Location of the :data:`MakeNode` of each kind, as ``package.module:name``."""


def stored_tensors(index: CheckpointIndex) -> dict[str, Expression]:
    """Return the checkpoint's tensors by key, in file order: a leaf for each, or an expression over several leaves.

    Raises:
        ConfigError: a tensor is quantized in a format that has no entry in :data:`NODES`.
    """
    expressions: dict[str, Expression] = {}
    for item in index.tensors():
        if item.key in index.composed:
            expressions[item.key] = _expression(index, index.composed[item.key].composition)
        else:
            expressions[item.key] = Stored(item.key, item.shape, item.dtype)
    return expressions


def extra_tensors(index: CheckpointIndex) -> dict[str, Expression]:
    """Return the tensors, by key, that are loaded only into a model that has a tensor of that name."""
    return {key: Stored(key, index.entries[key].shape, index.entries[key].dtype) for key in sorted(index.extra)}


def _expression(index: CheckpointIndex, composition: Composition) -> Expression:
    def leaf(key: str) -> Stored:
        entry = index.entries[key]
        return Stored(key, entry.shape, entry.dtype)

    # Forms of quantization are not known here. Their nodes are imported when a checkpoint has one.
    match composition:
        case Whole(key):
            return leaf(key)
        case View(key, strided):
            return as_strided(leaf(key), strided)
        case Joined(pieces, dim):
            return concat([_expression(index, inner) for inner in pieces], dim)
        case _:
            if composition.kind not in NODES:
                raise ConfigError(
                    f"{composition.kind!r}: has no entry in NODES, by which it is dequantized. Add one"
                )
            node: MakeNode = import_object(NODES[composition.kind])
            return node(composition, leaf)
