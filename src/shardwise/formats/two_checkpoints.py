"""Joins the indexes of two checkpoints, of which one lies in a folder of the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.composed import ComposedPart, Joined, View, Whole


def beside(first: CheckpointIndex, second: CheckpointIndex, folder: str) -> CheckpointIndex:
    """Both as one: the files and the keys of the second have names that begin with ``folder`` and a slash."""

    def inside(name: str) -> str:
        return f"{folder}/{name}"

    entries = {
        inside(key): replace(entry, key=inside(key), file=inside(entry.file))
        for key, entry in second.entries.items()
    }
    composed = {inside(key): replace(item, part=_moved(item.part, inside)) for key, item in second.composed.items()}
    return replace(
        first,
        files={**first.files, **{inside(file): nbytes for file, nbytes in second.files.items()}},
        entries={**first.entries, **entries},
        composed={**first.composed, **composed},
    )


def _moved(part: ComposedPart, inside: Callable[[str], str]) -> ComposedPart:
    match part:
        case Whole(key) | View(key):
            return replace(part, key=inside(key))
        case Joined(parts):
            return replace(part, parts=tuple(_moved(inner, inside) for inner in parts))
        case _:
            return part.moved(inside)
