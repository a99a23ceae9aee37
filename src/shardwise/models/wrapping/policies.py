"""Which modules become groups of their own: the policies, as we and as others write them, and what each names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.fsdp.wrap import (
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from shardwise.errors import ConfigError, PlacementError
from shardwise.models import transformers_compat as compat
from shardwise.models._torch_private import walk


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
    """The modules of the classes with these names, each of which there has to be."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        names: object = self.names
        if isinstance(names, str):
            raise ConfigError(f"names={names!r} must be a tuple of class names: names=({names!r},)")
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            shown = getattr(names, "__name__", None) or repr(names)
            raise ConfigError(
                f"names={shown} must be a tuple of the names of classes, as in ('LlamaDecoderLayer',)"
            )


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
class Matching:
    """The modules for which a function answers True: of the module alone, or as FSDP1 asks its policies.

    That is ``function(module=, recurse=, nonwrapped_numel=)``: whether to look inside of a module, and then whether
    to wrap it, with the elements that no group inside of it has.
    """

    function: Callable[..., bool]


@dataclass(frozen=True, slots=True)
class Automatic:
    """The first of :class:`ModelPlan`, :class:`NoSplitModules` and :class:`ModuleListBlocks` that names blocks."""


WrapPolicy: TypeAlias = (
    Automatic | ModelPlan | NoSplitModules | ModuleListBlocks | Classes | MinSize | Matching | WholeModel
)


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
            names = _matching(model, policy)
            if isinstance(policy, Classes):
                _require_each(model, policy)
            if names:
                return names
            if isinstance(policy, MinSize):
                numel = sum(parameter.numel() for parameter in model.parameters())
                raise PlacementError(
                    f"{policy} matches nothing in {type(model).__name__}, which has {numel:,} elements in all; "
                    "lower it, or pass WholeModel() to gather everything at once"
                )
            raise PlacementError(
                f"{policy} matches nothing in {type(model).__name__}; its modules are of {_classes_in(model)}"
            )


def _require_each(model: nn.Module, policy: Classes) -> None:
    """Raise for a name that no module of a model has, also where others are found: its blocks would stay ungrouped.

    Raises:
        PlacementError: naming it.
    """
    there = {name for prefix, module in walk(model) if prefix for name in _class_names(module)}
    absent = sorted(set(policy.names) - there)
    if absent:
        raise PlacementError(
            f"{policy}: {', '.join(absent)} matches nothing in {type(model).__name__}; its modules are of "
            f"{_classes_in(model)}"
        )


def _classes_in(model: nn.Module) -> str:
    return ", ".join(sorted({type(module).__name__ for module in model.modules()}))


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
        case Matching(function):
            return _answering(model, function)
        case Automatic() | WholeModel():
            return []


def _planned(model: nn.Module) -> list[str]:
    """Modules the plan frees after use; those it keeps gathered stay in the root group, which is kept too."""
    plan = compat.fsdp_plan(model)
    freed = {rule for rule, style in plan.items() if style == "free_full_weight"}
    names = [
        name
        for name, module in walk(model)
        if (name in freed or re.sub(r"\.\d+(?=\.|$)", ".*", name) in freed)
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict))  # containers have no forward to gather for
    ]
    repeats = any(re.search(r"\.\d+(\.|$)", name) for name in names)
    return names if repeats else []  # a plan that misses the blocks would leave them all in the root group


def _of_classes(model: nn.Module, classes: Iterable[str]) -> list[str]:
    wanted = set(classes)
    names = [name for name, module in walk(model) if name and wanted & _class_names(module)]
    return names


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__ if kind not in (nn.Module, object)}


def listed_blocks(model: nn.Module) -> list[str]:
    """Names of the members of every outermost ``nn.ModuleList`` that repeats one class at least twice, in order."""
    found: list[str] = []
    for name, module in walk(model):
        inside = any(name.startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inside:
            kinds = [type(member) for member in module]
            if len(set(kinds)) < len(kinds) and any(True for _ in module.parameters()):
                members = {id(member): index for index, member in reversed(list(enumerate(module)))}
                found += [f"{name}.{index}" if name else str(index) for index in sorted(members.values())]
    return found


def _answering(model: nn.Module, function: Callable[..., bool]) -> list[str]:
    """What a function chooses, containers aside: these have no forward to gather for."""
    if "recurse" in inspect.signature(function).parameters:
        chosen = _asked_inside_out(model, function)
    else:
        chosen = {name for name, module in walk(model) if name and function(module)}
    containers = (nn.ModuleList, nn.ModuleDict)
    return [name for name, module in walk(model) if name in chosen and not isinstance(module, containers)]


def _asked_inside_out(model: nn.Module, function: Callable[..., bool]) -> set[str]:
    """As of torch's ``_recursive_wrap``."""
    chosen: set[str] = set()

    def wrapped_in(name: str, module: nn.Module) -> int:
        """Elements that groups have, of the module or inside of it."""
        numel = sum(parameter.numel() for parameter in module.parameters())
        if not function(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        inside = [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
        total = sum(wrapped_in(child, part) for child, part in inside)
        if name and function(module=module, recurse=False, nonwrapped_numel=numel - total):
            chosen.add(name)
            return numel
        return total

    wrapped_in("", model)
    return chosen


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
    return [name for name, _ in walk(model) if name in found]


def as_policy(given: Any) -> Any:
    """The policy of ours that somebody else's comes to; what is neither is left as it is, for whoever checks it.

    A class, or several: the modules of these. ``transformer_auto_wrap_policy`` with its classes likewise, without:
    those that the model declares. ``size_based_auto_wrap_policy``: by size. Another function is asked.

    Raises:
        ConfigError: a partial of torch's that says what cannot be honoured.
    """
    if isinstance(given, functools.partial):
        return _of_partial(given)
    if given is transformer_auto_wrap_policy:
        return NoSplitModules()
    if given is size_based_auto_wrap_policy:
        return MinSize(_default_of(size_based_auto_wrap_policy, "min_num_params"))
    if _is_class(given):
        return Classes((given.__name__,))
    if isinstance(given, (set, frozenset, list, tuple)) and given and all(map(_is_class, given)):
        return Classes(_names(given))
    if callable(given) and not isinstance(given, type):
        return Matching(given)
    return given


def _of_partial(given: functools.partial[Any]) -> Any:
    if given.args:
        raise ConfigError(f"wrap is a functools.partial with {len(given.args)} positional arguments; name them")
    keywords = dict(given.keywords)
    if given.func is transformer_auto_wrap_policy:
        classes = keywords.pop("transformer_layer_cls", None)
        _refuse(keywords, "transformer_auto_wrap_policy")
        if not isinstance(classes, Collection) or not classes or not all(map(_is_class, classes)):
            raise ConfigError(
                f"transformer_layer_cls={classes!r} must be a set of classes, as in {{LlamaDecoderLayer}}"
            )
        return Classes(_names(classes))
    if given.func is size_based_auto_wrap_policy:
        numel = keywords.pop("min_num_params", _default_of(size_based_auto_wrap_policy, "min_num_params"))
        _refuse(keywords, "size_based_auto_wrap_policy")
        return MinSize(int(numel))
    if given.func is lambda_auto_wrap_policy:
        function = keywords.pop("lambda_fn", None)
        _refuse(keywords, "lambda_auto_wrap_policy")
        if not callable(function):
            raise ConfigError(f"lambda_fn={function!r} must be a function of a module")
        return Matching(function)
    return Matching(given)


def _refuse(keywords: dict[str, Any], of: str) -> None:
    left = {name: value for name, value in keywords.items() if value is not None}
    if left:
        name, value = next(iter(left.items()))
        raise ConfigError(
            f"wrap: {of} has {name}={value!r}, which is not known here; name the classes to wrap instead"
        )


def _is_class(given: object) -> bool:
    return isinstance(given, type) and issubclass(given, nn.Module)


def _names(classes: Collection[type]) -> tuple[str, ...]:
    """In an order that is the same on every rank, of a set too."""
    return tuple(sorted(kind.__name__ for kind in classes))


def _default_of(function: Callable[..., Any], name: str) -> int:
    return int(inspect.signature(function).parameters[name].default)
