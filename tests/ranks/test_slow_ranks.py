"""Which rank is named when ranks wait for one that lives."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch.distributed as dist
from tests.ranks.test_control_channel import PATIENT, QUICK, Ranks, clock, meet  # noqa: F401 - a fixture

from shardwise.core.errors import RankLostError
from shardwise.core.phases import busy_with, main_thread_work, phase
from shardwise.fsdp import torch_private
from shardwise.ranks import failure_detection, slow_ranks
from shardwise.ranks.slow_ranks import WARN_S, Meeting, RankStatus, find_wait
from shardwise.ranks.timeouts import Timeouts
from shardwise.ranks.world import World

KEY = "call/1"
MEETING = Meeting(0.0, (2, 3, 4))
WAITING = RankStatus({KEY: WARN_S}, "train", WARN_S)
STEPPING = RankStatus(phase="train", phase_s=WARN_S)
READING = RankStatus(phase="train", phase_s=14, busy="the next batch")
COMPUTING = RankStatus(phase="load, read", phase_s=12)


def waits_for(rank: int, own: RankStatus, others: dict[int, RankStatus]) -> str:
    return find_wait(rank, own, {KEY: MEETING}, others)[1]


def test_the_first_rank_of_a_meeting_names_who_has_not_come():
    text = waits_for(2, WAITING, {3: WAITING, 4: READING})
    assert text == "rank 4, which has been busy with the next batch for 14 s"
    text = waits_for(2, WAITING, {3: COMPUTING, 4: RankStatus(phase_s=3)})
    assert text == "rank 3, which has been in the phase 'load, read' for 12 s, and for ranks 4"
    assert waits_for(2, replace(WAITING, meetings={KEY: WARN_S - 1}), {3: READING, 4: READING}) == ""


def test_the_other_ranks_of_a_meeting_name_the_first_one_or_whom_it_names():
    assert waits_for(3, WAITING, {2: READING}).startswith("rank 2, which")
    assert waits_for(3, WAITING, {2: replace(WAITING, waits_for="rank 4, which sleeps")}) == "rank 4, which sleeps"


def test_in_a_collective_ranks_with_work_of_their_own_are_named():
    assert waits_for(0, STEPPING, {1: READING, 2: STEPPING}).startswith("rank 1, which has been busy")
    assert waits_for(0, STEPPING, {1: STEPPING}) == ""  # a long step of all
    assert waits_for(0, READING, {1: READING}) == ""
    assert (
        waits_for(2, STEPPING, {0: replace(STEPPING, waits_for="rank 1, which sleeps")}) == "rank 1, which sleeps"
    )
    assert waits_for(1, STEPPING, {0: replace(STEPPING, waits_for="rank 1, which sleeps")}) == ""


def test_what_the_main_thread_does():
    with phase("train"), busy_with("the callbacks"):
        assert main_thread_work()[:2] == ("train", "the callbacks")
        with phase("save"):
            assert main_thread_work()[:2] == ("train, save", "")
        with busy_with(""):
            assert main_thread_work()[:2] == ("train", "")


def test_a_rank_that_lives_is_named_and_not_waited_for_longer_than_the_timeout(clock, caplog):  # noqa: F811
    timeouts = replace(PATIENT, meeting_timeout_s=3 * WARN_S)
    left, waiting = threading.Event(), []

    def act(line):
        meet(line, b"")
        if line.rank == 1:
            left.wait()  # and comes to no further meeting
        waiting.append(line)
        try:
            return meet(line, b"")
        finally:
            left.set()

    with caplog.at_level(logging.WARNING), Ranks(3, timeouts) as ranks, ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(ranks.each, act)
        while len(waiting) < 2 or not all(line._detector.meetings for line in waiting):
            time.sleep(0.01)
        clock.put_forward(WARN_S, *ranks.lines)
        while "rank 0 has been waiting for" not in caplog.text:
            time.sleep(0.01)
        clock.now_s += 3 * WARN_S
        found = outcome.result()
    assert {type(error) for error in found} == {RankLostError}
    assert "s for rank 1, which" in str(found[0])
    assert "ddp_timeout" in str(found[0])


def test_a_meeting_that_ends_while_slow_ranks_are_looked_for_ends_no_heartbeat(monkeypatch):
    store = dist.HashStore()
    detector = failure_detection.Detector(store, 0)
    monkeypatch.setattr(slow_ranks, "WARN_S", 0.0)

    class Leaves:
        def watch(self, _store: object) -> None:
            detector.meetings.clear()

    detector.meetings[KEY] = Meeting(0.0, (0, 1))
    detector.add(leaves := Leaves(), 0.01)
    while detector.meetings:
        time.sleep(0.01)
    detector.watchers.discard(leaves)
    detector.end()
    assert detector.error is None


def test_a_timeout_of_the_process_group_holds_for_meetings(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert World.current().timeouts == Timeouts()
        torch_private.set_timeout(7200)
        assert World.current().timeouts == Timeouts(join_timeout_s=7200, meeting_timeout_s=7200)
        assert World.current(timeouts=QUICK).timeouts == QUICK
    finally:
        dist.destroy_process_group()
