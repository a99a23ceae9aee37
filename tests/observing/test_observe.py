"""A process that is observed, through the public interface; and what is read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import tiny

import shardwise
from shardwise.models import torch_words
from shardwise.observing.own_memory import OwnMemory
from shardwise.observing.phases import is_listened_to, phase, tell
from shardwise.observing.rank_file import RankFile
from shardwise.observing.rank_record import RankRecord
from shardwise.observing.run_record import RunReader
from shardwise.observing.sampler import DeviceUse, Place, RankObserver


def only_rank(run: Path) -> RankRecord:
    [rank] = RunReader(run).read().ranks
    return rank


def python(words: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", words, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


PEAK = """
import sys, time, numpy, shardwise
with shardwise.observe(sys.argv[1], samples_per_second=50):
    held = []
    for _ in range(20):
        held.append(numpy.ones(1 << 20))  # 8 MiB
        time.sleep(0.005)
    time.sleep(0.2)
    del held
    time.sleep(0.2)
"""


def test_the_samples_peak_is_that_of_the_kernel(tmp_path: Path) -> None:
    done = python(PEAK, tmp_path)
    assert done.returncode == 0, done.stderr
    rank = only_rank(tmp_path)
    assert rank.is_ended
    samples = rank.samples()
    total = samples["anonymous"] + samples["shared"] + samples["file"]
    assert rank.peak_kib > total[0] + 150 * 1024
    assert total.max() == pytest.approx(rank.peak_kib, abs=9 * 1024)  # what may come between two samples
    assert total[-1] < rank.peak_kib - 100 * 1024
    assert len(samples["t"]) > 10
    assert (samples["t"][1:] >= samples["t"][:-1]).all()


def test_a_sample_takes_less_than_a_percent_at_fifty_a_second(tmp_path: Path) -> None:
    with shardwise.observe(tmp_path, samples_per_second=1) as observer:
        costs = []
        for _ in range(5):  # the least of some: the machine has other things to do
            start = time.thread_time()
            for _ in range(200):
                observer.sample()
            costs.append((time.thread_time() - start) / 200)
    assert 50 * min(costs) < 0.01


def test_the_phases_of_a_load_and_what_was_foreseen_are_written_down(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    with shardwise.observe(tmp_path / "run"):
        _, report = shardwise.from_pretrained(model, output_loading_info=True)
        with phase("mine"):
            pass
    rank = only_rank(tmp_path / "run")
    paths = {times.path for times in rank.phases()}
    inside = {path[1] for path in paths if path[0] == "from_pretrained" and len(path) > 1}
    assert {"index", "plan", "read", "audit"} <= inside
    assert ("from_pretrained", "read", "materialize") in paths
    assert ("mine",) in paths
    assert not rank.stacks
    assert rank.now_in() == ()
    [(load, around)] = [(told.facts, told.around) for told in rank.told if told.facts["tell"] == "load"]
    assert around is not None
    assert around.path == ("from_pretrained",)
    assert load["read_bytes"] == report.read_bytes
    assert load["forecast"]["host_bytes"] == report.forecast.host_bytes
    assert len(rank.divided()["t"]) >= 1
    assert RunReader(tmp_path / "run").read().label == "run (model)"


def test_a_phase_that_fails_is_left(tmp_path: Path) -> None:
    with shardwise.observe(tmp_path):
        with pytest.raises(shardwise.ShardwiseError):
            shardwise.from_pretrained(tmp_path / "nothing")
        thread = threading.Thread(target=_in_a_phase)
        thread.start()
        thread.join()
    rank = only_rank(tmp_path)
    assert not rank.stacks
    assert {times.lane for times in rank.phases() if times.path == ("beside",)} == {1}
    assert not is_listened_to()


def test_the_first_lane_is_of_who_observes(tmp_path: Path) -> None:
    with shardwise.observe(tmp_path):
        thread = threading.Thread(target=_in_a_phase)
        thread.start()
        thread.join()
        with phase("mine"):
            pass
    assert {times.path: times.lane for times in only_rank(tmp_path).phases()} == {("beside",): 1, ("mine",): 0}


def test_lines_are_in_the_order_of_their_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write = RankFile.write

    def slowly(file: RankFile, line: Any) -> None:
        write(file, line)
        time.sleep(0.001)

    def some() -> None:
        for _ in range(15):
            _in_a_phase()

    monkeypatch.setattr(RankFile, "write", slowly)
    with shardwise.observe(tmp_path, samples_per_second=100):
        threads = [threading.Thread(target=some) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    [_, *lines] = map(json.loads, (tmp_path / "observed" / "rank-00000.jsonl").read_text().splitlines())
    times = [line["t"] if isinstance(line, dict) else line[1] for line in lines]
    assert times == sorted(times)
    marks = [line for line in lines if isinstance(line, list) and line[0] in (2, 3)]
    assert len({line[2] for line in marks}) == 4
    assert len(marks) == 4 * 15 * 2


def test_after_the_end_nothing_is_looked_at(tmp_path: Path) -> None:
    with shardwise.observe(tmp_path) as observer:
        pass
    size = (tmp_path / "observed" / "rank-00000.jsonl").stat().st_size
    observer.sample()
    observer.tell("late", {})
    assert (observer.fault, (tmp_path / "observed" / "rank-00000.jsonl").stat().st_size) == ("", size)


def test_facts_that_are_no_json_end_the_observing_alone(tmp_path: Path) -> None:
    with shardwise.observe(tmp_path) as observer:
        tell("load", {"dtype": torch.float32})
    assert "something was told that is no JSON (Object of type dtype" in observer.fault
    assert not only_rank(tmp_path).is_ended


LEFT_OPEN = """
import sys, time, shardwise
from shardwise.observing.phases import phase
observing = shardwise.observe(sys.argv[1], samples_per_second=100)
observing.__enter__()
inner = phase("open")
inner.__enter__()
"""


def test_an_interpreter_that_ends_ends_the_observing_in_order(tmp_path: Path) -> None:
    done = python(LEFT_OPEN, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert only_rank(tmp_path).is_ended


HANDLED = """
import signal, sys, shardwise
from shardwise.observing.phases import phase
from shardwise.observing.rank_file import RankFile
write = RankFile.write
def interrupted(file, line):
    if isinstance(line, list) and line[0] == 2 and line[3] == "on":
        signal.raise_signal(signal.SIGUSR1)
    write(file, line)
def handler(*_):
    with phase("of the handler"):
        pass
signal.signal(signal.SIGUSR1, handler)
with shardwise.observe(sys.argv[1]):
    RankFile.write = interrupted
    with phase("on"):
        pass
"""


def test_a_handler_of_a_signal_may_mark_a_phase(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HANDLED, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == 0
    assert {times.name for times in only_rank(tmp_path).phases()} == {"on", "of the handler"}


def _in_a_phase() -> None:
    with phase("beside"):
        pass


KILLED = """
import sys, time, shardwise
from shardwise.observing.phases import phase
with shardwise.observe(sys.argv[1], samples_per_second=100), phase("forever"):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_has_written_is_whole_and_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.1)
            process.send_signal(signal.SIGKILL)
    file = tmp_path / "observed" / "rank-00000.jsonl"
    for line in file.read_text().splitlines():
        json.loads(line)
    with file.open("a") as cut:
        cut.write("[0,1.5,12")  # as a full disk leaves it
    with shardwise.observe(tmp_path):
        pass
    run = RunReader(tmp_path).read()
    assert run.ranks[0].is_ended
    assert run.notes == (
        "observed/rank-00000.jsonl: lines that cannot be understood were passed over: 1",
        "earlier runs into this folder, not shown: 2",
    )


def test_a_child_process_is_not_observed(tmp_path: Path) -> None:
    with shardwise.observe(tmp_path):
        child = os.fork()
        if child == 0:
            with phase("of the child"):
                os._exit(int(is_listened_to()))
        assert os.waitpid(child, 0)[1] == 0
    assert "of the child" not in (tmp_path / "observed" / "rank-00000.jsonl").read_text()


def test_one_observer_for_a_process_and_one_process_for_a_file(tmp_path: Path) -> None:
    with shardwise.observe(tmp_path):
        with pytest.raises(shardwise.ConfigError, match="observed already"), shardwise.observe(tmp_path / "other"):
            pass
        done = python("import sys, shardwise\nwith shardwise.observe(sys.argv[1]): pass", tmp_path)
        assert "StorageError" in done.stderr
        assert "another process is observed into this file" in done.stderr
    with pytest.raises(shardwise.ConfigError, match="samples_per_second=0"):
        shardwise.observe(tmp_path, samples_per_second=0).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(shardwise.StorageError, match="cannot be written"):
        shardwise.observe(tmp_path / "file").__enter__()


FORKED = """
import os, sys, shardwise
from shardwise.observing.phases import phase
run = sys.argv[1]
with shardwise.observe(run, samples_per_second=100):
    with phase("of both"):
        if os.fork() == 0:
            os.kill(os.getpid(), 19)  # it stays, as a worker does; whoever continues it has it leave both blocks
            sys.exit(0)
with shardwise.observe(run):  # while the child is there
    pass
child = int(open(f"/proc/self/task/{os.getpid()}/children").read())
os.kill(child, 18)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_that_stays_holds_no_file_and_writes_no_end(tmp_path: Path) -> None:
    done = python(FORKED, tmp_path)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "observed" / "rank-00000.jsonl"
    assert file.read_text().count('"end":true') == 2
    run = RunReader(tmp_path).read()
    assert run.notes == ("earlier runs into this folder, not shown: 1",)


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_sample_that_fails_hides_no_error_of_the_block(
    when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(device: torch.device) -> tuple[int, int, int]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("shardwise.verbs.observe.this_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(
        "shardwise.verbs.observe.memory_in_use", failing if when == "before" else lambda _: (1, 2, 3)
    )
    observers = []

    def block() -> None:
        with shardwise.observe(tmp_path) as observer:
            observers.append(observer)
            monkeypatch.setattr("shardwise.verbs.observe.memory_in_use", failing)
            observer.sample()
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        block()
    [observer] = observers
    assert observer.fault == "samples have ended: CUDA error: device-side assert triggered"
    with shardwise.observe(tmp_path):  # the file was closed
        pass


def test_ranks_together_divide_no_more_often_than_one_alone(tmp_path: Path) -> None:
    """All wait for whoever is late: a hundredth of the ranks' time may not be a hundredth of the time of each."""
    counts = []
    enough = time.monotonic() + 0.9
    for size in (1, 1000):
        memory = OwnMemory()
        shares, looks = memory.shares(), []

        def slowly(shares=shares, looks=looks):
            looks.append(time.sleep(0.001))
            return shares

        memory.shares = slowly
        place = Place("a", 0, size, "m")
        with RankObserver(RankFile(tmp_path / str(size), 0), place, memory, DeviceUse, 1):
            began = time.monotonic()
            while time.monotonic() < enough or (size == 1 and len(looks) < 2):  # a look of a busy machine is long
                with phase("short"):
                    time.sleep(0.01)
            enough = 2 * time.monotonic() - began
        counts.append(len(looks))
    assert counts[0] > 1
    assert counts[1] == 1


FULL = """
import resource, sys, torch, shardwise
from shardwise.observing.phases import phase
with shardwise.observe(sys.argv[1], samples_per_second=100) as observer:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    for _ in range(100):
        with phase("on"):
            pass
print(observer.fault)
"""


def test_a_full_disk_ends_the_observing_and_nothing_else(tmp_path: Path) -> None:
    done = python(FULL, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "it cannot be written any more (File too large)" in done.stdout
    assert not only_rank(tmp_path).is_ended


def _two_ranks(run: str) -> None:
    with shardwise.observe(run), phase("together"):
        torch.distributed.barrier()


def _one_cannot(run: str) -> str:
    place = Path(run) / f"rank-{torch.distributed.get_rank()}"
    if torch.distributed.get_rank() == 1:
        place.touch()
    try:
        with shardwise.observe(place):
            return ""
    except shardwise.StorageError as error:
        return str(error).replace(str(place), "")


@pytest.mark.distributed
def test_ranks_write_a_file_each_and_raise_together(worlds, tmp_path: Path) -> None:
    worlds(2).run(_two_ranks, str(tmp_path / "run"))
    run = RunReader(tmp_path / "run").read()
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert {rank.world_size for rank in run.ranks} == {2}
    assert len({rank.machine for rank in run.ranks}) == 1
    first, second = worlds(2).run(_one_cannot, str(tmp_path))
    assert "cannot be written" in first
    assert "cannot be written" in second


class _Accelerator:
    """As torch has one, with 10 bytes taken of 64."""

    is_begun = False

    def is_initialized(self) -> bool:
        return self.is_begun

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert self.is_begun
        return 54, 64

    def memory_allocated(self, device: torch.device) -> int:
        return 5

    def memory_reserved(self, device: torch.device) -> int:
        return 8


def test_an_accelerator_is_looked_at_once_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _Accelerator()
    monkeypatch.setattr(torch_words, "module_of", lambda device: module)
    assert torch_words.memory_in_use(torch.device("cuda")) == (0, 0, 0)
    module.is_begun = True
    assert torch_words.memory_in_use(torch.device("cuda")) == (5, 8, 10)


def test_what_the_system_does_not_tell_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "pread", lambda *_: b"VmRSS: 12 kB\n")
    with pytest.raises(shardwise.ConfigError, match="RssAnon"):
        OwnMemory()
