"""What is learned of a row, what is refused, and which rows a step takes."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training import tiny

from shardwise.errors import ConfigError
from shardwise.training.data.batches import IGNORED, EvaluationBatches, Padded, pad
from shardwise.training.data.loader import StepLoader, StepSampler, step_loader
from shardwise.training.data.read_once import TrainData, read_data
from shardwise.training.options import Epochs, Steps, TrainOptions
from shardwise.training.texts.rows import Text, read_rows

# Templates


def test_a_template_may_refuse_a_row(tmp_path: Path) -> None:
    strict = "{%- if messages[0].role != 'user' %}{{ raise_exception('user first') }}{%- endif %}" + tiny.UNMARKED
    odd = {"messages": [{"role": "assistant", "content": "Hi"}]}
    file = tiny.write_rows(tmp_path / "chats.jsonl", tiny.chat("Hi", "Ho"), odd)
    with pytest.raises(ConfigError, match=r"chats.jsonl: 1 row cannot be used\n  line 2: .*user first"):
        read_data(file, tiny.tokenizer(strict), max_length=64)


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    chats = tiny.write_chats(tmp_path / "chats.jsonl", 2)
    with pytest.raises(ConfigError, match="no chat template"):
        read_data(chats, tiny.tokenizer(None), max_length=64)
    texts = tiny.write_rows(tmp_path / "texts.jsonl", {"text": "abc"})
    assert read_data(texts, tiny.tokenizer(None), max_length=64).supervised_tokens == 3


# Rows


def test_malformed_rows_are_named_by_line(tmp_path: Path) -> None:
    rows = [
        tiny.chat("Hi", "Ho"),
        "{",
        "",
        "[1]",
        {"text": 3},
        {"question": "?"},
        {"text": "a", "messages": []},
        {"completion": "a"},
        {"messages": []},
        {"messages": ["Hi"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    file = tiny.write_rows(tmp_path / "chats.jsonl", *rows)
    with pytest.raises(ConfigError) as caught:
        read_rows(file)
    heading, *lines = str(caught.value).splitlines()
    assert heading == f"{file}: 11 rows cannot be used"
    expected = {
        2: "it is not valid JSON",
        4: "it is a JSON array, not an object",
        5: "'text' is a JSON number, not a string",
        6: "it has 'question'; wanted are 'messages', or 'text', or 'prompt' and 'completion'",
        7: "it has both 'messages' and 'text'",
        8: "it has a 'completion' but no 'prompt'",
        9: "'messages' must be a list of at least one message",
        10: "messages[0] is a JSON string, not an object",
        11: "messages[0] has no 'content'",
        12: "messages[0].content is a JSON null, not a string",
        13: "no message is by the role 'assistant'",
    }
    for line, (number, cause) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"  line {number}: {cause}")


def test_one_cause_is_told_once_with_its_first_lines(tmp_path: Path) -> None:
    alike = [{"messages": [{"role": "user"}] * n} for n in (1, 1)]
    with pytest.raises(ConfigError) as caught:
        read_rows(tiny.write_rows(tmp_path / "chats.jsonl", *["{"] * 25, *["{{}"] * 2, {"text": 3}, *alike))
    heading, *lines = str(caught.value).splitlines()
    assert heading.endswith("30 rows cannot be used")
    assert [line.partition(": ")[0] for line in lines] == [
        "  lines 1, 2, 3, 4, 5, 6, 7, 8 and 19 more",
        "  line 28",
        "  lines 29, 30",
    ]
    assert lines[1:] == [
        "  line 28: 'text' is a JSON number, not a string",
        "  lines 29, 30: messages[0] has no 'content'",
    ]


def test_no_more_than_twenty_causes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rows(tiny.write_rows(tmp_path / "chats.jsonl", *[{chr(97 + n): 1} for n in range(25)]))
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 5 more causes"


def test_a_row_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_bytes(json.dumps({"text": "a"}).encode() + b'\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 2: invalid UTF-8 at byte 10 of the line"):
        read_rows(file)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_rows(tmp_path: Path, content: str) -> None:
    (tmp_path / "chats.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="there are no rows"):
        read_rows(tmp_path / "chats.jsonl")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl: the data cannot be read \(No such file"):
        read_rows(tmp_path / "none.jsonl")


def test_line_separators_within_a_text_do_not_end_a_row(tmp_path: Path) -> None:
    file = tiny.write_rows(tmp_path / "texts.jsonl", {"text": "a\u2028b\x85c"})
    assert read_rows(file) == [Text(1, "a\u2028b\x85c")]


def test_long_rows_are_cut_and_those_with_nothing_left_are_skipped(tmp_path: Path) -> None:
    rows = ({"prompt": "ab", "completion": "c" * n} for n in (1, 5))
    file = tiny.write_rows(tmp_path / "rows.jsonl", *rows, {"prompt": "a" * 9, "completion": "b"})
    data = read_data(file, tiny.tokenizer(), max_length=5)
    assert (data.cut_lines, data.skipped_lines) == ((2, 3), (3,))
    assert [len(example.tokens) for example in data.examples] == [4, 5]
    with pytest.raises(ConfigError, match=r"none of its 3 rows .* max_length=2"):
        read_data(file, tiny.tokenizer(), max_length=2)


# Batches


def test_a_batch_is_padded_at_the_end(tmp_path: Path) -> None:
    rows = ({"prompt": "a", "completion": text} for text in ("b", "cde"))
    data = read_data(tiny.write_rows(tmp_path / "rows.jsonl", *rows), tiny.tokenizer(), max_length=64)
    batch = pad(data.examples, data.pad_token_id)
    assert batch.input_ids.shape == (2, 5)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert (batch.labels != IGNORED).tolist() == [
        [False, True, True, False, False],
        [False, True, True, True, True],
    ]
    assert (batch.tokens, batch.supervised_tokens) == (8, 6)
    empty = pad([], data.pad_token_id)
    assert (empty.input_ids.shape, empty.supervised_tokens) == ((1, 1), 0)


def samplers(rows: int, size: int, **options: object) -> list[list[list[list[int]]]]:
    """Of every rank, its steps, their micro-batches, and the rows of those."""
    chosen = TrainOptions(**options)  # type: ignore[arg-type]
    return [list(StepSampler(rows, chosen, rank=rank, size=size)) for rank in range(size)]


counts = st.integers(min_value=1, max_value=5)


@given(rows=st.integers(min_value=1, max_value=40), size=counts, batch=counts, micro=counts, seed=counts)
def test_every_row_once_an_epoch_and_every_rank_in_step(
    rows: int, size: int, batch: int, micro: int, seed: int
) -> None:
    by_rank = samplers(
        rows, size, batch_size=batch, gradient_accumulation_steps=micro, seed=seed, duration=Epochs(2)
    )
    assert len({len(steps) for steps in by_rank}) == 1
    per_epoch = len(by_rank[0]) // 2
    for epoch in range(2):
        parts = [step for steps in by_rank for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert sorted(chain.from_iterable(chain.from_iterable(parts))) == list(range(rows))
    for of_all in zip(*by_rank, strict=True):
        assert len({len(batches) for batches in of_all}) == 1
        assert 1 <= len(of_all[0]) <= micro
        assert all(len(rows_of_batch) <= batch for batches in of_all for rows_of_batch in batches)
        loads = [sum(map(len, batches)) for batches in of_all]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(("size", "batch", "micro"), [(1, 8, 1), (1, 2, 4), (2, 4, 1), (2, 1, 4), (4, 1, 2)])
def test_a_step_takes_the_same_rows_however_they_are_shared(size: int, batch: int, micro: int) -> None:
    def rows_of_steps(by_rank: list[list[list[list[int]]]]) -> list[list[int]]:
        return [sorted(chain.from_iterable(chain.from_iterable(of_all))) for of_all in zip(*by_rank, strict=True)]

    one = samplers(21, 1, batch_size=8, duration=Epochs(2))
    other = samplers(21, size, batch_size=batch, gradient_accumulation_steps=micro, duration=Epochs(2))
    assert rows_of_steps(other) == rows_of_steps(one)


def test_the_order_is_made_of_seed_and_epoch() -> None:
    options = {"batch_size": 3, "duration": Epochs(2)}
    first, again, other = samplers(9, 1, **options), samplers(9, 1, **options), samplers(9, 1, seed=1, **options)
    assert first == again
    assert first != other
    assert first[0][:3] != first[0][3:]


def test_steps_go_on_over_epochs() -> None:
    assert len(samplers(9, 1, batch_size=4, duration=Steps(7))[0]) == 7


def test_the_loader_gives_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    data = read_data(tiny.write_chats(tmp_path / "chats.jsonl", 5), tiny.tokenizer(), max_length=64)
    assert isinstance(data, TrainData)
    options = TrainOptions(batch_size=1, gradient_accumulation_steps=3)
    loader = step_loader(data, options)
    steps = list(loader)
    assert len(loader) == len(steps) == 2
    assert [[batch.input_ids.shape[0] for batch in batches] for batches in steps] == [[1, 1, 1], [1, 1]]
    assert sum(batch.supervised_tokens for batches in steps for batch in batches) == data.supervised_tokens


# Going on


def taken(sampler: StepSampler, steps: int) -> list[list[int]]:
    """The rows of the next steps of all ranks together."""
    return [sorted(chain.from_iterable(step)) for _, step in zip(range(steps), sampler, strict=False)]


@given(rows=st.integers(min_value=1, max_value=30), done=st.integers(min_value=0, max_value=12), size=counts)
def test_any_number_of_ranks_goes_on_with_the_rows_of_one(rows: int, done: int, size: int) -> None:
    batch = 60  # of all ranks
    options = {"duration": Steps(20), "seed": 3}
    whole = StepSampler(rows, TrainOptions(batch_size=batch, **options))  # type: ignore[arg-type]
    expected = taken(whole, 20)
    first = StepSampler(rows, TrainOptions(batch_size=batch, **options))  # type: ignore[arg-type]
    assert taken(first, done) == expected[:done]
    found: list[list[int]] = [[] for _ in range(20 - done)]
    for rank in range(size):
        rest = StepSampler(rows, TrainOptions(batch_size=batch // size, **options), rank=rank, size=size)  # type: ignore[arg-type]
        rest.step, rest.epoch, rest.taken = first.step, first.epoch, first.taken
        for step, more in zip(found, taken(rest, 20), strict=True):
            step += more
    assert [sorted(step) for step in found] == expected[done:]


def loader(data: TrainData, batch_size: int, seed: int = 0) -> StepLoader:
    return step_loader(data, TrainOptions(batch_size=batch_size, duration=Epochs(2), seed=seed))


def test_steps_of_another_size_take_the_rows_that_are_left(tmp_path: Path) -> None:
    data = read_data(tiny.write_chats(tmp_path / "chats.jsonl", 11), tiny.tokenizer(), max_length=64)
    first = loader(data, 4)
    before = [line for _, [batch] in zip(range(2), first, strict=False) for line in batch.lines]
    state = first.state_dict()
    assert (state["step"], state["epoch"], state["taken"]) == (2, 0, 8)
    rest = loader(data, 2)
    rest.load_state_dict(state)
    assert len(rest) == 2 + 2 + 6
    after = [batch.lines for [batch] in rest]
    assert sorted([*before, *chain.from_iterable(after[:2])]) == list(range(1, 12))
    assert sorted(chain.from_iterable(after[2:])) == list(range(1, 12))
    assert rest.epochs_done == 2
    assert list(rest) == []


def test_a_position_in_other_data_is_refused(tmp_path: Path) -> None:
    data = read_data(tiny.write_chats(tmp_path / "chats.jsonl", 4), tiny.tokenizer(), max_length=64)
    other = read_data(tiny.write_chats(tmp_path / "others.jsonl", 4), tiny.tokenizer(), max_length=40)
    state = loader(data, 2).state_dict()
    loader(data, 2).load_state_dict(state)
    for there in (loader(other, 2), loader(data, 2, seed=1)):
        with pytest.raises(ConfigError, match="the position is one in other data"):
            there.load_state_dict(state)


@pytest.mark.parametrize("wrong", [{"taken": 4}, {"taken": -1}, {"step": -1}, {"epoch": -1}])
def test_a_position_that_is_none(tmp_path: Path, wrong: dict[str, int]) -> None:
    data = read_data(tiny.write_chats(tmp_path / "chats.jsonl", 4), tiny.tokenizer(), max_length=64)
    there = loader(data, 2)
    with pytest.raises(ConfigError, match="is no position in it; the checkpoint is damaged"):
        there.load_state_dict({**there.state_dict(), **wrong})
    assert there.state_dict() == loader(data, 2).state_dict()


@pytest.mark.parametrize("row", [{"text": "\ud800"}, {"prompt": "a", "completion": "b\udfff"}])
def test_half_of_a_surrogate_pair_is_named_by_its_line(tmp_path: Path, row: dict[str, str]) -> None:
    rows = tiny.write_rows(tmp_path / "rows.jsonl", json.dumps({"text": "a"}), json.dumps(row))
    with pytest.raises(ConfigError, match=r"1 row cannot be used\n  line 2: .* is half of a surrogate pair"):
        read_data(rows, tiny.tokenizer(), max_length=64)


def test_looking_takes_every_row_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    data = read_data(tiny.write_chats(tmp_path / "chats.jsonl", 5), tiny.tokenizer(), max_length=64)
    for size in (1, 2, 4):
        parts = [EvaluationBatches(data, Padded(), 2, rank=rank, size=size) for rank in range(size)]
        assert len({len(list(part)) for part in parts}) == 1
        assert sorted(chain.from_iterable(batch.lines for part in parts for batch in part)) == [1, 2, 3, 4, 5]
