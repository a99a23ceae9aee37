"""Ranks that skip a call, or are lost between two: the others are told who, and soon."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.faults.fault_injection import PATIENT, Doomed, Seat, through_a_file, through_rank_0
from tests.loading.on_ranks import Plain, angles, shard_plain
from tests.support.world import attempt

import shardwise
from shardwise.core.machine import ProcessId
from shardwise.ranks import control_channel
from shardwise.ranks.outcomes import Failure
from shardwise.ranks.timeouts import Timeouts
from shardwise.ranks.world import World

Told = tuple[str, str]


def skip(seat: Seat, checkpoint: str, folder: str, timeouts: Timeouts) -> list[Told]:
    """Rank 1 skips a save and comes to a load; all load; it skips a load and comes to another call; all go on."""
    model = shard_plain(Plain())
    options = shardwise.options.LoadOptions(timeouts=timeouts, progress=False)
    saving = shardwise.options.SaveOptions(timeouts=timeouts, progress=False)

    def load() -> object:
        return shardwise.load(model, checkpoint, buffers={"*.angles": angles}, options=options)

    def save() -> object:
        return shardwise.save(model, folder, options=saving)

    def state() -> object:
        return shardwise.get_model_state_dict(model, options=shardwise.options.StateOptions(timeouts=timeouts))

    told = [attempt(load)]
    told.append(attempt(load if seat.rank == 1 else save))
    told.append(attempt(load))
    told.append(attempt(state if seat.rank == 1 else load))
    told.extend([attempt(save), attempt(load)])
    return told


def lose(seat: Seat, checkpoint: str, timeouts: Timeouts, kind: str, rank: int) -> Told:
    """All load; a rank is lost as it computes; the others go on to another call."""
    model = shard_plain(Plain())
    options = shardwise.options.LoadOptions(timeouts=timeouts, progress=False)

    def load() -> object:
        return shardwise.load(model, checkpoint, buffers={"*.angles": angles}, options=options)

    load()
    places: list[Any] = [None] * seat.size
    dist.all_gather_object(places, ProcessId.here())
    if seat.rank == rank:
        seat.tell()
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                seat.wait_to_be_stopped()
            case "end":
                os._exit(0)
    while places[rank].is_running():
        time.sleep(0.01)
    return attempt(load)


def fail_alone(seat: Seat, timeouts: Timeouts, first: str) -> None:
    """Rank 1 fails, in no call of a verb's, and is slow to look; the first rank ends before it does."""
    seat.leaves = seat.rank == 0
    world = World.current(timeouts=timeouts)

    def conclude(said: list[int]) -> int:
        raise AssertionError(said)

    with world.collective("begin"):
        pass
    if seat.rank == 1:
        control_channel._FIRST_POLL_S = control_channel._LAST_POLL_S = 0.5
    if seat.rank == 0 and first == "untold":
        Failure.among = lambda *_: os._exit(1)  # type: ignore[method-assign, assignment]
    with world.all_reduce("count", conclude):
        if seat.rank == 1:
            seat.tell()
            raise shardwise.StorageError("struck")


def meet_until_struck(seat: Seat, folder: str) -> int:
    """All meet again and again until a file says that it is enough."""
    world = World.current(timeouts=Timeouts(heartbeat_interval_s=0.2, heartbeat_timeout_s=2.0))
    seat.tell()
    while not world.all_reduce_object(Path(folder, "enough").exists(), all):
        time.sleep(0.01)
    return seat.rank


pytestmark = pytest.mark.distributed


def test_a_call_that_one_rank_skipped_is_named_and_the_next_one_works(plain, tmp_path):
    with Doomed(3) as world:
        outcome = world.run(skip, plain, str(tmp_path / "saved"), PATIENT)
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
        outcome = world.run(lose, plain, PATIENT, kind, rank)
    survivors = [other for other in range(3) if other != rank]
    assert sorted(outcome.ends) == survivors
    ((error, text),) = {tuple(outcome.ends[other].value) for other in survivors}
    assert error == "RankLostError"
    assert f"rank {rank} (host {socket.gethostname()}, process {outcome.pids[rank]}) is lost" in text
    assert ("no sign of life" if kind == "stop" else "its process has ended") in text


@pytest.mark.slow
@pytest.mark.parametrize("meet", [through_a_file, through_rank_0])
def test_ranks_that_are_all_stopped_for_a_while_go_on(meet, tmp_path):
    """Ctrl-Z and fg. The time of the stop is more than the timeouts."""
    with Doomed(2, meet=meet) as world:
        world.start(meet_until_struck, str(tmp_path))
        world.wait_for_blow()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in world.outcome.pids:
                os.kill(pid, number)
            time.sleep(5)
        (tmp_path / "enough").touch()
        outcome = world.finish()
    assert [outcome.ends[rank].value for rank in range(2)] == [0, 1], outcome.errors()


@pytest.mark.parametrize("first", ["told", "untold"])
def test_a_rank_that_fails_as_the_store_ends_raises_its_own_error(first):
    """The others do, too, if they are told before the holder of the store ends."""
    with Doomed(3, meet=through_rank_0) as world:
        outcome = world.run(fail_alone, PATIENT, first)
    own = ("StorageError", "rank 1: struck")
    assert outcome.errors()[1] == own
    if first == "told":
        assert outcome.errors() == dict.fromkeys(range(3), own)
    else:
        assert outcome.errors()[2][0] == "RankLostError"
        assert "the store of the process group is gone" in outcome.errors()[2][1]
