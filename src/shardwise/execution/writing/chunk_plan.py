"""Plans which rank writes which chunk of a state into which file, before a byte is written.

Every rank writes a file of its own, chunk after chunk, each a tensor's box as ``torch.save`` writes it; then its
values that are no tensors. What several ranks hold is written by one of them, in parts or in turns.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.errors import PlacementError
from shardwise.execution.memory.garbage import collected_later
from shardwise.execution.moving.reshard import TensorFacts, require_same_tensors
from shardwise.execution.writing.torch_out import envelope
from shardwise.models.torch_words import stored_at
from shardwise.planning.moves.assembly import Boxes, shares_by_rank, shares_of_first
from shardwise.report.names import collapse
from shardwise.tensors import Box, numel

Way = TypeVar("Way", bound=tuple[str | int, ...])
"""What leads to a value of a checkpoint, as in ``("optimizer", "state", FQN, "step")``; numbers lead into lists."""

_NO_OTHERS: Mapping[Any, Any] = MappingProxyType({})

_VERSION = "1.0.0"
"""Of the format, as torch 2.11 to 2.13 note it."""

_ALIGNMENT = 64
"""Where archives begin in a file, as their tensors do in them."""


def data_file(rank: int, number: int = 0) -> str:
    """The file of what a rank wrote, by the name that torch gives such files."""
    return f"__{rank}_{number}.distcp"


def key_of(way: tuple[str | int, ...]) -> str:
    """The name that torch gives to what lies at the end of this way."""
    return ".".join(map(str, way))


@dataclass(frozen=True, slots=True)
class ArchivedChunk:
    """A box of a tensor, and where its archive lies in the file of the rank that writes it."""

    key: str
    box: Box
    dtype: torch.dtype
    start: int

    @property
    def data_start(self) -> int:
        return self.start + len(envelope(self.box.sizes, self.dtype).before)

    @property
    def data_stop(self) -> int:
        return self.data_start + self.box.numel * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.data_stop + len(envelope(self.box.sizes, self.dtype).after)


@dataclass(frozen=True, slots=True)
class TensorsPlan:
    """The tensors of a checkpoint, and the chunks of each rank's file, in their order there.

    ``others`` are further names of tensors that have several, with the keys of their first ones.
    """

    tensors: Mapping[str, tuple[tuple[str | int, ...], tuple[int, ...], torch.dtype]]
    by_rank: tuple[tuple[ArchivedChunk, ...], ...]
    others: Mapping[tuple[str | int, ...], str]

    @property
    def state_bytes(self) -> int:
        """Of all tensors."""
        return sum(numel(shape) * dtype.itemsize for _, shape, dtype in self.tensors.values())

    def nbytes(self, rank: int) -> int:
        """Of a rank's file, up to what is no tensor."""
        chunks = self.by_rank[rank]
        return chunks[-1].stop if chunks else 0


@collected_later()
def plan_tensors(
    tensors: Mapping[Way, tuple[tuple[int, ...], torch.dtype]],
    told: Sequence[Mapping[str, TensorFacts]],
    buffers: Collection[str] = (),
    others: Mapping[Way, Way] = _NO_OTHERS,
) -> TensorsPlan:
    """Deal the tensors out to the ranks. ``told`` is what each rank holds, by key.

    ``buffers`` are keys of tensors that the first rank writes which holds them, see [Note: Patchworks]; ``others``
    are further names of tensors, with their first ones.

    Raises:
        DisagreementError: the ranks have different tensors.
        PlacementError: together they do not hold all of one.
    """
    require_same_tensors(told)
    ends = [0] * len(told)
    files: list[list[ArchivedChunk]] = [[] for _ in told]
    lacking: list[str] = []
    found: dict[str, tuple[tuple[str | int, ...], tuple[int, ...], torch.dtype]] = {}
    for number, (path, (shape, dtype)) in enumerate(tensors.items()):
        key = key_of(path)
        found[key] = path, shape, dtype
        held = [facts[key].boxes for facts in told]
        shares = shares_of_first(held) if key in buffers else shares_by_rank(held, number, dtype.itemsize)
        whole = Box.whole(shape)
        if not whole.numel:  # somebody has to say that there is nothing
            shares = ((whole,), *((),) * (len(told) - 1))
        if sum(box.numel for boxes in shares for box in boxes) != whole.numel:
            lacking.append(key)
        _lay_out(key, dtype, shares, files, ends)
    if lacking:
        names = ", ".join(pattern for pattern, _ in collapse(lacking)[:6])
        raise PlacementError(
            f"the ranks do not hold, together, each element of {names}; pass a process_group that has all ranks of "
            "the tensors' meshes"
        )
    return TensorsPlan(found, tuple(map(tuple, files)), {path: key_of(first) for path, first in others.items()})


def _lay_out(
    key: str, dtype: torch.dtype, shares: Sequence[Boxes], files: list[list[ArchivedChunk]], ends: list[int]
) -> None:
    for rank, boxes in enumerate(shares):
        for box in boxes:
            chunk = ArchivedChunk(key, box, dtype, -(-ends[rank] // _ALIGNMENT) * _ALIGNMENT)
            ends[rank] = chunk.stop
            files[rank].append(chunk)


@collected_later()
def metadata_of(
    plan: TensorsPlan, values: Sequence[Mapping[Way, int]], name: Callable[[int], str] = data_file
) -> bytes:
    """The file ``.metadata``. ``values`` are what each rank stores that is no tensor, with its bytes, in order.

    ``name`` is that of the file of a rank. A tensor of several names is in it under each, since torch asks for all
    of them; its bytes are there once.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        for key, (_, shape, dtype) in plan.tensors.items()
    }
    paths: dict[str, tuple[str | int, ...]] = {key: path for key, (path, _, _) in plan.tensors.items()}
    places: dict[MetadataIndex, object] = {}
    for rank, chunks in enumerate(plan.by_rank):
        for chunk in chunks:
            tensor = described[chunk.key]
            assert isinstance(tensor, TensorStorageMetadata)
            index = MetadataIndex(chunk.key, chunk.box.offsets, len(tensor.chunks))
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes)))
            places[index] = stored_at(name(rank), chunk.start, chunk.stop - chunk.start)
    chunks_of: dict[str, list[MetadataIndex]] = {}
    for index in places:
        chunks_of.setdefault(index.fqn, []).append(index)
    for path, first in plan.others.items():
        key = key_of(path)
        described[key], paths[key] = described[first], path
        places |= {replace(index, fqn=key): places[index] for index in chunks_of[first]}
    for rank, sizes in enumerate(values):
        position = plan.nbytes(rank)
        for path, nbytes in sizes.items():
            key = key_of(path)
            described[key] = BytesStorageMetadata()
            paths[key] = path
            places[MetadataIndex(key)] = stored_at(name(rank), position, nbytes)
            position += nbytes
    metadata = Metadata(described, paths, places, version=_VERSION)
    return pickle.dumps(metadata)
