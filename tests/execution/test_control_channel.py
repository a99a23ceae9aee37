"""Meetings of ranks: messages, heartbeats, and lost ranks. Ranks are threads with one store here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, RankMismatchError
from shardwise.execution import Timeouts, control_channel
from shardwise.execution.control_channel import ControlChannel
from shardwise.execution.failure_detection import get_detector, heartbeat_keys
from shardwise.execution.outcomes import decode, encode
from shardwise.storage.machine import ProcessId


def meet(line: ControlChannel, message: bytes) -> list[bytes]:
    """Every rank's message, by rank."""
    if line.rank:
        return decode(line.report(encode(message)))
    reports = line.gather()
    result = [message, *(decode(report) for report in reports)]
    line.publish(encode(result))
    return result


QUICK = Timeouts(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.6, join_timeout_s=1.5)


class Ranks:
    """Lines of ranks in this process."""

    def __init__(
        self, size: int, timeouts: Timeouts = QUICK, store: Any = None, without: int | None = None
    ) -> None:
        self.store = store or dist.HashStore()
        here = [rank for rank in range(size) if rank != without]
        self.lines = [ControlChannel(self.store, "test", rank, range(size), timeouts, "a call") for rank in here]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for line in self.lines:
            line.close()

    def each(self, function: Callable[[ControlChannel], Any]) -> list[Any]:
        """The function's value or error, by rank, all running at once."""

        def attempt(line: ControlChannel) -> Any:
            try:
                return function(line)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.lines)) as pool:
            return list(pool.map(attempt, self.lines))


def test_nothing_but_signs_of_life_stays_in_the_store():
    with Ranks(3) as ranks:
        kept = []
        for _ in range(6):
            for _ in range(4):
                ranks.each(lambda line: meet(line, b"hello"))
            ranks.each(lambda line: line.finish())
            kept.append(ranks.store.num_keys())
        # A rank that has not run for a while on a busy machine has left no heartbeat, or one more.
        assert max(kept) - min(kept) <= 6, kept


def test_a_later_line_of_the_same_ranks_does_not_hear_an_earlier_one():
    with Ranks(2) as first:
        first.each(lambda line: meet(line, b"old"))
        with Ranks(2, store=first.store) as second:
            assert second.each(lambda line: meet(line, b"new")) == [[b"new"] * 2] * 2


def test_a_failure_cuts_the_work_before_the_next_meeting_only():
    cut_seen = threading.Event()

    def work(line: ControlChannel) -> tuple[bool, bool]:
        meet(line, b"")
        if line.rank == 1:
            line.interrupt()
            cut_seen.wait(5)
        else:
            while not line.is_interrupted:
                time.sleep(0.01)
            cut_seen.set()
        before = line.is_interrupted
        meet(line, b"")
        time.sleep(4 * QUICK.heartbeat_interval_s)
        return before, line.is_interrupted

    with Ranks(2) as ranks:
        assert ranks.each(work) == [(True, False)] * 2


CALLS = st.lists(st.tuples(*[st.sampled_from(["load", "save", "shard"])] * 3), min_size=1, max_size=4)


@given(rounds=CALLS, late=st.integers(0, 2))
@example(rounds=[("save", "load", "save"), ("load",) * 3, ("save", "save", "load"), ("save",) * 3], late=0)
@settings(max_examples=8)
def test_ranks_in_different_calls_are_reported_and_meet_in_the_next(rounds, late):
    store = dist.HashStore()

    def call(rank: int, turn: int) -> Any:
        if rank == late:
            time.sleep(0.02)
        line = ControlChannel(store, "test", rank, range(3), QUICK, rounds[turn][rank])
        try:
            return meet(line, bytes([turn]))
        except Exception as error:
            return error
        finally:
            line.close()

    def live(rank: int) -> list[Any]:
        return [call(rank, turn) for turn in range(len(rounds))]

    with ThreadPoolExecutor(3) as pool:
        outcomes = zip(*pool.map(live, range(3)), strict=True)
    for turn, (calls, found) in enumerate(zip(rounds, outcomes, strict=True)):
        if len(set(calls)) == 1:
            assert found == ([bytes([turn])] * 3,) * 3
            continue
        assert {type(error) for error in found} == {RankMismatchError}
        text = str(found[0])
        assert {str(error) for error in found} == {text}
        assert sum(f"is in {call}" in text for call in set(calls)) == 2


def ended() -> ProcessId:
    """Where a process was that ended."""
    code = (
        "import json, dataclasses; from shardwise.storage.machine import ProcessId; "
        "print(json.dumps(dataclasses.asdict(ProcessId.here())))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    return ProcessId(**json.loads(found))


def sign(store: Any, rank: int, place: ProcessId, beat: str = "7") -> None:
    """Set a rank's heartbeat."""
    heartbeat_keys(store).set(f"process/{rank}", json.dumps(asdict(place)).encode())
    heartbeat_keys(store).set(f"beat/{rank}", beat.encode())


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_whose_process_ended_between_calls_is_named_at_once(gone):
    timeouts = Timeouts(heartbeat_interval_s=0.05, heartbeat_timeout_s=20, join_timeout_s=30)
    store, place = dist.HashStore(), ended()
    sign(store, gone, place)
    with Ranks(3, timeouts, store=store, without=gone) as ranks:
        start = time.monotonic()
        one, other = ranks.each(lambda line: meet(line, b""))
        assert time.monotonic() - start < 5
    assert str(one) == str(other)
    assert f"rank {gone} ({place}) is lost: its process has ended" in str(one)


def test_a_rank_of_another_machine_is_missed_when_its_pulse_stops():
    """Not before: for as long as it beats it may be busy."""
    away = replace(ProcessId.here(), host="afar", pid_namespace="another kernel's")
    timeouts = replace(QUICK, join_timeout_s=60)
    store = dist.HashStore()
    sign(store, 1, away)
    with Ranks(2, timeouts, store=store, without=1) as ranks:
        stop = threading.Event()

        def beat() -> None:
            beats = 0
            while not stop.wait(0.05):
                beats += 1
                sign(store, 1, away, str(beats))

        beating = threading.Thread(target=beat)
        beating.start()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ranks.each, lambda line: meet(line, b""))
            time.sleep(3 * QUICK.heartbeat_timeout_s)
            assert not waiting.done()
            stop.set()
            beating.join()
            start = time.monotonic()
            (error,) = waiting.result(timeout=20)
    assert time.monotonic() - start < 4 * QUICK.heartbeat_timeout_s
    assert f"rank 1 (host afar, process {away.pid}) is lost: no sign of life" in str(error)


def test_a_rank_of_this_machine_that_runs_is_not_lost_though_its_pulse_pauses():
    """A library may not let other threads run."""
    store = dist.HashStore()
    sign(store, 1, ProcessId.here())
    with Ranks(2, store=store, without=1) as ranks:
        (error,) = ranks.each(lambda line: meet(line, b""))
    assert "rank 1 has not reached " in str(error)


def test_a_heartbeat_continues_until_its_store_or_its_process_ends(tmp_path):
    program = """if True:
        import sys, torch.distributed as dist
        from shardwise.execution.control_channel import get_detector
        store = dist.FileStore(sys.argv[1], 9)
        get_detector(store, 5)
    """
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], check=True)
    store = dist.FileStore(str(tmp_path / "store"), 9)
    assert heartbeat_keys(store).get(["beat/5"]) == [b"ended"]
    thread = get_detector(store, 3)._thread
    del store
    thread.join(5)
    assert not thread.is_alive()


def test_invalid_timeouts_are_refused():
    with pytest.raises(ConfigError):
        Timeouts(heartbeat_interval_s=5, heartbeat_timeout_s=1)


class CutStore:
    """A store that answers until the link to it is cut."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.link = threading.Event()
        self.link.set()

    def clone(self) -> CutStore:
        return self

    def __getattr__(self, name: str) -> Any:
        self.link.wait()
        return getattr(self.store, name)


def test_a_rank_at_work_finds_out_without_the_store_that_it_is_cut_off(monkeypatch):
    monkeypatch.setattr(ProcessId, "is_running", lambda _: False)
    store = CutStore(dist.HashStore())
    stores = (store.store, store)
    lines = [ControlChannel(own, "test", rank, range(2), QUICK, "a call") for rank, own in enumerate(stores)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda line: meet(line, b""), lines))
    time.sleep(2 * QUICK.heartbeat_timeout_s)
    assert [line.loss() for line in lines] == [None, None]
    start = time.monotonic()
    store.link.clear()
    times = {}
    while len(times) < 2 and time.monotonic() - start < 10 * QUICK.heartbeat_timeout_s:
        for line in lines:
            if (lost := line.loss()) and line.rank not in times:
                times[line.rank] = (time.monotonic() - start, str(lost))
        time.sleep(0.01)
    store.link.set()
    for line in lines:
        line.close()
    assert len(times) == 2
    for rank in range(2):
        least_s = QUICK.heartbeat_timeout_s - QUICK.heartbeat_interval_s
        assert least_s < times[rank][0] < 3 * QUICK.heartbeat_timeout_s
    assert "rank 1 (host" in times[0][1]
    assert "the store through which the ranks meet has not answered" in times[1][1]


def test_a_rank_that_has_made_no_call_is_logged_by_waiting_ranks(monkeypatch, caplog):
    monkeypatch.setattr(control_channel, "WARN_S", 0.2)
    with Ranks(3, without=2) as ranks:
        ranks.each(lambda line: meet(line, b""))
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "waiting for rank 2 of 3 at one store"
