"""Rows of files of any kind are those of JSON lines."""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training import tiny

from shardwise.errors import ConfigError
from shardwise.training.data.encoding import read_row
from shardwise.training.data.read_once import SkipRows, TrainData, read_data
from shardwise.training.data.row_files import ArrowTable, Csv, JsonArray, JsonLines, Parquet, RowFile
from shardwise.training.data.sources import DataName, open_source
from shardwise.training.texts.layouts import RowWords
from shardwise.training.texts.rows import Chat, Completion, Row, RowFault, Text

ROWS: list[dict[str, Any]] = [tiny.chat(f"Hi {n}", f"Ho {n}") for n in range(7)]
CALLS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "w", "arguments": {"c": "B"}}}],
            },
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "Rain."},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Time?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "t", "arguments": {"z": [1]}}}],
            },
            {"role": "assistant", "content": "Noon."},
        ]
    },
]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(arrow.Table.from_pylist(ROWS), tmp_path / "chats.parquet", row_group_size=3)
    return tmp_path / "chats.parquet"


def tokens(data: TrainData) -> list[list[int]]:
    return [example.tokens.tolist() for example in data.examples]


def read(path: Any, **options: Any) -> TrainData:
    return read_data(path, tiny.tokenizer(), max_length=64, **options)


def values_of(file: RowFile, nbytes: int = 1 << 20, words: RowWords = RowWords()) -> list[tuple[int, Any]]:  # noqa: B008
    """All rows of a file with their places in it."""
    found: list[tuple[int, Any]] = []
    at = 0
    for block in file.blocks(nbytes, words):
        rows = block.read()
        assert rows.broken is None
        found += [(place + at, value) for place, value in rows.rows]
        at += rows.places
    return found


def rows_of(file: RowFile) -> list[Row | RowFault]:
    return [read_row(place, value, RowWords())[0] for place, value in values_of(file)]


def same_rows(tmp_path: Path) -> list[Path]:
    """Files of every kind with the same rows."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    table = arrow.Table.from_pylist(ROWS)
    tiny.write_rows(tmp_path / "chats.jsonl", *ROWS)
    tiny.write_rows(tmp_path / "lines.json", *ROWS)
    (tmp_path / "array.json").write_text("\ufeff" + json.dumps(ROWS, indent=1))
    write_table(table, tmp_path / "chats.parquet", row_group_size=3)
    with arrow.OSFile(str(tmp_path / "file.arrow"), "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with (
        arrow.OSFile(str(tmp_path / "stream.arrow"), "wb") as file,
        arrow.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=2)
    with (tmp_path / "chats.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["source", "messages"])
        writer.writeheader()
        writer.writerows({"source": 'the "web",\nhere', "messages": json.dumps(row["messages"])} for row in ROWS)
    return sorted(path for path in tmp_path.iterdir() if path.is_file())


def test_files_of_all_kinds_have_the_same_rows(tmp_path: Path) -> None:
    expected = read(tiny.write_rows(tmp_path / "chats.jsonl", *ROWS))
    files = same_rows(tmp_path)
    assert len(files) == 7
    for file in files:
        found = read(file)
        assert tokens(found) == tokens(expected), file
        assert found.examples.digest == expected.examples.digest
        assert found.examples.lines.tolist() == list(range(1, 8))
        assert found.unit == ("line" if file.name in ("chats.jsonl", "lines.json") else "row")
        assert found.layouts == {"messages": 7}


@pytest.mark.parametrize("nbytes", [1, 60, 200, 1 << 20])
def test_blocks_of_any_size_are_the_whole_file(tmp_path: Path, nbytes: int) -> None:
    for path in same_rows(tmp_path):
        [file] = open_source(DataName(str(path)))
        whole = values_of(file)
        assert len(whole) == 7
        assert values_of(file, nbytes) == whole
        if nbytes == 1 and not isinstance(file, Parquet):  # whose groups are not cut into single rows
            assert len(list(file.blocks(1, RowWords()))) == 7


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=4), _JSON, max_size=3), max_size=6),
    nbytes=st.integers(1, 60),
    indent=st.sampled_from([None, 0, 2]),
    is_ascii=st.booleans(),
)
def test_any_array_is_cut_where_elements_end(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], nbytes: int, indent: int | None, is_ascii: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_text(json.dumps(rows, indent=indent, ensure_ascii=is_ascii), "utf-8", "surrogatepass")
    assert values_of(JsonArray(str(file)), nbytes) == list(enumerate(rows, start=1))


@given(
    rows=st.lists(st.tuples(st.text('a", \n\r', max_size=6), st.text("é", min_size=1, max_size=2)), max_size=8),
    nbytes=st.integers(1, 40),
)
def test_any_csv_is_cut_where_records_end(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], nbytes: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.csv"
    with file.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened, quoting=csv.QUOTE_ALL).writerows([["text", "prompt"], *rows])
    expected = [{"text": text, "prompt": prompt} if text else {"prompt": prompt} for text, prompt in rows]
    assert values_of(Csv(str(file)), nbytes) == list(enumerate(expected, start=1))


@given(
    rows=st.lists(
        st.tuples(st.text('a", \n\r', max_size=6), st.text('é"', min_size=1, max_size=2), st.booleans()), max_size=8
    ),
    nbytes=st.integers(1, 40),
)
def test_a_quote_within_a_field_opens_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, bool]], nbytes: int
) -> None:
    """Only the one that a field begins with does, as for whoever else reads such files."""
    file = tmp_path_factory.getbasetemp() / "inches.csv"
    quoted = ['"{}",{}"{}\n'.format(text.replace('"', '""'), "é", inches) for text, inches, _ in rows]
    plain = ['é{},"{}"\n'.format(inches, text.replace('"', '""')) for text, inches, _ in rows]
    lines = [one if first else other for (_, _, first), one, other in zip(rows, quoted, plain, strict=True)]
    file.write_text('"text","prompt"\n' + "".join(lines), "utf-8-sig", newline="")
    with file.open(newline="", encoding="utf-8-sig") as opened:
        expected = [{name: text for name, text in row.items() if text} for row in csv.DictReader(opened)]
    assert values_of(Csv(str(file)), nbytes) == list(enumerate(expected, start=1))


def test_columns_that_are_not_read_may_have_one_name(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,,,completion\na,1,2,b\n")
    [example] = read(tmp_path / "rows.csv").examples
    assert tiny.tokenizer().decode(example.tokens, skip_special_tokens=True) == "ab"


def test_what_a_row_says_twice_is_not_the_last_of_both(tmp_path: Path) -> None:
    twice, fine = '{"text": "a", "text": "b"}', '{"text": "c"}'
    (tmp_path / "rows.jsonl").write_text("\n".join([fine, twice, fine]))
    (tmp_path / "rows.json").write_text(f"[{fine}, {twice}, {fine}]")
    (tmp_path / "rows.csv").write_text('messages\n"[{""role"": ""user"", ""role"": ""assistant""}]"\n')
    for name, told in (
        ("rows.jsonl", "line 2: an object in it has 'text' twice"),
        ("rows.json", "row 2: an object in it has 'text' twice"),
        ("rows.csv", r"row 1: 'messages' is a string that is not valid JSON \(an object in it has 'role' twice"),
    ):
        with pytest.raises(ConfigError, match=rf"1 row cannot be used\n  {told}"):
            read(tmp_path / name)
    for name in ("rows.jsonl", "rows.json"):
        assert len(read(tmp_path / name, malformed=SkipRows()).examples) == 2


def test_empty_lines_count_as_places(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n \n{"text": "b"}')
    for nbytes in (1, 5, 100):
        assert values_of(JsonLines(str(file)), nbytes) == [(1, {"text": "a"}), (4, {"text": "b"})]


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
    text, completion, chat, fault = rows_of(Parquet(str(tmp_path / "rows.parquet")))
    assert (text, completion) == (Text(1, "a"), Completion(2, "b", "c"))
    assert isinstance(chat, Chat)
    assert chat.messages == tuple(ROWS[0]["messages"])
    assert isinstance(fault, RowFault)
    with pytest.raises(
        ConfigError, match=r"rows.parquet: 1 row cannot be used\n  row 4: it has nothing; wanted are"
    ):
        read(tmp_path / "rows.parquet")


def test_tool_calls_of_other_shapes_are_as_they_were(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(arrow.Table.from_pylist(CALLS), tmp_path / "calls.parquet")
    filled = arrow.parquet.read_table(tmp_path / "calls.parquet").to_pylist()
    assert filled[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"c": "B", "z": None}
    assert [value for _, value in values_of(Parquet(str(tmp_path / "calls.parquet")))] == CALLS


def test_files_that_are_broken(tmp_path: Path) -> None:
    """Each is one error that names the file, or the row from which on nothing can be told; skipping rows or not."""
    pytest.importorskip("pyarrow")
    array = json.dumps(ROWS)
    broken: dict[str, tuple[bytes, str]] = {
        "none.parquet": (b"PAR1 but no more", r"none.parquet: the data cannot be read \("),
        "none.arrow": (b"ARROW1 but no more", r"none.arrow: the data cannot be read \("),
        "cut.json": (array[:-1].encode(), r"cut.json: it is not valid JSON \(the array has no end"),
        "text.json": (
            array[:40].encode(),
            r"text.json: it is not valid JSON \(a string from byte \d+ on has no end",
        ),
        "more.json": ((array + "[]").encode(), r"more.json: it is not valid JSON \(there is more after the array"),
        "odd.json": (b'[{"text": "a"}, {"text": }, {"text": "c"}]', r"odd.json: row 2: it is not valid JSON \("),
        "one.json": (b'{\n "text": "a"\n}', "one.json: it is one JSON object over several lines"),
        "quote.csv": (b'text\n"a"\n"b\nc\n', r"quote.csv: row 2: its quotes are broken \("),
        "header.csv": (b'"text\na\nb\n', "header.csv: row 1: its quotes are broken"),
        "after.csv": (b'text\na\n"b" c\n', r"after.csv: row 2: its quotes are broken \("),
        "mac.csv": (b"text\ra\nb\n", "mac.csv: its header ends with a carriage return alone"),
        "twice.csv": (b"text,text\na,b\n", "two of its columns have one name: text, text"),
        "latin.csv": (b"text\na\n\xff\n", "latin.csv: row 1: invalid UTF-8"),
        "rows.jsonl.gz": (b"\x1f\x8b", "compressed files are not read"),
        "empty.jsonl": (b"", "empty.jsonl: there are no rows"),
        "empty.json": (b" \n", "empty.json: there are no rows"),
        "array.json": (b"[\n]", "array.json: there are no rows"),
        "empty.csv": (b"", "empty.csv: there are no rows"),
        "names.csv": (b"text\n", "names.csv: there are no rows"),
        "empty.parquet": (b"", r"empty.parquet: the data cannot be read \("),
    }
    for name, (content, message) in broken.items():
        (tmp_path / name).write_bytes(content)
        for malformed in ({}, {"malformed": SkipRows()}):
            with pytest.raises(ConfigError, match=message):
                read(tmp_path / name, **malformed)
    for name in ("gone.parquet", "gone.jsonl", "gone.json", "gone.csv", "gone.arrow"):
        with pytest.raises(ConfigError, match=rf"{name}: the data cannot be read \(.*No such file"):
            read(tmp_path / name)


def test_a_row_of_csv_with_other_fields_is_a_row_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\nc\nd,e,f\n\ng,h\n")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "rows.csv")
    assert "rows 2, 3: it has 1 fields, and the header 2" in str(caught.value)
    assert len(read(tmp_path / "rows.csv", malformed=SkipRows()).examples) == 2
    (tmp_path / "rows.tsv").write_text("prompt\tcompletion\na, b\tc\n")
    assert values_of(Csv(str(tmp_path / "rows.tsv"))) == [(1, {"prompt": "a, b", "completion": "c"})]


def test_files_of_other_columns(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(arrow.table({"question": ["?"], "answer": ["!"]}), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("question,answer\n?,!\n")
    words = RowWords(columns={"prompt": "question", "completion": "answer"})
    for file in ("rows.parquet", "rows.csv"):
        with pytest.raises(ConfigError, match="it has the columns question, answer; wanted are messages, or conv"):
            read(tmp_path / file)
        [example] = read(DataName(str(tmp_path / file), words=words)).examples
        assert tiny.tokenizer().decode(example.tokens) == "?!<|im_end|>"
        with pytest.raises(
            ConfigError, match="data.columns names 'asked', and it has the columns question, answer"
        ):
            read(DataName(str(tmp_path / file), words=RowWords(columns={"prompt": "asked"})))


def test_several_files_are_one_data_set(tmp_path: Path) -> None:
    tiny.write_rows(tmp_path / "b.jsonl", *ROWS[:3])
    tiny.write_rows(tmp_path / "a.jsonl", *ROWS[3:5], "")
    (tmp_path / "c.json").write_text(json.dumps(ROWS[5:]))
    whole = read(tiny.write_rows(tmp_path / "all.txt", *ROWS[3:5], *ROWS[:3], *ROWS[5:]))
    by_pattern = read(f"{tmp_path}/[ab].jsonl")
    assert tokens(by_pattern) == tokens(whole)[:5]
    listed = read([tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.json"])
    assert tokens(listed) == tokens(whole)
    assert by_pattern.name_rows([1, 4, 5]) == f"{tmp_path}/a.jsonl, line 1; {tmp_path}/b.jsonl, lines 1, 2"
    assert listed.name_rows([7]) == f"{tmp_path}/c.json, row 1"
    assert listed.unit == "row"
    tiny.write_rows(tmp_path / "b.jsonl", *ROWS[:2], "{")
    tiny.write_rows(tmp_path / "a.jsonl", "[]", *ROWS[3:5])
    with pytest.raises(ConfigError) as caught:
        read(f"{tmp_path}/[ab].jsonl")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{tmp_path}/a.jsonl: 1 row cannot be used"
    assert lines[1].startswith("  line 1: it is a JSON array")
    assert lines[2:4] == [f"{tmp_path}/b.jsonl: 1 row cannot be used", lines[3]]
    assert lines[3].startswith("  line 3: it is not valid JSON")
    with pytest.raises(ConfigError, match=r"\*.parquet: no file is called so"):
        read(f"{tmp_path}/*.parquet")


def test_a_folder_of_files(tmp_path: Path) -> None:
    lines = read(tiny.write_rows(tmp_path / "chats.jsonl", *ROWS))
    folder = tmp_path / "folder"
    (folder / "data").mkdir(parents=True)
    tiny.write_rows(folder / "data" / "train-00000-of-00002.jsonl", *ROWS[:4])
    (folder / "data" / "train-00001-of-00002.json").write_text(json.dumps(ROWS[4:]))
    tiny.write_rows(folder / "data" / "dev.jsonl", ROWS[2])
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    (folder / ".hidden.jsonl").write_text("{")
    assert tokens(read(folder)) == tokens(lines)
    for split in ("dev", "validation"):
        assert tokens(read(DataName(str(folder), split))) == tokens(lines)[2:3]
    with pytest.raises(ConfigError, match=r"folder: it has no split 'test'; it has train, validation"):
        read(DataName(str(folder), "test"))
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match=r"plain: there is no file of rows in it"):
        read(tmp_path / "plain")
    tiny.write_rows(tmp_path / "plain" / "chats.jsonl", *ROWS)
    (tmp_path / "plain" / "dataset_infos.json").write_text('{"default": {"features": {}}}')
    assert tokens(read(tmp_path / "plain")) == tokens(lines)


def test_a_data_set_that_was_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    lines = read(tiny.write_rows(tmp_path / "chats.jsonl", *ROWS))
    saved = datasets.Dataset.from_list([{**row, "source": "web"} for row in ROWS])
    datasets.disable_progress_bars()
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "several")
    for name in (DataName(str(tmp_path / "one")), DataName(str(tmp_path / "several"))):
        assert tokens(read(name)) == tokens(lines)
    test = read(DataName(str(tmp_path / "several"), "test"))
    assert tokens(test) == tokens(lines)[:1]
    with pytest.raises(ConfigError, match=r"several: it has no split 'dev'; it has train, test"):
        read(DataName(str(tmp_path / "several"), "dev"))


def test_a_folder_whose_card_says_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    datasets.disable_progress_bars()
    tiny.write_rows(folder / "some.jsonl", *ROWS)
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: some.jsonl\n---\n"
    (folder / "README.md").write_text(card)
    assert len(read(folder).examples) == 7
    with pytest.raises(ConfigError, match=r"folder: the data set cannot be read \(.*look at data.split"):
        read(DataName(str(folder), "test"))


def test_what_a_name_means(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").touch()
    (tmp_path / "rows.json").write_text(" [")
    for name, kind in (("rows.txt", JsonLines), ("rows.json", JsonArray)):
        assert [type(file) for file in open_source(DataName(str(tmp_path / name)))] == [kind]
    for name, kind in (
        ("rows.jsonl", JsonLines),
        ("rows.parquet", Parquet),
        ("a.arrow", ArrowTable),
        ("a.tsv", Csv),
    ):
        assert [type(file) for file in open_source(DataName(name))] == [kind]
    with pytest.raises(ConfigError, match="rows.csv.gz/x/y: the data cannot be read"):
        open_source(DataName("rows.csv.gz/x/y"))


def test_a_data_set_that_is_not_there_is_refused_at_once() -> None:
    pytest.importorskip("datasets")
    start = time.monotonic()
    with pytest.raises(
        ConfigError, match="nobody/nothing: there is no such file or folder, nor such a data set in the"
    ):
        read("nobody/nothing")
    assert time.monotonic() - start < 20


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"org/chats: .* datasets, which is not installed; pip install 'shardwise"
    ):
        read(DataName("org/chats"))


def test_malformed_rows_are_left_out_on_request(tmp_path: Path) -> None:
    file = tiny.write_rows(tmp_path / "chats.jsonl", ROWS[0], "{", ROWS[1], {"text": 3})
    found = read(file, malformed=SkipRows())
    assert len(found.examples) == 2
    assert found.examples.lines.tolist() == [1, 3]
    assert [fault.line for fault in found.malformed] == [2, 4]
    file = tiny.write_rows(tmp_path / "chats.jsonl", "{")
    with pytest.raises(ConfigError, match="in none of its 1 rows"):
        read(file, malformed=SkipRows())


def test_a_data_set_that_nobody_knows_is_one_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    from datasets import config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    start = time.monotonic()
    with pytest.raises(ConfigError, match="nobody/has-this: there is no such file or folder, and as a data set of"):
        open_source(DataName("nobody/has-this"))
    assert time.monotonic() - start < 10
