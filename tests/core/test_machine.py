import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

from shardwise.core import machine


def test_processes_of_one_machine_agree_on_it() -> None:
    code = "from shardwise.core import machine; print(machine.boot_id(), machine.namespace_id('pid'))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == [machine.boot_id(), machine.namespace_id("pid")]


def test_a_name_is_all_there_is_without_proc(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    machine.boot_id.cache_clear()
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr(machine, "_NAMESPACES", tmp_path / "none")
    try:
        assert machine.boot_id().startswith("host ")
        assert machine.namespace_id("pid").startswith(machine.boot_id())
    finally:
        machine.boot_id.cache_clear()


def test_a_process_is_known_by_its_birth_until_it_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        started = machine.process_start_time(process.pid)
        assert started == machine.process_start_time(process.pid) != ""
        assert started != machine.process_start_time(1)
        assert not machine.is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        while not machine.is_stopped(process.pid):
            time.sleep(0.01)
        assert machine.process_start_time(process.pid) == started
    finally:
        process.kill()
    while machine.process_start_time(process.pid):  # although nobody has waited for it yet
        time.sleep(0.01)
    process.wait()
    assert machine.process_start_time(process.pid) == ""
    assert not machine.is_stopped(process.pid)


def test_a_process_whose_start_cannot_be_read_has_not_certainly_ended(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """As for a process of another user, if /proc hides those."""
    here = machine.ProcessId.here()

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(machine, "_status", refuse)
    monkeypatch.setattr(os, "kill", refuse)
    assert not here.has_ended()
    assert not here.is_running()


def test_time_does_not_go_backwards_if_a_stop_is_noted_while_it_is_read(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    watch = object.__new__(machine._StopWatch)
    watch._stops, clock_s = (0.0, 100.0), 100.0

    def read_and_stop() -> float:
        nonlocal clock_s
        before_s, clock_s = clock_s, 600.0
        watch._stops = 499.0, 600.0
        return before_s

    monkeypatch.setattr(machine, "_stop_watch", lambda: watch)
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=read_and_stop))
    assert [machine.running_s(), machine.running_s()] == [100.0, 101.0]


def test_the_time_for_which_a_process_is_stopped_is_known() -> None:
    code = """if True:
        import time
        from shardwise.core import machine
        machine._AWAKE_S, machine._STOP_S = 0.01, 0.1
        before_s = time.monotonic() - machine.running_s()
        input("ready\\n")
        print(time.monotonic() - machine.running_s() - before_s)
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        while not machine.is_stopped(process.pid):
            time.sleep(0.01)
        time.sleep(0.4)
        process.send_signal(signal.SIGCONT)
        assert float(process.communicate("\n")[0]) >= 0.25
