"""Measures the structure of the package: names, circles, what ``load`` reaches.

- *names in two modules*: names of classes and of type aliases (``X: TypeAlias``, ``type X``) that two modules or
  more define, without leading underscores.
- *circles*: modules that import each other.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "shardwise"


def names_in_two_modules(trees: dict[str, ast.Module]) -> list[str]:
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for node in tree.body:
            name = ""
            if isinstance(node, ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation):
                name = ast.unparse(node.target)
            elif type(node).__name__ == "TypeAlias":
                name = ast.unparse(node.name)  # type: ignore[attr-defined]
            if name:
                homes[name.lstrip("_")].add(module)
    return sorted(f"{name}: {', '.join(sorted(found))}" for name, found in homes.items() if len(found) > 1)


def circles(trees: dict[str, ast.Module], named: Mapping[str, set[str]] = MappingProxyType({})) -> list[list[str]]:
    """Modules that import each other, at any depth, in functions too; the package's own root aside.

    What modules have ``named`` counts as imported.
    """
    after = {
        name: {found for found in _imported(tree) if found in trees and found not in (name, PACKAGE)}
        | named.get(name, set())
        for name, tree in trees.items()
    }
    left = dict(after)
    while ends := [name for name, found in left.items() if not found & left.keys()]:
        for name in ends:
            del left[name]
    return [sorted(left)] if left else []


def closure(start: str, trees: dict[str, ast.Module]) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name in found or name not in trees:
            continue
        found.add(name)
        todo += {".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)}
        todo += _imported(trees[name])
    return found - {PACKAGE}


def height_of(place: str) -> int:
    """Return the height of the package of a module, or of ``module:function``, in the import contract, or 0."""
    return _heights().get(place.partition(":")[0].split(".")[1], 0)


@cache
def _heights() -> dict[str, int]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = contracts[0]["layers"]
    return {name.strip("( )"): -number for number, layer in enumerate(layers) for name in layer.split("|")}


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (name for child in node.orelse for name in _imported(child))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from _imported(node)
