"""Facts of tensors, which ranks exchange and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.errors import RankMismatchError, ShardingError
from shardwise.models.view import local_boxes
from shardwise.planning import moves
from shardwise.report.names import ALL_RANKS, few_names


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor as one rank has it: all but the boxes is the same on every rank."""

    shape: tuple[int, ...]
    dtype: str
    boxes: moves.Boxes


def facts_of(tensor: torch.Tensor, name: str) -> TensorFacts:
    """Return the facts of a tensor on this rank."""
    return TensorFacts(tuple(tensor.shape), str(tensor.dtype), boxes_of(tensor, name))


def facts_by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorFacts]:
    """Return the facts of each tensor by name. Errors have the name."""
    return {name: facts_of(tensor, name) for name, tensor in tensors.items()}


def boxes_of(tensor: torch.Tensor, name: str) -> moves.Boxes:
    """Return the boxes of a tensor on this rank."""
    return tuple(item.box for item in local_boxes(tensor, name))


def require_same_tensors(
    facts: Sequence[Mapping[str, TensorFacts]], global_ranks: Sequence[int] = ALL_RANKS
) -> None:
    """Raise if ranks have different tensors. ``facts`` are by rank.

    Raises:
        RankMismatchError: naming tensors.
    """
    first, *others = [{name: (item.shape, item.dtype) for name, item in found.items()} for found in facts]
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
    facts: Sequence[Mapping[str, TensorFacts]], global_ranks: Sequence[int] = ALL_RANKS
) -> dict[str, tuple[moves.Boxes, ...]]:
    """Return the nonempty boxes of every tensor by rank: one object for all tensors with the same layout.

    Raises:
        RankMismatchError: ranks have different tensors.
        ShardingError: ranks do not have, together, all of a tensor.
    """
    require_same_tensors(facts, global_ranks)
    known: dict[tuple[moves.Boxes, ...], tuple[moves.Boxes, ...]] = {}
    held: dict[str, tuple[moves.Boxes, ...]] = {}
    for name in facts[0]:
        boxes = tuple(tuple(box for box in found[name].boxes if box.numel) for found in facts)
        held[name] = known.setdefault(boxes, boxes)
    if lacking := [name for name, item in facts[0].items() if not moves.covers(item.shape, held[name])]:
        raise ShardingError(
            f"the ranks do not hold, together, each element of {few_names(lacking)}. Pass a process_group that has "
            "all ranks of the tensors' meshes"
        )
    return held
