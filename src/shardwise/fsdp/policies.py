"""Wrapping policies: the modules that become FSDP2 groups."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.errors import ConfigError, ShardingError, private
from shardwise.core.formatting import join_names
from shardwise.core.layout import NamedPolicy
from shardwise.fsdp.torch_private import get_parameters


@dataclass(frozen=True, slots=True)
class Classes:
    """Modules by the names of their classes, each of which must match one."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        names: object = self.names
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"names={names!r} must be a tuple of names of classes, as in ('LlamaDecoderLayer',)")


@dataclass(frozen=True, slots=True)
class MinSize:
    """Innermost modules with at least ``numel`` elements that are in no other group.

    Smaller modules are grouped with their parents. The rest is in the root group.
    """

    numel: int

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ConfigError(f"numel={self.numel} must be 1 element or more: MinSize(numel=10_000_000)")


@dataclass(frozen=True, slots=True)
class Matching:
    """Modules for which a function returns True.

    It takes the module, or the arguments of FSDP1's policies: ``function(module=, recurse=False,
    nonwrapped_numel=)`` with the module's number of elements.
    """

    function: Callable[..., bool]


UNUSED_BY_FSDP2: Final = {
    **dict.fromkeys(
        ("backward_prefetch", "backward_prefetch_policy", "forward_prefetch"), "FSDP2 orders its gathers itself"
    ),
    "limit_all_gathers": "FSDP2 bounds its gathers itself",
    "sync_module_states": "every rank reads its own bytes",
    "use_orig_params": "FSDP2 always has the original parameters",
}
"""Options of FSDP1 and accelerate without a counterpart, and why."""

WrapPolicy: TypeAlias = NamedPolicy | Classes | MinSize | Matching
"""Policy that selects the modules to which ``fully_shard`` is applied.

``"model_plan"``: those of the model's own FSDP plan (``_fsdp_plan`` of transformers). ``"no_split_modules"``: those
whose class is in the model's ``_no_split_modules``. ``"module_list"``: the members of every outermost
``nn.ModuleList`` that has a class twice. ``"auto"``: the first of these that matches, and with the plan the
``_no_split_modules`` that it misses, as in a vision tower. ``"whole_model"``: one group for a small model.
"""


def select_blocks(model: nn.Module, policy: WrapPolicy) -> list[str]:
    """Return the names of the modules that become groups. They may be nested.

    Raises:
        ShardingError: the policy, or one of its classes, matches nothing.
    """
    if policy == "whole_model":
        return []
    candidates: tuple[WrapPolicy, ...] = ("model_plan", "no_split_modules", "module_list")
    for candidate in candidates if policy == "auto" else (policy,):
        if names := _select(model, candidate):
            if isinstance(policy, Classes):
                _require_matches(model, policy)
            return [*names, *select_unplanned(model, policy)]
    numel = sum(parameter.numel() for parameter in model.parameters())
    raise ShardingError(
        f"{policy} matches nothing in {type(model).__name__}, which has {numel:,} elements in modules of "
        f"{_classes_in(model)}. Pass wrap=Classes(names=(...)), or 'whole_model' to gather everything at once"
    )


def select_unplanned(model: nn.Module, policy: WrapPolicy) -> list[str]:
    """Return the blocks that ``"auto"`` adds to those of the plan: neither in these groups nor around them.

    Every config of transformers has a plan, which matches the layers of one stack, mostly of text.
    """
    planned = _select_by_plan(model) if policy == "auto" else []
    if not planned:
        return []
    around = {""}
    for name in planned:
        while name not in around:
            around.add(name)
            name = name.rpartition(".")[0]
    unplanned: list[str] = []
    for name in _select(model, "no_split_modules"):
        is_inside = any(f"{name}.".startswith(f"{block}.") for block in planned)
        if name not in around and not is_inside:
            unplanned.append(name)
    return unplanned


def _require_matches(model: nn.Module, policy: Classes) -> None:
    """Raise if a class matches nothing, even if others do."""
    present = {name for prefix, module in model.named_modules() if prefix for name in _class_names(module)}
    absent = sorted(set(policy.names) - present)
    if absent:
        raise ShardingError(
            f"{policy}: {', '.join(absent)} matches nothing in {type(model).__name__}. Name some of its classes: "
            f"{_classes_in(model)}"
        )


def _classes_in(model: nn.Module) -> str:
    return ", ".join(sorted({type(module).__name__ for module in model.modules()}))


def find_repeated_blocks(model: nn.Module) -> list[str]:
    """Return the names of the outermost repeated blocks, in order.

    These are those that the model declares (``"no_split_modules"``), otherwise those of its lists
    (``"module_list"``).

    Raises:
        ShardingError: there are none.
    """
    candidates: list[WrapPolicy] = ["no_split_modules", "module_list"]
    for candidate in candidates:
        names = _select(model, candidate)
        outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
        if outermost:
            return outermost
    raise ShardingError(
        f"{type(model).__name__}: has neither _no_split_modules nor an nn.ModuleList of blocks, so there are no "
        "blocks to recompute. Pass activation_checkpointing=False"
    )


def _select(model: nn.Module, policy: WrapPolicy) -> list[str]:
    match policy:
        case "model_plan":
            return _select_by_plan(model)
        case "no_split_modules":
            return _select_by_class(model, _no_split_classes(model))
        case Classes(names):
            return _select_by_class(model, names)
        case "module_list":
            return find_listed_blocks(model)
        case MinSize(numel):
            return _select_by_size(model, numel)
        case Matching(function):
            return _select_by_function(model, function)
        case "auto" | "whole_model":
            return []


def _select_by_plan(model: nn.Module) -> list[str]:
    """Return the modules whose parameters the plan frees after use.

    Modules that it keeps gathered stay in the root group, which is also kept.
    """
    freed = {rule for rule, style in _fsdp_plan(model).items() if style == "free_full_weight"}
    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # containers have no forward to gather for
            continue
        if name in freed or re.sub(r"\.\d+(?=\.|$)", ".*", name) in freed:
            names.append(name)
    repeats = any(re.search(r"\.\d+(\.|$)", name) for name in names)
    return names if repeats else []  # a plan that misses the blocks would leave them all in the root group


def _fsdp_plan(model: nn.Module) -> dict[str, str]:
    """Return the styles of the model's FSDP plan by module name, with ``*`` for numbers."""
    return dict(getattr(model, "_fsdp_plan", None) or {})


def _no_split_classes(model: nn.Module) -> set[str]:
    """Return class names of blocks that must stay whole."""
    if isinstance(model, PreTrainedModel):
        return set(private("transformers:PreTrainedModel._no_split_modules", model) or ())
    return set(getattr(model, "_no_split_modules", None) or ())


def _select_by_class(model: nn.Module, classes: Iterable[str]) -> list[str]:
    names = set(classes)
    return [name for name, module in model.named_modules() if name and names & _class_names(module)]


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__ if kind not in (nn.Module, object)}


def find_listed_blocks(model: nn.Module) -> list[str]:
    """Return the names of the members of every outermost ``nn.ModuleList`` that has a class twice, in order.

    Members without a forward of their own are passed over: the lists within a list count.
    """
    blocks: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        if any(f"{name}.".startswith(f"{block}.") for block in blocks):  # a block, or inside of one
            continue
        called = [(index, member) for index, member in enumerate(module) if not _is_container(member)]
        kinds = {type(member) for _, member in called}
        if len(kinds) < len(called) and any(True for _ in module.parameters()):
            # Of a member that is in the list twice, the first index counts.
            indices = {id(member): index for index, member in reversed(called)}
            prefix = f"{name}." if name else ""
            blocks += [f"{prefix}{index}" for index in sorted(indices.values())]
    return blocks


def _is_container(module: nn.Module) -> bool:
    """Return whether a module has no forward, whose parameters could be gathered for it."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _select_by_function(model: nn.Module, function: Callable[..., bool]) -> list[str]:
    """Return the modules that a function selects, without containers, which have no forward to gather for."""
    is_fsdp1_policy = "recurse" in inspect.signature(function).parameters
    names: list[str] = []
    for name, module in model.named_modules():
        if not name or _is_container(module):
            continue
        if is_fsdp1_policy:
            numel = sum(map(torch.numel, module.parameters()))
            is_selected = function(module=module, recurse=False, nonwrapped_numel=numel)
        else:
            is_selected = function(module)
        if is_selected:
            names.append(name)
    return names


def _select_by_size(model: nn.Module, numel: int) -> list[str]:
    selected: set[str] = set()
    seen: set[nn.Module | nn.Parameter] = set()

    def ungrouped_numel(name: str, module: nn.Module) -> int:
        """Return the elements of the module that are in no group inside of it."""
        seen.add(module)
        # torch's attention reads the parameters of its children, and never calls them.
        descends = not isinstance(module, nn.MultiheadAttention)
        count = 0
        for parameter in module.parameters(recurse=not descends):
            if parameter not in seen:
                seen.add(parameter)
                count += parameter.numel()
        for child_name, child in module.named_children() if descends else ():
            if child not in seen:
                count += ungrouped_numel(join_names(name, child_name), child)
        if count < numel or not name or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return count
        selected.add(name)
        return 0

    ungrouped_numel("", model)
    return [name for name, _ in model.named_modules() if name in selected]


MAX_PADDING = 1.1
"""How much padding of an uneven first dimension may enlarge stacked experts, before another one is split."""


@dataclass(frozen=True, slots=True)
class Group:
    """Modules of one ``fully_shard`` call, and the parameters that are therefore gathered together."""

    modules: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of blocks in the order of ``fully_shard``, and the root group.

    ``whole`` has the parameters that stay unsharded, with the reason.
    """

    blocks: tuple[Group, ...]
    root: Group
    whole: Mapping[nn.Parameter, str]


def group_parameters(
    model: nn.Module, policy: WrapPolicy, kept_whole: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> Grouping:
    """Assign parameters to groups, or keep them unsharded. ``wrap`` executes the result.

    Needs no mesh and no process group, and does not change the model.

    Raises:
        ShardingError: the policy matches nothing.
    """
    inside = _ModuleNames.from_model(model)
    whole = {**_unshardable(inside), **kept_whole}
    # Ties first: they decide which group a parameter is in, and so what dtype most of a group has.
    groups = _merge_tied(inside, select_blocks(model, policy))
    separate, mixed = _dtype_groups(inside, groups, set(whole))
    groups += separate
    whole |= mixed
    # fully_shard is called from the inside out, because it takes all parameters that no inner group has taken.
    groups.sort(key=_depth, reverse=True)
    owners = inside.owners(groups)
    members: dict[str, list[nn.Parameter]] = {name: [] for name in ["", *(names[0] for names in groups)]}
    for parameter, names in inside.names.items():
        if parameter not in whole:
            members[owners[names[0]]].append(parameter)
    blocks = tuple(Group(tuple(names), tuple(members[names[0]])) for names in groups)
    return Grouping(blocks, Group(("",), tuple(members[""])), whole)


@dataclass(frozen=True, slots=True)
class _ModuleNames:
    """The modules of a model by all of their names, and all names of each parameter."""

    modules: Mapping[str, nn.Module]
    names: Mapping[nn.Parameter, list[str]]

    @classmethod
    def from_model(cls, model: nn.Module) -> _ModuleNames:
        modules = dict(model.named_modules(remove_duplicate=False))
        parameters: dict[nn.Parameter, list[str]] = {}
        for prefix, module in modules.items():
            for name, parameter in get_parameters(module).items():
                if parameter is not None:
                    parameters.setdefault(parameter, []).append(join_names(prefix, name))
        return cls(modules, parameters)

    def owners(self, groups: Iterable[Sequence[str]]) -> dict[str, str]:
        """Return, by a parameter's name, the first block of the innermost group that it is in ("" for the root).

        Modules are compared by identity: a block that is registered twice is one block.
        """
        first = {id(self.modules[name]): names[0] for names in groups for name in names}
        first[id(self.modules[""])] = ""
        by_name: dict[str, str] = {}
        for name in (name for names in self.names.values() for name in names):
            # From the module of the parameter outwards. The search ends at the root at the latest.
            path = name.rpartition(".")[0]
            while id(self.modules[path]) not in first:
                path = path.rpartition(".")[0]
            by_name[name] = first[id(self.modules[path])]
        return by_name


def _merge_tied(inside: _ModuleNames, blocks: Sequence[str]) -> list[list[str]]:
    """Return groups of blocks such that no parameter is in two groups.

    Blocks that share a parameter become one group. A block that shares a parameter with a module outside of all
    blocks is left to the root group.
    """
    owners = inside.owners([block] for block in blocks)
    parent = {block: block for block in [*blocks, ""]}  # a union-find forest, whose roots stand for groups

    def find(block: str) -> str:
        while parent[block] != block:
            block = parent[block]
        return block

    # Unite the groups of the first name of a parameter and of each other one.
    for name, *others in inside.names.values():
        for other in others:
            first, second = sorted((find(owners[name]), find(owners[other])), key=len)
            parent[second] = first  # the root is the shortest name, "", so it stays the parent
    groups: dict[str, list[str]] = {}
    for block in blocks:
        groups.setdefault(find(block), []).append(block)
    groups.pop("", None)
    return list(groups.values())


def _depth(names: Sequence[str]) -> int:
    return max(name.count(".") for name in names)


def _unshardable(inside: _ModuleNames) -> dict[nn.Parameter, str]:
    """Return the parameters that FSDP2 cannot shard, with the reason.

    These have no dimensions or no elements, or are trained and of another dtype than most of their module's own
    trained elements.
    """
    reasons = {parameter: "it has no dimensions" for parameter in inside.names if parameter.ndim == 0}
    reasons |= {parameter: "it has no elements" for parameter in inside.names if parameter.numel() == 0}
    for module in inside.modules.values():
        trained = [p for p in get_parameters(module).values() if p is not None and p.requires_grad and p.ndim > 0]
        main = _main_dtype(trained)
        for parameter in trained:
            if parameter.dtype != main:
                reasons.setdefault(parameter, "its module has most of its parameters in another dtype")
    return reasons


def _main_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype | None:
    """Return the dtype of most elements."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=None)


def _dtype_groups(
    inside: _ModuleNames, groups: Sequence[Sequence[str]], replicated: set[nn.Parameter]
) -> tuple[list[list[str]], dict[nn.Parameter, str]]:
    """Return groups for trained parameters of another dtype than their group's, such as float32 norms.

    A module becomes a group of its own if all its trained parameters outside of other groups have that dtype and
    are not shared. Other parameters stay unsharded. The second value has these, with the reason.
    """
    owners = inside.owners(groups)
    trained: dict[str, nn.Parameter] = {}
    by_group: dict[str, list[nn.Parameter]] = {}
    for parameter, (name, *_) in inside.names.items():
        if parameter.requires_grad and parameter not in replicated:
            trained[name] = parameter
            by_group.setdefault(owners[name], []).append(parameter)
    # The dtype of most trained elements is that of the group. Frozen parameters do not count: FSDP2 needs one dtype
    # only where it reduces gradients.
    main = {group: _main_dtype(parameters) for group, parameters in by_group.items()}
    separate: list[list[str]] = []
    whole: dict[nn.Parameter, str] = {}
    for name, parameter in trained.items():
        group = owners[name]
        module = name.rpartition(".")[0]
        if parameter.dtype == main[group] or [module] in separate:
            continue
        # As a group, the module would take all trained parameters in it that no inner group has.
        members = [other for fqn, other in trained.items() if fqn.startswith(f"{module}.") and owners[fqn] == group]
        fits = all(other.dtype == parameter.dtype and len(inside.names[other]) == 1 for other in members)
        if module and module != group and fits:
            separate.append([module])
        else:
            whole[parameter] = "its group is of another dtype, and no module around it can be a group of its own"
    return separate, whole


def shard_dim(shape: Sequence[int], shard_size: int, *, is_packed: bool = False) -> int:
    """Return the dimension of a parameter that is sharded over ``shard_size`` ranks.

    It is the first one, FSDP2's default, unless a parameter of three or more dimensions would leave ranks empty, or
    would need much padding (fewer stacked experts than ranks, or 128 on 96). Then it is the next one that splits
    evenly, if there is one, because FSDP2 pads the first dimension only. The last dimension, whose shards are small
    pieces all over the file, is split only if ranks would be empty otherwise. That of packed weights is never
    split, because each rank dequantizes whole rows.
    """
    if len(shape) < 3:
        return 0
    # Examples on 8 ranks: 4 experts leave ranks empty, 9 are padded to 16, and 15 to 16, which is little.
    has_empty_ranks = shape[0] < shard_size
    padded = -(-shape[0] // shard_size) * shard_size
    if not has_empty_ranks and padded <= MAX_PADDING * shape[0]:
        return 0
    stop = len(shape) if has_empty_ranks and not is_packed else len(shape) - 1
    return next((dim for dim in range(1, stop) if shape[dim] % shard_size == 0), 0)
