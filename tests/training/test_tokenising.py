"""Rows are tokenised by several processes as they are by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.training import tiny

from shardwise.errors import ConfigError
from shardwise.training.data import tokenising
from shardwise.training.data.read_once import ReadOptions, TrainData, read_data
from shardwise.training.data.row_blocks import LinesBlock
from shardwise.training.data.sources import DataName
from shardwise.training.data.tokenising import Effort, EncoderPool
from shardwise.training.texts.layouts import RowWords

MANY = Effort(processes=2, bytes_per_process=1, block_bytes=400)


def read(path: Any, effort: Effort, **options: Any) -> TrainData:
    return read_data(path, tiny.tokenizer(), max_length=64, options=ReadOptions(effort=effort), **options)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[EncoderPool]:
    """Those that were started."""
    started: list[EncoderPool] = []
    begin = EncoderPool.started

    def start(count: int, encoding: Any) -> EncoderPool | None:
        pool = begin(count, encoding)
        if pool is not None:
            started.append(pool)
        return pool

    monkeypatch.setattr(EncoderPool, "started", start)
    return started


def test_several_processes_make_what_one_makes(tmp_path: Path, pools: list[EncoderPool]) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    rows = [tiny.chat(f"What is {n}?", "It is" + "!" * (n % 70)) for n in range(60)]
    tiny.write_rows(tmp_path / "a.jsonl", *rows[:30])
    (tmp_path / "b.json").write_text(json.dumps(rows[30:50]))
    write_table(arrow.Table.from_pylist(rows[50:]), tmp_path / "c.parquet", row_group_size=2)
    files = f"{tmp_path}/*"
    expected = read(files, Effort())
    assert pools == []
    found = read(files, MANY)
    assert [pool.size for pool in pools] == [2]
    assert alive([pid for pool in pools for pid in pool.pids]) == []
    assert found.examples.digest == expected.examples.digest
    assert found.examples.lines.tolist() == expected.examples.lines.tolist()
    assert found.cut_lines == expected.cut_lines
    assert found.name_rows([31, 51]) == expected.name_rows([31, 51])


def test_rows_that_cannot_be_used_have_their_lines(tmp_path: Path, pools: list[EncoderPool]) -> None:
    rows: list[Any] = [tiny.chat(f"What is {n}?", "It is") for n in range(40)]
    for number in (3, 20, 38):
        rows[number] = "{"
    file = tiny.write_rows(tmp_path / "a.jsonl", *rows)
    with pytest.raises(ConfigError) as one:
        read(file, Effort())
    with pytest.raises(ConfigError) as several:
        read(file, MANY)
    assert str(one.value) == str(several.value)
    assert "lines 4, 21, 39: it is not valid JSON" in str(one.value)
    rows[3], rows[20], rows[38] = '{"text": }', "1", "2"
    (tmp_path / "a.json").write_text(
        "[" + ",".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "]"
    )
    with pytest.raises(ConfigError, match=r"a.json: row 4: it is not valid JSON"):
        read(tmp_path / "a.json", MANY)
    chats = tiny.write_chats(tmp_path / "chats.jsonl", 40)
    with pytest.raises(ConfigError, match="no chat template"):
        read_data(chats, tiny.tokenizer(None), max_length=64, options=ReadOptions(effort=MANY))
    assert alive([pid for pool in pools for pid in pool.pids]) == []


def test_a_process_that_ends_is_one_error_with_its_rows(
    tmp_path: Path, pools: list[EncoderPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny.write_chats(tmp_path / "a.jsonl", 60)
    blocks = [(block, block.read().places) for block in tiny_blocks(file)]
    give = EncoderPool.give

    def fatal(self: EncoderPool, number: int, block: Any) -> None:
        if number == 5:
            worker = next(worker for worker in self._workers if worker.number is None)
            os.kill(worker.process.pid, signal.SIGKILL)
        give(self, number, block)

    monkeypatch.setattr(EncoderPool, "give", fatal)
    first = sum(places for _, places in blocks[:5]) + 1
    last = first + blocks[5][1] - 1
    with pytest.raises(
        ConfigError, match=rf"a.jsonl, lines {first} to {last}: the process .* has ended \(exit code -9\)"
    ):
        read(file, MANY)
    assert alive([pid for pool in pools for pid in pool.pids]) == []


def tiny_blocks(file: Path) -> list[LinesBlock]:
    from shardwise.training.data.sources import open_source

    [opened] = open_source(DataName(str(file)))
    return list(opened.blocks(MANY.block_bytes, RowWords()))  # type: ignore[arg-type]


class OnlyHere:
    """A tokenizer's part that other processes cannot have."""

    def __reduce__(self) -> Any:
        return _unknown, ()


def _unknown() -> None:
    raise ModuleNotFoundError("No module named 'of_the_user'")


@pytest.mark.slow
@pytest.mark.parametrize("part", [OnlyHere(), lambda: None])
def test_a_tokenizer_that_other_processes_cannot_have(tmp_path: Path, part: Any) -> None:
    file = tiny.write_chats(tmp_path / "a.jsonl", 9)
    tokenizer = tiny.tokenizer()
    tokenizer.own = part
    found = read_data(file, tokenizer, max_length=64, options=ReadOptions(effort=MANY))
    assert found.examples.digest == read(file, Effort()).examples.digest


def test_who_tokenises_imports_no_torch() -> None:
    code = "import sys, shardwise.training.data.encoding_worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_as_many_processes_as_are_worth_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "usable_processors", lambda: 16)
    counts = [Effort().count(nbytes) for nbytes in (0, 1 << 20, 9 << 20, 1 << 30)]
    assert counts == [1, 1, 2, 16]
    assert Effort(processes=3).count(1 << 30) == 3
