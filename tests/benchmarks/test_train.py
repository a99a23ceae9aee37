"""The benchmark of training, on a tiny model."""

from pathlib import Path

import pytest
from benchmarks import train
from benchmarks.harness.checkpoints import SHAPES, write
from benchmarks.harness.training import Job
from tests.conftest import Worlds
from tests.support.local_ranks import LIMIT_S


@pytest.fixture
def job(tmp_path: Path) -> Job:
    shape = SHAPES["qwen3-36m"].tiny()
    return Job(str(write(shape, tmp_path)), 3, 1, 8, shape.vocab_size)


def test_both_loops_do_the_same(worlds: Worlds, job: Job) -> None:
    world = worlds(2)
    ours, by_hand = (world.run(train.take_turn, arm, job) for arm in (train.OWN_LOOP, train.BY_HAND))
    for rank, other in zip(ours, by_hand, strict=True):
        assert len(rank["seconds"]) == len(other["seconds"]) == 3
        assert rank["losses"] == pytest.approx(other["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("arm", [train.OURS, train.TRL, train.ACCELERATE])
def test_every_arm_reaches_its_first_step(job: Job, arm: str) -> None:
    assert train.start_once(arm, job, 1, LIMIT_S) > 0
