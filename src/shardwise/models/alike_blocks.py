"""Repeated blocks of a model of which one stands for all that are like it.

Alike are blocks with the same modules, shapes, dtypes and plain attributes, trained or not, and with or without
something trained before them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from shardwise.layout import PassPart, Stretch
from shardwise.models._torch_private import buffers_of, parameters_of, walk
from shardwise.models.wrapping.blocks import Recomputed


def kinds_of(base: nn.Module, blocks: Sequence[str]) -> list[object]:
    """Of each block what tells it from others."""
    words = getattr(base, "get_input_embeddings", lambda: None)()
    is_trained_before = isinstance(words, nn.Module) and any(p.requires_grad for p in words.parameters())
    kinds: list[object] = []
    for name in blocks:
        block = base.get_submodule(name)
        kinds.append((_look_of(block), is_trained_before))
        is_trained_before = is_trained_before or any(p.requires_grad for p in block.parameters())
    return kinds


def _look_of(block: nn.Module) -> object:
    """Modules, what is registered in them, and their plain attributes, but for those that number them."""
    return (
        isinstance(vars(block).get("forward"), Recomputed),
        tuple(
            (
                name,
                type(module),
                tuple((key, value) for key, value in vars(module).items() if _is_telling(key, value)),
                tuple(
                    (key, tuple(value.shape), value.dtype, value.requires_grad)
                    for registry in (parameters_of(module), buffers_of(module))
                    for key, value in registry.items()
                    if value is not None
                ),
            )
            for name, module in walk(block)
        ),
    )


def _is_telling(key: str, value: object) -> bool:
    return (
        not key.startswith("_")
        and isinstance(value, (int, float, str))
        and not any(word in key for word in ("idx", "index", "layer_id", "layer_number", "name"))
    )


def lists_of(base: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The one list that has all blocks and nothing else; none where there is no such."""
    parents = {name.rpartition(".")[0] for name in blocks}
    if len(parents) != 1:
        return []
    [parent] = parents
    found = base.get_submodule(parent)
    return [parent] if isinstance(found, nn.ModuleList) and len(found) == len(blocks) else []


@contextlib.contextmanager
def only(base: nn.Module, blocks: Sequence[str], chosen: Sequence[int]) -> Iterator[None]:
    """For a while the list of blocks has some of them, under their own names, and configs tell of these."""
    [parent] = lists_of(base, blocks)
    members = base.get_submodule(parent)._modules
    before = dict(members)
    configs = {id(config): config for module in base.modules() if (config := getattr(module, "config", None))}
    types = {
        key: list(config.layer_types)
        for key, config in configs.items()
        if len(getattr(config, "layer_types", None) or ()) == len(blocks)
    }
    kept = [before[str(index)] for index in chosen]
    members.clear()
    members.update({str(place): module for place, module in enumerate(kept)})
    for key, found in types.items():
        configs[key].layer_types = [found[index] for index in chosen]
    try:
        yield
    finally:
        members.clear()
        members.update(before)
        for key, found in types.items():
            configs[key].layer_types = found


def repeated(
    found: Sequence[Stretch], stands_for: Sequence[int], groups: Sequence[tuple[str, ...]], blocks: Sequence[str]
) -> tuple[Stretch, ...]:
    """The stretches of all blocks, of which ``found`` has some: block ``i`` is as ``stands_for[i]``."""
    of_block: dict[tuple[bool, int], list[Stretch]] = {}
    first: dict[bool, int] = {}
    others: dict[bool, list[tuple[int, Stretch]]] = {False: [], True: []}
    for place, stretch in enumerate(found):
        is_back = stretch.way in (PassPart.BACKWARD, PassPart.LOSS_BACKWARD)
        if stretch.block < 0:
            others[is_back].append((place, stretch))
        else:
            first.setdefault(is_back, place)
            of_block.setdefault((is_back, stretch.block), []).append(stretch)
    number = {names: index for index, names in enumerate(groups)}

    def renamed(stretch: Stretch, block: int) -> Stretch:
        def other(index: int) -> int:
            source, target = blocks[stretch.block], blocks[block]
            names = tuple(
                target + name[len(source) :] if name == source or name.startswith(f"{source}.") else name
                for name in groups[index]
            )
            return number.get(names, index)

        return replace(
            stretch, block=block, opens=tuple(map(other, stretch.opens)), closes=tuple(map(other, stretch.closes))
        )

    made: list[Stretch] = []
    for is_back in (False, True):
        begin = first.get(is_back, math.inf)
        made += [stretch for place, stretch in others[is_back] if place < begin]
        order = range(len(blocks))
        for block in reversed(order) if is_back else order:
            made += [renamed(each, block) for each in of_block.get((is_back, stands_for[block]), ())]
        made += [stretch for place, stretch in others[is_back] if place >= begin]
    return tuple(made)
