"""Threads that work off a list and leave it together."""

import subprocess
import sys
import threading
import time

import pytest

from shardwise.transfer.workers import WorkerPool, in_background


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
        while task > 5 and not pool._stop:  # of the other worker
            time.sleep(0.001)
        done.append(task)

    pool = WorkerPool(carry_out, [None, None], nothing)
    with pytest.raises(OSError, match="gone"):
        pool.run(list(range(1000)))
    assert set(done) <= {0, 1, 2, 3, 4, 6}


def test_a_reason_to_leave_is_noticed_although_a_worker_hangs():
    release = threading.Event()

    def check() -> None:
        raise RuntimeError("another rank failed")

    with pytest.raises(RuntimeError, match="another rank"):
        WorkerPool(lambda task, tool: release.wait(), [None], check).run([1])
    release.set()


def test_a_function_runs_during_a_block_which_ends_with_its_error():
    entered = threading.Event()
    with in_background(entered.set):
        entered.wait()

    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), in_background(fail):
        pass


def test_a_function_runs_in_the_background_after_the_end_of_the_main_thread(monkeypatch):
    """As a checkpoint in progress does it: executors take no more work by then."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    entered = threading.Event()
    with in_background(entered.set):
        entered.wait()


def test_a_failed_block_waits_for_its_function():
    done: list[int] = []

    def work() -> None:
        time.sleep(0.05)
        done.append(1)

    with pytest.raises(RuntimeError, match="the block"), in_background(work):
        raise RuntimeError("the block")
    assert done == [1]


class SlowToEnd(threading.Thread):
    def run(self) -> None:
        super().run()
        time.sleep(0.05)


def test_no_worker_is_alive_when_all_is_done(monkeypatch):
    """One that is about to end may hold its buffer, in addition to those of the next."""
    before = threading.enumerate()  # workers that hung, of other tests
    monkeypatch.setattr(threading, "Thread", SlowToEnd)
    WorkerPool(lambda task, buffer: None, [bytearray(8)] * 4).run(range(8))
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in left if thread.name.startswith("shardwise-worker")]


@pytest.mark.slow
def test_a_forked_process_loads_with_several_threads(tmp_path):
    """Four threads that are the first to compute replaced the pool of threads that it inherits at once."""
    command = (sys.executable, "-m", "tests.loading.forked_loads", str(tmp_path), "100")
    output = subprocess.run(command, check=True, capture_output=True, text=True)
    assert output.stdout == "0 of 100 have failed\n", output.stderr[-2000:]
