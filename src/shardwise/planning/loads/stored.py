"""The tensors of a checkpoint as expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from shardwise._face import found_at
from shardwise.conversion import Expression, Stored, concat, view
from shardwise.errors import ConfigError
from shardwise.formats.checkpoint_index import CheckpointIndex, ComposedPart, Joined, View, Whole

MakeNode: TypeAlias = Callable[[Any, Callable[[str], Expression]], Expression]
"""What a :class:`~shardwise.formats.checkpoint_index.Coded` of one kind stands for; leaves are had by key."""

NODES: Final[dict[str, str]] = {
    "scaled": "shardwise.planning.loads.coded:scaled",
    "four bits": "shardwise.planning.loads.coded:four_bits",
    "grouped": "shardwise.planning.loads.coded:grouped",
}
"""By kind, where its :data:`MakeNode` is, as ``package.module:name``."""


def stored_tensors(index: CheckpointIndex) -> dict[str, Expression]:
    """The checkpoint's tensors by key, in file order: a leaf for each, or what composes it of leaves.

    Raises:
        ConfigError: numbers are coded in a way that has no line in :data:`NODES`.
    """
    return {
        item.key: _expression(index, index.composed[item.key].part)
        if item.key in index.composed
        else Stored(item.key, item.shape, item.dtype)
        for item in index.tensors()
    }


def spare_tensors(index: CheckpointIndex) -> dict[str, Expression]:
    """What is loaded only into a model that has a tensor of that name, by key."""
    return {key: Stored(key, index.entries[key].shape, index.entries[key].dtype) for key in sorted(index.spare)}


def _expression(index: CheckpointIndex, part: ComposedPart) -> Expression:
    def leaf(key: str) -> Stored:
        entry = index.entries[key]
        return Stored(key, entry.shape, entry.dtype)

    match part:
        case Whole(key):
            return leaf(key)
        case View(key, strided):
            return view(leaf(key), strided)
        case Joined(parts, dim):
            return concat([_expression(index, inner) for inner in parts], dim)
        case _:
            if part.kind not in NODES:
                raise ConfigError(f"nobody makes numbers of {part.kind!r}; add a line for it to NODES")
            node: MakeNode = found_at(NODES[part.kind])
            return node(part, leaf)
