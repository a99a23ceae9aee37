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

from shardwise.core.errors import ConfigError, RankLostError, RankMismatchError
from shardwise.core.machine import ProcessId
from shardwise.ranks import control_channel, failure_detection, slow_ranks
from shardwise.ranks.control_channel import ControlChannel
from shardwise.ranks.failure_detection import KeyStore, get_detector, heartbeat_keys
from shardwise.ranks.outcomes import decode, encode
from shardwise.ranks.timeouts import Timeouts


def meet(line: ControlChannel, message: bytes) -> list[bytes]:
    """Every rank's message, by rank."""
    if line.rank:
        return decode(line.report(encode(message)))
    reports = line.gather()
    result = [message, *(decode(report) for report in reports)]
    line.publish(encode(result))
    return result


PATIENT = Timeouts(heartbeat_interval_s=0.05, heartbeat_timeout_s=3600, join_timeout_s=3600)
"""Nobody waits as long."""

QUICK = Timeouts(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.6, join_timeout_s=1.5)
"""By a clock that a test sets."""


class SetClock:
    """The clock of detectors and channels, which stands still until it is put forward."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        time.sleep(max(seconds, 0.005))

    def put_forward(self, seconds: float, *lines: ControlChannel) -> None:
        """Return when these lines have looked for others, before and afterwards."""
        wait_for_looks(*lines)
        self.now_s += seconds
        wait_for_looks(*lines)


@pytest.fixture
def clock(monkeypatch):
    found = SetClock()
    monkeypatch.setattr(failure_detection, "time", found)
    for module in (failure_detection, control_channel):
        monkeypatch.setattr(module, "running_s", found.monotonic)
    monkeypatch.setattr(control_channel, "time", found)
    monkeypatch.setattr(slow_ranks, "time", found)
    return found


def wait_for_looks(*lines: ControlChannel) -> None:
    """Until the detectors of these lines, which come to a call, have begun to look at others, and have done so."""
    for line in lines:
        while line not in line._detector.watchers:
            time.sleep(0.005)
        keys, key = heartbeat_keys(line._store), f"beat/{line.rank}"
        last = int(keys.get([key])[0].split()[0]) + 2  # the look after the first one may have begun before
        while int(keys.get([key])[0].split()[0]) < last:
            time.sleep(0.005)


class Ranks:
    """Lines of ranks in this process."""

    def __init__(
        self, size: int, timeouts: Timeouts = PATIENT, store: Any = None, without: int | None = None
    ) -> None:
        self.store, self._is_own_store = store or dist.HashStore(), store is None
        here = [rank for rank in range(size) if rank != without]
        self.lines = [ControlChannel(self.store, "test", rank, range(size), timeouts, "a call") for rank in here]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for line in self.lines:
            line.close()
            if self._is_own_store:  # else other ranks use it. Its heartbeats would go on forever.
                line._detector.end()

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


def test_polls_do_not_write_to_the_file_of_a_store(tmp_path):
    """It would grow for as long as a rank is waited for."""
    file = tmp_path / "store"
    keys = KeyStore(dist.FileStore(str(file), 1), "test")
    keys.add("in", 2)
    keys.add("in", 3)
    nbytes = file.stat().st_size
    assert [keys.count("in"), keys.count("out")] == [5, 0]
    assert file.stat().st_size == nbytes


def test_the_text_of_a_rank_that_leaves_may_be_long():
    """More than torch's store takes for one value."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Ranks(2, store=store) as ranks:
        ranks.lines[1].abort("x" * (9 << 20))
        with pytest.raises(RankLostError, match="has left the call: xxx"):
            ranks.lines[0].gather()


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
            cut_seen.wait()
        else:
            while not line.is_interrupted:
                time.sleep(0.01)
            cut_seen.set()
        before = line.is_interrupted
        meet(line, b"")
        wait_for_looks(line)
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
        line = ControlChannel(store, "test", rank, range(3), PATIENT, rounds[turn][rank])
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
        "import json, dataclasses; from shardwise.core.machine import ProcessId; "
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
    store, place = dist.HashStore(), ended()
    sign(store, gone, place)
    with Ranks(3, store=store, without=gone) as ranks:
        one, other = ranks.each(lambda line: meet(line, b""))
    assert str(one) == str(other)
    assert f"rank {gone} ({place}) is lost: its process has ended" in str(one)


def test_a_rank_of_another_machine_is_missed_when_its_pulse_stops(clock):
    """Not before: for as long as it beats it may be busy."""
    away = replace(ProcessId.here(), host="afar", pid_namespace="another kernel's")
    store = dist.HashStore()
    sign(store, 1, away)
    with Ranks(2, replace(QUICK, join_timeout_s=60), store, without=1) as ranks, ThreadPoolExecutor(1) as pool:
        (line,) = ranks.lines
        waiting = pool.submit(ranks.each, lambda line: meet(line, b""))
        for beats in range(6):
            sign(store, 1, away, str(beats))
            clock.put_forward(0.9 * QUICK.heartbeat_timeout_s, line)
            assert line.loss() is None
        clock.put_forward(0.2 * QUICK.heartbeat_timeout_s, line)
        (error,) = waiting.result()
    assert f"rank 1 (host afar, process {away.pid}) is lost: no sign of life" in str(error)
    assert "or busy for so long in code that lets no other Python thread run" in str(error)


def test_a_rank_of_this_machine_that_runs_is_not_lost_though_its_pulse_pauses(clock):
    """A library may not let other threads run."""
    store = dist.HashStore()
    sign(store, 1, ProcessId.here())
    with Ranks(2, QUICK, store, without=1) as ranks, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks.each, lambda line: meet(line, b""))
        for _ in range(2):
            clock.put_forward(1.1 * QUICK.heartbeat_timeout_s, *ranks.lines)
            assert ranks.lines[0].loss() is None
        clock.put_forward(QUICK.heartbeat_timeout_s, *ranks.lines)
        (error,) = waiting.result()
    assert "rank 1 has not reached " in str(error)


class LateToBegin(threading.Thread):
    def run(self) -> None:
        if self.name.startswith("shardwise-heartbeat"):
            time.sleep(0.1)
        super().run()


def test_a_rank_that_has_come_to_a_call_has_a_heartbeat(monkeypatch):
    """Otherwise it would not be missed if it were killed at once."""
    monkeypatch.setattr(threading, "Thread", LateToBegin)
    with Ranks(2) as ranks:
        ranks.lines[1].join()
        assert heartbeat_keys(ranks.store).has("beat/1")


def test_a_heartbeat_continues_until_its_store_or_its_process_ends(tmp_path):
    program = """if True:
        import sys, torch.distributed as dist
        from shardwise.ranks import failure_detection
        failure_detection._JOIN_S = None
        store = dist.FileStore(sys.argv[1], 9)
        failure_detection.get_detector(store, 5)
    """
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], check=True)
    store = dist.FileStore(str(tmp_path / "store"), 9)
    assert heartbeat_keys(store).get(["beat/5"]) == [b"ended"]
    thread = get_detector(store, 3)._thread
    del store
    thread.join()


def test_invalid_timeouts_are_refused():
    with pytest.raises(ConfigError):
        Timeouts(heartbeat_interval_s=5, heartbeat_timeout_s=1)


class CutStore:
    """A store that answers until the link to it is cut."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.link, self.is_missed = threading.Event(), threading.Event()
        self.link.set()

    def clone(self) -> CutStore:
        return self

    def __getattr__(self, name: str) -> Any:
        if not self.link.is_set():
            self.is_missed.set()
            self.link.wait()
        return getattr(self.store, name)


def test_a_rank_at_work_finds_out_without_the_store_that_it_is_cut_off(monkeypatch, clock):
    monkeypatch.setattr(ProcessId, "is_running", lambda _: False)
    store = CutStore(dist.HashStore())
    stores = (store.store, store)
    lines = [ControlChannel(own, "test", rank, range(2), QUICK, "a call") for rank, own in enumerate(stores)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda line: meet(line, b""), lines))
    for _ in range(4):
        clock.put_forward(0.9 * QUICK.heartbeat_timeout_s, *lines)
    assert [line.loss() for line in lines] == [None, None]
    store.link.clear()
    store.is_missed.wait()
    clock.put_forward(0.9 * QUICK.heartbeat_timeout_s, lines[0])
    assert [line.loss() for line in lines] == [None, None]
    clock.put_forward(0.2 * QUICK.heartbeat_timeout_s, lines[0])
    assert "rank 1 (host" in str(lines[0].loss())
    assert lines[1].loss() is None
    clock.put_forward(0.2 * QUICK.heartbeat_timeout_s, lines[0])
    assert "the store of the process group has not answered" in str(lines[1].loss())
    store.link.set()
    for line in lines:
        line.close()


def test_a_rank_that_has_made_no_call_is_logged_by_waiting_ranks(clock, caplog):
    with Ranks(3, without=2) as ranks, ThreadPoolExecutor(1) as pool:
        pool.submit(ranks.each, lambda line: meet(line, b""))
        clock.put_forward(control_channel.WARN_S + 1, *ranks.lines)
        for line in ranks.lines:
            line.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "waiting for rank 2 of 3 at one store"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_limit_of_no_time_is_refused(seconds):
    with pytest.raises(ConfigError, match="meeting_timeout_s is not positive"):
        Timeouts(meeting_timeout_s=seconds)
