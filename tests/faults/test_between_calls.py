"""Ranks that skip a call, or are lost between two: the others are told who, and soon."""

import socket

import pytest
from tests.faults import between
from tests.faults.doomed import Doomed, through_a_file, through_rank_0

from shardwise.execution import Timeouts

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

NEVER_S = 60.0
QUICK = Timeouts(heartbeat_interval_s=0.1, heartbeat_timeout_s=3.0, join_timeout_s=NEVER_S)
BOUND_S = 12.0
"""The silence, and what a busy machine takes."""


def test_a_call_that_one_rank_skipped_is_named_and_the_next_one_works(plain, tmp_path):
    with Doomed(3) as world:
        outcome = world.run(between.skip, plain, str(tmp_path / "saved"), QUICK)
    assert {end.text for end in outcome.ends.values()} == {""}
    one, two, three = (outcome.ends[rank].value for rank in range(3))
    assert one == two == three
    first, skipped, second, other, *rest = one
    assert [first, second, *rest] == [("", "")] * 4
    assert skipped[0] == other[0] == "RankMismatchError"
    assert "rank 1 is in load" in skipped[1]
    assert "in save" in skipped[1]
    assert "rank 1 is in get_model_state_dict" in other[1]


@pytest.mark.parametrize(
    ("kind", "rank", "meet"),
    [
        ("kill", 1, through_a_file),
        ("kill", 0, through_a_file),
        ("end", 2, through_rank_0),
        ("stop", 1, through_a_file),
    ],
)
def test_a_rank_that_is_lost_between_calls_is_named_soon(kind, rank, meet, plain):
    with Doomed(3, meet=meet) as world:
        outcome = world.run(between.lose, plain, QUICK, kind, rank)
    survivors = [other for other in range(3) if other != rank]
    assert sorted(outcome.ends) == survivors
    ((error, text),) = {tuple(outcome.ends[other].value) for other in survivors}
    assert error == "RankLostError"
    assert f"rank {rank} (host {socket.gethostname()}, process {outcome.pids[rank]}) is lost" in text
    assert ("no sign of life" if kind == "stop" else "its process has ended") in text
    assert outcome.seconds() < BOUND_S


@pytest.mark.parametrize("first", ["told", "untold"])
def test_a_rank_that_fails_as_the_store_ends_raises_its_own_error(first):
    """The others do, too, if they are told before the holder of the store ends."""
    with Doomed(3, meet=through_rank_0) as world:
        outcome = world.run(between.fail_alone, QUICK, first)
    own = ("StorageError", "rank 1: struck")
    assert outcome.errors()[1] == own
    if first == "told":
        assert outcome.errors() == dict.fromkeys(range(3), own)
    else:
        assert outcome.errors()[2][0] == "RankLostError"
        assert "the store through which the ranks meet is gone" in outcome.errors()[2][1]
