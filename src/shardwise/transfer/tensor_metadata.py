"""Metadata of tensors, which ranks exchange and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.core.errors import RankMismatchError, ShardingError
from shardwise.core.formatting import ALL_RANKS, few_names
from shardwise.fsdp.named_tensors import local_boxes
from shardwise.transfer import move_plan
from shardwise.transfer.move_plan import Boxes


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor as one rank has it: all but the boxes is the same on every rank."""

    shape: tuple[int, ...]
    dtype: str
    boxes: Boxes


def get_metadata(tensor: torch.Tensor, name: str) -> TensorMetadata:
    """Return the metadata of a tensor on this rank."""
    return TensorMetadata(tuple(tensor.shape), str(tensor.dtype), get_boxes(tensor, name))


def metadata_by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorMetadata]:
    """Return the metadata of each tensor by name. Errors have the name."""
    return {name: get_metadata(tensor, name) for name, tensor in tensors.items()}


def get_boxes(tensor: torch.Tensor, name: str) -> Boxes:
    """Return the boxes of a tensor on this rank."""
    return tuple(item.box for item in local_boxes(tensor, name))


def require_same_tensors(
    metadata: Sequence[Mapping[str, TensorMetadata]], global_ranks: Sequence[int] = ALL_RANKS
) -> None:
    """Raise if ranks have different tensors. ``metadata`` are by rank.

    Raises:
        RankMismatchError: naming tensors.
    """
    first, *others = [{name: (item.shape, item.dtype) for name, item in found.items()} for found in metadata]
    for rank, other in enumerate(others, start=1):
        if list(other.items()) == list(first.items()):
            continue
        names = [name for name in dict.fromkeys([*first, *other]) if other.get(name) != first.get(name)]
        raise RankMismatchError(
            f"rank {global_ranks[rank]} has other tensors than rank {global_ranks[0]} (absent, or of another "
            f"shape, dtype or order): {few_names(names or list(other))}. Build the model and its "
            "optimizers alike on every rank"
        )


def held_by_rank(
    metadata: Sequence[Mapping[str, TensorMetadata]], global_ranks: Sequence[int] = ALL_RANKS
) -> dict[str, tuple[Boxes, ...]]:
    """Return the nonempty boxes of every tensor by rank: one object for all tensors with the same layout.

    Raises:
        RankMismatchError: ranks have different tensors.
        ShardingError: ranks do not have, together, all of a tensor.
    """
    require_same_tensors(metadata, global_ranks)
    known: dict[tuple[Boxes, ...], tuple[Boxes, ...]] = {}
    held: dict[str, tuple[Boxes, ...]] = {}
    for name in metadata[0]:
        boxes = tuple(tuple(box for box in found[name].boxes if box.numel) for found in metadata)
        held[name] = known.setdefault(boxes, boxes)
    if lacking := [name for name, item in metadata[0].items() if not move_plan.covers(item.shape, held[name])]:
        raise ShardingError(
            f"the ranks do not hold, together, each element of {few_names(lacking)}. Pass a process_group that has "
            "all ranks of the tensors' meshes"
        )
    return held
