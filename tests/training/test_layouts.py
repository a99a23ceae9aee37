"""Rows in the words of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.training import tiny

from shardwise.errors import ConfigError
from shardwise.training.data.read_once import SkipRows, read_data
from shardwise.training.data.sources import DataName
from shardwise.training.texts.layouts import RowWords, without_filled_nulls
from shardwise.training.texts.rows import RowError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
TOOL = {"name": "w", "description": "weather", "parameters": {"type": "object", "properties": {}}}
FUNCTION = {"type": "function", "function": TOOL}


def turn(speaker: str, value: object) -> dict[str, object]:
    return {"from": speaker, "value": value}


@pytest.mark.parametrize(
    ("theirs", "layout", "ours"),
    [
        ({"messages": [USER, ANSWER]}, "messages", {"messages": [USER, ANSWER]}),
        (
            {"conversations": [turn("human", "Hi"), turn("gpt", "Ho")], "id": 3},
            "sharegpt",
            {"messages": [USER, ANSWER]},
        ),
        (
            {"system": "Be.", "conversations": [turn("user", "Hi"), turn("assistant", "Ho")]},
            "sharegpt",
            {"messages": [{"role": "system", "content": "Be."}, USER, ANSWER]},
        ),
        ({"conversation": [USER, ANSWER], "system": ""}, "sharegpt", {"messages": [USER, ANSWER]}),
        ({"messages": [turn("human", "Hi"), turn("gpt", "Ho")]}, "messages", {"messages": [USER, ANSWER]}),
        (
            {
                "conversations": [
                    turn("system", "Be."),
                    turn("human", "Hi"),
                    turn("function_call", '{"name": "w", "arguments": {"c": 1}}'),
                    turn("observation", "rain"),
                    {**turn("gpt", "Ho"), "weight": 0},
                ],
                "tools": json.dumps([TOOL]),
            },
            "sharegpt",
            {
                "messages": [
                    {"role": "system", "content": "Be."},
                    USER,
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"c": 1}}}],
                    },
                    {"role": "tool", "content": "rain"},
                    {**ANSWER, "weight": 0},
                ],
                "tools": [FUNCTION],
            },
        ),
        ({"instruction": "Hi", "output": "Ho"}, "alpaca", {"messages": [USER, ANSWER]}),
        (
            {"instruction": "Hi", "input": "", "output": "Ho", "system": None},
            "alpaca",
            {"messages": [USER, ANSWER]},
        ),
        (
            {"instruction": "Sum", "input": "1 2", "output": "3", "system": "Be.", "history": [["a", "b"]]},
            "alpaca",
            {
                "messages": [
                    {"role": "system", "content": "Be."},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "Sum\n1 2"},
                    {"role": "assistant", "content": "3"},
                ]
            },
        ),
        ({"prompt": "Hi", "completion": "Ho"}, "completion", {"prompt": "Hi", "completion": "Ho"}),
        ({"prompt": [USER], "completion": [ANSWER]}, "completion", {"prompt": [USER], "completion": [ANSWER]}),
        ({"text": "Hi", "instruction": "not an Alpaca"}, "text", {"text": "Hi", "instruction": "not an Alpaca"}),
        ({"messages": json.dumps([USER, ANSWER]), "text": None}, "messages", {"messages": [USER, ANSWER]}),
        ({"messages": [USER, ANSWER], "tools": []}, "messages", {"messages": [USER, ANSWER]}),
    ],
)
def test_a_layout_is_known_by_its_names(theirs: dict[str, Any], layout: str, ours: dict[str, Any]) -> None:
    before = json.dumps(theirs)
    assert RowWords().in_ours(theirs) == (layout, ours)
    assert json.dumps(theirs) == before


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (
            {"messages": [], "conversations": []},
            "it has both 'messages' and 'conversations'; which of them is meant",
        ),
        (
            {"instruction": "a", "output": "b", "text": "c"},
            r"both 'instruction' and 'text'.*data.layout \(alpaca, text\)",
        ),
        ({"conversations": "none"}, "'conversations' is a string that is not valid JSON"),
        ({"conversations": {"from": "human"}}, "'conversations' is not a list of messages"),
        ({"conversations": [turn("martian", "Hi")]}, r"conversations\[0\] is from 'martian'; known are 'human'"),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\] has 'from' but no 'value'"),
        ({"conversations": [{"from": "human", "role": "user"}]}, "both 'from' and 'role'"),
        ({"conversations": [turn("function_call", "w(1)")]}, "is a function_call that is not valid JSON"),
        ({"conversations": [turn("function_call", "[1]")]}, "a function_call without a 'name' and 'arguments'"),
        ({"conversations": [turn("system", "a")], "system": "b"}, "both are the system's"),
        ({"instruction": "a"}, "it has an 'instruction' but no 'output'"),
        ({"instruction": 1, "output": "b"}, "'instruction' is not a string"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, r"history\[0\] is not a pair of texts"),
        ({"instruction": "a", "output": "b", "history": "c"}, "'history' is a string that is not valid JSON"),
    ],
)
def test_rows_that_are_not_what_they_seem(row: dict[str, Any], cause: str) -> None:
    with pytest.raises(RowError, match=cause):
        RowWords().in_ours(row)


def test_a_layout_that_is_asked_for_settles_what_is_meant() -> None:
    row = {"instruction": "Hi", "output": "Ho", "text": "### Hi"}
    assert RowWords("alpaca").in_ours(row) == ("alpaca", {"messages": [USER, ANSWER]})
    assert RowWords("text").in_ours(row) == ("text", {"text": "### Hi"})
    with pytest.raises(
        RowError, match="it has 'instruction', 'output', 'text', and no 'messages', which data.layout"
    ):
        RowWords("messages").in_ours(row)
    assert RowWords("alpaca").wanted(["id", "text", "output", "instruction"]) == ["output", "instruction"]
    assert RowWords("alpaca").wanted(["text"]) == []


def test_columns_have_other_names() -> None:
    words = RowWords(columns={"prompt": "question", "completion": "answer"})
    row = {"question": "Hi", "answer": "Ho", "prompt": "not meant"}
    assert words.in_ours(row) == ("completion", {"prompt": "Hi", "completion": "Ho"})
    with pytest.raises(
        ConfigError, match="data.columns: 'asked' is none of our names, which are chat_template_kwargs"
    ):
        RowWords(columns={"asked": "question"})


def test_nulls_that_arrow_has_filled_in_go_at_every_level() -> None:
    call = {
        "function": {"name": "w", "arguments": {"c": "B", "z": None, "deep": {"a": None, "b": [None, {"x": None}]}}}
    }
    row = {
        "messages": [{"content": None, "tool_calls": [call], "name": None}, {"content": None, "tool_calls": None}]
    }
    assert without_filled_nulls(row) == {
        "messages": [
            {
                "content": None,
                "tool_calls": [{"function": {"name": "w", "arguments": {"c": "B", "deep": {"b": [None, {}]}}}}],
            },
            {},
        ]
    }


def test_a_file_may_hold_several_layouts(tmp_path: Path) -> None:
    mixed: list[Any] = [
        tiny.chat("Hi", "Ho"),
        {"conversations": [turn("human", "Hi"), turn("gpt", "Ho")]},
        {"instruction": "Hi", "output": "Ho"},
        {"prompt": "a", "completion": "b"},
        {"text": "c"},
        {"messages": [USER, ANSWER], "text": "c"},
        {"rubbish": 1},
    ]
    file = tiny.write_rows(tmp_path / "rows.jsonl", *mixed)
    with pytest.raises(ConfigError) as caught:
        read_data(file, tiny.tokenizer(), max_length=64)
    assert "2 rows cannot be used" in str(caught.value)
    assert "line 6: it has both 'messages' and 'text'" in str(caught.value)
    assert "line 7: it has 'rubbish'; wanted are messages, or conversations" in str(caught.value)
    assert "data.columns renames" in str(caught.value)
    found = read_data(file, tiny.tokenizer(), max_length=64, malformed=SkipRows())
    assert found.layouts == {"messages": 1, "sharegpt": 1, "alpaca": 1, "completion": 1, "text": 1}
    chats = [tiny.tokenizer().decode(found.examples[number].tokens) for number in range(3)]
    assert chats[0] == chats[1] == chats[2]
    one = DataName(str(file), words=RowWords("sharegpt"))
    only = read_data(one, tiny.tokenizer(), max_length=64, malformed=SkipRows())
    assert (len(only.examples), len(only.malformed)) == (1, 6)
