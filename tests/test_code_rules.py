"""Rules of the source: imports, names, places named in texts and documentation, spelling."""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.code_rules import (
    PACKAGE,
    ROOT,
    circles,
    closure,
    height_of,
    names_in_two_modules,
)


@cache
def trees() -> dict[str, ast.Module]:
    src = ROOT / "src"
    return {
        ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in (src / PACKAGE).rglob("*.py")
    }


def test_no_name_has_two_meanings():
    """Classes and type aliases, leading underscores aside: a name is defined in one module of the package."""
    assert names_in_two_modules(trees()) == []


def test_a_name_in_two_modules_is_found():
    first = ast.parse("class Part: ...")
    second = ast.parse("from typing import TypeAlias\n_Part: TypeAlias = int")
    assert names_in_two_modules({"one": first, "two": second}) == ["Part: one, two"]


def test_no_modules_import_each_other():
    """Neither when they are imported, nor later, in functions."""
    assert circles(trees()) == []


def test_modules_that_import_each_other_are_found():
    one = ast.parse("def later():\n    from shardwise.two import x")
    two = ast.parse("from shardwise.one import later")
    assert circles({"shardwise.one": one, "shardwise.two": two}) == [["shardwise.one", "shardwise.two"]]


WITHOUT_TORCH = {"core", "files", "cli"}


def test_packages_without_torch_import_it_by_no_name():
    """The import contracts see statements only."""
    above = ("torch", "transformers", "peft", "accelerate")
    for name, tree in trees().items():
        package = name.split(".")[1] if "." in name else ""
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if package in WITHOUT_TORCH and called.endswith(("import_module", "__import__")):
                assert not ast.unparse(node.args[0]).strip("'\"").startswith(above), (name, node.lineno)


_PLACE = re.compile(rf"({PACKAGE}(?:\.\w+)+)(?::(\w+))?")


def named_places(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name in it or "") of what is named in texts, for ``import_object`` to import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            place = _PLACE.fullmatch(node.value)
            if place is not None:
                yield place[1], place[2] or ""


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def tables() -> dict[str, list[tuple[str, str]]]:
    """By module, what it names for ``import_object``."""
    opens = {
        name
        for name, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and any(alias.name == "import_object" for alias in node.names)
    }
    return {name: list(named_places(trees()[name])) for name in opens}


def test_what_a_table_names_is_there_and_lies_no_higher():
    """The import contracts see statements only; what is opened by its name keeps to the same order of packages."""
    assert len(tables()) >= 2
    for module, places in tables().items():
        assert places, module
        for place, name in places:
            opened = importlib.import_module(place)
            assert not name or hasattr(opened, name), (module, place, name)
            assert height_of(place) <= height_of(module), (module, place)


def test_what_a_table_names_is_seen_by_the_type_checker():
    """It reads no texts: each line stands in one file as a statement, too, beside the type that is promised."""
    tree = ast.parse((ROOT / "tests" / "support" / "tables.py").read_text())
    seen = set(imported(tree.body[-1]))
    for places in tables().values():
        for place, name in places:
            assert place in seen or f"{place}.{name}" in seen, (place, name)


def test_what_a_table_names_imports_none_of_its_importers():
    """With the tables' lines for imports there is still no circle."""
    named = {module: {place for place, _ in places} for module, places in tables().items()}
    assert circles(trees(), named) == []
    upward = {"shardwise.one": {"shardwise.two"}}
    assert circles({"shardwise.one": ast.parse(""), "shardwise.two": ast.parse("import shardwise.one")}, upward)


FORMATS = "accelerate_saves coded distributed join_entries peft_adapter pickles quantized torch_files"


def required_packages() -> set[str]:
    """Names of what the package requires with all extras but ``dev``, and of what these require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    waiting = [*project["dependencies"], *(item for name in extras if name != "dev" for item in extras[name])]
    names: set[str] = set()
    while waiting:
        name = canonicalize_name(Requirement(waiting.pop()).name)
        if name in names:
            continue
        names.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # Pillow
            continue
        waiting += [item for item in required if "extra ==" not in item]
    return names


def test_what_is_imported_is_required():
    """And not there by chance, with what tests need."""
    required, packages = required_packages(), metadata.packages_distributions()
    assert "torch" in required
    assert "pytest" not in required
    for place, tree in trees().items():
        whole = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        for name in [*imported(tree), *whole]:
            root = name.partition(".")[0]
            if root not in sys.stdlib_module_names | {PACKAGE, "bitsandbytes", "PIL"}:
                assert required & {canonicalize_name(item) for item in packages[root]}, f"{place}: {name}"


def test_load_imports_no_format():
    """A reader of a format is opened by its name, when one is met."""
    met = closure(f"{PACKAGE}.loading.load", trees())
    assert met & {f"{PACKAGE}.files.{name}" for name in FORMATS.split()} == set()


def test_names_in_architecture_md_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.splitlines()) <= 250
    source = ROOT / "src" / "shardwise"
    paths = set(re.findall(r"`((?:[a-z_]+/)+[a-z_.]*)`", text))
    assert len(paths) > 15
    assert not [path for path in paths if not (source / path).exists() and not (ROOT / path).exists()]
    notes = re.findall(r"(\[Note: [^\]]+\])\s+in\s+`([^`]+)`", text)
    assert len(notes) > 2
    assert not [note for note, path in notes if note not in (source / path).read_text()]


def test_tests_listed_as_longest_exist():
    """Tests by file and function; a name that has changed would be quick again, unseen."""
    for line in (ROOT / "tests" / "longest.txt").read_text().splitlines():
        if not line.startswith("#"):
            file, _, function = line.partition("::")
            definition = f"def {function.partition('[')[0]}(" if function else ""
            assert definition in (ROOT / file).read_text(), line


BRITISH = re.compile(
    r"\w*(quanti|tokeni|initiali|normali|seriali|materiali|optimi|synchroni|summari)s(e|es|ed|ing|ation)\b"
)


def test_spelling_is_american():
    found = {path.name: BRITISH.findall(path.read_text()) for path in (ROOT / "src" / PACKAGE).rglob("*.py")}
    assert {name: words for name, words in found.items() if words} == {}
