"""Trees of saved states: DCP folders and files of ``torch.save``, with their tensors on meta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import FormatError
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.distributed import DistributedMetadata, open_state, read_metadata
from shardwise.files.storage import StorageReader
from shardwise.files.stored_tensors import stored_tensors
from shardwise.files.urls import shown
from shardwise.ranks.world import World
from shardwise.saving.torch_saves import load_plain, load_value, nest_values
from shardwise.state.state_values import read_numbers
from shardwise.transfer.distributed_chunks import StatePath
from shardwise.transfer.read import ReadExecutor

_MAX_DEPTH = 16


_MAX_OBJECT_BYTES = 100_000_000
"""The maximum size of a value that is not a tensor."""


@dataclass(frozen=True)
class SavedTree:
    """Dicts and lists, as they were saved.

    Tensors of more than one element are on meta. ``keys`` are the keys of tensors in ``index``, by their path in
    ``tree``.
    """

    index: CheckpointIndex
    tree: Any
    keys: Mapping[StatePath, str]

    def inside(self, wrapper: str) -> SavedTree:
        """Return the content of an outer dict that holds everything (accelerate writes one), or the tree itself."""
        if not isinstance(self.tree, Mapping) or list(self.tree) != [wrapper]:
            return self
        return SavedTree(self.index, self.tree[wrapper], {path[1:]: key for path, key in self.keys.items()})


def read_distributed_tree(reader: StorageReader, budget_bytes: int) -> SavedTree:
    """Return the tree of a ``torch.distributed.checkpoint`` folder.

    Raises:
        FormatError, StorageError: as of ``open_state``.
    """
    index, metadata = open_state(reader), read_metadata(reader)
    keys = {metadata.levels[path]: ".".join(path) for path in metadata.tensors}
    stored = stored_tensors(index)
    # Alone: other ranks may read other tensors, or none.
    executor = ReadExecutor(reader, index, budget_bytes, World(0, 1))
    values: dict[StatePath, Any] = {**read_numbers(executor, {levels: stored[key] for levels, key in keys.items()})}
    values |= read_objects(reader, metadata)
    return SavedTree(index, nest_values(values), keys)


def read_objects(reader: StorageReader, metadata: DistributedMetadata) -> dict[StatePath, Any]:
    """Return the values of a DCP folder that are not tensors, by path.

    Raises:
        FormatError, StorageError: a value is too long, holds more than data, or cannot be read.
    """
    values: dict[StatePath, Any] = {}
    for path, place in metadata.objects.items():
        what = f"{shown('.'.join(path))} in {shown(place.file)} in {reader.root}"
        if place.bytes.nbytes > _MAX_OBJECT_BYTES:
            raise FormatError(f"{what}: has {place.bytes.nbytes} bytes, more than any setting of an optimizer")
        content = reader.read(place.file, place.bytes.start, place.bytes.stop)
        values[metadata.levels[path]] = load_value(content, what)
    return values


def read_file_tree(reader: StorageReader, file: str) -> SavedTree:
    """Return the tree of a ``torch.save`` file.

    Raises:
        FormatError, StorageError: as in ``open_state``, or the file holds objects other than
            data.
    """
    index = open_state(reader, file)
    keys: dict[StatePath, str] = {}

    def on_meta(value: Any, path: StatePath) -> Any:
        if len(path) > _MAX_DEPTH:
            raise FormatError(f"{shown(file)} in {reader.root}: its dicts are nested too deeply for an optimizer's")
        if isinstance(value, torch.Tensor):
            # The key under which open_state() lists this tensor.
            keys[path] = ".".join(map(str, path))
            return value.clone() if value.numel() == 1 else torch.empty_like(value, device="meta")
        if isinstance(value, Mapping):
            return {key: on_meta(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(on_meta(inner, (*path, number)) for number, inner in enumerate(value))
        return value

    tree = on_meta(load_plain(Path(reader.root, file)), ())
    return SavedTree(index, tree, keys)
