"""The benchmark of training, on a tiny model."""

from pathlib import Path

import pytest
from benchmarks import train
from benchmarks.start import ACCELERATE, OURS, TRL, start_once
from tests.conftest import Worlds
from tests.support.local_ranks import LIMIT_S


@pytest.fixture
def job(tmp_path: Path) -> train.Job:
    shape = train.SMALL.tiny()
    return train.Job(str(train.write(shape, tmp_path)), 3, 1, 8, shape.config["vocab_size"])


def test_both_loops_do_the_same(worlds: Worlds, job: train.Job) -> None:
    turns = worlds(2).run(train.take_turns, job)
    for rank in turns:
        assert len(rank["shardwise"]["seconds"]) == len(rank["by hand"]["seconds"]) == 3
        assert rank["shardwise"]["losses"] == pytest.approx(rank["by hand"]["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("arm", [OURS, TRL, ACCELERATE])
def test_every_arm_reaches_its_first_step(job: train.Job, arm: str) -> None:
    assert start_once(arm, job, 2, LIMIT_S) > 0
