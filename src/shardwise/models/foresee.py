"""What ``wrap`` would make of a model on any mesh, without a mesh: groups, and the layout of every rank.

Which parameters are grouped, which stay whole and which dimension is split is asked of
:mod:`shardwise.models.wrap`, which indices a rank then holds of torch's own placements. So nothing here knows how a
tensor is sharded, and a forecast is as true as what is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise.errors import PlacementError
from shardwise.layout import Kind, LocalBox, MeshShape, ModelLayout, Origin, Spread, TensorLayout, WorldLayout
from shardwise.models.view import (
    Held,
    boxes_at,
    local_boxes,
    look_inside,
    placement_in_words,
    tensor_layout,
)
from shardwise.models.wrap import Group, WrapPolicy, group_parameters, shard_dim
from shardwise.tensors import contiguous_strides


@dataclass(frozen=True, slots=True)
class ForeseenGroup:
    """One ``fully_shard`` group: its modules ("" for the root) and the FQNs of the parameters it gathers."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Foresight:
    """A model as :func:`~shardwise.models.wrap.wrap` would leave it on a mesh.

    ``groups`` has the blocks and, last, the root, which gathers what is left. ``whole`` are the FQNs of parameters
    that stay whole on every rank, with the reason.
    """

    layout: WorldLayout
    groups: tuple[ForeseenGroup, ...]
    whole: Mapping[str, str]


def foresee(
    model: nn.Module, policy: WrapPolicy, mesh: MeshShape, origin_of: Callable[[Held], Origin]
) -> Foresight:
    """What each rank will hold of a model, on meta or real, that nothing has sharded yet.

    Raises:
        PlacementError: when the policy matches nothing, or the model holds what ``fully_shard`` refuses.
    """
    held = look_inside(model)
    grouping = group_parameters(model, policy)
    fqns = {item.tensor: item.fqn for item in held}

    def foreseen(group: Group) -> ForeseenGroup:
        return ForeseenGroup(group.modules, tuple(fqns[parameter] for parameter in group.parameters))

    spreader = _Spreader(mesh, set(grouping.whole))
    spreads: dict[str, Spread] = {}
    tensors: list[TensorLayout] = []
    for item in held:
        spread, placement = spreader.spread(item)
        spreads[item.fqn] = spread
        tensors.append(tensor_layout(item, origin_of(item), spread.boxes[0], placement))
    return Foresight(
        layout=WorldLayout(mesh, ModelLayout(tuple(tensors)), spreads),
        groups=(*map(foreseen, grouping.blocks), foreseen(grouping.root)),
        whole={fqns[parameter]: reason for parameter, reason in grouping.whole.items()},
    )


class _Spreader:
    """Spreads of tensors over a mesh, one object for all of the same shape, memory and placement."""

    def __init__(self, mesh: MeshShape, whole: set[nn.Parameter]) -> None:
        self.mesh = mesh
        self.whole = whole
        self.made: dict[object, Spread] = {}

    def spread(self, item: Held) -> tuple[Spread, str]:
        """Where a tensor lies, and the same in words."""
        tensor = item.tensor
        if item.kind is not Kind.PARAMETER or tensor in self.whole:
            whole_key = (tuple(tensor.shape), tuple(tensor.stride()))
            if whole_key not in self.made:
                boxes = local_boxes(tensor, item.fqn)
                self.made[whole_key] = Spread((boxes,) * self.mesh.shard_size, tensor.numel())
            return self.made[whole_key], "whole"
        if not tensor.is_contiguous():
            raise PlacementError(
                f"{item.fqn} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}: fully_shard "
                "takes contiguous parameters only; have the model's class make it contiguous"
            )
        dim = shard_dim(tensor.shape, self.mesh.shard_size)
        placements = (*[Replicate()] * (len(self.mesh.sizes) - 1), Shard(dim))
        sharded_key = (tuple(tensor.shape), dim)
        if sharded_key not in self.made:
            self.made[sharded_key] = self.sharded(tuple(tensor.shape), placements, item.fqn)
        return self.made[sharded_key], placement_in_words(placements, self.mesh.names, self.mesh.sizes)

    def sharded(self, shape: tuple[int, ...], placements: Sequence[Placement], fqn: str) -> Spread:
        """The boxes at every position of the shard axis."""

        def boxes(position: int, strides: tuple[int, ...]) -> tuple[LocalBox, ...]:
            coordinate = (*[0] * (len(self.mesh.sizes) - 1), position)
            return boxes_at(shape, placements, self.mesh.sizes, coordinate, strides, fqn)

        # A shard is the first part of contiguous memory that is padded to the size of the first position's.
        (first,) = boxes(0, contiguous_strides(shape))
        strides = contiguous_strides(first.box.sizes)
        positions = range(self.mesh.shard_size)
        return Spread(tuple(boxes(position, strides) for position in positions), first.box.numel)
