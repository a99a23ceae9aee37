"""Requests to stop by signals to this process."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
from tests.support.fork_server import start_server
from tests.support.local_ranks import LIMIT_S
from torch.utils.data import DataLoader, get_worker_info

from shardwise.ranks import processes, stop_signals
from shardwise.ranks.stop_signals import (
    RELAYED,
    STOP_SIGNALS,
    StoppedNowError,
    StopRequest,
    shield_data_workers,
    stopping_on_signals,
)

pytestmark = pytest.mark.usefixtures("terminal_signals")


def until(condition: Callable[[], bool]) -> None:
    """Let signals come until a condition holds. pytest's limit ends a wait in vain."""
    while not condition():
        time.sleep(0.01)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def end_by(number: int) -> None:
    """Send a signal, and go on until it raises."""
    send(number)
    until(lambda: False)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request_and_ctrl_c_is_acknowledged(number, capfd):
    with stopping_on_signals() as request:
        assert not request.is_made
        send(number)
        until(lambda: request.is_made)
        assert request.number == number
    told = "finishing the current step, then saving" in capfd.readouterr().err
    assert told == (number == signal.SIGINT)


@pytest.mark.parametrize("other", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_within_a_second_of_the_first_are_one_request(monkeypatch, other):
    monkeypatch.setattr(stop_signals, "SAME_REQUEST_S", 3600.0)
    with stopping_on_signals() as request:
        send(signal.SIGTERM)
        until(lambda: request.is_made)
        for _ in range(3):
            send(other)
            send(RELAYED)
        assert request.number == signal.SIGTERM


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGTERM, StoppedNowError), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_later_signal_ends_the_process_but_not_a_relayed_one(monkeypatch, number, kind):
    monkeypatch.setattr(stop_signals, "SAME_REQUEST_S", 0.0)
    with stopping_on_signals() as request:
        send(RELAYED)
        until(lambda: request.is_made)
        for _ in range(3):
            send(RELAYED)
        with pytest.raises(kind) as caught:
            end_by(number)
    if kind is StoppedNowError:
        assert caught.value.code == 128 + number


def test_nothing_is_raised_if_the_console_is_gone(capfd):
    ours, theirs = os.pipe()
    os.close(ours)
    stderr = os.dup(2)
    try:
        os.dup2(theirs, 2)
        with stopping_on_signals() as request:
            send(signal.SIGINT)
            until(lambda: request.is_made)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(theirs)


@pytest.mark.parametrize(
    ("name", "number", "kind"),
    [
        ("_PATIENCE_S", signal.SIGTERM, StoppedNowError),
        ("_PATIENCE_AT_CTRL_C_S", signal.SIGINT, KeyboardInterrupt),
    ],
)
def test_a_request_does_not_keep_a_rank_that_waits_for_another_one(monkeypatch, caplog, name, number, kind):
    monkeypatch.setattr(stop_signals, name, 0.0)
    monkeypatch.setattr(stop_signals, "describe_wait", lambda: "rank 1, which sleeps")
    with stopping_on_signals(), pytest.raises(kind):
        end_by(number)
    assert "stopped while waiting for rank 1, which sleeps" in caplog.text


def test_a_process_in_a_collective_ends_all_the_same(monkeypatch):
    """Where no handler runs: here the main thread goes on whatever is raised in it."""
    ended = []
    monkeypatch.setattr(stop_signals, "SAME_REQUEST_S", 0.0)
    monkeypatch.setattr(stop_signals, "_RAISE_S", 0.0)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(StopRequest, "handle", lambda *_: None)
    with stopping_on_signals() as request:
        send(signal.SIGTERM)
        until(lambda: request.is_made)
        until(lambda: send(signal.SIGTERM) or bool(ended))
    assert ended == [128 + signal.SIGTERM]


class Rows(list[int]):
    """Rows with which a data worker starts a thread that blocks no signals, before its init function is called."""

    def __setstate__(self, _: object) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def change_first_row(_worker: int) -> None:
    get_worker_info().dataset[0] = -1


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_data_workers_obey_their_parent_alone(method):
    """A data loader raises an error if a signal to the process group ends one of its workers."""
    start_server()
    rows = Rows(range(100))
    rows.start = method  # so that it has a state
    loader = DataLoader(rows, num_workers=1, multiprocessing_context=method, worker_init_fn=change_first_row)
    with stopping_on_signals() as request:
        shield_data_workers(loader)
        batches = iter(loader)
        assert int(next(batches)) == -1
        [worker] = batches._workers
        for number in (*STOP_SIGNALS, RELAYED):
            subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
        assert [int(batch) for batch in batches] == list(range(1, 100))
        assert not request.is_made, "a signal to the worker is none to its parent"
    batches = iter(loader)
    next(batches)
    [worker] = batches._workers
    if method == "fork":
        worker.terminate()
    else:  # another thread may take that signal. The init function has what ends the worker, also with this process
        loader.worker_init_fn = batches._worker_init_fn = None
    worker.join()
    assert worker.exitcode == 0


def terminate_program() -> None:
    """End with the number of the signal that has ended a program."""
    with subprocess.Popen(["sleep", "1000"]) as program:
        program.terminate()
        os._exit(-program.wait(timeout=LIMIT_S))


def test_signals_to_other_children_are_as_without_a_block():
    """Workers of a reward that take too long, and programs that they start."""
    context = multiprocessing.get_context("fork")
    waiting, starting = context.Process(target=threading.Event().wait), context.Process(target=terminate_program)
    with stopping_on_signals() as request:
        waiting.start()
        starting.start()
        waiting.terminate()
        starting.join()
        waiting.join()
    assert (waiting.exitcode, starting.exitcode) == (-signal.SIGTERM, signal.SIGTERM)
    assert not request.is_made, "a signal to a child is none to its parent"


@pytest.mark.parametrize("block", [stopping_on_signals, lambda: processes._signals([], None)])
def test_a_handler_of_c_code_becomes_the_default_one(monkeypatch, block):
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda _number: None)
        with block():
            pass
    assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_DFL}
