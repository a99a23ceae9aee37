"""The benchmark of training, on a tiny model."""

from pathlib import Path

import pytest
from benchmarks import train
from benchmarks.start import ACCELERATE, OURS, start_once
from tests.conftest import Worlds


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
@pytest.mark.parametrize("arm", [OURS, ACCELERATE])
def test_every_arm_comes_to_its_first_step(job: train.Job, arm: str) -> None:
    assert 1 < start_once(arm, job, 2, timeout_s=100) < 100
