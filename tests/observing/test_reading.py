"""Folders that are not as a run leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.observing.made_runs import make_rank, make_run

import shardwise
from shardwise.observing.rank_record import RankReader
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
    make_rank(tmp_path, 3, 4, began=100.0)
    run = RunReader(tmp_path).read()
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.notes == ("of 4 ranks nothing is there of rank 2, 3",)


def test_every_cut_of_a_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, seconds=0.5)
    whole = path.read_bytes()
    before = -1
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        reader = RankReader(path)
        reader.read_on()
        assert reader.odd_lines == 0
        count = sum(len(record.rows) + len(record.phases) for record in reader.records)
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
    assert reader.records == once.records
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
    assert (reader.odd_lines, reader.records) == (1, sound.records)


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
