"""Rows of Parquet and of data sets are those of JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.training import tiny

from shardwise.errors import ConfigError
from shardwise.training.data import SkipRows, TrainData, read_data
from shardwise.training.rows import Chat, Completion, RowFault, Text
from shardwise.training.sources import Arrow, DataName, JsonLines, Parquet, open_source

ROWS: list[dict[str, Any]] = [tiny.chat(f"Hi {n}", f"Ho {n}") for n in range(7)]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(arrow.Table.from_pylist(ROWS), tmp_path / "chats.parquet", row_group_size=3)
    return tmp_path / "chats.parquet"


def tokens(data: TrainData) -> list[list[int]]:
    return [example.tokens.tolist() for example in data.examples]


def test_a_parquet_file(parquet: Path, tmp_path: Path) -> None:
    lines = read_data(tiny.write_rows(tmp_path / "chats.jsonl", *ROWS), tiny.tokenizer(), max_length=64)
    found = read_data(parquet, tiny.tokenizer(), max_length=64)
    assert tokens(found) == tokens(lines)
    assert (found.unit, lines.unit) == ("row", "line")
    assert found.examples.digest == lines.examples.digest


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_ranks_share_the_rows(parquet: Path, tmp_path: Path, size: int) -> None:
    jsonl = tiny.write_rows(tmp_path / "chats.jsonl", *ROWS)
    for source in (Parquet(parquet), JsonLines(jsonl)):
        shares = [list(source.share(rank, size)) for rank in range(size)]
        whole = list(source.share(0, 1))
        assert [row.line for row in whole] == list(range(1, 8))
        for index, row in enumerate(whole):
            assert shares[index % size][index // size] == row
        assert sum(map(len, shares)) == 7


def test_columns_that_are_null_are_not_there(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    rows = [
        {"messages": None, "text": "a", "prompt": None, "completion": None, "source": "web"},
        {"messages": None, "text": None, "prompt": "b", "completion": "c", "source": None},
        {"messages": ROWS[0]["messages"], "text": None, "prompt": None, "completion": None, "source": "web"},
        {"messages": None, "text": None, "prompt": None, "completion": None, "source": "web"},
    ]
    write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    text, completion, chat, fault = Parquet(tmp_path / "rows.parquet").share(0, 1)
    assert (text, completion) == (Text(1, "a"), Completion(2, "b", "c"))
    assert isinstance(chat, Chat)
    assert chat.messages == tuple(ROWS[0]["messages"])
    assert isinstance(fault, RowFault)
    with pytest.raises(
        ConfigError, match=r"rows.parquet: 1 row cannot be used\n  row 4: it has nothing; wanted are"
    ):
        read_data(tmp_path / "rows.parquet", tiny.tokenizer(), max_length=64)


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ConfigError, match=r"rows.parquet: the data cannot be read \("):
        read_data(tmp_path / "rows.parquet", tiny.tokenizer(), max_length=64)
    with pytest.raises(ConfigError, match=r"none.parquet: the data cannot be read \("):
        read_data(tmp_path / "none.parquet", tiny.tokenizer(), max_length=64)


def test_a_parquet_file_of_other_columns(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(arrow.table({"question": ["?"]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="it has the columns question; wanted are messages, or text"):
        read_data(tmp_path / "rows.parquet", tiny.tokenizer(), max_length=64)


def test_a_data_set_that_was_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    lines = read_data(tiny.write_rows(tmp_path / "chats.jsonl", *ROWS), tiny.tokenizer(), max_length=64)
    saved = datasets.Dataset.from_list([{**row, "source": "web"} for row in ROWS])
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "several")
    for name in (DataName(str(tmp_path / "one")), DataName(str(tmp_path / "several"))):
        assert tokens(read_data(name, tiny.tokenizer(), max_length=64)) == tokens(lines)
    test = read_data(DataName(str(tmp_path / "several"), "test"), tiny.tokenizer(), max_length=64)
    assert tokens(test) == tokens(lines)[:1]
    with pytest.raises(ConfigError, match=r"several: it has no split 'dev'; it has train, test"):
        read_data(DataName(str(tmp_path / "several"), "dev"), tiny.tokenizer(), max_length=64)


def test_a_folder_that_datasets_knows_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    datasets.disable_progress_bars()
    tiny.write_rows(tmp_path / "folder" / "train.jsonl", *ROWS)
    found = read_data(tmp_path / "folder", tiny.tokenizer(), max_length=64)
    assert len(found.examples) == 7
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match=r"nothing: the data set cannot be read \(.*look at data.split"):
        read_data(tmp_path / "nothing", tiny.tokenizer(), max_length=64)


def test_what_a_name_means(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").touch()
    assert isinstance(open_source(DataName("rows.jsonl")), JsonLines)
    assert isinstance(open_source(DataName(str(tmp_path / "rows.txt"))), JsonLines)
    assert isinstance(open_source(DataName("rows.parquet")), Parquet)
    assert isinstance(open_source(DataName("org/chats")), Arrow)
    assert isinstance(open_source(DataName(str(tmp_path))), Arrow)
    with pytest.raises(ConfigError, match="rows.csv.gz/x/y: the data cannot be read"):
        open_source(DataName("rows.csv.gz/x/y"))


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"org/chats: .* datasets, which is not installed; pip install 'shardwise"
    ):
        read_data(DataName("org/chats"), tiny.tokenizer(), max_length=64)


def test_malformed_rows_are_left_out_on_request(tmp_path: Path) -> None:
    file = tiny.write_rows(tmp_path / "chats.jsonl", ROWS[0], "{", ROWS[1], {"text": 3})
    found = read_data(file, tiny.tokenizer(), max_length=64, malformed=SkipRows())
    assert len(found.examples) == 2
    assert found.examples.lines.tolist() == [1, 3]
    assert [fault.line for fault in found.malformed] == [2, 4]
    file = tiny.write_rows(tmp_path / "chats.jsonl", "{")
    with pytest.raises(ConfigError, match="in none of its 1 rows"):
        read_data(file, tiny.tokenizer(), max_length=64, malformed=SkipRows())
