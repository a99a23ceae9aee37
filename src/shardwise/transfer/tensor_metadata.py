"""Metadata of tensors, which ranks exchange and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import nn

from shardwise.core.errors import RankMismatchError, ShardingError
from shardwise.core.formatting import ALL_RANKS, abbreviate, few_names
from shardwise.fsdp.named_tensors import TensorRef, local_boxes
from shardwise.fsdp.torch_private import sets_grad_dtype
from shardwise.ranks.world import Exchange, World
from shardwise.transfer import move_plan
from shardwise.transfer.move_plan import Boxes


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor as one rank has it. All but the boxes has to be the same on every rank.

    Attributes:
        shape: shape of the full tensor.
        dtype: torch's name of it, or "" if ranks may have the tensor in different dtypes.
        boxes: boxes of its elements on this rank.
        kind: what it is, for messages and comparison.
        other_names: FQNs of a model's tensor other than the first, if modules share it.
        requires_grad: True for a parameter that is trained.
        grad_dtype: dtype of its gradients, if one has been set.
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: Boxes = field(default=(), compare=False, repr=False)
    kind: str = "tensor"
    other_names: tuple[str, ...] = ()
    requires_grad: bool = False
    grad_dtype: str = ""

    @classmethod
    def from_ref(cls, item: TensorRef, dtype: str = "", boxes: Boxes = ()) -> TensorMetadata:
        """Return the metadata of a model's tensor."""
        tensor, grad_dtype = item.tensor, ""
        if isinstance(tensor, nn.Parameter) and sets_grad_dtype(tensor):
            grad_dtype = str(tensor.grad_dtype or "any dtype")
        shape = tuple(tensor.shape)
        return cls(shape, dtype, boxes, item.kind.value, item.names[1:], tensor.requires_grad, grad_dtype)

    def __str__(self) -> str:
        text = f"a {self.kind} of shape {self.shape}"
        if self.dtype:
            text += f", {self.dtype}"
        if self.requires_grad:
            text += ", trained"
        if self.grad_dtype:
            text += f", with gradients of {self.grad_dtype}"
        if self.other_names:
            text += f", tied to {', '.join(self.other_names)}"
        return text


def metadata_by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorMetadata]:
    """Return the metadata of each tensor by name. Errors have the name."""
    describe = cache(TensorMetadata)  # one object for equal tensors, which a message has once
    return {
        name: describe(tuple(tensor.shape), str(tensor.dtype), get_boxes(tensor, name))
        for name, tensor in tensors.items()
    }


def get_boxes(tensor: torch.Tensor, name: str) -> Boxes:
    """Return the boxes of a tensor on this rank."""
    return tuple(item.box for item in local_boxes(tensor, name))


def require_same_tensors(
    metadata: Sequence[Mapping[str, TensorMetadata]], global_ranks: Sequence[int] = ALL_RANKS
) -> None:
    """Raise if ranks have different tensors. ``metadata`` are by rank.

    Raises:
        RankMismatchError: tensors differ. The error lists them, each with its description on both ranks.
    """
    first, *others = metadata
    for rank, other in enumerate(others, start=1):
        if _are_equal(first, other):
            continue
        here, there = f"rank {global_ranks[rank]}", f"rank {global_ranks[0]}"
        lines: list[str] = []
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                descriptions = f"{other.get(name, 'absent')} on {here}, {first.get(name, 'absent')} on {there}"
                lines.append(f"{name} is {descriptions}")
        # Equal items in another order are also refused: the order is that in which ranks exchange tensors.
        if not lines:
            lines.append(f"the order of the tensors on {here} is not that on {there}")
        shown = "\n  ".join(abbreviate(lines))
        raise RankMismatchError(
            f"the ranks have different tensors:\n  {shown}\nBuild the model and its optimizers from one "
            "configuration on every rank, with the same weights tied and frozen"
        )


def _are_equal(one: Mapping[str, TensorMetadata], other: Mapping[str, TensorMetadata]) -> bool:
    """Return whether two ranks have the same tensors in the same order."""
    if list(one) != list(other):
        return False
    # By identity: equal tensors of a rank are one object (metadata_by_name), and models have many.
    pairs = {(id(a), id(b)): (a, b) for a, b in zip(one.values(), other.values(), strict=True)}
    return all(a == b for a, b in pairs.values())


def collect_boxes(
    metadata: Sequence[Mapping[str, TensorMetadata]], global_ranks: Sequence[int] = ALL_RANKS
) -> dict[str, tuple[Boxes, ...]]:
    """Return the nonempty boxes of every tensor by rank: one object for all tensors with the same layout.

    Raises:
        RankMismatchError: ranks have different tensors.
    """
    require_same_tensors(metadata, global_ranks)
    # Interned: find_shared_boxes and others use the identity of a layout as their cache key.
    layouts: dict[tuple[Boxes, ...], tuple[Boxes, ...]] = {}
    # By the ids of the ranks' metadata, which are hashed faster than their boxes.
    boxes_by_ids: dict[tuple[int, ...], tuple[Boxes, ...]] = {}
    boxes: dict[str, tuple[Boxes, ...]] = {}
    # All ranks have the names in this order, as compared above.
    for name, *items in zip(metadata[0], *(local.values() for local in metadata), strict=True):
        ids = tuple(map(id, items))
        if ids not in boxes_by_ids:
            by_rank = tuple(tuple(box for box in item.boxes if box.numel) for item in items)
            boxes_by_ids[ids] = layouts.setdefault(by_rank, by_rank)
        boxes[name] = boxes_by_ids[ids]
    return boxes


def collect_all_boxes(
    metadata: Sequence[Mapping[str, TensorMetadata]], global_ranks: Sequence[int] = ALL_RANKS
) -> dict[str, tuple[Boxes, ...]]:
    """Return boxes as :func:`collect_boxes` does.

    Raises:
        RankMismatchError: ranks have different tensors.
        ShardingError: the ranks together do not have each element of a tensor.
    """
    boxes = collect_boxes(metadata, global_ranks)
    tensors = ((name, item.shape, boxes[name]) for name, item in metadata[0].items())
    if incomplete := move_plan.find_incomplete(tensors):
        raise ShardingError(
            f"the ranks together do not have each element of {few_names(incomplete)}. Pass a process_group with "
            "all ranks of the tensors' meshes"
        )
    return boxes


def describing_tensors(world: World) -> Exchange:
    """Return a block in which each rank describes its tensors by name. ``result`` is :func:`collect_all_boxes`.

    The first rank collects them, so that each rank gets a layout once, not the metadata of all ranks.
    """
    return world.all_reduce("describe tensors", partial(collect_all_boxes, global_ranks=world.global_ranks))
