"""What ``wrap`` would make of a model on any mesh, without a mesh: groups, and the layout of every rank.

Which parameters are grouped, which stay whole and which dimension is split is asked of
:mod:`shardwise.models.wrapping.groups`, which indices a rank then holds of torch's own placements. So nothing here
knows how a tensor is sharded, and a forecast is as true as what is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise.errors import PlacementError
from shardwise.layout import (
    GroupLayout,
    LocalBox,
    MeshShape,
    ModelLayout,
    Origin,
    Spread,
    TensorKind,
    TensorLayout,
    WorldLayout,
)
from shardwise.models.view import (
    Held,
    boxes_at,
    local_boxes,
    look_inside,
    placement_in_words,
    tensor_layout,
)
from shardwise.models.wrapping.groups import Group, group_parameters, shard_dim
from shardwise.models.wrapping.policies import WrapPolicy
from shardwise.tensors import contiguous_strides


def foresee(
    model: nn.Module,
    policy: WrapPolicy,
    mesh: MeshShape,
    origin_of: Callable[[Held], Origin],
    *,
    root: nn.Module | None = None,
    kept_whole: Mapping[nn.Parameter, str] = MappingProxyType({}),
) -> WorldLayout:
    """A model as :func:`~shardwise.models.wrapping.wrap.wrap` would leave it on a mesh; it is not sharded yet.

    ``root`` is what is wrapped of it, by default all; the names of groups are those in it.

    Pure: needs no process group, and leaves the model as it is.

    Raises:
        PlacementError: when the policy matches nothing, or the model holds what ``fully_shard`` refuses.
    """
    held = look_inside(model)
    grouping = group_parameters(root or model, policy, kept_whole)
    fqns = {item.tensor: item.fqn for item in held}

    def layout_of_group(group: Group) -> GroupLayout:
        return GroupLayout(group.modules, tuple(fqns[parameter] for parameter in group.parameters))

    spreader = _Spreader(mesh, set(grouping.whole))
    spreads: dict[str, Spread] = {}
    tensors: list[TensorLayout] = []
    for item in held:
        spread, placement = spreader.spread(item)
        spreads[item.fqn] = spread
        tensors.append(tensor_layout(item, origin_of(item), spread.boxes[0], placement))
    return WorldLayout(
        mesh=mesh,
        first=ModelLayout(tuple(tensors)),
        spreads=spreads,
        groups=(*map(layout_of_group, grouping.blocks), layout_of_group(grouping.root)),
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
        if item.kind is not TensorKind.PARAMETER or tensor in self.whole:
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
