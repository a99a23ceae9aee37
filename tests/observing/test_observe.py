"""Recording the phases and the memory of a process, and reading damaged records."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.observing.synthetic_runs import make_metrics, make_rank, make_run
from tests.support.local_ranks import LocalRanks
from tests.training import tiny

import shardwise
from shardwise.engines import observe as observers
from shardwise.observing import is_observed, observed_by, phase
from shardwise.run_records import RankRecord, read_run


def only_rank(run: Path) -> RankRecord:
    [rank] = read_run(run).ranks
    return rank


def file_in(run: Path) -> Path:
    return run / "observed" / "rank-00000.jsonl"


def python(words: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    command = [sys.executable, "-c", words, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


PEAK = """
import sys, pathlib, time, numpy, shardwise
def wait_for_samples():
    [file] = pathlib.Path(sys.argv[1]).glob("observed/*")
    lines = file.read_bytes().count(b"\\n") + 2  # one may be on its way
    while file.read_bytes().count(b"\\n") < lines:
        time.sleep(0.001)
with shardwise.observe(sys.argv[1], samples_per_second=100):
    held = []
    for _ in range(20):
        held.append(numpy.ones(1 << 20))  # 8 MiB
        wait_for_samples()
    del held
    wait_for_samples()
"""


def test_the_samples_peak_is_that_of_the_kernel(tmp_path: Path) -> None:
    done = python(PEAK, tmp_path)
    assert done.returncode == 0, done.stderr
    rank = only_rank(tmp_path)
    samples = rank.samples
    total = rank.host_kib + samples["file"]
    peak = rank.peak_kib("peak")
    assert rank.is_closed
    assert peak > total[0] + 150 * 1024
    assert total.max() == pytest.approx(peak, abs=9 * 1024)
    assert total[-1] < peak - 100 * 1024
    assert len(samples["t"]) > 10
    assert (samples["t"][1:] >= samples["t"][:-1]).all()


def test_the_phases_of_a_load_are_recorded_with_memory_in_each(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    with shardwise.observe(tmp_path / "run", samples_per_second=0.1):
        shardwise.from_pretrained(model)
        with phase("mine"):
            pass
    rank = only_rank(tmp_path / "run")
    paths = {span.path for span in rank.phases}
    assert {("from_pretrained", name) for name in ("index", "plan", "read", "audit")} <= paths
    assert ("from_pretrained", "read", "materialize") in paths
    assert ("mine",) in paths
    for span in rank.phases:
        assert any(span.start <= t <= span.stop for t in rank.samples["t"])


def test_a_phase_that_fails_is_left_and_threads_are_apart(tmp_path: Path) -> None:
    with shardwise.observe(tmp_path):
        with pytest.raises(shardwise.ShardwiseError):
            shardwise.from_pretrained(tmp_path / "nothing")
        thread = threading.Thread(target=_in_a_phase)
        thread.start()
        thread.join()
        with phase("mine"):
            pass
    spans = {span.path: span.thread for span in only_rank(tmp_path).phases}
    assert spans["aside",] == 1
    assert spans["mine",] == 0
    assert not is_observed()


def test_the_end_of_one_observer_ends_no_other() -> None:
    first: list[str | None] = []
    second: list[str | None] = []
    with observed_by(first.append):
        with observed_by(second.append), phase("both"):
            pass
        with phase("mine"):
            pass
    assert (first, second) == (["both", None, "mine", None], ["both", None])
    assert not is_observed()


def _in_a_phase() -> None:
    with phase("aside"):
        pass


def test_lines_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    with shardwise.observe(tmp_path, samples_per_second=100) as observer:
        threads = [threading.Thread(target=lambda: [_in_a_phase() for _ in range(15)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    size = file_in(tmp_path).stat().st_size
    observer.sample()
    assert (observer.fault, file_in(tmp_path).stat().st_size) == ("", size)  # nothing after the end
    [_, *lines] = map(json.loads, file_in(tmp_path).read_text().splitlines())
    times = [line["t"] if isinstance(line, dict) else line[0] for line in lines]
    assert times == sorted(times)
    assert [span.path for span in only_rank(tmp_path).phases] == [("aside",)] * 60


def _record_until_killed(run: str) -> None:
    with shardwise.observe(run, samples_per_second=100), phase("forever"):
        Path(run, "ready").touch()
        threading.Event().wait()


@pytest.mark.distributed
def test_a_killed_process_leaves_whole_lines_and_the_next_run_replaces_them(tmp_path: Path) -> None:
    with LocalRanks(1, is_forked=True) as ranks:
        ranks.start(_record_until_killed, str(tmp_path))
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        ranks.kill()
    for line in file_in(tmp_path).read_text().splitlines():
        json.loads(line)
    run = read_run(tmp_path)
    assert [span.path for span in run.ranks[0].phases] == [("forever",)]
    [note] = run.notes
    assert note.startswith("rank 0 did not end in order. Its last line is of second ")
    with shardwise.observe(tmp_path):
        pass
    run = read_run(tmp_path)
    assert (run.ranks[0].is_closed, run.notes, run.ranks[0].phases) == (True, [], [])


def _hold(lock: threading.Lock, is_held: threading.Event, until: threading.Event) -> None:
    with lock:
        is_held.set()
        until.wait()


def _fork_while_observed(run: str) -> str:
    """What is recorded by a process whose child, as a worker, lives on. At its end the child leaves all blocks.

    It is forked while another thread writes a sample.
    """
    child = -1
    is_written, is_forked = threading.Event(), threading.Event()
    try:
        with shardwise.observe(run, samples_per_second=100) as observer, phase("of both"):
            threading.Thread(target=_hold, args=(observer._lock, is_written, is_forked)).start()
            is_written.wait()
            child = os.fork()
            is_forked.set()
            if child == 0:
                with phase("of the child"):
                    os.kill(os.getpid(), signal.SIGSTOP)
    finally:
        if child == 0:
            os._exit(sys.exc_info()[0] is not None)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    before = file_in(Path(run)).read_text()
    with shardwise.observe(run):  # while the child is there
        pass
    os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0
    return before + file_in(Path(run)).read_text()


@pytest.mark.distributed
def test_a_child_that_stays_holds_no_file_and_writes_nothing(tmp_path: Path) -> None:
    with LocalRanks(1, is_forked=True) as ranks:
        [text] = ranks.run(_fork_while_observed, str(tmp_path))
    assert text.count('"closed":true') == 2
    assert "of both" in text
    assert "of the child" not in text


def test_one_observer_for_a_process_and_one_process_for_a_file(worlds, tmp_path: Path) -> None:
    with shardwise.observe(tmp_path):
        with pytest.raises(shardwise.ConfigError, match="observed already"), shardwise.observe(tmp_path / "other"):
            pass
        [error] = worlds(1).run(_observed, str(tmp_path))
        assert "another process records into this file" in error
    assert only_rank(tmp_path).is_closed
    with pytest.raises(shardwise.ConfigError, match="samples_per_second=0"):
        shardwise.observe(tmp_path, samples_per_second=0).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(shardwise.StorageError, match="cannot be written"):
        shardwise.observe(tmp_path / "file").__enter__()


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_sample_that_fails_hides_no_error_of_the_block(
    when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(_: torch.device) -> tuple[int, int, int]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def fails_within() -> None:
        with shardwise.observe(tmp_path) as observer:
            found.append(observer)
            monkeypatch.setattr("shardwise.engines.observe.memory_in_use", failing)
            observer.sample()
            raise KeyError("of the block")

    found: list[observers.RankObserver] = []
    first = failing if when == "before" else lambda _: (1, 2, 3)
    monkeypatch.setattr("shardwise.engines.observe.this_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("shardwise.engines.observe.memory_in_use", first)
    with pytest.raises(KeyError, match="of the block"):
        fails_within()
    assert found[0].fault == "CUDA error: device-side assert triggered"
    with shardwise.observe(tmp_path):  # the file was closed
        pass


def _fill_the_disk(run: str) -> str:
    with shardwise.observe(run, samples_per_second=100) as observer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        for _ in range(100):
            _in_a_phase()
    return observer.fault


@pytest.mark.distributed
def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    with LocalRanks(1, is_forked=True) as limited:
        [fault] = limited.run(_fill_the_disk, str(tmp_path))
    assert "File too large" in fault
    assert not only_rank(tmp_path).is_closed


def _observed(place: str) -> str:
    """The error where a file cannot be recorded into."""
    try:
        with shardwise.observe(place):
            return ""
    except shardwise.StorageError as error:
        return str(error)


def _one_cannot(run: str) -> str:
    place = Path(run) / f"rank-{torch.distributed.get_rank()}"
    if torch.distributed.get_rank() == 1:
        place.touch()
    return _observed(str(place))


def _two_ranks(run: str) -> None:
    with shardwise.observe(run), phase("together"):
        torch.distributed.barrier()


def test_ranks_write_a_file_each_and_raise_together(worlds, tmp_path: Path) -> None:
    worlds(2).run(_two_ranks, str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    assert [(rank.rank, rank.world_size) for rank in run.ranks] == [(0, 2), (1, 2)]
    assert all("together" in span.path for rank in run.ranks for span in rank.phases)
    first, second = worlds(2).run(_one_cannot, str(tmp_path))
    assert "cannot be written" in first
    assert "cannot be written" in second


def test_a_system_that_does_not_count_memory_by_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(observers, "_counts", lambda _: {b"VmRSS": 12})
    with pytest.raises(shardwise.ConfigError, match="RssAnon"), shardwise.observe(tmp_path):
        pass


# Reading


@pytest.mark.parametrize("content", [None, b"", b"\x00\xff" * 50, b"[1, 2]\n{}\n", b'{"run": 99}\n', b"[" * 5000])
def test_a_folder_of_something_else_is_one_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        file_in(tmp_path).parent.mkdir()
        file_in(tmp_path).write_bytes(content)
    (tmp_path / "trainer_state.json").write_bytes(b"nothing of ours\n[1]\n")
    with pytest.raises(shardwise.FormatError, match="neither observed/ with files of ranks, nor trainer_state"):
        read_run(tmp_path)
    with pytest.raises(shardwise.StorageError, match="no such folder"):
        read_run(tmp_path / "nothing")


def test_missing_ranks_and_those_of_an_earlier_run_are_named(tmp_path: Path) -> None:
    make_run(tmp_path, ranks=4)
    (tmp_path / "observed" / "rank-00002.jsonl").unlink()
    make_rank(tmp_path, 3, 4, [(0.0, {})], run_id="earlier")
    run = read_run(tmp_path)
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.notes == ["no file of rank 2, 3 of 4"]


def test_every_cut_of_a_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = file_in(make_run(tmp_path, ranks=1, seconds=1))
    whole = path.read_bytes()
    header = whole.index(b"\n")
    before = -1
    for length in range(header, len(whole), 7):
        path.write_bytes(whole[:length])
        rank = only_rank(tmp_path)
        assert rank.bad_lines <= 1
        count = len(rank.samples["t"]) + len(rank.phases)
        assert count >= before
        before = count


def test_lines_of_anybody_are_skipped_and_counted(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, [(0.0, {"anonymous": 5}), (1.0, "x"), (2.0, None)])
    values = ["NaN", "Infinity", "1" + "0" * 400, '"1"', "null", "[1]", "true", "[" * 3000]
    bad = [f"[{value}{',1' * 9}]" for value in values] + [
        f'{{"t":{value},"thread":0,"begin":"y"}}' for value in values
    ]
    bad += ['{"t":1,"thread":1e999,"end":true}', '{"t":1,"thread":0,"end":true}', "{}", "[]", "[1,2]", "7", "\x00"]
    path.write_text(path.read_text() + "\n".join(bad) + "\n")
    rank = only_rank(tmp_path)
    assert (list(rank.samples["anonymous"]), [span.path for span in rank.phases]) == ([5.0], [("x",)])
    assert rank.bad_lines == len(bad)


def test_curves_are_those_of_metrics_of_tenants_and_of_the_trainer(tmp_path: Path) -> None:
    make_metrics(tmp_path / "own")
    make_metrics(tmp_path / "many" / "ada")
    make_metrics(tmp_path / "many" / "bob", steps=5)
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}, {"step": 2, "eval_loss": 3}, 4, None]
    for number, step in ((2, 10), (1, 5)):
        folder = tmp_path / "trained" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history[: number * 2 - 1]}))
        os.utime(folder / "trainer_state.json", (number, number))
    own = read_run(tmp_path / "own").curves
    assert [len(values) for values in own[""]["loss"]] == [20, 20]
    assert list(own[""]["eval_loss"][0]) == [10, 20]
    many = read_run(tmp_path / "many").curves
    assert {name: len(curves["loss"][0]) for name, curves in many.items()} == {"ada": 20, "bob": 5}
    trained = read_run(tmp_path / "trained").curves
    wanted = {"loss": [[1.0], [2.0]], "eval_loss": [[2.0], [3.0]]}
    assert {name: [list(values) for values in curve] for name, curve in trained[""].items()} == wanted
