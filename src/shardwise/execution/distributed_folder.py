"""Writes a sharded state as a folder of ``torch.distributed.checkpoint``, which ``.metadata`` has count."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import FormatError, PlacementError, StorageError
from shardwise.execution.chunks import (
    data_file,
    key_of,
    metadata_of,
    plan_tensors,
    views_of,
    write_chunks,
)
from shardwise.execution.committing import make_file
from shardwise.execution.marked_folder import Saving
from shardwise.execution.moving import TensorFacts, facts_of
from shardwise.execution.torch_saves import Levels, flattened
from shardwise.execution.world import World
from shardwise.execution.write import Sink
from shardwise.formats.distributed import read_metadata
from shardwise.formats.joining import METADATA
from shardwise.models.view import local_tensor
from shardwise.planning.commit import WrittenFiles, fresh
from shardwise.storage.reading import LocalReader
from shardwise.storage.writing import open_writer

_DATA = re.compile(r"__[0-9]+_([0-9]+)\.distcp")

_FIRST_NUMBER = 1 << 32
"""Names of files have the number of their save, from here on: those that torch writes count from 0."""


def write_distributed_folder(
    world: World, saving: Saving, name: str, state: Mapping[str, Any], *, budget_bytes: int
) -> WrittenFiles:
    """Write a nest of dicts with DTensors, whole tensors and other values into a folder of this name.

    It is in the folder that is marked, which every rank sees. The new files have other names than an older
    checkpoint's, which counts until ``.metadata`` takes the place of its own. What is no tensor is the first
    rank's.

    Collective: yes.
    Memory: ``budget_bytes``, and that only for tensors that are strided, or on an accelerator.

    Raises:
        DisagreementError: ranks have different tensors.
        PlacementError: together they do not hold all of one; two have one name.
        StorageError: the folder could not be written to, or somebody else writes there, or has since.
    """
    tensors: dict[Levels, torch.Tensor] = {}
    values: dict[Levels, bytes] = {}

    def look() -> dict[str, TensorFacts]:
        keys: set[str] = set()
        for way, value in flattened(state, as_text=True):
            if isinstance(value, Mapping):
                continue  # an empty dict; torch leaves it out
            if (key := key_of(way)) in keys:
                raise PlacementError(f"{key}: two values have this name, with dots in other places; rename one")
            keys.add(key)
            if isinstance(value, torch.Tensor):
                tensors[way] = value
            elif world.rank == 0:
                values[way] = _packed(value)
        return {key_of(way): facts_of(tensor, key_of(way)) for way, tensor in tensors.items()}

    told = world.each(look)
    shapes = {way: (tuple(tensor.shape), tensor.dtype) for way, tensor in tensors.items()}
    plan = world.together(lambda: plan_tensors(shapes, told))
    sizes = world.each(lambda: {way: len(value) for way, value in values.items()})
    number, folder = _number(saving.token), Path(saving.folder, name)
    files = {data_file(rank, number): plan.nbytes(rank) + sum(own.values()) for rank, own in enumerate(sizes)}

    def write_own() -> None:
        saving.require()
        file, chunks = data_file(world.rank, number), plan.by_rank[world.rank]
        by_key = {key_of(way): tensor for way, tensor in tensors.items()}
        views = views_of(chunks, by_key, {key: local_tensor(tensor) for key, tensor in by_key.items()})
        with open_writer(folder) as writer:
            writer.create(file, files[file])
            sink = Sink(writer, check=world.check)
            write_chunks(sink, file, chunks, views, list(values.values()), budget_bytes)
            writer.sync(file)
            writer.sync_names()

    def write_metadata() -> int:
        metadata = metadata_of(plan, sizes, lambda rank: data_file(rank, number))
        with open_writer(folder) as writer:
            make_file(writer, fresh(METADATA, saving.token), metadata)
            writer.sync_names()
        return len(metadata)

    world.together(write_own)
    named = {f"{name}/{METADATA}": world.from_first(write_metadata)}
    return WrittenFiles(named, {f"{name}/{file}": nbytes for file, nbytes in files.items()})


def _packed(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _number(token: str) -> int:
    return _FIRST_NUMBER + int(token, 16)


def older_in(folder: Path, files: Collection[str]) -> list[str]:
    """Data of older checkpoints in a folder, beside these files."""
    with open_writer(folder) as writer:
        return [name for name in writer.list() if _DATA.fullmatch(name) and name not in files]


def left_in(folder: Path, of: str = "") -> list[str]:
    """Data of saves of ours that ``.metadata`` does not tell of; of the save with this token, or of any."""
    with open_writer(folder) as writer:
        names = writer.list()
    ours = [name for name in names if (found := _DATA.fullmatch(name)) and int(found[1]) >= _FIRST_NUMBER]
    if of:
        ours = [name for name in ours if (found := _DATA.fullmatch(name)) and int(found[1]) == _number(of)]
    if not ours or METADATA not in names:
        return ours
    try:
        with LocalReader(folder) as reader:
            metadata = read_metadata(reader)
    except (FormatError, StorageError):
        return []  # nobody knows what belongs together
    places = [place for tensor in metadata.tensors.values() for _, place in tensor.chunks]
    named = {place.file for place in [*places, *metadata.objects.values()]}
    # A rank that holds nothing has a file that is not told of; it goes with the others of its save.
    counting = {found[1] for name in named if (found := _DATA.fullmatch(name))}
    return [name for name in ours if (found := _DATA.fullmatch(name)) and found[1] not in counting]
