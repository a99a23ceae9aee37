"""What the pages show is Python, and every name of shardwise in it is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import shardwise

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


def test_pages_show_something():
    assert len(BLOCKS) > 15


@pytest.mark.parametrize("block", BLOCKS)
def test_names_in_examples_are_there(block: str):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                try:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                except shardwise.ConfigError as error:  # of a library that is too old for this name
                    pytest.skip(str(error))
        elif isinstance(node, ast.Attribute) and (path := _path(node)) and path[0] == "shardwise":
            found: object = shardwise
            for name in path[1:3]:
                assert hasattr(found, name), ".".join(path)
                found = getattr(found, name)
                if isinstance(found, type) or callable(found):
                    break


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_words_are_there(page: Path):
    """In backticks: ``shardwise.options.Upcast``, ``shardwise.load``. Not files that saves make."""
    for path in re.findall(r"`shardwise\.([A-Za-z_.]+)", page.read_text()):
        names = path.rstrip(".").split(".")
        if names[0] in ("saving", "checkpoint", "fingerprints", "trainer"):
            continue
        found: object = shardwise
        for depth, name in enumerate(names):
            if not hasattr(found, name):
                importlib.import_module(".".join(("shardwise", *names[: depth + 1])))
            found = getattr(found, name)


def _path(node: ast.expr) -> list[str]:
    match node:
        case ast.Name(name):
            return [name]
        case ast.Attribute(inner, name):
            return [*inside, name] if (inside := _path(inner)) else []
    return []
