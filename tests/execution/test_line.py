"""The line between ranks: messages, beats, and who is lost. Ranks are threads with one store here."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, DisagreementError, RankLostError
from shardwise.execution.ranks import lost_ranks
from shardwise.execution.ranks.line import Line, Patience
from shardwise.execution.ranks.messages import encode, packed, unpacked
from shardwise.execution.ranks.whereabouts import ProcessPlace, keep_beating


def meet(line: Line, message: bytes) -> list[bytes]:
    """Every rank's message, by rank."""
    return unpacked(line.meet(encode(message), packed))


QUICK = Patience(beat_s=0.05, silence_s=0.6, join_s=1.5)


class Ranks:
    """Lines of ranks in this process."""

    def __init__(self, size: int, patience: Patience = QUICK, name: str = "test", store: Any = None) -> None:
        self.store = store or dist.HashStore()
        self.lines = [Line(self.store, name, rank, size, patience) for rank in range(size)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for line in self.lines:
            line.close()

    def each(self, function: Callable[[Line], Any], *, without: int | None = None) -> list[Any]:
        """The function's value or error, by rank, all running at once."""

        def attempt(line: Line) -> Any:
            try:
                return function(line)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.lines)) as pool:
            return list(pool.map(attempt, [line for line in self.lines if line.rank != without]))


@pytest.mark.parametrize("size", [2, 5])
def test_every_rank_gets_every_message_in_the_order_of_ranks(size):
    with Ranks(size) as ranks:
        for turn in range(3):
            wanted = [b"x" * rank + bytes([turn]) for rank in range(size)]
            assert ranks.each(lambda line, t=turn: meet(line, b"x" * line.rank + bytes([t]))) == [wanted] * size


def test_nothing_but_signs_of_life_stays_in_the_store():
    with Ranks(3) as ranks:
        kept = []
        for _ in range(6):
            for _ in range(4):
                ranks.each(lambda line: meet(line, b"hello"))
            ranks.each(lambda line: line.part())
            kept.append(ranks.store.num_keys())
        # A rank that has not run for a while on a busy machine has left no beat, or one more.
        assert max(kept) - min(kept) <= 3, kept


def test_a_later_line_of_the_same_ranks_does_not_hear_an_earlier_one():
    with Ranks(2) as first:
        first.each(lambda line: meet(line, b"old"))
        with Ranks(2, store=first.store) as second:
            assert second.each(lambda line: meet(line, b"new")) == [[b"new"] * 2] * 2


def test_a_rank_that_works_long_is_waited_for():
    def work(line: Line) -> list[bytes]:
        meet(line, b"")
        if line.rank == 1:
            time.sleep(3 * QUICK.silence_s)
        return meet(line, b"done")

    with Ranks(3) as ranks:
        assert ranks.each(work) == [[b"done"] * 3] * 3


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_falls_silent_is_named_on_all_others(gone):
    def work(line: Line) -> list[bytes]:
        meet(line, b"")
        if line.rank == gone:
            line.close()
            return []
        return meet(line, b"still here")

    with Ranks(3) as ranks:
        start = time.monotonic()
        outcomes = ranks.each(work)
        assert time.monotonic() - start < 4 * QUICK.silence_s
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != gone]
    for outcome in others:
        assert isinstance(outcome, RankLostError)
        assert f"rank {gone} (host" in str(outcome)
        assert "no sign of life" in str(outcome)


def test_a_rank_that_is_lost_while_the_others_work_cuts_their_work_short():
    def work(line: Line) -> float:
        meet(line, b"")
        if line.rank == 1:
            line.close()
            return 0.0
        start = time.monotonic()
        while not line.is_cut and time.monotonic() - start < 10:
            time.sleep(0.01)
        return time.monotonic() - start

    with Ranks(3) as ranks:
        waits = ranks.each(work)
    assert max(waits) < 4 * QUICK.silence_s


def test_a_rank_that_never_comes_is_named():
    with Ranks(3) as ranks:
        first, second = ranks.each(lambda line: meet(line, b""), without=2)
    assert str(first) == str(second)
    assert "rank 2 has not come to this call" in str(first)


def test_a_failure_cuts_the_work_before_the_next_meeting_only():
    cut_seen = threading.Event()

    def work(line: Line) -> tuple[bool, bool]:
        meet(line, b"")
        if line.rank == 1:
            line.cut()
            cut_seen.wait(5)
        else:
            while not line.is_cut:
                time.sleep(0.01)
            cut_seen.set()
        before = line.is_cut
        meet(line, b"")
        time.sleep(4 * QUICK.beat_s)
        return before, line.is_cut

    with Ranks(2) as ranks:
        assert ranks.each(work) == [(True, False)] * 2


def test_the_first_rank_hears_the_sum_of_all_progress():
    def work(line: Line) -> int:
        meet(line, b"")
        line.progress = 10 + line.rank
        deadline = time.monotonic() + 5
        while line.rank == 0 and line.total_progress < 33 and time.monotonic() < deadline:
            time.sleep(0.01)
        meet(line, b"")
        return line.total_progress

    with Ranks(3) as ranks:
        assert ranks.each(work)[0] == 33


CALLS = st.lists(st.tuples(*[st.sampled_from(["load", "save", "shard"])] * 3), min_size=1, max_size=4)


@given(rounds=CALLS, late=st.integers(0, 2))
@example(rounds=[("save", "load", "save"), ("load",) * 3, ("save", "save", "load"), ("save",) * 3], late=0)
@settings(max_examples=8)
def test_ranks_in_different_calls_are_told_so_and_meet_in_the_next(rounds, late):
    store = dist.HashStore()

    def call(rank: int, turn: int) -> Any:
        if rank == late:
            time.sleep(0.02)
        line = Line(store, "test", rank, 3, QUICK, call=rounds[turn][rank])
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
        assert {type(error) for error in found} == {DisagreementError}
        text = str(found[0])
        assert {str(error) for error in found} == {text}
        # Whoever comes last finds out; a third rank may come later still.
        assert sum(f"in {call}" in text for call in set(calls)) >= 2
        if len(set(calls)) == 2 and "where ranks" in text:
            (odd,) = (rank for rank in range(3) if calls.count(calls[rank]) == 1)
            assert f"rank {odd} is in {calls[odd]}, where ranks" in text


def test_a_rank_that_was_given_up_comes_to_the_next_call_not_to_the_one_it_skipped():
    store = dist.HashStore()
    others_gave_up = threading.Barrier(3)

    def call(rank: int, name: str) -> Any:
        line = Line(store, "test", rank, 3, replace(QUICK, silence_s=0.3, join_s=0.4), call=name)
        try:
            return meet(line, name.encode())
        except RankLostError as error:
            return str(error)
        finally:
            line.close()

    def live(rank: int) -> list[Any]:
        first = "" if rank == 1 else call(rank, "save")
        others_gave_up.wait(10)
        return [first, call(rank, "load")]

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(live, range(3)))
    assert "rank 1 has not come to this call" in outcomes[0][0]
    assert [later for _, later in outcomes] == [[b"load"] * 3] * 3


def ended() -> ProcessPlace:
    """Where a process was that ended."""
    code = (
        "from shardwise.execution.ranks.whereabouts import ProcessPlace; "
        "print(ProcessPlace.here().encode().decode())"
    )
    return ProcessPlace.of(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_whose_process_ended_between_calls_is_named_at_once(gone):
    patience = Patience(beat_s=0.05, silence_s=20, join_s=30)
    with Ranks(3, patience) as ranks:
        place = ended()
        ranks.store.set(f"shardwise/alive/place/{gone}", place.encode())
        ranks.store.set(f"shardwise/alive/pulse/{gone}", b"7 1.0")
        start = time.monotonic()
        one, other = ranks.each(lambda line: meet(line, b""), without=gone)
        assert time.monotonic() - start < 5
    assert str(one) == str(other)
    assert f"rank {gone} ({place}) is lost: its process has ended" in str(one)


def test_a_rank_that_ended_after_it_had_said_all_is_not_missed():
    """Its process may be gone before the others have read what it said."""
    with Ranks(2) as ranks:
        ranks.store.set("test/line1/joined/0", ended().encode())
        ranks.store.set("test/line1/beat/0", b"1 0")
        line = ranks.lines[1]
        line._order(lambda talk: talk.beat(lambda: True))
        with pytest.raises(RankLostError, match="rank 0 .* its process has ended"):
            line.find_lost()


def test_a_rank_of_another_machine_is_missed_when_its_pulse_stops():
    """Not before: for as long as it beats it may be busy."""
    away = replace(ProcessPlace.here(), host="afar", space="another kernel's")
    patience = replace(QUICK, join_s=60)
    with Ranks(2, patience) as ranks:
        ranks.store.set("shardwise/alive/place/1", away.encode())
        stop = threading.Event()

        def beat() -> None:
            beats = 0
            while not stop.wait(0.05):
                beats += 1
                ranks.store.set("shardwise/alive/pulse/1", f"{beats} 0.05".encode())

        beating = threading.Thread(target=beat)
        beating.start()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ranks.each, lambda line: meet(line, b""), without=1)
            time.sleep(3 * QUICK.silence_s)
            assert not waiting.done()
            stop.set()
            beating.join()
            start = time.monotonic()
            (error,) = waiting.result(timeout=20)
    assert time.monotonic() - start < 4 * QUICK.silence_s
    assert f"rank 1 (host afar, process {away.process}) is lost: no sign of life" in str(error)


def test_a_rank_of_this_machine_that_runs_is_not_lost_though_its_pulse_pauses():
    """A library may not let other threads run."""
    with Ranks(2) as ranks:
        ranks.store.set("shardwise/alive/place/1", ProcessPlace.here().encode())
        ranks.store.set("shardwise/alive/pulse/1", b"7 0.05")
        (error,) = ranks.each(lambda line: meet(line, b""), without=1)
    assert "rank 1 has not come to this call" in str(error)


def test_a_pulse_goes_on_until_its_store_or_its_process_ends(tmp_path):
    program = """if True:
        import sys, torch.distributed as dist
        from shardwise.execution.ranks.whereabouts import keep_beating
        store = dist.FileStore(sys.argv[1], 9)
        keep_beating(store, 5, 60.0)
    """
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], check=True)
    assert time.monotonic() - start < 30
    seen = dist.FileStore(str(tmp_path / "store"), 9)
    assert seen.check(["shardwise/alive/pulse/5"])
    assert seen.get("shardwise/alive/pulse/5") == b"ended"
    store = dist.FileStore(str(tmp_path / "store"), 9)
    before = set(threading.enumerate())
    keep_beating(store, 3, 60.0)
    keep_beating(store, 3, 0.01)
    (pulse,) = set(threading.enumerate()) - before

    def beats() -> int:
        return int(seen.get("shardwise/alive/pulse/3").split()[0]) if seen.check(["shardwise/alive/pulse/3"]) else 0

    deadline = time.monotonic() + 10
    while beats() < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert beats() >= 3
    del store
    pulse.join(5)
    assert not pulse.is_alive()


class DeadStore:
    """A store whose process does not answer any more."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def has_extended_api(self) -> bool:
        return False

    def add(self, key: str, more: int) -> int:
        self.release.wait(20)
        return 1


def test_a_store_that_does_not_answer_is_an_error_in_time():
    store = DeadStore()
    line = Line(store, "test", 1, 2, QUICK)
    with pytest.raises(RankLostError, match="has not answered"):
        meet(line, b"")
    store.release.set()
    line.close()


def test_patience_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError):
        Patience(beat_s=5, silence_s=1)


class CutStore:
    """A store that answers until the link to it is cut."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.link = threading.Event()
        self.link.set()

    def __getattr__(self, name: str) -> Any:
        self.link.wait()
        return getattr(self.store, name)


def test_a_rank_at_work_finds_out_without_the_store_that_it_is_cut_off():
    store = CutStore(dist.HashStore())
    lines = [Line(store.store, "test", 0, 2, QUICK), Line(store, "test", 1, 2, QUICK)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda line: meet(line, b""), lines))
    time.sleep(2 * QUICK.silence_s)
    assert [line.lost(in_haste=True) for line in lines] == [None, None]
    start = time.monotonic()
    store.link.clear()
    times = {}
    while len(times) < 4 and time.monotonic() - start < 10 * QUICK.silence_s:
        for line in lines:
            for in_haste in (True, False):
                if (lost := line.lost(in_haste=in_haste)) and (line.rank, in_haste) not in times:
                    times[line.rank, in_haste] = (time.monotonic() - start, str(lost))
        time.sleep(0.01)
    store.link.set()
    for line in lines:
        line.close()
    assert len(times) == 4
    for rank in range(2):
        assert times[rank, True][0] < QUICK.silence_s - QUICK.beat_s < times[rank, False][0] < 3 * QUICK.silence_s
    assert "no sign of life" in times[0, True][1]
    assert "rank 1 (host" in times[0, False][1]
    assert "the store through which the ranks meet has not answered" in times[1, False][1]


def test_a_rank_that_has_made_no_call_yet_is_told_of_by_who_waits(monkeypatch, caplog):
    monkeypatch.setattr(lost_ranks, "TELL_S", 0.2)
    with Ranks(3) as ranks:
        ranks.each(lambda line: meet(line, b""), without=2)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "waiting for rank 2 of 3 at one store"
