"""Threads that work off a list and leave it together."""

import threading
import time

import pytest

from shardwise.execution.memory import Prefetch, WorkerPool


def nothing() -> None:
    pass


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tasks", [0, 1, 50])
def test_every_task_is_carried_out_once(threads, tasks):
    done: list[int] = []
    WorkerPool(lambda task, tool: done.append(task), list(range(threads)), nothing).run(list(range(tasks)))
    assert sorted(done) == list(range(tasks))


def test_the_first_error_ends_the_work_and_is_raised():
    done: list[int] = []

    def carry_out(task: int, tool: None) -> None:
        if task == 5:
            raise OSError("gone")
        time.sleep(0.002)
        done.append(task)

    with pytest.raises(OSError, match="gone"):
        WorkerPool(carry_out, [None, None], nothing).run(list(range(1000)))
    assert len(done) < 100


def test_a_reason_to_leave_is_noticed_although_a_worker_hangs():
    release = threading.Event()

    def check() -> None:
        raise RuntimeError("another rank failed")

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="another rank"):
        WorkerPool(lambda task, tool: release.wait(20), [None], check).run([1])
    assert time.monotonic() - start < 5
    release.set()


def test_what_is_begun_ahead_is_there_or_fails_where_it_is_wanted():
    assert Prefetch(lambda: 41 + 1).value(nothing) == 42

    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        Prefetch(fail).value(nothing)


def test_waiting_for_what_is_ahead_can_be_left():
    release = threading.Event()

    def check() -> None:
        raise RuntimeError("another rank failed")

    with pytest.raises(RuntimeError, match="another rank"):
        Prefetch(lambda: release.wait(20)).value(check)
    release.set()
