"""The benchmark of training, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import train
from benchmarks.place import machine
from benchmarks.start import ACCELERATE, ARMS, OURS, OURS_AS_STORED, start_once
from tests.conftest import Worlds

pytestmark = pytest.mark.distributed


@pytest.fixture
def job(tmp_path: Path) -> train.Job:
    shape = train.SMALL.tiny()
    return train.Job(str(train.write(shape, tmp_path)), 3, 1, 8, shape.config["vocab_size"])


def test_both_loops_do_the_same(worlds: Worlds, job: train.Job) -> None:
    turns = worlds(2).run(train.take_turns, job)
    for rank in turns:
        assert len(rank["shardwise"]["seconds"]) == len(rank["by hand"]["seconds"]) == 3
        assert rank["shardwise"]["losses"] == pytest.approx(rank["by hand"]["losses"], rel=1e-5)


def test_what_is_in_tensors_is_what_is_held(worlds: Worlds, job: train.Job) -> None:
    """Weights, gradients and two moments, and next to nothing else."""
    ours, hand = (worlds(2).run(train.remember, arm, job, job) for arm in ("shardwise", "by hand"))
    for one, other in zip(ours, hand, strict=True):
        assert one["weights"] == other["weights"]
        assert one["steady"] == pytest.approx(4 * one["weights"], rel=0.05)
        assert one["largest_group"] == other["largest_group"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_comes_to_its_first_step(job: train.Job, arm: str) -> None:
    assert 1 < start_once(arm, job, 2, timeout_s=100) < 100


def test_the_page_and_the_verdict() -> None:
    step = {"seconds": [9.0, 2.0, 4.0, 3.0], "losses": [1.0, 1.0, 1.0, 1.0]}
    hand = {"seconds": [1.0, 1.0, 1.0, 2.0], "losses": [1.0, 1.0, 1.0, 1.001]}
    held = {"weights": 100, "largest_group": 10, "brought_up": 110, "steady": 405, "peak": 500}
    found = {
        "turns": [{"shardwise": step, "by hand": hand}] * 2,
        "memory": {"shardwise": [held, held], "by hand": [held, held]},
        "starts": {"tiny": {OURS: [3.0, 1.0, 2.0], OURS_AS_STORED: [3.0], ACCELERATE: [5.0, 4.0, 3.0]}},
    }
    made = train.summary(found)
    assert made["step_ratio"] == 3.0
    assert made["step_ratio_paired"] == 2.0
    assert made["loss_difference"] == pytest.approx(0.001, rel=0.01)
    kept = train.limits(made)
    assert [limit.verdict for limit in kept] == ["FAIL", "pass", "pass", "FAIL"]
    assert [limit.value for limit in kept] == [3.0, pytest.approx(405 / 410), 0.5, 0.75]
    results = {
        "date": "today",
        "commit": "none",
        "minutes": 1.0,
        "command": "none",
        "machine": machine(),
        "ranks": 2,
        "model": "tiny",
        "firsts": {"tiny": "tiny, a LoRA"},
        "rows": 1,
        "tokens": 8,
        "summary": made,
        "limits": [vars(limit) | {"verdict": limit.verdict} for limit in kept],
    }
    text = "\n".join(train.lines(results))
    assert "| step time / by hand | 3.000 | 1.03 | FAIL |" in text
    assert "| tiny: start of shardwise train to first step / accelerate | 0.500 | 0.6 | pass |" in text
    assert "| tiny, a LoRA | 2.00 | 3.00 | 4.00 |" in text
    json.dumps(results)
