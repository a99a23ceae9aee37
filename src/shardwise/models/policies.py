"""Wrapping policies: the modules that become FSDP2 groups."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch import nn

from shardwise.errors import ConfigError, ShardingError
from shardwise.models import pretrained
from shardwise.models.torch_api import SHARDS_INTEGERS, parameters_of


@dataclass(frozen=True, slots=True)
class Classes:
    """The modules of the classes with these names, each of which there has to be."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        names: object = self.names
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"names={names!r} must be a tuple of names of classes, as in ('LlamaDecoderLayer',)")


@dataclass(frozen=True, slots=True)
class MinSize:
    """The innermost modules with at least ``numel`` elements that no smaller group has, as of ``fully_shard``.

    A module that is too small counts as a part of its parent. The remainder goes to the root group.
    """

    numel: int

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ConfigError(f"numel={self.numel} must be 1 element or more: MinSize(numel=10_000_000)")


@dataclass(frozen=True, slots=True)
class Matching:
    """Modules for which a function of the module returns True, or one with the signature of FSDP1's policies.

    FSDP1 calls ``function(module=, recurse=False, nonwrapped_numel=)`` with the module's number of elements.
    """

    function: Callable[..., bool]


NamedPolicy: TypeAlias = Literal["auto", "model_plan", "no_split_modules", "module_list", "whole_model"]
WrapPolicy: TypeAlias = NamedPolicy | Classes | MinSize | Matching
"""Policy that chooses the modules that ``fully_shard`` is applied to.

``"model_plan"``: those of the model's own FSDP plan (``_fsdp_plan`` of transformers). ``"no_split_modules"``: those
whose class the model declares in ``_no_split_modules``. ``"module_list"``: the members of every outermost
``nn.ModuleList`` that repeats one class at least twice. ``"auto"``: the first of these that names blocks.
``"whole_model"``: one group, gathered at once, for small models.
"""


def select_blocks(model: nn.Module, policy: WrapPolicy) -> list[str]:
    """Return the names of the modules that become groups. Blocks may lie inside of blocks.

    Raises:
        ShardingError: when there are none.
    """
    if policy == "whole_model":
        return []
    candidates: tuple[WrapPolicy, ...] = ("model_plan", "no_split_modules", "module_list")
    for candidate in candidates if policy == "auto" else (policy,):
        if names := _matching(model, candidate):
            if isinstance(policy, Classes):
                _require_each(model, policy)
            return names
    numel = sum(parameter.numel() for parameter in model.parameters())
    raise ShardingError(
        f"{policy} matches nothing in {type(model).__name__}, which has {numel:,} elements in modules of "
        f"{_classes_in(model)}. Pass wrap=Classes(names=(...)), or 'whole_model' to gather everything at once"
    )


def _require_each(model: nn.Module, policy: Classes) -> None:
    """Raise for a name that no module of a model has, also where others are found: its blocks would stay ungrouped.

    Raises:
        ShardingError: naming it.
    """
    there = {name for prefix, module in model.named_modules() if prefix for name in _class_names(module)}
    absent = sorted(set(policy.names) - there)
    if absent:
        raise ShardingError(
            f"{policy}: {', '.join(absent)} matches nothing in {type(model).__name__}; its modules are of "
            f"{_classes_in(model)}"
        )


def _classes_in(model: nn.Module) -> str:
    return ", ".join(sorted({type(module).__name__ for module in model.modules()}))


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks that a model is a stack of, outermost ones only and in order.

    Those that the model declares (``"no_split_modules"``), else those of its lists (``"module_list"``).

    Raises:
        ShardingError: when there are none.
    """
    candidates: list[WrapPolicy] = ["no_split_modules", "module_list"]
    for candidate in candidates:
        names = _matching(model, candidate)
        outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
        if outermost:
            return outermost
    raise ShardingError(
        f"{type(model).__name__} has neither _no_split_modules nor an nn.ModuleList of blocks, so there are none "
        "to recompute. Pass activation_checkpointing=False"
    )


def _matching(model: nn.Module, policy: WrapPolicy) -> list[str]:
    match policy:
        case "model_plan":
            return _planned(model)
        case "no_split_modules":
            return _of_classes(model, pretrained.no_split_classes(model))
        case Classes(names):
            return _of_classes(model, names)
        case "module_list":
            return listed_blocks(model)
        case MinSize(numel):
            return _large_enough(model, numel)
        case Matching(function):
            return _answering(model, function)
        case "auto" | "whole_model":
            return []


def _planned(model: nn.Module) -> list[str]:
    """Return modules that the plan frees after use.

    Those that it keeps gathered stay in the root group, which is also kept.
    """
    freed = {rule for rule, style in pretrained.fsdp_plan(model).items() if style == "free_full_weight"}
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
    return [name for name, module in model.named_modules() if name and wanted & _class_names(module)]


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


def _answering(model: nn.Module, function: Callable[..., bool]) -> list[str]:
    """Return the modules that a function selects, without containers, which have no forward to gather for."""
    inside = [(name, module) for name, module in model.named_modules() if name]
    if "recurse" in inspect.signature(function).parameters:  # as FSDP1 calls its policies
        chosen = [
            function(module=module, recurse=False, nonwrapped_numel=sum(map(torch.numel, module.parameters())))
            for _, module in inside
        ]
    else:
        chosen = [function(module) for _, module in inside]
    containers = (nn.ModuleList, nn.ModuleDict)
    return [
        name
        for (name, module), is_chosen in zip(inside, chosen, strict=True)
        if is_chosen and not isinstance(module, containers)
    ]


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


MAX_PADDING = 1.1
"""How much larger stacked experts may get by the padding of an uneven first dimension, before another is taken."""


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that ``fully_shard`` takes together, and the parameters that are therefore gathered at once."""

    modules: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Blocks in the order of ``fully_shard``, and the parameters that the root takes.

    ``whole`` are the parameters that stay whole on every rank, with the reason.
    """

    blocks: tuple[Group, ...]
    root: Group
    whole: Mapping[nn.Parameter, str]


def group_parameters(
    model: nn.Module, policy: WrapPolicy, kept_whole: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> Grouping:
    """Assign parameters to groups, or keep them unsharded. ``wrap`` executes the result.

    Pure: needs no mesh and no process group, and leaves the model as it is.

    Raises:
        ShardingError: when the policy matches nothing.
    """
    inside = _Inside.of(model)
    whole = {**_unshardable(inside), **kept_whole}
    groups = _merge_tied(inside, select_blocks(model, policy))
    islands, strays = _islands(inside, groups, set(whole))
    groups += islands
    whole |= strays
    groups.sort(key=_depth, reverse=True)
    owner = _group_finder(inside, [name for names in groups for name in names])
    leader = {name: names[0] for names in groups for name in names} | {"": ""}
    members: dict[str, list[nn.Parameter]] = {name: [] for name in leader.values()}
    for parameter, names in inside.places.items():
        if parameter not in whole:
            members[leader[owner(names[0])]].append(parameter)
    blocks = tuple(Group(tuple(names), tuple(members[names[0]])) for names in groups)
    return Grouping(blocks, Group(("",), tuple(members[""])), whole)


@dataclass(frozen=True, slots=True)
class _Inside:
    """A model looked through once: its modules, by every name, and every parameter with all of its names."""

    modules: Mapping[str, nn.Module]
    places: Mapping[nn.Parameter, list[str]]

    @classmethod
    def of(cls, model: nn.Module) -> _Inside:
        modules = dict(model.named_modules(remove_duplicate=False))
        places: dict[nn.Parameter, list[str]] = {}
        for prefix, module in modules.items():
            for name, parameter in parameters_of(module).items():
                if parameter is not None:
                    places.setdefault(parameter, []).append(f"{prefix}.{name}" if prefix else name)
        return cls(modules, places)


def _merge_tied(inside: _Inside, blocks: Sequence[str]) -> list[list[str]]:
    """Blocks as groups, such that no parameter is seen by two groups.

    Blocks that share a parameter become one group. A block that shares a parameter with a module outside of all
    blocks is left to the root group.
    """
    owner = _group_finder(inside, blocks)
    places = [[owner(name) for name in names] for names in inside.places.values()]
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


def _depth(names: Sequence[str]) -> int:
    return max(name.count(".") for name in names)


def _group_finder(inside: _Inside, blocks: Iterable[str]) -> Callable[[str], str]:
    """A function from a parameter's name to the innermost block it is in ("" for the root).

    Modules count, not their names: a block that is registered twice is one block under both names.
    """
    modules = inside.modules
    block_of = {id(modules[block]): block for block in blocks}

    def owner(name: str) -> str:
        path = name.rpartition(".")[0]
        while path and id(modules[path]) not in block_of:
            path = path.rpartition(".")[0]
        return block_of[id(modules[path])] if path else ""

    return owner


def _unshardable(inside: _Inside) -> dict[nn.Parameter, str]:
    """Parameters FSDP2 cannot take, and why.

    These are 0-d and empty ones, with an older torch integers, and those of a minority dtype among a module's own
    trained ones.
    """
    found = {parameter: "it has no dimensions" for parameter in inside.places if parameter.ndim == 0}
    found |= {parameter: "it has no elements" for parameter in inside.places if parameter.numel() == 0}
    if not SHARDS_INTEGERS:
        integers = [p for p in inside.places if not p.is_floating_point() and not p.is_complex()]
        found |= dict.fromkeys(integers, "it has integers, which this torch does not shard; 2.13 does")
    for module in inside.modules.values():
        own = [p for p in parameters_of(module).values() if p is not None and p.requires_grad and p.ndim > 0]
        if len(own) < 2:
            continue
        sizes: dict[torch.dtype, int] = {}
        for parameter in own:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        if len(sizes) > 1:
            main = max(sizes, key=sizes.__getitem__)
            for parameter in own:
                if parameter.dtype != main:
                    found.setdefault(parameter, "its module has most of its parameters in another dtype")
    return found


def _islands(
    inside: _Inside, groups: Sequence[Sequence[str]], replicated: set[nn.Parameter]
) -> tuple[list[list[str]], dict[nn.Parameter, str]]:
    """Return parameters whose dtype differs from their group's (float32 norms), as groups of their own if possible.

    A module can be a group of its own when all that it holds outside of other groups has that one dtype and is
    shared with nobody. Otherwise its parameters of that dtype stay unsharded. They are the second value.
    """
    owner = _group_finder(inside, [name for names in groups for name in names])
    leader = {name: names[0] for names in groups for name in names} | {"": ""}
    sizes: dict[str, dict[torch.dtype, int]] = {}
    trained = {
        names[0]: parameter
        for parameter, names in inside.places.items()
        if parameter.requires_grad and parameter not in replicated
    }
    for name, parameter in trained.items():
        counts = sizes.setdefault(leader[owner(name)], {})
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    main = {group: max(counts, key=counts.__getitem__) for group, counts in sizes.items()}
    islands: list[list[str]] = []
    whole: dict[nn.Parameter, str] = {}
    for name, parameter in trained.items():
        group = leader[owner(name)]
        module = name.rpartition(".")[0]
        if parameter.dtype == main[group] or [module] in islands:
            continue
        beside = [other for other in trained if other.startswith(f"{module}.") and leader[owner(other)] == group]
        fits = all(
            trained[other].dtype == parameter.dtype and len(inside.places[trained[other]]) == 1 for other in beside
        )
        if module and module != group and fits:
            islands.append([module])
        else:
            whole[parameter] = "its group is of another dtype, and no module around it can be a group of its own"
    return islands, whole


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
