"""A rank fails in a save: the others soon raise one error, a whole save stays, and the next one succeeds."""

import itertools
import os
import random
import signal
import time

import pytest
from tests.faults import saving
from tests.faults.fault_injection import PATIENT, Doomed, through_rank_0
from tests.faults.on_ranks import Blow, assert_all_end_alike, falling
from tests.faults.saving import ONE_FILE, SEVERAL_FILES, is_model, litter

import shardwise

pytestmark = pytest.mark.distributed

RANKS = 3
OLD, NEW, NEXT = 1, 2, 3

KINDS = ("raise", "exit", "kill", "stop")

STAGES = {
    "plan_reads": 0,
    "create": 1,
    "mark": 0,
    "write": 2,
    "sync": 1,
    "compare": 0,
    "commit": 0,
    "beside": 0,
    "name": 0,
    "remove": 0,
    "tidy": 0,
}
"""In order, with the number of calls after which the blow falls."""

ON_RANK_0 = {"create", "commit", "beside", "name", "remove", "tidy"}
"""Stages that only the first rank goes through."""

ENDS_COMMITTED = ON_RANK_0 - {"create"}
"""Stages in which a rank that is stopped and goes on commits the new save."""

COMMITTED = {"remove", "tidy"}
"""Stages in which the new save counts."""

TO_ONE_FILE = {"name", "tidy"}
"""Stages in which a save of one file takes the place of one of several; in the others it is the other way round."""


def blows():
    for stage, kind, rank in itertools.product(STAGES, KINDS, (0, 1)):
        if (not rank or stage not in ON_RANK_0) and (kind, stage) != ("raise", "tidy"):  # a warning
            yield Blow(kind, stage, rank, STAGES[stage])


def some():
    """Every stage, the kinds in turn."""
    kinds = itertools.cycle(["kill", "raise", "stop", "raise", "exit", "raise"])
    for number, (stage, after) in enumerate(STAGES.items()):
        yield Blow(next(kinds), stage, 0 if stage in ON_RANK_0 else number % 2, after)


FAST = list(some())
REST = [blow for blow in blows() if blow not in FAST]


def fall(blow, folder):
    old_size, new_size = ONE_FILE, SEVERAL_FILES
    if blow.stage in TO_ONE_FILE:
        old_size, new_size = new_size, old_size
    shardwise.save(saving.Blocks(OLD), folder, max_shard_size=old_size)
    with Doomed(RANKS) as world:
        outcome = world.run(saving.save, str(folder), NEW, new_size, PATIENT, blow)
        assert_all_end_alike(blow, outcome, RANKS, found_by_one=ON_RANK_0)
        assert is_model(folder, NEW if blow.stage in COMMITTED else OLD)
        if blow.kind == "stop":
            go_on(blow, world, folder)
        # The ranks that are left still live, and a mark of theirs would count.
        report = shardwise.save(saving.Blocks(NEXT), folder, max_shard_size=old_size)
        assert is_model(folder, NEXT)
        assert litter(folder) == set()
        assert shardwise.verify(folder).compared == report.tensors


def go_on(blow, world, folder):
    """A rank that was stopped is continued: until then the mark is its own, then it ends as the others did."""
    errors = world.outcome.errors()
    if blow.rank == 0 and blow.stage != "plan_reads":
        with pytest.raises(shardwise.StorageError, match=f"process {world.outcome.pids[0]} on"):
            shardwise.save(saving.Blocks(NEXT), folder)
    world.go_on(blow.rank)
    end = world.finish().ends[blow.rank]
    assert (end.error, end.text) == next(iter(errors.values()))
    assert is_model(folder, NEW if blow.stage in ENDS_COMMITTED else OLD)


@pytest.fixture(scope="module")
def fallen(request, tmp_path_factory):
    with falling(request, lambda blow: fall(blow, tmp_path_factory.mktemp("saved"))) as found:
        yield found


@pytest.mark.parametrize("blow", FAST, ids=str)
def test_a_save_stays_and_the_next_succeeds(blow, fallen):
    fallen(blow)


@pytest.mark.slow
@pytest.mark.parametrize("blow", REST, ids=str)
def test_a_save_stays_and_the_next_succeeds_everywhere(blow, fallen):
    fallen(blow)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_is_interrupted_leaves_no_mark(rank, tmp_path):
    """Ctrl-C, after which the process lives on and saves again."""
    folder = tmp_path / "saved"
    shardwise.save(saving.Blocks(OLD), folder)
    with Doomed(RANKS) as world:
        outcome = world.run(saving.save, str(folder), NEW, SEVERAL_FILES, PATIENT, Blow("interrupt", "write", rank))
        assert outcome.ends.pop(rank).error == "KeyboardInterrupt"
        ((error, text),) = set(outcome.errors().values())
        assert error == "RankLostError"
        assert "has left the call" in text
        assert is_model(folder, OLD)
        assert litter(folder) == set()
        shardwise.save(saving.Blocks(NEXT), folder)


def test_the_store_may_die_with_rank_0(tmp_path):
    shardwise.save(saving.Blocks(OLD), tmp_path)
    blow = Blow("kill", "write", 0, after=2)
    with Doomed(RANKS, meet=through_rank_0) as world:
        outcome = world.run(saving.save, str(tmp_path), NEW, SEVERAL_FILES, PATIENT, blow)
        assert sorted(outcome.ends) == [1, 2]
        ((error, text),) = set(outcome.errors().values())
        assert (error, "the store of the process group is gone" in text) == ("RankLostError", True)
        assert is_model(tmp_path, OLD)
        shardwise.save(saving.Blocks(NEXT), tmp_path)
    assert litter(tmp_path) == set()


def test_ranks_that_do_not_see_one_folder_are_reported(tmp_path):
    """A folder on a disk that every machine has for itself."""
    with Doomed(2) as world:
        outcome = world.run(saving.save_apart, str(tmp_path), PATIENT)
    ((error, text),) = set(outcome.errors().values())
    assert error == "StorageError"
    assert f"rank 1: {tmp_path}/1: shardwise.saving" in text
    assert "a directory that all ranks share" in text
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


KILLS = 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_at_random_moments(tmp_path):
    """Of one rank or of both, as they save one model after another; the two differ in every tensor."""
    draw = random.Random(0)
    shardwise.save(saving.Blocks(OLD), tmp_path)
    found = {OLD: 0, NEW: 0}
    for number in range(KILLS):
        sizes = [ONE_FILE, SEVERAL_FILES]
        with Doomed(2) as world:
            world.start(saving.save_one_after_another, str(tmp_path), (NEW, OLD), tuple(sizes), PATIENT)
            world.wait_for_moment(draw)
            for rank in draw.choice([(0,), (1,), (0, 1), (0, 1)]):
                os.kill(world.outcome.pids[rank], signal.SIGKILL)
            time.sleep(draw.uniform(0.0, 0.1))
        whole = [seed for seed in (OLD, NEW) if is_model(tmp_path, seed)]
        assert len(whole) == 1, number
        found[whole[0]] += 1
        assert shardwise.verify(tmp_path).is_sound
        assert shardwise.verify(tmp_path).compared
        if number % 5 == 4:
            shardwise.save(saving.Blocks(NEXT), tmp_path, max_shard_size=draw.choice(sizes))
            assert is_model(tmp_path, NEXT)
            assert litter(tmp_path) == set()
            shardwise.save(saving.Blocks(OLD), tmp_path)
    assert min(found.values()) > 0, found
