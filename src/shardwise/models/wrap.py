"""Which modules become FSDP2 groups, and wrapping them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import ConfigError, PlacementError
from shardwise.models import _torch_private, blocks
from shardwise.models import transformers_compat as compat
from shardwise.models.blocks import ActivationCheckpointing, Compiling, Off


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The modules named by the model's own FSDP plan (``_fsdp_plan`` of transformers)."""


@dataclass(frozen=True, slots=True)
class NoSplitModules:
    """The modules whose class the model declares in ``_no_split_modules``."""


@dataclass(frozen=True, slots=True)
class ModuleListBlocks:
    """The members of every outermost ``nn.ModuleList`` that repeats one class at least twice."""


@dataclass(frozen=True, slots=True)
class Classes:
    """The modules of the classes with these names."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        names: object = self.names
        if isinstance(names, str):
            raise ConfigError(f"names={names!r} must be a tuple of class names: names=({names!r},)")


@dataclass(frozen=True, slots=True)
class MinSize:
    """The innermost modules with at least ``numel`` elements that no smaller group has, as of ``fully_shard``.

    What is too small goes to the module around it, and counts there; what is left, to the root group.
    """

    numel: int

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ConfigError(f"numel={self.numel} must be 1 element or more: MinSize(numel=10_000_000)")


@dataclass(frozen=True, slots=True)
class WholeModel:
    """One group: everything is gathered at once. For small models."""


@dataclass(frozen=True, slots=True)
class Automatic:
    """The first of :class:`ModelPlan`, :class:`NoSplitModules` and :class:`ModuleListBlocks` that names blocks."""


MAX_PADDING = 1.1
"""How much larger stacked experts may get by the padding of an uneven first dimension, before another is taken."""

WrapPolicy: TypeAlias = Automatic | ModelPlan | NoSplitModules | ModuleListBlocks | Classes | MinSize | WholeModel


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is sharded: the mesh, which modules are groups, FSDP2's own policies, and how blocks are run.

    ``mesh`` is one-dimensional (shard) or two-dimensional (replicate, shard); None means all ranks of the default
    process group, or no sharding where there is none. ``reshard_after_forward`` is for the blocks; what is left in
    the root group stays gathered until the backward pass, as in FSDP2. ``activation_checkpointing`` and
    ``compiling`` are for the blocks as :func:`repeated_blocks` finds them, whatever the groups are, and without a
    mesh too.
    """

    mesh: DeviceMesh | None = None
    wrap: WrapPolicy = field(default_factory=Automatic)
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    reshard_after_forward: bool | int = True
    activation_checkpointing: ActivationCheckpointing = field(default_factory=Off)
    compiling: Compiling = field(default_factory=Off)


def default_mesh(group: dist.ProcessGroup | None = None) -> DeviceMesh | None:
    """All ranks of a process group (None: the default one) in one axis; None where there is no process group.

    Collective: yes, over the default group.
    """
    if not dist.is_initialized():
        return None
    accelerated = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
    kind = "cuda" if accelerated else "cpu"
    if group is not None:
        return DeviceMesh.from_group(group, kind, mesh_dim_names=("fsdp",))
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """The global ranks of a process group (None: the default one), sorted."""
    return sorted(dist.get_process_group_ranks(group)) if dist.is_initialized() else [0]


def with_mesh(sharding: Sharding, group: dist.ProcessGroup | None) -> Sharding:
    """With a mesh, if there is to be one, that has the ranks of the process group (None: the default one).

    Collective: yes, over the default group, where no mesh is given.

    Raises:
        PlacementError: when the given mesh has other ranks.
    """
    mesh = sharding.mesh if sharding.mesh is not None else default_mesh(group)
    if mesh is not None and sorted(mesh.mesh.flatten().tolist()) != ranks_of(group):
        raise PlacementError(
            f"the mesh has the ranks {mesh.mesh.flatten().tolist()}, and the process group that acts together has "
            f"{ranks_of(group)}; pass process_group=... in the options, with the mesh's ranks"
        )
    return replace(sharding, mesh=mesh)


def wrap(
    model: nn.Module, sharding: Sharding, kept_whole: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Apply ``fully_shard`` to the blocks and then to the root; returns the blocks' names, nested ones first.

    FSDP2 cannot shard parameters without dimensions or without elements, and wants one dtype per group. Such
    parameters, those of another dtype that no group of their own can hold, and those in ``kept_whole`` (with the
    reason) stay whole on every rank; see :func:`average_replicated_gradients`.

    Collective: yes (creates process groups the first time a mesh is used).

    Raises:
        PlacementError: when the policy matches nothing, or ``fully_shard`` would refuse the mesh or a parameter.
    """
    mesh = sharding.mesh
    if mesh is None:
        raise PlacementError("there is no mesh to shard the model on; pass one, or initialise torch.distributed")
    grouping = group_parameters(model, sharding.wrap, kept_whole)
    _require_shardable(model, grouping, mesh)
    _require_divisor(sharding.reshard_after_forward, mesh.size(mesh.ndim - 1))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": sharding.mp_policy,
        "offload_policy": _pinning_where_it_can(sharding.offload_policy),
        "shard_placement_fn": _placement_for(mesh.size(mesh.ndim - 1)),
        "ignored_params": set(grouping.whole),
    }
    modules = dict(model.named_modules())
    for group in grouping.blocks:
        members = [modules[name] for name in group.modules]
        fully_shard(
            members if len(members) > 1 else members[0],
            reshard_after_forward=sharding.reshard_after_forward,
            **options,
        )
    fully_shard(model, **options)
    compat.mark_sharded(model)
    return tuple(name for group in grouping.blocks for name in group.modules)


def prepare_blocks(model: nn.Module, sharding: Sharding) -> None:
    """Recompute or compile a model's blocks as the sharding says; before or after :func:`wrap`, or without it.

    Raises:
        ConfigError, PlacementError: as of :func:`blocks_to_prepare`.
    """
    names = blocks_to_prepare(model, sharding)
    blocks.prepare_blocks(model, names, sharding.activation_checkpointing, sharding.compiling)


def blocks_to_prepare(model: nn.Module, sharding: Sharding) -> list[str]:
    """Names of the blocks that :func:`prepare_blocks` will recompute or compile. Changes nothing.

    Raises:
        ConfigError: the model recomputes activations by itself, or its blocks have been prepared already.
        PlacementError: no blocks can be told.
    """
    if isinstance(sharding.activation_checkpointing, Off) and isinstance(sharding.compiling, Off):
        return []
    names = repeated_blocks(model)
    blocks.require_unprepared(model, names, sharding.activation_checkpointing)
    return names


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks that a model is a stack of, outermost ones only and in order.

    Those that the model declares (:class:`NoSplitModules`), else those of its lists (:class:`ModuleListBlocks`).

    Raises:
        PlacementError: when there are none.
    """
    candidates: list[WrapPolicy] = [NoSplitModules(), ModuleListBlocks()]
    for candidate in candidates:
        names = _matching(model, candidate)
        outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
        if outermost:
            return outermost
    raise PlacementError(
        f"{type(model).__name__} has neither _no_split_modules nor an nn.ModuleList of blocks, so there are none "
        "to recompute or to compile; pass activation_checkpointing=Off() and compiling=Off()"
    )


def _pinning_where_it_can(policy: OffloadPolicy) -> OffloadPolicy:
    """Without an accelerator there is no memory to pin, and no use for it."""
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        return CPUOffloadPolicy(pin_memory=False)
    return policy


def _require_divisor(reshard_after_forward: bool | int, shard_size: int) -> None:  # noqa: FBT001 - FSDP2's own
    fitting = [size for size in range(2, shard_size + 1) if shard_size % size == 0]
    if not isinstance(reshard_after_forward, bool) and reshard_after_forward not in fitting:
        raise PlacementError(
            f"reshard_after_forward={reshard_after_forward}: a number is that of ranks to which a block is dealt "
            f"after its forward pass, and divides the {shard_size} that it is sharded over: one of {fitting}, or "
            "True or False"
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that ``fully_shard`` takes together, and the parameters that are therefore gathered at once."""

    modules: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True, slots=True)
class Grouping:
    """What is to be done to a model: the blocks in the order of ``fully_shard``, and what the root then takes.

    ``whole`` are the parameters that stay whole on every rank, with the reason.
    """

    blocks: tuple[Group, ...]
    root: Group
    whole: Mapping[nn.Parameter, str]


def group_parameters(
    model: nn.Module, policy: WrapPolicy, kept_whole: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> Grouping:
    """Which parameters become groups, and which stay whole: all that :func:`wrap` then carries out.

    Pure: needs no mesh and no process group, and leaves the model as it is.

    Raises:
        PlacementError: when the policy matches nothing.
    """
    whole = {**_unshardable(model), **kept_whole}
    groups = _merge_tied(model, select_blocks(model, policy))
    islands, strays = _islands(model, groups, set(whole))
    groups += islands
    whole |= strays
    groups.sort(key=lambda names: -max(name.count(".") for name in names))
    owner = _group_finder(model, [name for names in groups for name in names])
    leader = {name: names[0] for names in groups for name in names} | {"": ""}
    members: dict[str, list[nn.Parameter]] = {name: [] for name in leader.values()}
    for name, parameter in model.named_parameters():
        if parameter not in whole:
            members[leader[owner(name)]].append(parameter)
    blocks = tuple(Group(tuple(names), tuple(members[names[0]])) for names in groups)
    return Grouping(blocks, Group(("",), tuple(members[""])), whole)


def select_blocks(model: nn.Module, policy: WrapPolicy) -> list[str]:
    """Names of the modules that become groups of their own; blocks may lie inside of blocks.

    Raises:
        PlacementError: when there are none.
    """
    match policy:
        case Automatic():
            candidates: list[WrapPolicy] = [ModelPlan(), NoSplitModules(), ModuleListBlocks()]
            for candidate in candidates:
                if names := _matching(model, candidate):
                    return names
            raise PlacementError(
                f"{type(model).__name__} has no FSDP plan, no _no_split_modules and no nn.ModuleList of blocks; "
                "pass wrap=Classes(names=(...)), or WholeModel() to gather everything at once"
            )
        case WholeModel():
            return []
        case _:
            if names := _matching(model, policy):
                return names
            if isinstance(policy, MinSize):
                numel = sum(parameter.numel() for parameter in model.parameters())
                raise PlacementError(
                    f"{policy} matches nothing in {type(model).__name__}, which has {numel:,} elements in all; "
                    "lower it, or pass WholeModel() to gather everything at once"
                )
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise PlacementError(
                f"{policy} matches nothing in {type(model).__name__}; its modules are of {', '.join(classes)}"
            )


def _matching(model: nn.Module, policy: WrapPolicy) -> list[str]:
    match policy:
        case ModelPlan():
            return _planned(model)
        case NoSplitModules():
            return _of_classes(model, compat.no_split_classes(model))
        case Classes(names):
            return _of_classes(model, names)
        case ModuleListBlocks():
            return listed_blocks(model)
        case MinSize(numel):
            return _large_enough(model, numel)
        case Automatic() | WholeModel():
            return []


def _planned(model: nn.Module) -> list[str]:
    """Modules the plan frees after use; those it keeps gathered stay in the root group, which is kept too."""
    plan = compat.fsdp_plan(model)
    freed = {rule for rule, style in plan.items() if style == "free_full_weight"}
    names = [
        name
        for name, module in model.named_modules()
        if (name in freed or re.sub(r"\.\d+(?=\.|$)", ".*", name) in freed)
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict))  # containers have no forward to gather for
    ]
    repeats = any(re.search(r"\.\d+(\.|$)", name) for name in names)
    return names if repeats else []  # a plan that misses the blocks would leave them all in the root group


def _of_classes(model: nn.Module, classes: Iterable[str]) -> list[str]:
    wanted = set(classes)
    names = [name for name, module in model.named_modules() if name and wanted & _class_names(module)]
    return names


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__ if kind not in (nn.Module, object)}


def listed_blocks(model: nn.Module) -> list[str]:
    """Names of the members of every outermost ``nn.ModuleList`` that repeats one class at least twice, in order."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inside:
            kinds = [type(member) for member in module]
            if len(set(kinds)) < len(kinds) and any(True for _ in module.parameters()):
                members = {id(member): index for index, member in reversed(list(enumerate(module)))}
                found += [f"{name}.{index}" if name else str(index) for index in sorted(members.values())]
    return found


def _large_enough(model: nn.Module, numel: int) -> list[str]:
    found: set[str] = set()
    seen: set[nn.Module | nn.Parameter] = set()

    def left_of(name: str, module: nn.Module) -> int:
        """Elements that no group inside of the module has."""
        seen.add(module)
        # torch's attention reads the parameters of its parts, and never calls them.
        parts_run = not isinstance(module, nn.MultiheadAttention)
        count = 0
        for parameter in module.parameters(recurse=not parts_run):
            if parameter not in seen:
                seen.add(parameter)
                count += parameter.numel()
        for child_name, child in module.named_children() if parts_run else ():
            if child not in seen:
                count += left_of(f"{name}.{child_name}" if name else child_name, child)
        if count < numel or not name or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return count
        found.add(name)
        return 0

    left_of("", model)
    return [name for name, _ in model.named_modules() if name in found]


def _merge_tied(model: nn.Module, blocks: Sequence[str]) -> list[list[str]]:
    """Blocks as groups, such that no parameter is seen by two groups.

    Blocks that share a parameter become one group. A block that shares one with what is outside of all blocks is
    left to the root group, where the shared parameter then is.
    """
    owner = _group_finder(model, blocks)
    places = [[owner(name) for name in names] for names in _places(model).values()]
    parent = {block: block for block in [*blocks, ""]}

    def find(block: str) -> str:
        while parent[block] != block:
            block = parent[block]
        return block

    for owners in places:
        for other in owners[1:]:
            first, second = sorted((find(owners[0]), find(other)), key=len)
            parent[second] = first  # the root, "", is the shortest, so that it absorbs
    groups: dict[str, list[str]] = {}
    for block in blocks:
        groups.setdefault(find(block), []).append(block)
    groups.pop("", None)
    return list(groups.values())


def _group_finder(model: nn.Module, blocks: Iterable[str]) -> Callable[[str], str]:
    """A function from a parameter's name to the innermost block it is in ("" for the root).

    Modules count, not their names: a block that is registered twice is one block under both names.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    block_of = {id(modules[block]): block for block in blocks}

    def owner(name: str) -> str:
        path = name.rpartition(".")[0]
        while path and id(modules[path]) not in block_of:
            path = path.rpartition(".")[0]
        return block_of[id(modules[path])] if path else ""

    return owner


def _unshardable(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameters FSDP2 cannot take, and why.

    These are 0-d and empty ones, and those of a minority dtype among a module's own trained ones.
    """
    found = {parameter: "it has no dimensions" for parameter in model.parameters() if parameter.ndim == 0}
    found |= {parameter: "it has no elements" for parameter in model.parameters() if parameter.numel() == 0}
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and p.ndim > 0]
        sizes: dict[torch.dtype, int] = {}
        for parameter in own:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        if len(sizes) > 1:
            main = max(sizes, key=lambda dtype: sizes[dtype])
            for parameter in own:
                if parameter.dtype != main:
                    found.setdefault(parameter, "its module has most of its parameters in another dtype")
    return found


def _islands(
    model: nn.Module, groups: Sequence[Sequence[str]], replicated: set[nn.Parameter]
) -> tuple[list[list[str]], dict[nn.Parameter, str]]:
    """What is of another dtype than most of its group (float32 norms, say): groups of its own, if it can be.

    A module can be a group of its own when all that it holds outside of other groups has that one dtype and is
    shared with nobody. Otherwise its parameters of that dtype have to stay whole; they are the second value.
    """
    owner = _group_finder(model, [name for names in groups for name in names])
    leader = {name: names[0] for names in groups for name in names} | {"": ""}
    places = _places(model)
    sizes: dict[str, dict[torch.dtype, int]] = {}
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter not in replicated
    }
    for name, parameter in trained.items():
        counts = sizes.setdefault(leader[owner(name)], {})
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    main = {group: max(counts, key=lambda dtype: counts[dtype]) for group, counts in sizes.items()}
    islands: list[list[str]] = []
    whole: dict[nn.Parameter, str] = {}
    for name, parameter in trained.items():
        group = leader[owner(name)]
        module = name.rpartition(".")[0]
        if parameter.dtype == main[group] or [module] in islands:
            continue
        inside = [other for other in trained if other.startswith(f"{module}.") and leader[owner(other)] == group]
        fits = all(trained[other].dtype == parameter.dtype and len(places[trained[other]]) == 1 for other in inside)
        if module and module != group and fits:
            islands.append([module])
        else:
            whole[parameter] = "its group is of another dtype, and no module around it can be a group of its own"
    return islands, whole


def _places(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter with all of its names."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    return places


def shard_dim(shape: Sequence[int], shard_size: int) -> int:
    """The dimension of a parameter that is dealt to ``shard_size`` ranks.

    The first one, as FSDP2 has it by default. Of three and more dimensions, where the first leaves ranks empty or
    much emptier than others (fewer stacked experts than ranks, or 128 of them on 96), it is the first of the others
    that splits evenly, if there is one: FSDP2 takes no uneven split but of the first. The last dimension, whose
    parts are scattered in small pieces over the file, is taken only where ranks would get nothing at all.
    """
    if len(shape) < 3:
        return 0
    if shape[0] < shard_size:
        others = range(1, len(shape))
    elif -(-shape[0] // shard_size) * shard_size > MAX_PADDING * shape[0]:
        others = range(1, len(shape) - 1)
    else:
        return 0
    return next((dim for dim in others if shape[dim] % shard_size == 0), 0)


def _require_shardable(model: nn.Module, grouping: Grouping, mesh: DeviceMesh) -> None:
    """What ``fully_shard`` would refuse half way, without a name."""
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    words = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    if mesh.ndim > 2:
        raise PlacementError(
            f"{type(model).__name__} cannot be sharded on the mesh {words}: fully_shard takes one axis (shard) or "
            "two (replicate, shard). Shard on the further axes yourself, then fully_shard on these, and call "
            "shardwise.load"
        )
    for name, parameter in model.named_parameters():
        if parameter not in grouping.whole and not parameter.is_contiguous():
            raise PlacementError(
                f"{name} has shape {tuple(parameter.shape)} and strides {parameter.stride()}, and cannot be "
                f"sharded on the mesh {words}: fully_shard takes contiguous parameters only; have the model's "
                "class make it contiguous"
            )


def _placement_for(shard_size: int) -> Callable[[nn.Parameter], Shard]:
    return lambda parameter: Shard(shard_dim(parameter.shape, shard_size))


def average_replicated_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give whole parameters of a sharded model the mean gradient of all ranks, as sharded ones have it.

    To be called once the parameters are materialised (the hooks belong to the parameter objects); again does no
    harm. Afterwards every backward pass is a collective for each of them that is trained, except where FSDP2 has
    been told not to exchange gradients (``set_requires_gradient_sync(False)``): they add up on each rank then,
    until it does.
    """
    average = Averaging(mesh, _torch_private.exchanges_gradients(model))
    for parameter in model.parameters():
        is_alone = parameter.requires_grad and parameter.numel() and not isinstance(parameter, DTensor)
        if is_alone and not is_averaged(parameter):
            parameter.register_post_accumulate_grad_hook(average)


class Averaging:
    """A hook that averages a gradient over all ranks of a mesh.

    What an earlier pass has averaged is the same on every rank, and so is its mean: a gradient that is added to it
    may be averaged together with it.
    """

    def __init__(self, mesh: DeviceMesh, exchanges: Callable[[], bool]) -> None:
        self.mesh = mesh
        self.exchanges = exchanges

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and self.exchanges():
            for group in self.mesh.get_all_groups():
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(self.mesh.size())


def is_averaged(parameter: nn.Parameter) -> bool:
    """Whether :func:`average_replicated_gradients` takes care of a parameter's gradient."""
    return any(isinstance(hook, Averaging) for hook in _torch_private.gradient_hooks(parameter))
