"""Ranks that are killed: what was committed stays, the others end soon, and the training goes on on other ranks."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.checkpoints import on_ranks
from tests.checkpoints.tiny import Training, differences
from tests.faults.fault_injection import PATIENT, Doomed, Seat

import shardwise
from shardwise import Checkpointer
from shardwise.checkpoints import write
from shardwise.options import StateOptions
from shardwise.saving import locked_folder, saving_lock
from shardwise.transfer import distributed_chunks

pytestmark = pytest.mark.distributed

STAGES = {
    "begin": (locked_folder, "new_save_id", 0),
    "stage": (distributed_chunks, "copy_all", 1),
    "write": (write, "_write_local", 1),
    "sync": (distributed_chunks, "envelope", 2),
    "commit": (write, "publish", 0),
    "remove": (saving_lock, "release_lock", 0),
}
"""By stage, a function that is called in it, and the rank that is killed as it calls it."""


def struck(seat: Seat, folder: str, at: str, mode: str) -> list[int]:
    """Train and save; at the third checkpoint a rank is killed in the middle."""
    options = StateOptions(timeouts=PATIENT)
    training = Training()
    checkpointer = Checkpointer(folder, mode=mode, keep=2, options=options)
    for step in (1, 2):
        training.step()
        checkpointer.save(step, training.state)
    checkpointer.wait()
    module, name, rank = STAGES[at]
    original = getattr(module, name)

    def killed(*args):
        seat.tell()
        os.kill(os.getpid(), signal.SIGKILL)

    if seat.rank == rank:
        setattr(module, name, killed)
    else:
        setattr(module, name, original)
    training.step()
    checkpointer.save(3, training.state)
    checkpointer.close()
    return checkpointer.steps()


ALL = [
    pytest.param(at, mode, marks=[] if (at, mode) == ("write", "async") else pytest.mark.slow)
    for at in STAGES
    for mode in ("sync", "async")
    if (at, mode) != ("stage", "sync")
]


@pytest.mark.parametrize(("at", "mode"), ALL)
def test_a_rank_that_is_killed_loses_nothing_committed(worlds, tmp_path, at, mode):
    """Four ranks, one killed in the middle of a save; two go on; then three."""
    with Doomed(4) as world:
        outcome = world.run(struck, str(tmp_path), at, mode)
        rank = STAGES[at][2]
        assert sorted(outcome.ends) == [other for other in range(4) if other != rank]
        ((kind, text),) = set(outcome.errors().values())
        assert kind == "RankLostError"
        assert f"rank {rank} " in text
    last = 3 if at == "remove" else 2
    alone = Training()
    alone.step(last)
    wanted = alone.taken()
    alone.losses.clear()
    alone.step(4)
    found = worlds(2).run(on_ranks.restore_and_train, str(tmp_path), 2, "flat", last + 2)
    assert {item["report"]["step"] for item in found} == {last}
    later = worlds(3).run(on_ranks.restore_and_train, str(tmp_path), 2)
    assert {item["report"]["step"] for item in later} == {last + 2}
    assert differences(later[0]["state"], found[0]["after"]) == []
    assert found[0]["state"]["schedule"] == wanted["schedule"]
    assert found[0]["losses"] == pytest.approx(alone.losses[:2], abs=1e-6)
    assert later[0]["losses"] == pytest.approx(alone.losses[2:], abs=1e-6)
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"step-1", *(f"step-{step}" for step in (2, 3, 4, 5))}


def save_for_ever(seat: Seat, folder: str, mode: str) -> None:
    """Train and save until killed."""
    training = Training()
    checkpointer = Checkpointer(folder, mode=mode, keep=2, options=StateOptions(timeouts=PATIENT))
    if checkpointer.latest() is not None:
        checkpointer.restore(training.state)
    while True:
        seat.tell()
        training.step()
        checkpointer.save(training.data.at, training.state)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_kills_at_random_moments(tmp_path, mode):
    """What is found is always complete, never older than what was there, and is what one process comes to."""
    draw = random.Random(0)
    newest = number = 0
    while number < 20 or newest <= 20:
        number += 1
        assert number < 200, f"only {newest} steps were committed"
        with Doomed(draw.choice((2, 3))) as world:
            world.start(save_for_ever, str(tmp_path), mode)
            world.wait_for_moment(draw)
            for rank in draw.choice([(0,), (1,), (0, 1)]):
                os.kill(world.outcome.pids[rank], signal.SIGKILL)
            time.sleep(draw.uniform(0.0, 0.1))
        training = Training(seed=1)
        if newest or list(tmp_path.glob("step-*/.metadata")):
            report = Checkpointer(tmp_path).restore(training.state)
            assert report.step >= newest, number
            assert report.step == training.data.at == training.schedule.last_epoch
            newest = report.step
    alone = Training()
    alone.step(newest)
    step = Training(seed=1)
    Checkpointer(tmp_path).restore(step.state)
    for name, tensor in alone.taken()["model"].items():
        assert tensor.allclose(step.taken()["model"][name], atol=1e-4), name
    assert len(list(Path(tmp_path).glob("step-*/.metadata"))) <= 3
    Checkpointer(tmp_path).save(newest + 1, step.state)
    assert shardwise.Checkpointer(tmp_path).latest() == newest + 1
