"""By which steps a save begins to count, and what of the older one is then removed; see [Note: One commit]."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from shardwise.planning.save_plan import SINGLE_FILE, SavePlan

OLDER = ".older"
"""Ends the name of older weights that were set aside for the moment of a commit."""

_OF_A_SAVE = (
    rf"(-[0-9a-f]{{8}}-\d{{5,}}-of-\d{{5,}}\.safetensors|\.[0-9a-f]{{8}}(\.incomplete|{re.escape(OLDER)}))"
    r"|\..+\.[0-9a-f]{8}\.incomplete"  # what a process left that died while it replaced a small file
)
"""What follows the stem in names that only saves give."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a folder holds before a save: its files, and those of them that make up the weights that count."""

    files: frozenset[str]
    weights: frozenset[str]


@dataclass(frozen=True, slots=True)
class Rename:
    """Give a file another name, in place of whatever had it."""

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Put content under a name, in one step."""

    file: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file, for good."""

    file: str


Step: TypeAlias = Rename | Replace | Remove

NOTHING_BOUND: Mapping[str, bytes] = MappingProxyType({})


def look_at_folder(files: Collection[str], index: bytes | None, single_file: str = SINGLE_FILE) -> Standing:
    """What is there, of the names in a folder and of its index file; an index that makes no sense names nothing."""
    weights = {single_file} & set(files)
    if not weights and index is not None:
        try:
            named = json.loads(index)["weight_map"].values()
            weights = {name for name in named if isinstance(name, str)} & set(files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            weights = set()
    return Standing(frozenset(files), frozenset(weights))


def commit_steps(plan: SavePlan, standing: Standing, bound: Mapping[str, bytes] = NOTHING_BOUND) -> list[Step]:
    """In their order, each to be durable before the next.

    After the last one, and not before, the new save counts. ``bound`` are small files, by name, beside which the
    older weights would be read as what they are not (the config of an adapter has its scaling). Then there are no
    weights, rather than wrong ones, between the first step and the last: the older ones are set aside.
    """
    if plan.index is None:
        steps: list[Step] = [Replace(name, content) for name, content in bound.items()]
        if bound and plan.single_file in standing.files:
            steps.insert(0, Rename(plan.single_file, set_aside(plan)))
        return [*steps, Rename(plan.files[0].name, plan.single_file)]
    steps = [Replace(plan.index_file, plan.index)]
    return [*steps, Remove(plan.single_file)] if plan.single_file in standing.files else steps


def set_aside(plan: SavePlan) -> str:
    """The name that older weights have while a save commits that cannot be told from them."""
    return f"{plan.stem}.{plan.token}{OLDER}"


def obsolete(plan: SavePlan, standing: Standing) -> list[str]:
    """Files to remove once the new save counts: those of the older one, and of saves that were never committed."""
    new = {*plan.names, plan.single_file if plan.index is None else plan.index_file}
    old = {name for name in standing.weights if name.endswith(".safetensors")}
    old |= {name for name in standing.files if re.fullmatch(f"{plan.stem}{_OF_A_SAVE}", name)}
    old |= {plan.index_file} & standing.files
    return sorted(old - new)
