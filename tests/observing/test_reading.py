"""Folders that are not as a run leaves them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.observing.made_runs import make_rank, make_run

import shardwise
from shardwise.observing.rank_reader import RankReader
from shardwise.observing.run_record import RunReader


@pytest.mark.parametrize(
    "content", [None, b"", b"\x00\xff" * 50, b"[1, 2]\n{}\n", b'{"observed": 99}\n', b"[" * 5000]
)
def test_a_folder_of_something_else_is_one_error_that_says_what_is_meant(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "observed").mkdir()
        (tmp_path / "observed" / "rank-00000.jsonl").write_bytes(content)
    (tmp_path / "metrics.jsonl").write_bytes(b"nothing of ours\n[1]\n")
    with pytest.raises(shardwise.FormatError, match="neither observed/ with files of observed ranks nor metrics"):
        RunReader(tmp_path).read()


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(shardwise.StorageError, match="no such folder"):
        RunReader(tmp_path / "nothing")


def test_a_rank_that_lacks_and_one_of_an_earlier_run_are_named(tmp_path: Path) -> None:
    make_run(tmp_path, ranks=4, began=10_000.0)
    (tmp_path / "observed" / "rank-00002.jsonl").unlink()
    (tmp_path / "observed" / "rank-00003.jsonl").unlink()
    make_rank(tmp_path, 3, 4, began=100.0, run_name="earlier")
    run = RunReader(tmp_path).read()
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.notes == (
        "of 4 ranks nothing is there of rank 2, 3",
        "earlier runs into this folder, not shown: 1",
    )


def test_every_cut_of_a_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, seconds=0.5)
    whole = path.read_bytes()
    before = -1
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        reader = RankReader(path)
        reader.read_on()
        assert reader.odd_lines == 0
        record = reader.record
        count = record.count + sum(times.times for times in record.phases()) if record else 0
        assert count >= before
        before = count


def test_a_file_that_grows_is_read_on(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, seconds=0.5)
    whole = path.read_bytes()
    path.write_bytes(b"")
    reader = RankReader(path)
    for start in range(0, len(whole), 13):
        with path.open("ab") as file:
            file.write(whole[start : start + 13])
        reader.read_on()
    once = RankReader(path)
    once.read_on()
    assert reader.record == once.record
    assert reader.odd_lines == 0


@pytest.mark.parametrize(
    "line",
    [
        "[0,1]",
        '[0,"1",2,3,4,5,6,7,8,9,10,11,12]',
        "[3,1,7]",
        "[2,1,0,5]",
        "[9,1]",
        "[]",
        '{"t":-1,"tell":"load"}',
        "1",
        "[0,1,NaN,3,4,5,6,7,8,9,10,11,12]",
        "[0,true,2,3,4,5,6,7,8,9,10,11,12]",
        '{"t":1,"tell":5}',
        "[null,1]",
        f"[0,1,1{'0' * 400},3,4,5,6,7,8,9,10,11,12]",
        "[0,1,2,3,4,Infinity,6,7,8,9,10,11,12]",
        "[0,1,2,3,4,-5,6,7,8,9,10,11,12]",
    ],
)
def test_a_line_of_another_kind_is_passed_over(tmp_path: Path, line: str) -> None:
    path = make_rank(tmp_path, 0, 1, seconds=0.5)
    sound = RankReader(path)
    sound.read_on()
    head, rest = path.read_text().split("\n", 1)
    path.write_text(f"{head}\n{line}\n{rest}")
    reader = RankReader(path)
    reader.read_on()
    assert (reader.odd_lines, reader.record) == (1, sound.record)


def test_metrics_of_tenants_are_told_apart(tmp_path: Path) -> None:
    for name in ("ada", "bob"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "loss": 2.0}) + "\n")
    run = RunReader(tmp_path).read()
    assert sorted(run.metrics) == ["ada", "bob"]


def test_metrics_that_were_replaced_are_read_anew(tmp_path: Path) -> None:
    def line(step: int) -> str:
        return json.dumps({"kind": "step", "step": step}) + "\n"

    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1) + line(2) + line(3))
    reader = RunReader(tmp_path)
    assert [told["step"] for told in reader.read().metrics[""]] == [1, 2, 3]
    fresh = tmp_path / "metrics.jsonl.new"
    fresh.write_text(line(1))
    fresh.replace(file)
    with file.open("a") as more:
        more.write(line(2)[:5])
    assert [told["step"] for told in reader.read().metrics[""]] == [1]
    with file.open("a") as more:
        more.write(line(2)[5:])
    assert [told["step"] for told in reader.read().metrics[""]] == [1, 2]


def test_metrics_that_were_written_over_are_read_anew(tmp_path: Path) -> None:
    """As a number of an inode is given again; and more has been written than before."""

    def line(step: int, loss: float) -> str:
        return json.dumps({"kind": "step", "step": step, "loss": loss}) + "\n"

    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(step, 2.5) for step in range(1, 4)))
    reader = RunReader(tmp_path)
    assert len(reader.read().metrics[""]) == 3
    file.write_text("".join(line(step, 1.25) for step in range(1, 6)))
    assert [told["loss"] for told in reader.read().metrics[""]] == [1.25] * 5


def _header(**others: object) -> str:
    told = {"observed": 1, "run": "a", "began": 5.0, "samples_per_second": 20, "rank": 0, "world_size": 1}
    told |= {"machine": "m", "host": "h", "pid": 1, "device": ""} | others
    return json.dumps(told) + "\n"


@pytest.mark.parametrize(
    "others",
    [
        {"samples_per_second": 0},
        {"samples_per_second": 1e300},
        {"began": float("nan")},
        {"began": 1e300},
        {"rank": 1, "world_size": 2},  # of another rank than the file's name says
        {"rank": 0.0},
        {"rank": True, "world_size": 2},
        {"world_size": 10**12},
        {"world_size": "1"},
        {"pid": "x"},
    ],
)
def test_a_header_that_cannot_be_is_of_no_rank(tmp_path: Path, others: dict[str, object]) -> None:
    make_rank(tmp_path, 1, 2)
    (tmp_path / "observed" / "rank-00000.jsonl").write_text(_header(**others) + "[0,1]\n")
    run = RunReader(tmp_path).read()
    assert [rank.rank for rank in run.ranks] == [1]
    assert run.notes[0] == "observed/rank-00000.jsonl is not of an observed rank, or empty"


def test_clocks_hours_apart_make_one_run(tmp_path: Path) -> None:
    for rank, began in enumerate((50_000.0, 50_000.0, 50_000.0 + 7200, 50_000.0 - 7200)):
        make_rank(tmp_path, rank, 4, began=began, machine=f"m{rank}", run_name="now")
    make_rank(tmp_path, 4, 5, began=59_000.0, run_name="before")  # by a clock that is ahead
    run = RunReader(tmp_path).read()
    assert [rank.rank for rank in run.ranks] == [0, 1, 2, 3]
    assert [run.shift_of(rank) for rank in run.ranks] == pytest.approx([0, 0.01, 0, 0])
    assert run.notes == (
        "the clock of host-m2, host-m3 is not that of host-m0; ranks there are shown as if all had begun at once",
        "earlier runs into this folder, not shown: 1",
    )


def test_the_later_run_by_one_clock_is_the_newest_wherever_its_first_rank_is(tmp_path: Path) -> None:
    """Folders that machines do not share: this one had ranks 0 and 1 once, and has 2 and 3 by now."""
    for rank in range(4):
        name, began = ("then", 1000.0) if rank < 2 else ("now", 9000.0)
        make_rank(tmp_path, rank, 4, began=began, run_name=name)
    run = RunReader(tmp_path).read()
    assert [rank.rank for rank in run.ranks] == [2, 3]
    assert run.notes == ("of 4 ranks nothing is there of rank 0, 1", "earlier runs into this folder, not shown: 1")


def test_a_run_that_another_one_followed_is_older_whatever_the_clock_said(tmp_path: Path) -> None:
    for rank in range(4):
        make_rank(tmp_path, rank, 4, began=9000.0, run_name="then")
    for rank in range(2):  # the clock was set back
        path = tmp_path / "observed" / f"rank-{rank:05d}.jsonl"
        before = path.read_text()
        make_rank(tmp_path, rank, 2, began=5000.0, run_name="now")
        path.write_text(before + path.read_text())
    run = RunReader(tmp_path).read()
    assert ([rank.rank for rank in run.ranks], run.ranks[0].run) == ([0, 1], "now")
    assert run.notes == ("earlier runs into this folder, not shown: 1",)


def test_a_rank_that_is_late_on_the_same_machine_is_late(tmp_path: Path) -> None:
    for rank in range(3):
        make_rank(tmp_path, rank, 3, began=1000.0 + 60 * (rank > 0), machine="b" if rank == 2 else "a")
    run = RunReader(tmp_path).read()
    assert [run.shift_of(rank) for rank in run.ranks] == pytest.approx([0, 60.01, 0])
    assert run.notes == (
        "the clock of host-b is not that of host-a; ranks there are shown as if all had begun at once",
    )


def test_a_run_that_is_removed_and_made_anew_while_it_is_read(tmp_path: Path) -> None:
    make_run(tmp_path / "out", ranks=3, seconds=1)
    reader = RunReader(tmp_path / "out")
    assert len(reader.read().ranks) == 3
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(shardwise.FormatError, match="neither observed/"):
        reader.read()
    make_run(tmp_path / "out", ranks=1, seconds=1, run_name="next")
    run = reader.read()
    assert ([rank.run for rank in run.ranks], run.notes) == (["next"], ())


def test_more_names_of_phases_than_anybody_reads_are_one(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, seconds=0.5)
    with path.open("a") as more:
        for number in range(6000):
            more.write(f'[2,1,{number % 40},"p{number}"]\n[3,2,{number % 40}]\n')
    reader = RankReader(path)
    reader.read_on()
    assert reader.record is not None
    phases = reader.record.phases()
    assert (reader.odd_lines, len(phases)) == (0, 4097)
    assert sum(times.times for times in phases) >= 6000


def test_a_file_that_another_has_taken_the_place_of_is_read_anew(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, seconds=2, run_name="first")
    reader = RankReader(path)
    reader.read_on()
    path.unlink()
    reader.read_on()
    assert reader.record.run == "first"
    make_rank(tmp_path, 0, 1, seconds=1, run_name="second")
    reader.read_on()
    assert (reader.record.run, *reader.earlier) == ("second",)
    assert (reader.record.count, reader.odd_lines) == (20, 0)
    path.write_text(_header(run="third"))
    reader.read_on()
    assert (reader.record.run, *reader.earlier) == ("third",)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    make_run(tmp_path, ranks=1, seconds=1)
    os.mkfifo(tmp_path / "observed" / "rank-00001.jsonl")
    os.mkfifo(tmp_path / "config.yaml")
    (tmp_path / "round").symlink_to("round")
    assert RunReader(tmp_path).read().label.endswith(" (Tiny)")


def test_a_folder_beside_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, ranks=1, seconds=1)
    (tmp_path / "lost+found").mkdir()
    is_file = Path.is_file

    def refusing(path: Path) -> bool:
        if path.parent.name == "lost+found":
            raise PermissionError
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refusing)
    assert len(RunReader(tmp_path).read().ranks) == 1


def test_words_of_a_stranger_obey_nobody(tmp_path: Path) -> None:
    evil = "\x1b]0;x\x07\x1b[2J\n\u202e\ud800" + "long" * 200
    path = make_rank(tmp_path, 0, 1, seconds=1, model=f"m/{evil}", machine=evil)
    path.write_text(path.read_text().replace('"audit"', json.dumps(evil)))
    run = RunReader(tmp_path).read()
    for words in (run.label, run.ranks[0].host, *(times.name for times in run.ranks[0].phases())):
        assert words.isprintable()
        assert len(words) < 200


@pytest.mark.parametrize(
    "model", ["[&a [x,x,x], [*a,*a,*a]]", "{name: [1]}", "5", "&a [*a]", "!!python/name:os.system"]
)
def test_a_configuration_of_another_kind_names_no_model(tmp_path: Path, model: str) -> None:
    make_rank(tmp_path, 0, 1, seconds=1)
    (tmp_path / "config.yaml").write_text(f"model: {model}\n")
    assert RunReader(tmp_path).read().model == "Tiny"
