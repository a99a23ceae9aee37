"""Measures the structure of the package: names, circles, long functions, what ``load`` reaches.

- *names in two modules*: names of classes and of type aliases (``X: TypeAlias``, ``type X``) that two modules or
  more define, without leading underscores.
- *circles*: modules that import each other.
- *the walk*: ``load``'s ``model``, followed from call to call: into every function of the package that it is given
  to, itself or under another name (``held = model``), with the functions defined inside; each function once.
  What is made of it, and methods of objects, are not followed.
- *long*: functions of more than 50 lines without their docstring.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "shardwise"


def long_functions(trees: dict[str, ast.Module], length: Callable[[Function], int]) -> list[str]:
    """The functions of more than 50 lines, with their lengths."""
    return [
        f"{name}.{node.name} ({length(node)})"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and length(node) > 50
    ]


def length_of_code(node: Function) -> int:
    """Lines of a function, less those of its docstring."""
    return _length(node) - (_length(node.body[0]) if ast.get_docstring(node) else 0)


def _length(node: Function | ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


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


Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


def walk(module: str, function: str, parameter: str, trees: dict[str, ast.Module]) -> list[str]:
    """The functions that a parameter of one is given to, in the order of the code, with returns to the caller."""
    stays: list[str] = []
    seen: set[tuple[str, str]] = set()

    def enter(module: str, name: str, tracked: set[str]) -> None:
        found = _defined(trees, module, name)
        if found is None or (found[0], name) in seen:
            return
        home, node = found
        seen.add((home, name))
        place = f"{home}:{name}"
        stays.append(place)
        names = _names_in(home, trees)
        for child in ast.walk(node):
            if isinstance(child, ast.Assign) and isinstance(child.value, ast.Name) and child.value.id in tracked:
                tracked |= {target.id for target in child.targets if isinstance(target, ast.Name)}
        for call in sorted(
            (child for child in ast.walk(node) if isinstance(child, ast.Call)), key=lambda child: child.lineno
        ):
            callee = _callee(call, home, names)
            given = callee and _given(call, trees, *callee, tracked)
            if callee and given:
                before = len(stays)
                enter(*callee, given)
                if len(stays) > before:
                    stays.append(place)

    enter(module, function, {parameter})
    return stays


def height_of(place: str) -> int:
    """How high the room of a module, or of ``module:function``, is in the import contract; 0: the top, or none."""
    return _heights().get(place.partition(":")[0].split(".")[1], 0)


@cache
def _heights() -> dict[str, int]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = contracts[0]["layers"]
    return {room.strip("( )"): -number for number, layer in enumerate(layers) for room in layer.split("|")}


def _defined(trees: dict[str, ast.Module], module: str, name: str) -> tuple[str, Function] | None:
    for node in trees[module].body if module in trees else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return module, node
    return None


def _names_in(module: str, trees: dict[str, ast.Module]) -> dict[str, tuple[str, str]]:
    """What names mean in a module: (module, "") or (module, name in it)."""
    names: dict[str, tuple[str, str]] = {}
    for node in ast.walk(trees[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = (whole, "") if whole in trees else (node.module, alias.name)
    return names


def _callee(call: ast.Call, module: str, names: dict[str, tuple[str, str]]) -> tuple[str, str] | None:
    match call.func:
        case ast.Name(name):
            return names.get(name, (module, name))
        case ast.Attribute(ast.Name(inside), name) if names.get(inside, ("", "x"))[1] == "":
            return names[inside][0], name
    return None


def _given(call: ast.Call, trees: dict[str, ast.Module], module: str, name: str, tracked: set[str]) -> set[str]:
    """The parameters of a function that a call gives something that is tracked."""
    found = _defined(trees, module, name)
    if found is None:
        return set()
    parameters = [item.arg for item in (*found[1].args.posonlyargs, *found[1].args.args)]
    given = {
        parameter
        for parameter, value in zip(parameters, call.args, strict=False)
        if isinstance(value, ast.Name) and value.id in tracked
    }
    return given | {
        item.arg
        for item in call.keywords
        if item.arg and isinstance(item.value, ast.Name) and item.value.id in tracked
    }


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
