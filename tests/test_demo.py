"""`demo`: its folder, and all of it with a few steps. The rows of `demo-real`."""

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples.demo import prepare_folder

from shardwise.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
LINES = (ROOT / "recipes" / "smollm2" / "short_answers.jsonl").read_text("utf-8").splitlines()
ROWS = [tuple(message["content"] for message in json.loads(line)["messages"]) for line in LINES]
"""Questions and answers."""


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


# ── the rows of `make demo-real` ──────────────────────────────────────────────────────────────────

EXPRESSION = re.compile(r"`([^`]+)` gives `([^`]+)`")


def test_rows_have_one_form_and_are_not_asked_in_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    questions = {question.lower() for question, _ in ROWS}
    assert len(questions) == len(ROWS) == 300
    for question, answer in ROWS:
        sentence, _, example = answer.partition("\n\nExample: ")
        assert (question[-1:], sentence[-1:], example[-1:]) == ("?", ".", "."), question
        assert "\n" not in sentence + example, question
    asked = importlib.import_module("demo_real").QUESTIONS
    assert questions.isdisjoint(question.lower() for question in asked)


def test_rows_about_pytorch_are_true() -> None:
    expressions = [found for _, answer in ROWS for found in EXPRESSION.findall(answer)]
    assert len(expressions) > 40
    names = {"torch": torch, "math": math}
    wrong = [(code, value) for code, value in expressions if repr(eval(code, dict(names))) != value]
    assert wrong == []
