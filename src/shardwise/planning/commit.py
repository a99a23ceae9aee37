"""By which steps a save begins to count, and what of the older one is then removed; see [Note: One commit]."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.planning.save_plan import INDEX_FILE, SINGLE_FILE, SavePlan

_OF_A_SAVE = re.compile(
    r"model(-[0-9a-f]{8}-\d{5,}-of-\d{5,}\.safetensors|\.[0-9a-f]{8}\.incomplete)"
    r"|\.(model|config|generation_config|shardwise)\.[\w.]*[0-9a-f]{8}\.incomplete"
)


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


def look_at_folder(files: Collection[str], index: bytes | None) -> Standing:
    """What is there, of the names in a folder and of its index file; an index that makes no sense names nothing."""
    weights = {SINGLE_FILE} & set(files)
    if not weights and index is not None:
        try:
            named = json.loads(index)["weight_map"].values()
            weights = {name for name in named if isinstance(name, str)} & set(files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            weights = set()
    return Standing(frozenset(files), frozenset(weights))


def commit_steps(plan: SavePlan, standing: Standing) -> list[Step]:
    """In their order, each to be durable before the next.

    After the last one, and not before, the new save counts.
    """
    if plan.index is None:
        return [Rename(plan.files[0].name, SINGLE_FILE)]
    steps: list[Step] = [Replace(INDEX_FILE, plan.index)]
    return [*steps, Remove(SINGLE_FILE)] if SINGLE_FILE in standing.files else steps


def obsolete(plan: SavePlan, standing: Standing) -> list[str]:
    """Files to remove once the new save counts: those of the older one, and of saves that were never committed."""
    new = {*plan.names, *((SINGLE_FILE,) if plan.index is None else (INDEX_FILE,))}
    old = {name for name in standing.weights if name.endswith(".safetensors")}
    old |= {name for name in standing.files if _OF_A_SAVE.fullmatch(name)}
    old |= {INDEX_FILE} & standing.files
    return sorted(old - new)
