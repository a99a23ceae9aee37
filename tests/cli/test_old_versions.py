"""A torch or transformers that is too old is one error that says so, before either is imported."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwise.cli import train
from shardwise.core.errors import _OLDEST, ConfigError, private, require_version

_START = """
import sys
from importlib import metadata
version = metadata.version
metadata.version = lambda name: {found!r} if name == {library!r} else version(name)
"""
_IMPORTS = """
import importlib, shardwise.core.errors
for name in {names!r}:
    try:
        importlib.import_module("shardwise." + name)
    except shardwise.core.errors.ConfigError as error:
        print(error)
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
_COMMAND = """
from shardwise.cli import main
main(["verify", "nowhere"])
"""
PACKAGES = sorted(
    path.parent.name
    for path in Path(__file__).parents[2].glob("src/shardwise/*/__init__.py")
    if any(
        re.search("^(from|import) (torch|transformers)", inner.read_text(), re.M)
        for inner in path.parent.rglob("*.py")
    )
)
ERROR = "transformers 5.10.4: is too old. shardwise needs 5.17 or newer. Run pip install -U transformers"


def run(text: str, library: str, found: str) -> subprocess.CompletedProcess[str]:
    text = _START.format(library=library, found=found) + text
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)


def test_an_old_version_is_reported_by_the_first_import():
    assert len(PACKAGES) > 8
    done = run(_IMPORTS.format(names=PACKAGES), "transformers", "5.10.4")
    assert done.stdout.splitlines() == [ERROR] * len(PACKAGES), done.stderr


def test_a_command_reports_an_old_version_in_one_line():
    done = run(_COMMAND, "transformers", "5.10.4")
    assert (done.returncode, done.stderr) == (2, f"error: {ERROR}\n")


@pytest.mark.parametrize(
    ("library", "found", "oldest"),
    [("trl", "1.0.0", "1.16"), ("peft", "0.17.1", "0.20"), ("transformers", "5.18.0", "5.19")],
)
def test_a_training_needs_newer_libraries_before_it_starts(tmp_path, library, found, oldest):
    config = tmp_path / "config.yaml"
    config.write_text("model_name_or_path: someone/model\ndataset_name: none.jsonl\noutput_dir: out\n")
    # The tests may run with a transformers that is too old for a training.
    newer = f"import shardwise.cli.train as train\ntrain._OLDEST = {{{library!r}: train._OLDEST[{library!r}]}}\n"
    command = f"from shardwise.cli import main\nmain(['train', {str(config)!r}, '--check'])\n"
    done = run(newer + command, library, found)
    error = (
        f"error: {library} {found}: is too old. shardwise needs {oldest} or newer. Run pip install -U {library}\n"
    )
    assert (done.returncode, done.stderr) == (2, error)


@pytest.mark.parametrize(
    ("found", "is_old"),
    [
        ("2.10.0+cpu", True),
        ("2.9", True),
        ("2.11.0", False),
        ("2.13.0a0+git", False),
        ("3.0", False),
        ("weird", False),
    ],
)
def test_versions_are_compared_as_numbers(monkeypatch, found, is_old):
    monkeypatch.setattr("shardwise.core.errors.metadata.version", lambda _: found)
    old = "is too old. shardwise needs 2.11 or newer. Run pip install -U torch"
    if is_old:
        with pytest.raises(ConfigError, match=re.escape(old)):
            require_version("torch", "2.11")
    else:
        require_version("torch", "2.11")
    lacks = (
        f"torch {found} lacks the private name Tensor._none (torch). Use torch 2.11 to 2.15, or a newer shardwise"
    )
    with pytest.raises(ConfigError, match=re.escape(old if is_old else lacks)):
        private("torch:Tensor._none")


def test_the_oldest_versions_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = dict(item.split(">=") for item in project["dependencies"])
    assert {name: asked[name].removesuffix(".0") for name in _OLDEST} == _OLDEST
    asked = dict(item.split(">=") for item in project["optional-dependencies"]["train"])
    for name in ("peft", "trl"):
        assert asked[name].removesuffix(".0") == train._OLDEST[name]
