import os
import signal
import subprocess
import sys
import time

from shardwise.storage import machine


def test_processes_of_one_machine_agree_on_it() -> None:
    code = "from shardwise.storage import machine; print(machine.boot(), machine.process_space())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == [machine.boot(), machine.process_space()]


def test_a_name_is_all_there_is_without_proc(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    machine.boot.cache_clear()
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr(machine, "_PROCESS_NAMESPACE", str(tmp_path / "none"))
    try:
        assert machine.boot().startswith("host ")
        assert machine.process_space().startswith(machine.boot())
    finally:
        machine.boot.cache_clear()


def test_a_process_is_known_by_its_birth_until_it_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        born = machine.born(process.pid)
        assert born == machine.born(process.pid) != ""
        assert born != machine.born(1)
        assert not machine.is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not machine.is_stopped(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert machine.is_stopped(process.pid)
        assert machine.born(process.pid) == born
    finally:
        process.kill()
    while machine.born(process.pid) and time.monotonic() < deadline + 10:
        time.sleep(0.01)
    assert machine.born(process.pid) == ""  # although nobody has waited for it yet
    process.wait()
    assert machine.born(process.pid) == ""
    assert not machine.is_stopped(process.pid)


def test_a_process_whose_start_cannot_be_read_has_not_certainly_ended(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """As for a process of another user, if /proc hides those."""
    here = machine.ProcessPlace.here()

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(machine, "_status", refuse)
    monkeypatch.setattr(os, "kill", refuse)
    assert not here.has_ended()
    assert not here.is_running()
