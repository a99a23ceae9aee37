"""Datasets of ``shardwise train``: layouts of rows, and chats that are tokenized with masks."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
from tests.integrations.requirements import require_patched_names
from tests.training import tiny, trl_templates
from tests.training.test_dataset_loading import mixture, script
from trl.data_utils import extract_prompt
from trl.trainer import kto_trainer, sft_trainer

from shardwise.core.errors import ConfigError
from shardwise.training import dataset_preparation
from shardwise.training.arguments import ShardwiseArguments, TrainMethod
from shardwise.training.chat_rows import MalformedRowError, to_messages

ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def load_data(
    name: Path,
    tokenizer: Any,
    *,
    masked: bool = False,
    evaluated: str | None = None,
    own: Any = ShardwiseArguments(),  # noqa: B008
    **further: Any,
) -> Any:
    """The rows for training, and whether TRL is to mask them."""
    require_patched_names()
    from shardwise.training import trl_objects

    training = SimpleNamespace(assistant_only_loss=masked, seed=0, eval_strategy="steps" if evaluated else "no")
    training.completion_only_loss = None
    own = replace(own, eval_dataset_name=evaluated)
    named = script(str(name), **further)
    arguments: Any = SimpleNamespace(script=named, training=training, mixture=mixture(), own=own)
    rows, _ = trl_objects.load_data(arguments, tokenizer, 0)
    return rows, training.assistant_only_loss


def test_a_streamed_data_set_without_rows_is_an_error(tmp_path: Path) -> None:
    name = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"messages": []}).to_parquet(name)
    with pytest.raises(ConfigError, match="train: has no rows"):
        load_data(name, tiny.tokenizer(), dataset_streaming=True)


def test_rows_with_weights_are_masked_by_the_training_template_of_trl(tmp_path: Path) -> None:
    """Which keeps all reasoning in one rendering, as that of the model does not."""
    answer = {**ASKED[1], "reasoning_content": "Be brief."}
    for weight, masked_by_trl in ((None, True), (1, False), (0, False)):
        first = answer if weight is None else {**answer, "weight": weight}
        name = tiny.write_rows(tmp_path / f"{weight}.jsonl", {"messages": [ASKED[0], first, ASKED[0], answer]})
        tokenizer = trl_templates.tokenizer(trl_templates.text("qwen3"))
        rows, is_left_to_trl = load_data(name, tokenizer, masked=True)
        assert (len(rows), is_left_to_trl) == (1, masked_by_trl)
        if weight is not None:
            tokens = zip(rows[0]["input_ids"], rows[0]["assistant_masks"], strict=True)
            trained = tokenizer.decode([token for token, mask in tokens if mask])
            assert trained.count("Be brief.\n</think>\n\nHo<|im_end|>") == 1 + weight
            assert tokenizer.decode(rows[0]["input_ids"]).count("Be brief.") == 2


def test_a_template_with_marks_may_render_answers_otherwise_when_more_follows(tmp_path: Path) -> None:
    call = "{%- for c in m.tool_calls or () %}{{- c.function.name ~ c.function.arguments | tojson }}{%- endfor %}"
    thought = "{%- if m.role == 'assistant' and loop.last %}{{- '(thought)' }}{%- endif %}"
    template = tiny.MARKED.replace("{% generation %}", "{% generation %}" + thought + call)
    name = tiny.write_rows(tmp_path / "rows.jsonl", {"messages": ASKED})
    assert load_data(name, tiny.tokenizer(template), masked=True)[1]


def test_the_special_tokens_of_a_configuration_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """From the beginning, because templates may write it, of which shardwise makes masks."""
    require_patched_names()
    from shardwise.training.train_model import require_pad_token
    from shardwise.training.trl_objects import load_processor

    tiny.tokenizer().save_pretrained(tmp_path)
    model = SimpleNamespace(model_name_or_path=str(tmp_path), model_revision=None)
    training = SimpleNamespace(trust_remote_code=False, eos_token=tiny.PAD)
    arguments: Any = SimpleNamespace(model=model, training=training, own=ShardwiseArguments())
    assert load_processor(arguments).eos_token == tiny.PAD
    model.model_name_or_path = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"Check the name \(there is no such folder on this machine\)"):
        load_processor(arguments)
    model.model_name_or_path = str(tmp_path)
    training.eos_token = "<end>"
    with pytest.raises(ConfigError, match="eos_token: <end> is not in the vocabulary"):
        load_processor(arguments)
    padded, small = tiny.tokenizer(), tiny.model()
    padded.add_tokens([f"<{number}>" for number in range(10)])
    padded.add_special_tokens({"pad_token": "<pad>"})
    padded.save_pretrained(tmp_path)
    training.eos_token = None
    for token, message in (
        ("<end>", "is not in the vocabulary"),
        (None, "has the id 269"),
        ("<9>", "has the id 268"),
    ):
        training.pad_token = token
        with pytest.raises(ConfigError, match=f"pad_token: .*{message}"):
            require_pad_token(small, load_processor(arguments))
    training.pad_token = tiny.PAD
    require_pad_token(small, load_processor(arguments))


def test_a_tokenizer_may_have_a_tokenizer() -> None:
    """As that of mistral-common has."""
    tokenizer: Any = tiny.tokenizer()
    tokenizer.tokenizer = object()
    assert dataset_preparation.get_tokenizer(tokenizer) is tokenizer


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"conversations": json.dumps([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}])},
        {"instruction": "Hi", "input": "", "output": "Ho"},
        {"instruction": "Hi", "input": None, "output": "Ho", "history": []},
        {"messages": [{**message, "tool_calls": None} for message in ASKED]},
    ],
)
def test_other_layouts_become_messages(row: dict[str, Any]) -> None:
    assert to_messages(row) == {"messages": ASKED}


def test_calls_tools_and_systems_of_sharegpt() -> None:
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    row = {
        "system": "Be kind.",
        "conversations": [
            {"from": "human", "value": "Rain?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "dry"},
            {"from": "gpt", "value": "No."},
        ],
        "tools": json.dumps([{"name": "weather"}]),
    }
    found = to_messages(row)
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in found["messages"]] == roles
    assert found["messages"][2]["tool_calls"] == [{"type": "function", "function": call}]
    assert found["tools"] == [{"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_system_begins_chats_without_a_system_message(tmp_path: Path, streaming: bool) -> None:
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    column = {"role": "system", "content": "s"}
    for number, (key, turns) in enumerate((("messages", ASKED), ("conversations", shared))):
        owns = [[{"role": role, "content": "mine"}, *ASKED] for role in ("system", "developer")]
        rows = [{"system": None, key: turns}, {"system": "s", key: turns}]
        rows += [{"system": "s", key: own} for own in owns] if key == "messages" else []
        name = tiny.write_rows(tmp_path / f"{number}.jsonl", *rows)
        wanted = [ASKED, [column, *ASKED], *(owns if key == "messages" else [])]
        prepared, _ = load_data(name, tiny.tokenizer(), dataset_streaming=streaming)
        assert list(prepared) == [{"messages": messages} for messages in wanted]
        tokenizer = tiny.tokenizer(tiny.UNMARKED)
        masked, _ = load_data(name, tokenizer, masked=True, dataset_streaming=streaming)
        rendered = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in wanted]
        assert [tokenizer.decode(row["input_ids"]) for row in masked] == rendered
    for row in ({"messages": ASKED}, {"messages": ASKED, "system": True}):
        stored = datasets.Dataset.from_list([row])
        assert dataset_preparation.convert_to_messages(stored, "sft", num_proc=None) is stored


def test_rows_keep_their_own_tools_and_columns_may_be_null_for_long() -> None:
    answered = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    called = [answered[0], {"from": "function_call", "value": json.dumps(call)}]
    tools = [{"name": name, "parameters": {"properties": {name: {"type": "string"}}}} for name in ("city", "sum")]
    rows = [{"conversations": answered, "tools": "", "category": "x", "facts": {"a": 1, "b": None}}] * 1000
    rows += [{"conversations": called, "tools": json.dumps([tool]), "category": None} for tool in tools]
    messages = dataset_preparation.convert_to_messages(datasets.Dataset.from_list(rows), "sft", num_proc=None)
    assert sorted(messages.column_names or ()) == ["category", "facts", "messages", "tools"]
    first, *called_rows = (messages[index] for index in (0, 1000, 1001))
    assert first == {"category": "x", "facts": {"a": 1, "b": None}, "messages": ASKED, "tools": None}
    for row, tool in zip(called_rows, tools, strict=True):
        assert row["tools"] == [{"type": "function", "function": tool}]
        assert row["messages"][1]["tool_calls"] == [{"type": "function", "function": call}]
        assert row["category"] is None
    alpaca = [{"instruction": "Hi", "output": "Ho", "category": "x"}] * 1000
    alpaca += [{"instruction": "Hi", "output": "Ho", "category": None}]
    messages = dataset_preparation.convert_to_messages(datasets.Dataset.from_list(alpaca), "sft", num_proc=None)
    assert messages[1000] == {"category": None, "messages": ASKED}


def test_nulls_that_arrow_adds_to_tools_and_calls_are_removed() -> None:
    def row(name: str, **further: Any) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": {name: "x", "content": 1 / 3}}}
        answers = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        tools = [{"name": name, "parameters": {name: {"default": None, "type": "string"}}}]
        return {"prompt": ASKED[:1], "completion": answers, "tools": tools, "facts": {name: 1}, **further}

    def prepared(*rows: dict[str, Any]) -> Any:
        stored = datasets.Dataset.from_list(list(rows))
        return stored, dataset_preparation.convert_to_messages(stored, "sft", num_proc=None)

    first, second, bare = row("city"), row("sum"), row("city", tools=None)
    stored, alike = prepared(first, first, bare)
    assert alike is stored
    assert alike[0]["completion"] == first["completion"]
    _, varied = prepared(first, second, bare)
    for found, wanted in zip(varied, (first, second, bare), strict=True):
        [call], [wanted_call] = (one["completion"][0]["tool_calls"] for one in (found, wanted))
        assert call["function"]["arguments"].keys() == wanted_call["function"]["arguments"].keys()
        assert found["completion"][0]["content"] is None
        assert (found["prompt"], found["facts"]) == (
            wanted["prompt"],
            {"city": None, "sum": None} | wanted["facts"],
        )
        names = [wanted["tools"] and wanted["tools"][0]["name"], found["tools"] and found["tools"][0]["name"]]
        assert names[0] == names[1]
    assert [varied[0]["tools"], varied[2]["tools"]] == [
        [{"name": "city", "parameters": {"city": {"type": "string"}}}],
        None,
    ]
    _, further = prepared({**first, "chat_template_kwargs": {}}, {**second, "chat_template_kwargs": {"a": 1}})
    assert further[0]["completion"][0]["tool_calls"][0]["function"]["arguments"].keys() == {"city", "content"}


def test_numbers_of_calls_and_tools_keep_all_digits(tmp_path: Path) -> None:
    numbers = [1.7, -28.923, 3.141592653589793, 1e-11, 1.5e300, 2**64 + 1, -(2**70), 5, "1.7", True, None]
    small = [value for value in numbers if not isinstance(value, int) or abs(value) < 2**63]

    def rows(key: str, arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of ShareGPT, and of messages in Parquet."""
        call = {"name": key, "arguments": {key: arguments}}
        tools = [{"type": "function", "function": {"name": key, "parameters": {key: {"enum": arguments}}}}]
        shared = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps(call)}]
        called = [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}]
        return {"conversations": shared, "tools": json.dumps(tools)}, {"messages": called, "tools": tools}

    floats = [value for value in small if isinstance(value, float)]
    sharegpt = [rows("x", numbers)[0], rows("y", small)[0]]
    messages = [rows("x", floats)[1], rows("y", floats)[1]]
    own = ShardwiseArguments(system_prompt="s")
    for number, given, wanted in ((0, sharegpt, numbers), (1, messages, floats)):
        datasets.Dataset.from_list(given).to_parquet(name := tmp_path / f"{number}.parquet")
        for streaming in (False, True) if number == 0 else (False,):
            prepared, _ = load_data(name, tiny.tokenizer(), own=own, dataset_streaming=streaming)
            prepared = prepared.map(lambda _: {"size": 1}).filter(lambda row: row["messages"])
            first = next(iter(prepared))
            [call] = first["messages"][2]["tool_calls"]
            assert repr(call["function"]["arguments"]) == repr({"x": wanted})
            assert repr(first["tools"][0]["function"]["parameters"]["x"]["enum"]) == repr(wanted)


@pytest.mark.parametrize(
    "rejected",
    [{"content": "No."}, {"content": "No.", "tool_calls": None}, {"tool_calls": [{"function": {"name": "web"}}]}],
)
def test_a_pair_begins_with_its_prompt_when_only_chosen_answers_call_several_tools(
    rejected: dict[str, Any],
) -> None:
    def row(name: str) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": {name: "x"}}}
        chosen = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"chosen": [ASKED[0], chosen], "rejected": [ASKED[0], {"role": "assistant", **rejected}]}

    stored = datasets.Dataset.from_list([row("city"), row("sum")])
    for pair in dataset_preparation.convert_to_messages(stored, "dpo", num_proc=None):
        assert extract_prompt(pair)["prompt"] == ASKED[:1]


def test_messages_of_json_and_variables_of_some_templates(tmp_path: Path) -> None:
    rows = [{"messages": json.dumps(ASKED), "chat_template_kwargs": variables} for variables in ({"a": 1}, None)]
    name = tiny.write_rows(tmp_path / "rows.jsonl", *rows)
    wanted = [{"messages": ASKED, "chat_template_kwargs": variables} for variables in ({"a": 1}, {})]
    for streaming in (False, True):
        assert list(load_data(name, tiny.tokenizer(), dataset_streaming=streaming)[0]) == wanted


def test_streams_of_other_columns_are_mixed(tmp_path: Path) -> None:
    streams = []
    for column in ("messages", "conversations"):
        name = str(tiny.write_rows(tmp_path / f"{column}.jsonl", {column: ASKED}))
        streams.append(datasets.load_dataset("json", data_files=name, split="train", streaming=True))
    rows = datasets.concatenate_datasets(streams)
    assert list(dataset_preparation.convert_to_messages(rows, "sft", num_proc=None)) == [{"messages": ASKED}] * 2


def test_texts_of_prompts_beside_chats_are_left_out(tmp_path: Path) -> None:
    """The published files of the alignment handbook have both."""
    rejected = [ASKED[0], {**ASKED[1], "content": "No"}]
    chat = {"prompt": "Hi", "messages": ASKED}
    pair = {**chat, "chosen": ASKED, "rejected": rejected}
    answers = {"prompt": "Hi", "chosen": ASKED[1:], "rejected": rejected[1:]}
    system = [{"role": "system", "content": "s"}]
    own = ShardwiseArguments(system_prompt="s")
    problems = replace(own, method="grpo", dataset_prompt_column="prompt")
    sft = {"messages": system + ASKED}
    cases = [
        ("chats", [chat], own, sft),
        ("mixture", [{**chat, "prompt": None}, chat], own, sft),
        ("chosen", [pair], own, {**sft, "chosen": ASKED, "rejected": rejected}),
        ("pairs", [pair], replace(own, method="dpo"), {"chosen": system + ASKED, "rejected": system + rejected}),
        ("texts", [{**chat, "completion": "Ho"}], own, sft),
        ("json", [{**chat, "messages": json.dumps(ASKED)}], own, sft),
        ("prompts", [{**chat, "prompt": ASKED[:1]}], own, sft),
        ("nulls", [{"prompt": "Hi", "messages": None}, chat], ShardwiseArguments(), {"messages": None}),
        ("answers", [{**pair, **answers}], ShardwiseArguments(method="dpo"), answers),
        ("sampled", [pair], ShardwiseArguments(method="grpo"), pair),
        ("rewards", [{**chat, "messages": "[]"}], ShardwiseArguments(method="grpo"), {**chat, "messages": "[]"}),
        ("column", [pair], problems, {**pair, "prompt": system + ASKED[:1]}),
    ]
    for name, rows, keys, wanted in cases:
        file = tiny.write_rows(tmp_path / f"{name}.jsonl", *rows)
        assert load_data(file, tiny.tokenizer(), own=keys)[0][0] == wanted, name
    for name in ("chats", "prompts"):
        file = tmp_path / f"{name}.jsonl"
        tokenized, is_left_to_trl = load_data(file, tiny.tokenizer(tiny.UNMARKED), masked=True)
        assert not is_left_to_trl
        assert sum(tokenized[0]["assistant_masks"]) == len("Ho") + 1


def test_chats_beside_answers_are_their_prompt(tmp_path: Path) -> None:
    """As in files for LLaMA-Factory, and those of pairs of text."""
    human, texts = {"from": "human", "value": "Hi"}, {"chosen": "Ho", "rejected": "No"}
    turns = {key: {"from": "gpt", "value": text} for key, text in texts.items()}
    chats = {key: [{"role": "assistant", "content": text}] for key, text in texts.items()}
    named = {key: one[0] for key, one in chats.items()}
    asked = {"system": "s", "question": "Hi"}
    wanted = {"prompt": ASKED[:1], **chats}
    completion = {"completion": "Ho", "label": True}
    dpo = ShardwiseArguments(method="dpo")
    cases = [
        ("texts", {"conversations": [human], **texts}, dpo, wanted),
        ("turns", {"conversations": [human], **turns}, dpo, wanted),
        ("named", {"messages": ASKED[:1], **named}, replace(dpo, method="orpo"), wanted),
        ("chats", {"messages": ASKED[:1], **chats}, replace(dpo, method="reward"), wanted),
        (
            "kto",
            {"messages": ASKED[:1], **completion},
            replace(dpo, method="kto"),
            {"prompt": ASKED[:1], **completion, "completion": chats["chosen"]},
        ),
        ("column", {**asked, **texts}, replace(dpo, dataset_prompt_column="question"), {"system": "s", **wanted}),
        ("alone", {"text": "x", **texts}, replace(dpo, method="reward"), {"text": "x", **texts}),
    ]
    for name, row, keys, found in cases:
        file = tiny.write_rows(tmp_path / f"{name}.jsonl", row, row)
        for streaming in (False, True) if name in ("turns", "column") else (False,):
            rows, _ = load_data(file, tiny.tokenizer(), own=keys, dataset_streaming=streaming)
            assert list(rows) == [found] * 2, name
    turns = {key: value[0] for key, value in chats.items()}
    for name, answers in (("pairs", texts), ("lists", chats), ("single turns", turns)):
        file = tiny.write_rows(
            tmp_path / f"{name}.jsonl", {**asked, **answers, "rejected": answers["chosen"]}, asked | answers
        )
        with pytest.raises(ConfigError, match="row 2 of the dataset: prompt: is missing, and chosen and rejected"):
            load_data(file, tiny.tokenizer(), own=dpo)


def test_a_prompt_may_be_null_where_chats_are_looked_for(tmp_path: Path) -> None:
    parts = {"prompt": ASKED[:1], "completion": ASKED[1:], "messages": None}
    rows = [{**dict.fromkeys(parts), "messages": ASKED}, parts]
    name = tiny.write_rows(tmp_path / "rows.jsonl", *rows)
    tokenized, _ = load_data(name, tiny.tokenizer(tiny.UNMARKED), masked=True)
    assert [sum(row["assistant_masks"]) for row in tokenized] == [len("Ho") + 1] * 2


def test_rows_that_trl_would_not_name(tmp_path: Path) -> None:
    own = ShardwiseArguments(method="grpo")
    cases: list[tuple[list[Any], ShardwiseArguments, bool, str]] = [
        ([{"text": "Hi"}], ShardwiseArguments(), True, "assistant_only_loss: the rows have no chats"),
        ([{"messages": []}, {"messages": ASKED}], ShardwiseArguments(), True, "row 1 of the dataset: messages: is"),
        ([{"prompt": ASKED[:1]}, {"prompt": None}], own, False, "row 2 of the dataset: prompt: is null"),
        ([{"problem": "Hi"}], own, False, "prompt: is no column of the dataset. Set dataset_prompt_column"),
        (
            [{"question": "Hi", "answer": "Ho"}],
            ShardwiseArguments(),
            True,
            "has the columns question, answer, and sft needs messages, or prompt and completion, or text. Rename",
        ),
        (
            [{"messages": ASKED, "label": True}],
            ShardwiseArguments(method="kto"),
            False,
            "messages, label, and kto needs prompt and completion and label, or chosen and rejected. Rename",
        ),
        ([{"chosen": "a", "rejected": "b"}], ShardwiseArguments(method="tpo"), False, "tpo needs .* and reference"),
        (
            [{"messages": ASKED}, {"messages": None}],
            ShardwiseArguments(system_prompt="s"),
            False,
            "row 2 of the dataset: messages: is not a list of messages",
        ),
    ]
    for number, (rows, keys, masked, message) in enumerate(cases):
        file = tiny.write_rows(tmp_path / f"{number}.jsonl", *rows)
        with pytest.raises(ConfigError, match=message):
            load_data(file, tiny.tokenizer(), masked=masked, own=keys)


def test_a_text_that_is_not_utf_8_is_shown(tmp_path: Path) -> None:
    name = tmp_path / "rows.jsonl"
    name.write_bytes('{"text": "Hi"}\n{"text": "A café is open"}\n'.encode("latin-1"))
    shown = r"the dataset: a text is not UTF-8, b'A caf\\xe9 is open'. Save the file that has it as UTF-8"
    with pytest.raises(ConfigError, match=shown):
        load_data(name, tiny.tokenizer(), own=ShardwiseArguments(method="grpo", dataset_prompt_column="text"))


def test_a_number_in_a_column_of_text_is_named() -> None:
    rows = datasets.Dataset.from_dict({"text": [5]}).to_iterable_dataset()
    with pytest.raises(ConfigError, match="row 1 of the dataset: text: is int, not text. Write text"):
        list(dataset_preparation.check_when_read(rows, "text", "sft", num_proc=None))


@pytest.mark.parametrize(
    ("method", "row", "changes", "message"),
    [
        ("sft", {"messages": ASKED}, {"messages": ASKED[:1]}, "messages: none has the role 'assistant'"),
        (
            "sft",
            {"prompt": ASKED[:1], "completion": ASKED[1:]},
            {"completion": ASKED[:1]},
            "messages: none has the role 'assistant'",
        ),
        (
            "kto",
            {"prompt": "a", "completion": "b", "label": True},
            {"label": None},
            "label: is null, not a boolean",
        ),
        ("kto", {"prompt": "a", "completion": "b", "label": "no"}, {}, "label: is str, not a boolean"),
    ],
)
def test_a_row_that_trl_fails_on_is_named(
    method: TrainMethod, row: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    number = 2 if changes else 1
    module: Any = {"sft": sft_trainer, "kto": kto_trainer}[method]
    trainer = module.SFTTrainer if method == "sft" else module.KTOTrainer
    data = [None, datasets.Dataset.from_list([row, {**row, **changes}])]
    training = SimpleNamespace(assistant_only_loss=True)
    with (
        dataset_preparation.preparing_together(trainer, 0, data, method, training),
        pytest.raises(ConfigError, match=f"row {number} of the dataset: {message}"),
        module.global_then_local_main_first(),
    ):
        raise RuntimeError


def test_rows_of_json_are_searched_for_images_once(tmp_path: Path) -> None:
    name = tiny.write_rows(tmp_path / "rows.jsonl", {"conversations": ASKED})
    search = dataset_preparation.require_no_media_parts
    with mock.patch.object(dataset_preparation, "require_no_media_parts", side_effect=search) as searches:
        load_data(name, tiny.tokenizer())
        assert searches.call_count == len(ASKED)
        load_data(name, tiny.tokenizer())
    assert searches.call_count == len(ASKED)


def test_only_columns_of_tokens_need_embeddings() -> None:
    tokenizer, small = tiny.tokenizer(), tiny.model()
    tokenizer.add_tokens([f"<{number}>" for number in range(10)])
    rows = datasets.Dataset.from_list([{"input_ids": [1], "doc_ids": [268], "labels": [1]}])
    assert dataset_preparation.require_embedded_tokens(rows, tokenizer, small) is rows
    for name in ("input_ids", "prompt_ids", "chosen_ids", "rejected_input_ids", "KL_completion_ids"):
        prepared = rows.select_columns("doc_ids").rename_column("doc_ids", name)
        with pytest.raises(ConfigError, match="uses '<9>'"):
            dataset_preparation.require_embedded_tokens(prepared, tokenizer, small)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": "["}, "conversations: is a string that is not valid JSON"),
        ({"messages": "7"}, "messages: is not a list of messages"),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "has the speaker 'nobody'"),
        ({"instruction": "x"}, "output: is missing"),
        ({"instruction": "x", "output": "y", "history": [1]}, "history: is not a list of pairs"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "is not a function call in JSON"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, r"messages\[0\]: has the speaker \['gpt'\]"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]: has no role"),
        ({"messages": ASKED, "tools": "7"}, "tools: is not a list of functions"),
        ({"messages": ASKED, "tools": ["x"]}, "tools: is not a list of functions"),
        ({"prompt": "x", "tools": {"name": "x"}}, "tools: is not a list of functions"),
        ({"instruction": 5, "output": "y"}, "instruction: is not text"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedRowError, match=message):
        to_messages(row)


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_are_tokenized_with_masks(streaming: bool) -> None:
    rows: Any = datasets.Dataset.from_list([{"messages": ASKED}, {"messages": [*ASKED, *ASKED]}])
    rows = rows.to_iterable_dataset() if streaming else rows
    tokenizer = tiny.tokenizer(tiny.FORGETFUL)  # which has an example for each answer
    found = list(dataset_preparation.tokenize_with_masks(rows, tokenizer, num_proc=None))
    trained = [
        tokenizer.decode([t for t, mask in zip(one["input_ids"], one["assistant_masks"], strict=True) if mask])
        for one in found
    ]
    assert trained == ["(thought)Ho<|im_end|>"] * 3


def test_only_completions_are_trained_of_prompts_with_completions() -> None:
    rows = datasets.Dataset.from_list([{"prompt": [*ASKED, ASKED[0]], "completion": [ASKED[1]]}])
    tokenizer = tiny.tokenizer(tiny.UNMARKED)
    [one] = dataset_preparation.tokenize_with_masks(rows, tokenizer, num_proc=None)
    num_tokens = len(tokenizer("Ho<|im_end|>")["input_ids"])
    assert sum(one["assistant_masks"]) == num_tokens
    # With completion_only_loss: false, answers in prompts are trained on, too.
    whole = dataset_preparation.tokenize_with_masks(rows, tokenizer, completion_only=False, num_proc=None)
    assert sum(whole[0]["assistant_masks"]) == 2 * num_tokens


def test_examples_of_other_code_are_not_taken_from_the_cache() -> None:
    rows: Any = datasets.Dataset.from_list([{"conversations": ASKED}])
    same, again = (dataset_preparation.convert_to_messages(rows, "sft", num_proc=None) for _ in "12")
    with mock.patch.object(dataset_preparation, "_digest_code", return_value="of another version"):
        other = dataset_preparation.convert_to_messages(rows, "sft", num_proc=None)
    assert isinstance(other, datasets.Dataset)
    assert same._fingerprint == again._fingerprint != other._fingerprint


@pytest.mark.parametrize("stored", [ASKED, json.dumps(ASKED)], ids=["messages", "json"])
def test_other_rows_before_the_first_chat_are_not_decoded(stored: Any) -> None:
    prompts = datasets.Dataset.from_list([{"prompt": "Hi", "completion": "Ho"}] * 3000)
    chats = datasets.Dataset.from_list([{"messages": stored}])
    mixed = datasets.concatenate_datasets([prompts, chats])
    for rows, most in ((mixed, 1000), (mixed.select(range(3000, -1, -1)), 1), (mixed.select(range(5)), 0)):
        decoded: list[int] = []

        def counting(some: Any, decoded: list[int] = decoded) -> Any:
            for row in some:
                decoded.append(1)
                yield row

        with mock.patch.object(dataset_preparation, "without_decoding", counting):
            first = dataset_preparation._first_row_with("messages", rows)
        assert first.get("messages") == (stored if most else None)
        assert len(decoded) <= most


def answer(**further: Any) -> dict[str, Any]:
    return {"messages": json.dumps([ASKED[0], {**ASKED[1], **further}])}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": json.dumps(ASKED[:1])}, "messages: none has the role 'assistant'"),
        ({"messages": json.dumps([*ASKED, {"role": None, "content": "x"}])}, r"messages\[2\]: has no role"),
        ({"messages": json.dumps([*ASKED, {"role": 5, "content": "x"}])}, r"messages\[2\]: has no role"),
        (answer(content=5), r"messages\[1\].content: is not text"),
        (answer(content=["x"]), r"messages\[1\].content: is not text"),
        (answer(tool_calls=5), r"messages\[1\].tool_calls: is not a list of calls"),
        (answer(tool_calls=["x"]), r"messages\[1\].tool_calls: is not a list of calls"),
        (answer(tool_calls=[{"function": {"arguments": {}}}]), r"messages\[1\].tool_calls: is not a list of calls"),
        (answer(tool_calls=[{"name": "x", "arguments": "{"}]), r"messages\[1\].tool_calls: is not a list of calls"),
        *(
            (
                answer(tool_calls=[{"name": "x", "arguments": other}]),
                r"messages\[1\].tool_calls: is not a list of calls",
            )
            for other in ("[1, 2]", "5", "null", [1])
        ),
        ({**answer(), "tools": json.dumps([{"function": "weather"}])}, "tools: is not a list of functions"),
        ({**answer(), "chat_template_kwargs": "7"}, "chat_template_kwargs: is not a mapping"),
        ({"prompt": ["x"], "completion": ASKED[1:]}, "prompt: is not a list of messages"),
        ({"prompt": ASKED[:1], "completion": "x"}, "completion: is not a list of messages"),
        ({"prompt": [{"content": "x"}], "completion": ASKED[1:]}, r"messages\[0\]: has no role"),
    ],
)
def test_a_row_whose_chat_cannot_be_used_is_named(row: dict[str, Any], message: str) -> None:
    rows = datasets.Dataset.from_list(
        [{**dict.fromkeys(row), "messages": json.dumps(ASKED)} if "messages" in row else row, row]
    )
    number = 2 if "messages" in row else 1
    with pytest.raises(ConfigError, match=f"row {number} of the dataset: {message}"):
        dataset_preparation.tokenize_with_masks(rows, tiny.tokenizer(tiny.UNMARKED), num_proc=None)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_with_a_call_that_a_template_with_marks_leaves_out_is_named(tmp_path: Path, streaming: bool) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"n": 1}}}
    rows = [tiny.chat("Hi", "Ho"), tiny.chat("Hi", "Ho")]
    rows[1]["messages"][1]["tool_calls"] = [call]  # type: ignore[index]
    name = tiny.write_rows(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(ConfigError, match="row 2 of the dataset: chat template: does not use 'tool_calls'"):
        list(load_data(name, tiny.tokenizer(tiny.MARKED), masked=True, dataset_streaming=streaming)[0])


def test_a_system_prompt_begins_each_chat_without_one() -> None:
    user = {"role": "user", "content": "u"}
    own = {"role": "system", "content": "mine"}
    rows = datasets.Dataset.from_list([{"messages": [user]}, {"messages": [own, user]}])
    system = {"role": "system", "content": "s"}
    done = dataset_preparation.add_system_prompt(rows, "s", None, num_proc=None)
    assert done["messages"] == [[system, user], [own, user]]
    rows = datasets.Dataset.from_list([{"messages": [{"role": "developer", "content": "mine"}, user]}])
    assert dataset_preparation.add_system_prompt(rows, "s", None, num_proc=None)["messages"] == rows["messages"]
    pair = datasets.Dataset.from_list([{"chosen": [user], "rejected": [user]}])
    done = dataset_preparation.add_system_prompt(pair, "s", None, num_proc=None)
    assert (done["chosen"], done["rejected"]) == ([[system, user]], [[system, user]])
    problems = datasets.Dataset.from_list([{"problem": "2 + 2", "solution": "4"}])
    done = dataset_preparation.add_system_prompt(problems, "s", "problem", num_proc=None)
    assert done[0] == {"solution": "4", "prompt": [system, {"role": "user", "content": "2 + 2"}]}
    done = dataset_preparation.add_system_prompt(problems, None, "solution", num_proc=None)
    assert done["prompt"] == [[{"role": "user", "content": "4"}]]
    solved = datasets.Dataset.from_list([{"problem": "2 + 2", "solution": "4", "messages": ASKED}])
    done = dataset_preparation.add_system_prompt(solved, "s", "problem", num_proc=None)
    assert (done[0]["prompt"][0], done[0]["messages"]) == (system, ASKED)
    with pytest.raises(ConfigError, match="row 1 of the dataset: has no messages, prompt or chosen"):
        dataset_preparation.add_system_prompt(problems, "s", None, num_proc=None)
    with pytest.raises(ConfigError, match="row 1 of the dataset: prompt: is text, which has no system message"):
        dataset_preparation.add_system_prompt(
            datasets.Dataset.from_list([{"prompt": "a"}]), "s", None, num_proc=None
        )
    with pytest.raises(ConfigError, match="nothing: is not text"):
        dataset_preparation.add_system_prompt(problems, "s", "nothing", num_proc=None)


def test_a_split_that_an_evaluation_dataset_lacks_is_named(tmp_path: Path) -> None:
    name = tiny.write_rows(tmp_path / "rows.jsonl", {"text": "a"})
    (tmp_path / "splits").mkdir()
    for split in ("train", "test"):
        tiny.write_rows(tmp_path / "splits" / f"{split}.jsonl", {"text": "a"})
    with pytest.raises(ConfigError, match="held_out: is not a split of the dataset, which has train, test"):
        load_data(name, tiny.tokenizer(), evaluated=str(tmp_path / "splits"), dataset_test_split="held_out")
