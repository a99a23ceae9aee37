"""The line between ranks: messages, beats, and who is lost. Ranks are threads with one store here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.errors import ConfigError, RankLostError
from shardwise.execution.line import Line, Patience

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
            assert ranks.each(lambda line, t=turn: line.meet(b"x" * line.rank + bytes([t]))) == [wanted] * size


def test_nothing_but_signs_of_life_stays_in_the_store():
    with Ranks(3) as ranks:
        for _ in range(4):
            ranks.each(lambda line: line.meet(b"hello"))
        kept = ranks.store.num_keys()
        for _ in range(4):
            ranks.each(lambda line: line.meet(b"hello"))
        assert ranks.store.num_keys() == kept


def test_a_later_line_of_the_same_ranks_does_not_hear_an_earlier_one():
    with Ranks(2) as first:
        first.each(lambda line: line.meet(b"old"))
        with Ranks(2, store=first.store) as second:
            assert second.each(lambda line: line.meet(b"new")) == [[b"new"] * 2] * 2


def test_a_rank_that_works_long_is_waited_for():
    def work(line: Line) -> list[bytes]:
        line.meet(b"")
        if line.rank == 1:
            time.sleep(3 * QUICK.silence_s)
        return line.meet(b"done")

    with Ranks(3) as ranks:
        assert ranks.each(work) == [[b"done"] * 3] * 3


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_falls_silent_is_named_on_all_others(gone):
    def work(line: Line) -> list[bytes]:
        line.meet(b"")
        if line.rank == gone:
            line.close()
            return []
        return line.meet(b"still here")

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
        line.meet(b"")
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
        first, second = ranks.each(lambda line: line.meet(b""), without=2)
    assert str(first) == str(second)
    assert "rank 2 has not come to this call" in str(first)


def test_a_failure_cuts_the_work_before_the_next_meeting_only():
    cut_seen = threading.Event()

    def work(line: Line) -> tuple[bool, bool]:
        line.meet(b"")
        if line.rank == 1:
            line.cut()
            cut_seen.wait(5)
        else:
            while not line.is_cut:
                time.sleep(0.01)
            cut_seen.set()
        before = line.is_cut
        line.meet(b"")
        time.sleep(4 * QUICK.beat_s)
        return before, line.is_cut

    with Ranks(2) as ranks:
        assert ranks.each(work) == [(True, False)] * 2


def test_the_first_rank_hears_the_sum_of_all_progress():
    def work(line: Line) -> int:
        line.meet(b"")
        line.progress = 10 + line.rank
        deadline = time.monotonic() + 5
        while line.rank == 0 and line.total_progress < 33 and time.monotonic() < deadline:
            time.sleep(0.01)
        line.meet(b"")
        return line.total_progress

    with Ranks(3) as ranks:
        assert ranks.each(work)[0] == 33


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
        line.meet(b"")
    store.release.set()
    line.close()


def test_patience_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError):
        Patience(beat_s=5, silence_s=1)
