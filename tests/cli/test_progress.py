"""Lines on stderr that show what a command is doing."""

import io
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.integrations.requirements import require_patched_names
from tests.training import tiny

from shardwise.cli import progress
from shardwise.core import console, phases

ENDS_AT_TORCH = """
import os, sys
class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch":
            os._exit(9)
sys.meta_path.insert(0, Finder)
os.environ.update({environment!r})
from shardwise.cli import main
main({arguments!r})
"""
LAUNCHED = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
TRL = "importing torch and TRL (about 10 s) ...\n"
TRANSFORMERS = "importing torch and transformers (about 10 s) ...\n"


@pytest.mark.parametrize(
    ("words", "environment", "line"),
    [
        ("train config.yaml", {}, TRL),
        ("train config.yaml --json --nproc-per-node 2", {}, TRL),
        ("train config.yaml", {**LAUNCHED, "RANK": "0"}, TRL),
        ("train config.yaml", {**LAUNCHED, "RANK": "1"}, ""),
        ("plan config.yaml --ranks 2 --json", {}, TRL),
        ("plan model --ranks 2", {}, TRANSFORMERS),
        ("verify model --json", {}, TRANSFORMERS),
        ("merge-adapter model adapter out", {}, TRANSFORMERS),
        ("merge-weights model out", {}, TRANSFORMERS),
        ("serve model", {}, TRANSFORMERS),
    ],
)
def test_the_first_line_comes_before_torch_is_imported(
    tmp_path: Path, words: str, environment: dict[str, str], line: str
) -> None:
    if "config.yaml" in words:
        require_patched_names()
    (tmp_path / "model").mkdir()
    tiny.write_config(tmp_path)
    code = ENDS_AT_TORCH.format(environment=environment, arguments=words.split())
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (9, "", line)


class Screen(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Minutes:
    """The clock, and the event that ends signs of life. A wait for the event moves the clock."""

    def __init__(self, end_s: float) -> None:
        self.now_s, self._end_s = 0.0, end_s
        self._phase = ExitStack()

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        """Be in a phase from 10 to 30 s, show a bar from 40 to 90 s, be in a short phase at 200 s."""
        self.now_s += seconds
        if self.now_s == 10:
            self._phase.enter_context(phases.phase("load"))
        elif self.now_s == 30:
            self._phase.close()
        elif 40 <= self.now_s <= 90:
            sys.stderr.write("\r50%")
        elif self.now_s == 200:
            with phases.phase("short"):
                pass
        return self.now_s > self._end_s


LOADED = [f"load ({seconds} s) ..." for seconds in (1, 6, 11, 16)]


@pytest.mark.parametrize(
    ("is_terminal", "work", "lines"),
    [
        (True, "train", ["train (5 s) ...", *LOADED, "train (31 s) ...", "train (36 s) ...", "BAR"]),
        (True, "", [*LOADED, "BAR"]),
        (False, "train", ["BAR", "train (150 s) ...", "train (210 s) ..."]),
        (False, "", ["BAR"]),
    ],
)
def test_signs_of_life_stand_where_there_is_no_other_output(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, work: str, lines: list[str]
) -> None:
    clock, screen = Minutes(220), Screen(is_terminal=is_terminal)
    for module in (progress, console, phases):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    names: list[str] = []  # whatever this process does besides
    monkeypatch.setattr(phases._PHASES, "names", names)
    monkeypatch.setattr(phases._MAIN_THREAD, "phases", names)
    monkeypatch.setattr(phases._MAIN_THREAD, "changed_s", 0.0)
    monkeypatch.setattr(sys, "stderr", screen)
    with console.surviving_console():
        progress._report(work, clock)  # type: ignore[arg-type]
    told = screen.getvalue().replace("\r50%" * 101, "BAR").splitlines()
    if is_terminal and work:
        lines = [*lines, *(f"train ({seconds} s) ..." for seconds in range(95, 221, 5))]
    assert told == lines
