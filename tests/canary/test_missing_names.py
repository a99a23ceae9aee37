"""A private name that a library lacks disables the features that use it, and nothing else."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from tests.canary.missing_names import NEEDS_A_NAME, OF_LORAS, OF_TORCH, SOURCE, private_names, sources
from tests.integrations.requirements import require_patched_names

OF_MODULES = {
    "Module._parameters",
    "Module._buffers",
    "Module._non_persistent_buffers_set",
    "Module._state_dict_pre_hooks",
    "tree_leaves",
}
"""Names without which no module can be saved or loaded."""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_patched_names()
    command = [sys.executable, "-m", "tests.canary.missing_names", str(tmp_path_factory.mktemp("models"))]
    done = subprocess.run(command, cwd=SOURCE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_private_names_are_in_the_files_that_are_listed() -> None:
    text = (SOURCE.parent / "docs" / "architecture.md").read_text()
    (listed,) = re.findall(r"Names that a library does not export.*?\n\n", text, re.DOTALL)
    files = {name.replace("/", ".") for name in re.findall(r"`([a-z_/]+)\.py`", listed)}
    found = {name.removeprefix("shardwise."): [*private_names(text)] for name, text in sources().items()}
    assert {name for name, names in found.items() if names} == files
    assert sum(map(len, found.values())) > 100


@pytest.mark.slow
def test_nothing_is_looked_up_by_an_import(failures: dict[str, Any]) -> None:
    with_all, without_any = failures["imports"]
    assert sorted([*with_all, NEEDS_A_NAME]) == sorted(without_any)


@pytest.mark.slow
def test_each_missing_name_is_an_error_of_the_features_that_use_it(failures: dict[str, Any]) -> None:
    features = failures["features"]
    assert features.pop("") == {}
    for path, errors in features.items():
        module, _, name = path.partition(":")
        library = module.partition(".")[0]
        assert errors, path
        for error in errors.values():
            assert re.match(f"ConfigError: .*{library} .* lacks the private name {re.escape(name)}[. ]", error), (
                error
            )
        disabled = {
            "torch": errors.keys() - {"inspect"},
            "transformers": errors.keys() - {feature.__name__ for feature in OF_TORCH},
            "peft": {"accelerating", *(feature.__name__ for feature in OF_LORAS)},
            "accelerate": {"accelerating"},
        }
        assert errors.keys() <= disabled[library], path
    assert {path.partition(":")[2] for path, errors in features.items() if "module" in errors} == OF_MODULES
