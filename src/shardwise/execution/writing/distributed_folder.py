"""Writes a sharded state as a folder of ``torch.distributed.checkpoint``, which ``.metadata`` has count."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import FormatError, PlacementError, StorageError
from shardwise.execution.moving.reshard import TensorFacts, facts_of
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.chunk_plan import TensorsPlan, data_file, key_of, metadata_of, plan_tensors
from shardwise.execution.writing.chunk_stream import ChunkStream, InPlace, places_of, views_of
from shardwise.execution.writing.committing import make_file
from shardwise.execution.writing.marked_folder import Saving
from shardwise.execution.writing.torch_out import Levels
from shardwise.formats.distributed import METADATA, read_metadata
from shardwise.models.view import local_tensor
from shardwise.planning.saves.commit import WrittenFiles, fresh
from shardwise.storage.reading.local import LocalReader
from shardwise.storage.writing.opening import open_writer

_DATA = re.compile(r"__[0-9]+_([0-9]+)\.distcp")

_FIRST_NUMBER = 1 << 32
"""Names of files have the number of their save, from here on: those that torch writes count from 0."""


@dataclass(frozen=True)
class _RankState:
    """What this rank has of a state: tensors, and what is none, as it is written; and what it tells the others."""

    tensors: Mapping[Levels, torch.Tensor]
    values: Mapping[Levels, bytes]
    told: Mapping[str, TensorFacts]


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
    content, told = _looked_at(world, state)
    shapes = {way: (tuple(tensor.shape), tensor.dtype) for way, tensor in content.tensors.items()}
    plan = world.together(lambda: plan_tensors(shapes, told))
    sizes = world.each(lambda: {way: len(value) for way, value in content.values.items()})
    number, folder = _number(saving.token), Path(saving.folder, name)
    files = {data_file(rank, number): plan.nbytes(rank) + sum(own.values()) for rank, own in enumerate(sizes)}
    world.together(lambda: _write_own(world, saving, folder, plan, content, files, budget_bytes))

    def write_metadata() -> int:
        metadata = metadata_of(plan, sizes, lambda rank: data_file(rank, number))
        with open_writer(folder) as writer:
            make_file(writer, fresh(METADATA, saving.token), metadata)
            writer.sync_names()
        return len(metadata)

    named = {f"{name}/{METADATA}": world.from_first(write_metadata)}
    return WrittenFiles(named, {f"{name}/{file}": nbytes for file, nbytes in files.items()})


def _looked_at(world: World, state: Mapping[str, Any]) -> tuple[_RankState, list[Mapping[str, TensorFacts]]]:
    """What there is, on this rank and on all. Collective: yes."""
    found: list[_RankState] = []

    def look() -> Mapping[str, TensorFacts]:
        tensors: dict[Levels, torch.Tensor] = {}
        values: dict[Levels, bytes] = {}
        keys: set[str] = set()
        for way, value in _leaves(state, ()):
            key = key_of(way)
            if key in keys:
                raise PlacementError(f"{key}: two values have this name, with dots in other places; rename one")
            keys.add(key)
            if isinstance(value, torch.Tensor):
                tensors[way] = value
            elif world.rank == 0:
                values[way] = _packed(value)
        told = {key_of(way): facts_of(tensor, key_of(way)) for way, tensor in tensors.items()}
        found.append(_RankState(tensors, values, told))
        return told

    told = world.each(look)
    return found[0], told


def _leaves(value: Any, way: Levels) -> Iterator[tuple[Levels, Any]]:
    """As torch flattens a state: an empty dict is nothing, and a list a value unless there is more inside of it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*way, str(key)))
    elif isinstance(value, list) and any(_is_nest(item) or isinstance(item, torch.Tensor) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*way, number))
    else:
        yield way, value


def _is_nest(value: object) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and any(_is_nest(item) or isinstance(item, torch.Tensor) for item in value)
    )


def _packed(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _number(token: str) -> int:
    return _FIRST_NUMBER + int(token, 16)


def _write_own(
    world: World,
    saving: Saving,
    folder: Path,
    plan: TensorsPlan,
    content: _RankState,
    files: Mapping[str, int],
    budget_bytes: int,
) -> None:
    """This rank's file, once it sees the mark."""
    saving.require()
    file = data_file(world.rank, _number(saving.token))
    chunks = plan.by_rank[world.rank]
    tensors = {key_of(way): tensor for way, tensor in content.tensors.items()}
    local = {key: local_tensor(tensor) for key, tensor in tensors.items()}
    views = views_of(places_of(chunks, tensors), local)
    with open_writer(folder) as writer:
        writer.create(file, files[file])
        stream = ChunkStream(writer, file, world.check)
        stream.write(chunks, InPlace(views, budget_bytes), list(content.values.values()))
        writer.sync(file)
        writer.sync_names()


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
