"""The names that users see."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.integrations.requirements import require_patched_names

import shardwise
from shardwise.core.lazy_exports import import_object

MODULES = [shardwise, shardwise.integrations, shardwise.options, shardwise.report, shardwise.storage]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_name_that_is_stated_is_there(module):
    if module is shardwise.integrations:
        require_patched_names()
    for name in module.__all__:
        found = getattr(module, name)
        assert getattr(found, "__name__", name).rpartition(".")[2] == name, name
    assert dir(module) == module.__all__


def test_public_names_fit_on_a_page():
    assert len(shardwise.__all__) <= 41
    names = [name for module in MODULES for name in module.__all__]
    assert len(names) == len(set(names)), "a name has one home"


def test_a_name_of_another_module_is_an_error_that_names_it():
    with pytest.raises(AttributeError, match=r"'LoadOptions'; it is shardwise\.options\.LoadOptions"):
        shardwise.LoadOptions  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'LoadOption'$"):
        shardwise.LoadOption  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_brings_nothing_that_is_slow():
    words = "import sys, shardwise; print(sorted({'torch', 'transformers', 'numpy', 'click'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_stub_is_installed_with_its_package():
    """An editable install would not notice."""
    root = Path(shardwise.__file__).parent.parent
    project = tomllib.loads((root.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]
    files = [path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.pyi")]
    stubs = {name.removesuffix("/__init__").replace("/", ".") for name in files}
    assert stubs == {module.__name__ for module in MODULES}
    for package in stubs:
        assert any("*.pyi" in patterns.get(name, ()) for name in (package, "*")), package


@pytest.mark.parametrize(
    "place", ["no.such.module:name", "shardwise.core.errors:NoSuchName", "shardwise.no_such_module"]
)
def test_a_line_of_a_table_that_leads_nowhere_is_an_error_that_names_it(place):
    words = rf"{place} .*(No module|no attribute).*correct the line"
    with pytest.raises(shardwise.core.errors.ConfigError, match=words):
        import_object(place)
