"""The house keeps its words: one noun has one meaning."""

from __future__ import annotations

import ast

from tests.house import PACKAGE, ROOT, names_in_two_modules


def trees() -> dict[str, ast.Module]:
    src = ROOT / "src"
    return {
        ".".join(path.relative_to(src).with_suffix("").parts): ast.parse(path.read_text())
        for path in (src / PACKAGE).rglob("*.py")
    }


def test_no_name_has_two_meanings():
    """Classes and type aliases, leading underscores aside: a name is defined in one module of the package."""
    assert names_in_two_modules(trees()) == []


def test_a_name_in_two_modules_is_found():
    first = ast.parse("class Part: ...")
    second = ast.parse("from typing import TypeAlias\n_Part: TypeAlias = int")
    assert names_in_two_modules({"one": first, "two": second}) == ["Part: one, two"]
