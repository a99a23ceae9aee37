"""Whatever befalls one rank, at whatever stage: the others end, with one error that says what happened.

They end soon, which takes no measurement: nothing that they could wait for comes before the test counts as hung.
"""

import itertools
import socket

import pytest
from tests.faults import on_ranks
from tests.faults.fault_injection import PATIENT, Doomed, through_rank_0
from tests.faults.on_ranks import Blow, assert_all_end_alike, falling

from shardwise.ranks.timeouts import Timeouts

pytestmark = pytest.mark.distributed

WAYS = {
    "open": ("flat", 3, 0),
    "headers": ("reader", 3, 0),
    "build": ("flat", 3, 0),
    "wrap": ("flat", 3, 0),
    "plan": ("flat", 3, 0),
    "materialize": ("flat", 3, 0),
    "read": ("flat", 3, 5),
    "join": ("hsdp", 4, 0),
    "share": ("hsdp", 4, 2),
    "send": ("whole", 3, 0),
    "fill": ("flat", 3, 0),
    "audit": ("reader", 3, 0),
    "look": ("shard", 3, 0),
    "give": ("shard", 3, 3),
    "take": ("shard", 3, 3),
    "pack": ("stream", 3, 1),
}
"""By stage: how a model is brought up, on how many ranks, and after how many calls the blow falls."""


ON_RANK_0 = {"headers", "give"}
"""Stages that only the first rank goes through."""

ON_THE_OTHERS = {"take"}
"""Stages that the first rank does not go through."""


def some():
    """Every stage raising on one rank and losing another, the kinds of loss in turn."""
    losses = itertools.cycle(["kill", "stop", "exit"])
    for number, stage in enumerate(WAYS):
        raising, lost = (
            (0, 0) if stage in ON_RANK_0 else (1, 1) if stage in ON_THE_OTHERS else (1 - number % 2, number % 2)
        )
        yield Blow("raise", stage, raising, WAYS[stage][2])
        yield Blow(next(losses), stage, lost, WAYS[stage][2])


def checkpoint_of(blow, qwen3, plain):
    return plain if WAYS[blow.stage][0] in ("reader", "whole") else qwen3


def fall(blow, qwen3, plain):
    way, size, _ = WAYS[blow.stage]
    with Doomed(size) as world:
        outcome = world.run(on_ranks.load, checkpoint_of(blow, qwen3, plain), way, PATIENT, blow)
        assert_all_end_alike(blow, outcome, size, found_by_one={"headers"})
        if blow.kind == "stop":
            world.go_on(blow.rank)
            end = world.finish().ends[blow.rank]
            assert (end.error, end.text) == next(iter(outcome.errors().values()))


@pytest.fixture(scope="module")
def fallen(request, qwen3, plain):
    with falling(request, lambda blow: fall(blow, qwen3, plain)) as found:
        yield found


@pytest.mark.parametrize("blow", list(some()), ids=str)
def test_the_others_end_soon_and_alike(blow, fallen):
    fallen(blow)


def assert_nothing_befell(outcome, size):
    assert outcome.errors() == dict.fromkeys(range(size), ("", ""))


@pytest.mark.slow
def test_a_storage_that_stalls_ends_no_rank(qwen3):
    """The rank's beats go on while it waits, however long."""
    with Doomed(3) as world:
        outcome = world.run(on_ranks.load_stalled, qwen3, 1)
    assert_nothing_befell(outcome, 3)


@pytest.mark.parametrize("busy", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_comes_late_is_waited_for(busy, plain):
    """It may be busy with something else for longer than a silence."""
    with Doomed(3) as world:
        outcome = world.run(on_ranks.load_busy, plain, busy)
    assert_nothing_befell(outcome, 3)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_was_configured(plain):
    with Doomed(3) as world:
        outcome = world.run(on_ranks.load_too_late, plain, 2)
    late = outcome.ends.pop(2)
    assert late.error == "RankLostError"
    assert len(set(outcome.errors().values())) == 1
    assert "rank 2 has not reached " in outcome.ends[0].text


@pytest.mark.parametrize(
    ("kind", "told"), [("kill", "is gone"), pytest.param("stop", "has not answered", marks=pytest.mark.slow)]
)
def test_the_store_may_die_with_rank_0(kind, told, qwen3):
    """Without a launcher that holds it, the store is in the process of rank 0."""
    blow = Blow(kind, "plan", 0)
    with Doomed(3, meet=through_rank_0) as world:
        outcome = world.run(on_ranks.load, qwen3, "flat", PATIENT, blow)
    assert sorted(outcome.ends) == [1, 2]
    ((error, text),) = set(outcome.errors().values())
    assert error == "RankLostError"
    assert f"the store of the process group {told}" in text
    assert "rank 0" in text


def test_the_holder_of_the_store_stays_until_the_others_know(qwen3):
    """Rank 0 is the first to know that rank 1 is lost, and its process may end with its call."""
    blow = Blow("kill", "plan", 1)
    with Doomed(3, meet=through_rank_0) as world:
        outcome = world.run(on_ranks.load_and_end, qwen3, PATIENT, blow)
    assert_all_end_alike(blow, outcome, 3)


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_program_ends_though_a_collective_was_left(kind, plain):
    blow = Blow(kind, "send", 1)
    with Doomed(3) as world:
        outcome = world.run(on_ranks.load_and_leave, plain, "whole", PATIENT, blow)
    assert_all_end_alike(blow, outcome, 3)


def test_an_interrupted_rank_announces_it(qwen3):
    """Ctrl-C on one machine: nobody has to wait for a silence."""
    with Doomed(3) as world:
        outcome = world.run(on_ranks.load, qwen3, "flat", PATIENT, Blow("interrupt", "plan", 1))
    assert outcome.ends.pop(1).error == "KeyboardInterrupt"
    ((error, text),) = set(outcome.errors().values())
    assert error == "RankLostError"
    assert f"rank 1 (host {socket.gethostname()}, process {outcome.pids[1]}) has left the call" in text
    assert "KeyboardInterrupt" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_with_the_patience_that_is_usual(kind, qwen3, plain):
    blow = Blow(kind, "read", 1, after=5)
    with Doomed(3) as world:
        outcome = world.run(on_ranks.load, qwen3, "flat", Timeouts(), blow)
        assert_all_end_alike(blow, outcome, 3)
