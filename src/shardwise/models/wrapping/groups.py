"""Which parameters are gathered together, and along which dimension each is dealt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from shardwise.models._torch_private import SHARDS_INTEGERS, parameters_of, walk
from shardwise.models.wrapping.policies import WrapPolicy, select_blocks

MAX_PADDING = 1.1
"""How much larger stacked experts may get by the padding of an uneven first dimension, before another is taken."""


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
    """Which parameters become groups, and which stay whole: all that ``wrap`` then carries out.

    Pure: needs no mesh and no process group, and leaves the model as it is.

    Raises:
        PlacementError: when the policy matches nothing.
    """
    inside = _Inside.of(model)
    whole = {**_unshardable(inside), **kept_whole}
    groups = _merge_tied(inside, select_blocks(model, policy))
    islands, strays = _islands(inside, groups, set(whole))
    groups += islands
    whole |= strays
    groups.sort(key=lambda names: -max(name.count(".") for name in names))
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
        modules = dict(walk(model, every_name=True))
        places: dict[nn.Parameter, list[str]] = {}
        for prefix, module in modules.items():
            for name, parameter in parameters_of(module).items():
                if parameter is not None:
                    places.setdefault(parameter, []).append(f"{prefix}.{name}" if prefix else name)
        return cls(modules, places)


def _merge_tied(inside: _Inside, blocks: Sequence[str]) -> list[list[str]]:
    """Blocks as groups, such that no parameter is seen by two groups.

    Blocks that share a parameter become one group. A block that shares one with what is outside of all blocks is
    left to the root group, where the shared parameter then is.
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
            main = max(sizes, key=lambda dtype: sizes[dtype])
            for parameter in own:
                if parameter.dtype != main:
                    found.setdefault(parameter, "its module has most of its parameters in another dtype")
    return found


def _islands(
    inside: _Inside, groups: Sequence[Sequence[str]], replicated: set[nn.Parameter]
) -> tuple[list[list[str]], dict[nn.Parameter, str]]:
    """What is of another dtype than most of its group (float32 norms, say): groups of its own, if it can be.

    A module can be a group of its own when all that it holds outside of other groups has that one dtype and is
    shared with nobody. Otherwise its parameters of that dtype have to stay whole; they are the second value.
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
    main = {group: max(counts, key=lambda dtype: counts[dtype]) for group, counts in sizes.items()}
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
