"""`demo`: its folder, and all of it with a few steps."""

import subprocess
import sys
from pathlib import Path

import pytest
from examples.demo import prepare_folder

from shardwise.core.errors import ConfigError


def test_files_of_others_are_not_removed_by_the_demo(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="is not empty, and not of an earlier demo"):
        prepare_folder(tmp_path)
    prepare_folder(tmp_path / "new")
    (tmp_path / "new" / "trained").mkdir()
    prepare_folder(tmp_path / "new")
    assert not (tmp_path / "new" / "trained").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_trains_is_killed_resumes_and_loads_what_it_saved(tmp_path: Path) -> None:
    command = [sys.executable, "examples/demo.py", "--out", str(tmp_path / "demo"), "--steps", "12"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "killed; checkpoint-11 is complete" in done.stdout
    assert "trained 1 step after step 11" in done.stdout
    assert "fingerprints equal to what was saved" in done.stdout
