"""Loops of tinker_cookbook, with unmodified source, against a server: they run to their end, and they learn."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.serve.conftest import make_base, serving
from tests.serve.cookbook_loops import LOOPS, MAX_LENGTH, MODEL, PEERS, VOCAB_SIZE
from tests.serve.test_stops import Controls, wait_for
from tests.support.local_ranks import LIMIT_S

from shardwise.serve.records import Settings

missing = [name for name in PEERS if not Path(sys.prefix, "peers", name).is_dir()]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)}: not beside the environment (make .venv/project)"
    ),
]


@dataclass(frozen=True)
class Loops:
    """What the loops have logged, and the tracebacks of those that raised."""

    folder: Path
    errors: dict[str, str]
    output: str

    def read(self, loop: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        assert loop not in self.errors, self.errors[loop]
        return [json.loads(line) for line in (self.folder / loop / file).read_text().splitlines()]

    def series(self, loop: str, name: str) -> list[float]:
        return [entry[name] for entry in self.read(loop) if name in entry]


def start(url: str, key: str, folder: Path, *names: str) -> subprocess.Popen[str]:
    """Start loops. Some packages of the cookbook warn when they are imported, so warnings are no errors there."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.serve.cookbook_loops", url, str(folder), *names],
        env={**os.environ, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> Loops:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return Loops(folder, json.loads((folder / "errors.json").read_text()), output)


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    folder = tmp_path_factory.mktemp("cookbook")
    # The cookbook gives no seeds, and a model without one has a random one: how fast it learns would vary.
    seed = mock.patch("shardwise.serve.app.secrets.randbits", return_value=0)
    with seed, serving(make_base(VOCAB_SIZE, MAX_LENGTH), folder, Settings(MODEL, MODEL), {"ada": {}}) as served:
        return finish(start(served.url, served.keys["ada"], folder, *LOOPS), folder)


def test_supervised_learning(loops: Loops) -> None:
    losses = loops.series("learn", "train_mean_nll")
    assert losses[0] == pytest.approx(math.log(VOCAB_SIZE), abs=0.3), "of a random model"
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2
    assert loops.series("learn", "skipped:max") == [0.0] * 6
    saved = [(entry["name"], "sampler_path" in entry) for entry in loops.read("learn", "checkpoints.jsonl")]
    assert saved == [("000002", False), ("000004", False), ("final", True)]


def test_the_reward_rises(loops: Loops) -> None:
    rewards = loops.series("reinforce", "reward/total")
    assert len(rewards) == 12
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2, rewards


def test_preferences(loops: Loops) -> None:
    losses = loops.series("prefer", "dpo_loss")
    # The reference is scored with other passes than the policy, and is the same model before the first step.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < 0.4
    assert loops.series("prefer", "accuracy")[-1] == 1.0


def test_distillation_with_several_targets_a_token(loops: Loops) -> None:
    losses = loops.series("distill", "train/loss:sum")
    assert len(losses) == 6
    assert losses[-1] < losses[0] * 0.7
    assert "falling back to hard targets" not in loops.output


def test_a_loop_resumes_after_a_kill(tmp_path: Path) -> None:
    """The server is killed while the third step runs: the loop raises, and goes on from its save when run again."""
    base, state, folder = tmp_path / "base", tmp_path / "state", tmp_path / "logs"
    folder.mkdir()
    make_base(VOCAB_SIZE, MAX_LENGTH).save_pretrained(base)
    controls, options = Controls(tmp_path / "controls"), ("--served-model-name", MODEL)
    with controls.serving(base, state, *options) as server:
        controls.hold("before save")
        loop = start(server.url, "tml-any", folder, "learn")
        controls.wait_until_held()
        controls.hold("before optim_step")
        controls.release("before save")
        wait_for(folder / "learn" / "checkpoints.jsonl")
        os.killpg(server.process.pid, signal.SIGKILL)
        server.wait()
    with controls.serving(base, state, *options, "--port", server.url.rpartition(":")[2]) as server:
        assert "learn" in finish(loop, folder).errors
        again = finish(start(server.url, "tml-any", folder, "learn"), folder)
    assert [entry["step"] for entry in again.read("learn")] == [0, 1, 2, 3, 4, 5]
    losses = again.series("learn", "train_mean_nll")
    assert losses[-1] < losses[0] / 2
