"""Groups and layouts that ``wrap`` would create on a mesh, without processes.

Groups, unsharded parameters and split dimensions come from :mod:`shardwise.fsdp.policies`, and the boxes of a
rank from torch's placements, as in a load.
"""

from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise.core.layout import (
    GroupLayout,
    MeshShape,
    ModelLayout,
    Origin,
    Spread,
    TensorKind,
    TensorLayout,
    WorldLayout,
)
from shardwise.core.tensors import contiguous_strides
from shardwise.fsdp.named_tensors import (
    TensorRef,
    boxes_at,
    collect_tensors,
    describe_placements,
    local_boxes,
    tensor_layout,
)
from shardwise.fsdp.policies import WrapPolicy, group_parameters, shard_dim
from shardwise.fsdp.wrap import require_contiguous


def predict_layout(
    model: nn.Module,
    root: nn.Module,
    policy: WrapPolicy,
    mesh: MeshShape,
    find_origin: Callable[[TensorRef], Origin],
    kept_whole: Mapping[nn.Parameter, str],
) -> WorldLayout:
    """Return the layout that :func:`~shardwise.fsdp.wrap.wrap` would give a model that is not sharded yet.

    ``root`` is the module that is wrapped, the model or one inside of it. Names of groups are relative to it. No
    process group is needed, and the model is not changed.

    Raises:
        ShardingError: the policy matches nothing, or ``fully_shard`` would reject a parameter.
    """
    # Names in the result are FQNs, while a grouping has parameters.
    refs = collect_tensors(model)
    # The decisions of fully_shard without calling it: which parameters are in which group, and which are in
    # none.
    grouping = group_parameters(root, policy, kept_whole)
    require_contiguous(root, grouping)
    fqns = {item.tensor: item.fqn for item in refs}
    spreader = _Spreader(mesh, set(grouping.whole))
    spreads: dict[str, Spread] = {}
    tensors: list[TensorLayout] = []
    for item in refs:
        spread, placement = spreader.spread(item)
        spreads[item.fqn] = spread
        tensors.append(tensor_layout(item, find_origin(item), spread.boxes[0], placement))
    groups: list[GroupLayout] = []
    for group in (*grouping.blocks, grouping.root):
        groups.append(GroupLayout(group.modules, tuple(fqns[parameter] for parameter in group.parameters)))
    return WorldLayout(
        mesh=mesh,
        rank0=ModelLayout(tuple(tensors)),
        spreads=spreads,
        groups=tuple(groups),
        whole={fqns[parameter]: reason for parameter, reason in grouping.whole.items()},
    )


class _Spreader:
    """Makes the spreads of tensors over a mesh. Tensors of equal shape, strides and placement share one."""

    def __init__(self, mesh: MeshShape, whole: set[nn.Parameter]) -> None:
        self.mesh = mesh
        self.whole = whole
        self.spreads: dict[object, Spread] = {}

    def spread(self, item: TensorRef) -> tuple[Spread, str]:
        """Return the spread of a tensor, and a description of its placement."""
        tensor = item.tensor
        shape = tuple(tensor.shape)
        key: object = (shape, tuple(tensor.stride()))
        # 1. Buffers, and parameters that FSDP2 cannot shard: the full tensor at every position.
        if item.kind is not TensorKind.PARAMETER or tensor in self.whole:
            if key not in self.spreads:
                boxes = local_boxes(tensor, item.fqn)
                self.spreads[key] = Spread((boxes,) * self.mesh.shard_size, tensor.numel())
            return self.spreads[key], "whole"
        # 2. Sharded along the last axis of the mesh, and replicated along the others (HSDP).
        dim = shard_dim(tensor.shape, self.mesh.shard_size, is_packed=not tensor.is_floating_point())
        placements = (*[Replicate()] * (len(self.mesh.sizes) - 1), Shard(dim))
        key = (shape, dim)
        if key not in self.spreads:
            self.spreads[key] = self.shard(shape, placements)
        return self.spreads[key], describe_placements(placements, self.mesh.names, self.mesh.sizes)

    def shard(self, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Spread:
        """Return the spread of a sharded tensor: its boxes at every coordinate of the shard axis."""
        sizes = self.mesh.sizes
        coordinates = [(*[0] * (len(sizes) - 1), position) for position in range(self.mesh.shard_size)]
        (first,) = boxes_at(shape, placements, sizes, coordinates[0], contiguous_strides(shape))
        # All shards have the contiguous memory of the first one, and are padded at the end.
        strides = contiguous_strides(first.box.sizes)
        boxes = tuple(boxes_at(shape, placements, sizes, each, strides) for each in coordinates)
        return Spread(boxes, first.box.numel)
