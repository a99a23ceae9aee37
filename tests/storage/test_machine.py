from __future__ import annotations

import subprocess
import sys

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
