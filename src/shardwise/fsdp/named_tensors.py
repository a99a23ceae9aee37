"""The tensors of a model, with their places in the module tree and their boxes on this rank."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parallel import DistributedDataParallel

from shardwise.core.errors import ShardingError
from shardwise.core.formatting import canonical_name, few_names, join_names
from shardwise.core.layout import LocalBox, ModelLayout, Origin, TensorKind, TensorLayout
from shardwise.core.tensors import Box, Strided, contiguous_strides
from shardwise.fsdp import torch_private

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module: registries, hooks, ``training``."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile`` and DistributedDataParallel, or the module itself."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


@dataclass(frozen=True, slots=True)
class Slot:
    """A module and a local name under which a tensor is registered."""

    module: nn.Module
    name: str
    fqn: str


@dataclass(slots=True)
class TensorRef:
    """A parameter or buffer of a model, with all slots that it is registered in."""

    tensor: torch.Tensor
    kind: TensorKind
    slots: list[Slot] = field(default_factory=list)

    @property
    def fqn(self) -> str:
        return self.slots[0].fqn

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.fqn for slot in self.slots))

    @property
    def local(self) -> torch.Tensor:
        """This rank's local tensor."""
        return local_tensor(self.tensor)

    def install(self, tensor: torch.Tensor) -> None:
        """Register another tensor in all slots, also by ``__setattr__`` of modules that override it.

        An example is ``nn.LSTM``, which has its weights in a list as well.
        """
        self.replace(tensor)
        for slot in self.slots:
            if type(slot.module).__setattr__ is not nn.Module.__setattr__:
                setattr(slot.module, slot.name, tensor)

    def recast(self, dtype: torch.dtype) -> None:
        """Change the dtype of a tensor on meta."""
        other = torch.empty_like(self.tensor, dtype=dtype)
        if isinstance(self.tensor, nn.Parameter):
            other = nn.Parameter(other, requires_grad=self.tensor.requires_grad)
            torch_private.copy_attributes(other, self.tensor)
        self.install(other)

    def replace(self, tensor: torch.Tensor) -> None:
        """Register another tensor in all slots. In place of a parameter, it may be of any type."""
        for slot in self.slots:
            if self.kind is TensorKind.PARAMETER:
                torch_private.get_parameters(slot.module)[slot.name] = tensor
            else:
                torch_private.get_buffers(slot.module)[slot.name] = tensor
        self.tensor = tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, or the tensor itself, detached from autograd."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if not torch.is_grad_enabled():  # many small tensors: entering no_grad costs more than the rest
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as flat bytes, for bitwise comparisons."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def are_bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors, of DTensors this rank's shards, are known to have the same bits.

    NaN equals itself. Of tensors on meta nothing is known.
    """
    first, second = local_tensor(one), local_tensor(other)
    if first.is_meta or second.is_meta or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(raw_bytes(first).to(second.device), raw_bytes(second))


def place_like(tensor: torch.Tensor, local: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a matrix with the rows and the placement of ``tensor``, of which ``local`` is this rank's part."""
    if not isinstance(tensor, DTensor):
        return local
    # The full shape is passed, because shards of unequal rows do not tell it.
    shape, stride = torch.Size((tensor.shape[0], columns)), (columns, 1)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


def strided_view(tensor: torch.Tensor, view: Strided) -> torch.Tensor:
    """Return a strided view relative to the first element of a tensor."""
    return torch.as_strided(tensor, view.sizes, view.strides, tensor.storage_offset() + view.offset)


def reshard(model: nn.Module) -> None:
    """Reshard the FSDP2 groups that hold parameters of a model, also those of modules around it.

    A forward pass leaves the root group gathered for the backward pass. In an evaluation, or after an error in the
    forward pass, none follows. Until then ``model.parameters()`` are not the shards, and a change of the shards
    does not reach the next forward pass.
    """
    for module in model.modules():
        torch_private.reshard_owners(module)


def collect_tensors(model: nn.Module) -> list[TensorRef]:
    """Return all parameters and buffers, shared ones once, in the order of the modules.

    Non-persistent buffers of a module are sorted by name, because some models register them in the order of a set,
    which differs between processes. FSDP2 groups that are gathered are resharded first.

    Raises:
        ShardingError: the model is under torch's ``replicate()`` or FSDP1.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    for name, module in modules:
        if isinstance(module, FullyShardedDataParallel):
            raise ShardingError(
                f"{canonical_name(name) or 'the model'} is under FSDP1 (FullyShardedDataParallel). Use "
                "fully_shard, or shardwise.shard, in its place. Checkpoints of FSDP1 are read"
            )
        if torch_private.is_under_replicate(module):
            raise ShardingError(
                f"{canonical_name(name) or 'the model'} is under torch's replicate(), which keeps every parameter "
                "whole on every rank. Build it without, and apply fully_shard, or shardwise.shard, on a mesh that "
                "has a dimension to replicate over"
            )
    reshard(model)  # before the registries are read: gathered groups have unsharded parameters in them
    refs: dict[int, TensorRef] = {}  # by id: two slots are one tensor only if they have the same object
    for module, tensor, name, kind, prefix in _iter_registered(modules):
        item = refs.get(id(tensor))
        if item is None:
            item = refs[id(tensor)] = TensorRef(tensor, kind)
        item.slots.append(Slot(module, name, canonical_name(join_names(prefix, name))))
    return list(refs.values())


def map_saved_names(model: nn.Module, tensors: Sequence[TensorRef]) -> dict[str, TensorRef]:
    """Return the tensors of ``model.state_dict()`` by its names, which are not canonical, in its order."""
    by_id = {id(item.tensor): item for item in tensors}
    saved: dict[str, TensorRef] = {}
    for _, tensor, name, kind, prefix in _iter_registered(model.named_modules(remove_duplicate=False)):
        if kind.is_saved:
            saved[join_names(prefix, name)] = by_id[id(tensor)]
    return saved


def _iter_registered(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[nn.Module, torch.Tensor, str, TensorKind, str]]:
    for prefix, module in modules:
        for name, parameter in torch_private.get_parameters(module).items():
            if parameter is not None:
                yield module, parameter, name, TensorKind.PARAMETER, prefix
        if not torch_private.get_buffers(module):
            continue
        buffers = {name: buffer for name, buffer in torch_private.get_buffers(module).items() if buffer is not None}
        # Only persistent buffers are in the order in which they were registered, as in state_dict().
        temporary = sorted(torch_private.get_temporary_names(module) & buffers.keys())
        for name, buffer in buffers.items():
            if name not in temporary:
                yield module, buffer, name, TensorKind.PERSISTENT_BUFFER, prefix
        for name in temporary:
            yield module, buffers[name], name, TensorKind.NON_PERSISTENT_BUFFER, prefix


def build_layout(
    tensors: Sequence[TensorRef], find_origin: Callable[[TensorRef], Origin] | Origin = Origin.NOWHERE
) -> ModelLayout:
    """Return this rank's layout of tensors. ``find_origin`` is their source if the checkpoint lacks them."""
    layouts: list[TensorLayout] = []
    for item in tensors:
        origin = find_origin(item) if callable(find_origin) else find_origin
        boxes = local_boxes(item.tensor, item.fqn)
        layouts.append(tensor_layout(item, origin, boxes, describe_placement(item.tensor)))
    return ModelLayout(tuple(layouts))


def tensor_layout(item: TensorRef, origin: Origin, boxes: tuple[LocalBox, ...], placement: str) -> TensorLayout:
    """Return the layout of a tensor with these boxes."""
    tensor = item.tensor
    if item.kind.is_saved:
        dtype = torch_private.from_torch(tensor.dtype, item.fqn)
    else:
        dtype = torch_private.from_torch_or_other(tensor.dtype)
    return TensorLayout(
        names=item.names,
        kind=item.kind,
        shape=tuple(tensor.shape),
        dtype=dtype,
        boxes=boxes,
        placement=placement,
        requires_grad=tensor.requires_grad,
        origin=origin,
    )


def describe_placement(tensor: torch.Tensor) -> str:
    """Return text such as ``Shard(dim=0) on fsdp=8``, or ``whole``."""
    if not isinstance(tensor, DTensor):
        return "whole"
    return describe_placements(tensor.placements, axis_names(tensor.device_mesh), tensor.device_mesh.shape)


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's axes. They are numbered if they have no names."""
    return mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))


def describe_placements(placements: Sequence[Placement], names: Sequence[str], sizes: Sequence[int]) -> str:
    """Return text such as ``Replicate() on replicate=2, Shard(dim=0) on shard=4``."""
    pairs = zip(placements, names, sizes, strict=True)
    return ", ".join(f"{placement} on {name}={size}" for placement, name, size in pairs)


def local_boxes(tensor: torch.Tensor, fqn: str) -> tuple[LocalBox, ...]:
    """Return the boxes of a tensor on this rank, and their layout in its local tensor."""
    if not isinstance(tensor, DTensor):
        whole = Box.whole(tuple(tensor.shape))
        return (LocalBox(whole, Strided(0, whole.sizes, tuple(tensor.stride()))),) if whole.numel else ()
    # A rank outside of the mesh holds nothing.
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    _require_supported_placements(tensor, fqn)
    return boxes_at(
        tuple(tensor.shape),
        tuple(tensor.placements),
        tuple(tensor.device_mesh.shape),
        tuple(coordinate),
        tuple(local_tensor(tensor).stride()),
    )


def boxes_by_rank(tensor: torch.Tensor, fqn: str, ranks: Sequence[int]) -> tuple[tuple[Box, ...], ...]:
    """Return the boxes of a tensor on each of these global ranks."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return ((Box.whole(shape),),) * len(ranks)
    _require_supported_placements(tensor, fqn)
    mesh = tensor.device_mesh
    strides = contiguous_strides(shape)  # any: local layouts are not used
    boxes: list[tuple[Box, ...]] = []
    for rank in ranks:
        # Where the rank is in the mesh, as get_coordinate() returns it for this rank.
        coordinate = torch.nonzero(mesh.mesh == rank).flatten().tolist()
        local = boxes_at(shape, tuple(tensor.placements), tuple(mesh.shape), tuple(coordinate), strides)
        boxes.append(tuple(piece.box for piece in local))
    return tuple(boxes)


def _require_supported_placements(tensor: DTensor, fqn: str) -> None:
    """Reject placements that are neither shards nor replicas."""
    mesh = tensor.device_mesh.shape
    for placement, size in zip(tensor.placements, mesh, strict=True):
        if torch_private.splitting_dim(placement) is None and not placement.is_replicate():
            raise ShardingError(
                f"{fqn} is placed as {placement} on an axis of {size} ranks (mesh {tuple(mesh)}), which is neither "
                "Shard nor Replicate. Redistribute it before it is loaded"
            )


@lru_cache(maxsize=4096)
def boxes_at(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    local_strides: tuple[int, ...],
) -> tuple[LocalBox, ...]:
    """Return the boxes at a coordinate of a mesh, according to torch's placements."""
    # The splits of each dim, in the order of the mesh, as torch applies them: a later axis divides what an earlier
    # one has left. For example 8 rows, split twice on a mesh (2, 2): at coordinate (1, 0) rows 4 to 7, then 4 to 5.
    splits: list[list[tuple[Placement, int, int]]] = [[] for _ in shape]
    for placement, size, position in zip(placements, mesh_shape, coordinate, strict=True):
        dim = torch_private.splitting_dim(placement)
        if dim is not None:
            splits[dim].append((placement, size, position))
    runs = [torch_private.local_runs(size, tuple(split)) for size, split in zip(shape, splits, strict=True)]
    # A dim may have several runs (strided shards), which are adjacent in the local tensor. Every combination of one
    # run of each dim is a box.
    boxes: list[LocalBox] = []
    local_starts = [list(itertools.accumulate((n for _, n in dim_runs), initial=0)) for dim_runs in runs]
    for picks in itertools.product(*(range(len(dim_runs)) for dim_runs in runs)):
        picked_runs = [runs[dim][pick] for dim, pick in enumerate(picks)]
        starts = [local_starts[dim][pick] for dim, pick in enumerate(picks)]
        box = Box(tuple(offset for offset, _ in picked_runs), tuple(count for _, count in picked_runs))
        start = sum(index * stride for index, stride in zip(starts, local_strides, strict=True))
        boxes.append(LocalBox(box, Strided(start, box.sizes, local_strides)))
    return tuple(boxes)


def meta_leftovers(model: nn.Module) -> list[str]:
    """Return the names of all parameters, buffers, and tensors in attributes that are on meta."""
    names = [item.fqn for item in collect_tensors(model) if item.tensor.is_meta]
    return names + [slot.fqn for slot in attributes_on_meta(model)]


def attributes_on_meta(model: nn.Module) -> list[Slot]:
    """Return plain attributes of modules that are tensors on meta, or lists, tuples or dicts with one."""
    slots: list[Slot] = []
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and any(map(_is_on_meta, torch_private.tree_leaves(value))):
                slots.append(Slot(module, name, canonical_name(join_names(prefix, name))))
    return slots


def _is_on_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def is_sharded(model: nn.Module, tensors: Sequence[TensorRef]) -> bool:
    """Return whether ``fully_shard`` has been applied to a model.

    It has been if the root, or the model inside of PEFT's, is sharded, or if all parameters are in groups.

    Raises:
        ShardingError: only some modules are sharded, or parameters are distributed, but not by ``fully_shard``.
            The message names them.
    """
    groups = [canonical_name(name) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    parameters = [item for item in tensors if item.kind is TensorKind.PARAMETER]
    distributed = [item.fqn for item in parameters if isinstance(item.tensor, DTensor)]
    outside = [item.fqn for item in parameters if not isinstance(item.tensor, DTensor)]
    # Parameters that are not distributed have been left whole on purpose if the root of all groups contains them.
    root: Any = find_fsdp_root(model)
    in_root = () if root is None else {id(parameter) for parameter in root.parameters()}
    if groups and (not outside or all(id(item.tensor) in in_root for item in parameters)):
        return True
    if groups:
        raise ShardingError(
            f"the model is sharded in part: fully_shard was applied to {abbreviate(groups)}, but not to the owners "
            f"of {abbreviate(outside)}. Apply it to the root as well, or to no module"
        )
    if distributed:
        raise ShardingError(
            f"parameters are distributed, but not by fully_shard: {abbreviate(distributed)}. Call fully_shard "
            "yourself on a model under tensor parallelism"
        )
    return False


def find_fsdp_root(model: nn.Module) -> FSDPModule | None:
    """Return the outermost module that ``fully_shard`` has been applied to, or None."""
    return next((module for module in model.modules() if isinstance(module, FSDPModule)), None)


def computing_device(parameter: torch.Tensor) -> torch.device:
    """Return the device that a parameter is used on. The parameter itself may be offloaded, or on meta."""
    kind = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type
    if kind == parameter.device.type:
        return parameter.device
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def require_plain_tensors(tensors: Sequence[TensorRef]) -> None:
    """Reject meta tensors of a subclass, because materialized tensors are plain.

    Raises:
        ShardingError: the message has their names.
    """
    subclasses: list[tuple[str, str]] = []
    for item in tensors:
        if item.tensor.is_meta and (kind := type(item.local)) not in (torch.Tensor, nn.Parameter):
            subclasses.append((item.fqn, kind.__name__))
    if subclasses:
        raise ShardingError(
            f"{abbreviate([name for name, _ in subclasses])}: on meta, and a {subclasses[0][1]}, a subclass of "
            "Tensor whose behavior (FSDP2's all-gather hooks, say) would be lost when it gets memory. Load plain "
            "parameters, and convert the model afterwards"
        )


def abbreviate(names: Sequence[str]) -> str:
    """Return the first few of many names, with equal patterns collapsed."""
    return few_names((name or "the root" for name in names), most=8)


def padded_numels(tensors: Sequence[TensorRef], fsdp_params: Mapping[nn.Parameter, Any]) -> dict[str, int]:
    """Return the elements of this rank's memory for each sharded parameter by name, including padding.

    ``fsdp_params`` are FSDP2's ``FSDPParam`` objects by parameter.
    """
    numels: dict[str, int] = {}
    for item in tensors:
        if isinstance(item.tensor, nn.Parameter) and item.tensor in fsdp_params:
            numels[item.fqn] = torch_private.padded_numel(fsdp_params[item.tensor])
    return numels
