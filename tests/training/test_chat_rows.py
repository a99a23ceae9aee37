"""What a row with messages may say, and what becomes of it: learned, handed to the template, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.training import shipped, tiny

from shardwise.errors import ConfigError
from shardwise.training.configuration.config_sections import TrainConfig
from shardwise.training.data.read_once import read_data
from shardwise.training.session import read_rows
from shardwise.training.texts.chat_script import ChatOptions, Learn
from shardwise.training.texts.masking import Encoder, Example
from shardwise.training.texts.rows import Completion, RowError, RowFault, row_of

HEAD = "{{- '<|im_start|>' + m.role + '\\n' }}"
TURNS = "{%- for m in messages %}" + HEAD + "BODY{{- '<|im_end|>\\n' }}{%- endfor %}"
ASKING = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"


UNMARKED_AND_ENDED = tiny.UNMARKED + "{%- if not add_generation_prompt %}{{- '<|endoftext|>' }}{%- endif %}"


def template(body: str, before: str = "") -> str:
    """A template that writes each message so."""
    return before + TURNS.replace("BODY", body) + ASKING


def message(role: str, content: object, **further: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **further}


def encode(row: dict[str, Any], text: str = tiny.UNMARKED, learn: Learn = Learn.ALL) -> list[Example] | str:
    """The examples of a row, or what is wrong with it."""
    try:
        [made] = Encoder(tiny.tokenizer(text), ChatOptions(learn=learn)).encode_many([row_of(1, row)])
    except RowError as error:
        return str(error)
    return made.cause if isinstance(made, RowFault) else made


def learned(row: dict[str, Any], text: str = tiny.UNMARKED, learn: Learn = Learn.ALL) -> list[str]:
    made = encode(row, text, learn)
    assert not isinstance(made, str), made
    return [run for example in made for run in shipped.runs(example, tiny.tokenizer(text))]


def written(row: dict[str, Any], text: str) -> str:
    made = encode(row, text)
    assert not isinstance(made, str), made
    return shipped.whole(made, tiny.tokenizer(text))[-1]


HI, HO = message("user", "Hi"), message("assistant", "Ho")
AND, BYE = message("user", "And?"), message("assistant", "Bye")


# Which answers


@pytest.mark.parametrize("text", [tiny.MARKED, tiny.UNMARKED, tiny.FORGETFUL])
def test_an_answer_with_a_weight_of_0_is_not_learned(text: str) -> None:
    for weight in (0, 0.0, False):
        row = {"messages": [HI, {**HO, "weight": weight}, AND, {**BYE, "weight": 1}]}
        [last] = learned(row, text)
        assert last.removeprefix("(thought)") == "Bye<|im_end|>"
        assert "weight" not in written(row, template("{{- m.content }}{{- m.weight }}"))
    [first] = learned({"messages": [HI, HO, AND, {**BYE, "weight": 0}]}, text)
    assert first.removeprefix("(thought)") == "Ho<|im_end|>"


@pytest.mark.parametrize("text", [tiny.MARKED, tiny.UNMARKED, tiny.FORGETFUL])
def test_the_last_answer_alone_is_learned_on_request(text: str) -> None:
    for more in ([], [message("user", "Thanks")]):
        [last] = learned({"messages": [HI, HO, AND, BYE, *more]}, text, Learn.LAST)
        assert last.removeprefix("(thought)") == "Bye<|im_end|>"
    with_weight = {"messages": [HI, HO, AND, {**BYE, "weight": 0}]}
    assert learned(with_weight, tiny.MARKED, Learn.LAST) == ["Ho<|im_end|>"]


def test_a_prompt_and_a_completion_of_messages() -> None:
    row = {"prompt": [HI, HO, AND], "completion": [BYE]}
    assert learned(row) == ["Bye<|im_end|>"]
    assert written(row, tiny.UNMARKED) == written({"messages": [HI, HO, AND, BYE]}, tiny.UNMARKED)
    assert row_of(1, {"prompt": "a", "completion": "b"}) == Completion(1, "a", "b")
    assert encode({"prompt": [HI], "completion": "Ho"}) == "'completion' must be a list of at least one message"
    assert encode({"prompt": "Hi", "completion": [HO]}) == "'prompt' must be a list of at least one message"
    assert "nothing to learn" in str(encode({"prompt": [HI, HO], "completion": [AND]}))


def test_consecutive_answers_are_learned_each() -> None:
    row = {"messages": [HI, HO, BYE]}
    assert learned(row) == ["Ho<|im_end|>", "Bye<|im_end|>"]
    assert learned({"messages": [HO, AND, BYE]}) == ["Ho<|im_end|>", "Bye<|im_end|>"]


# What is handed to the template


def test_tools_are_written() -> None:
    text = template(
        "{{- m.content }}", "{%- for tool in tools or [] %}{{- tool.function.name + ' ' }}{%- endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for given in (tools, json.dumps(tools)):
        assert written({"messages": [HI, HO], "tools": given}, text).startswith("f <|im_start|>user")
    for none in ([], None, "[]"):
        assert written({"messages": [HI, HO], "tools": none}, text).startswith("<|im_start|>user")
    assert (
        encode({"messages": [HI, HO], "tools": tools}) == "it has 'tools', of which the chat template knows nothing"
    )


def test_a_tokenizer_may_have_a_template_for_tools() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = {
        "default": template("{{- m.content }}"),
        "tool_use": "{{- tools | length }}" + tiny.MARKED,
    }
    rows = [row_of(1, {"messages": [HI, HO]}), row_of(2, {"messages": [HI, HO], "tools": [{"name": "f"}]})]
    first, second = Encoder(tokenizer).encode_many(rows)
    assert not isinstance(first, RowFault)
    assert not isinstance(second, RowFault)
    assert shipped.whole([*first, *second], tokenizer)[0].startswith("<|im_start|>user")
    assert shipped.whole([*first, *second], tokenizer)[1].startswith("1<|im_start|>user")
    [named] = Encoder(tokenizer, ChatOptions("tool_use")).encode_many(rows[1:])
    assert not isinstance(named, RowFault)
    assert shipped.whole(named, tokenizer) == shipped.whole(second, tokenizer)


def test_a_row_has_variables_of_its_own_for_the_template() -> None:
    text = (
        tiny.UNMARKED
        + "{%- if add_generation_prompt and enable_thinking is false %}{{- '<think></think>' }}{% endif %}"
    )
    text = text.replace(
        "m.content +", "('<think></think>' if m.role == 'assistant' and loop.last else '') + m.content +"
    )
    row = {"messages": [HI, HO], "chat_template_kwargs": {"enable_thinking": False}}
    assert learned(row, text) == ["Ho<|im_end|>"]
    assert learned({"messages": [HI, HO]}, text) == ["<think></think>Ho<|im_end|>"]
    assert encode(row) == "it has chat_template_kwargs.enable_thinking, of which the chat template knows nothing"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_is_learned_by_whatever_name(name: str, read: str) -> None:
    text = template(f"{{%- if m.{read} %}}{{{{- '<t>' + m.{read} + '</t>' }}}}{{%- endif %}}{{{{- m.content }}}}")
    row = {"messages": [HI, {**HO, name: "Well, ..."}]}
    assert learned(row, text) == ["<t>Well, ...</t>Ho<|im_end|>"]
    assert f"leaves out messages[1].{name}, which is to be learned" in str(encode(row))
    assert learned({"messages": [HI, {**HO, name: "Well", "weight": 0}, AND, BYE]}) == ["Bye<|im_end|>"]


def call(arguments: object, **further: Any) -> dict[str, Any]:
    return {
        **message("assistant", None),
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        **further,
    }


CALLS = "{%- for c in m.tool_calls or [] %}{{- c.function.name }}{{- ARGUMENTS }}{%- endfor %}"


@pytest.mark.parametrize(
    "arguments", ["c.function.arguments | tojson", "'' + c.function.arguments", "c.function.arguments"]
)
@pytest.mark.parametrize("content", ["m.content or ''", "'' if m.content is none else m.content", "'' + m.content"])
def test_calls_are_learned_in_the_form_that_the_template_takes(arguments: str, content: str) -> None:
    text = template("{{- " + content + " }}" + CALLS.replace("ARGUMENTS", arguments))
    flat = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    for calling in (call({"a": 1}), call('{"a": 1}'), call({"a": 1}, content=""), flat):
        assert learned({"messages": [HI, calling]}, text) == ['f{"a": 1}<|im_end|>']
    assert learned({"messages": [HI, call({})]}, text) in (["f{}<|im_end|>"], ['f"{}"<|im_end|>'])
    assert learned({"messages": [HI, {**HO, "tool_calls": []}]}, text) == ["Ho<|im_end|>"]


def test_arguments_that_are_json_stay_as_they_are() -> None:
    text = template("{{- m.content or '' }}" + CALLS.replace("ARGUMENTS", "'' + c.function.arguments"))
    assert learned({"messages": [HI, call('{"a":1}')]}, text) == ['f{"a":1}<|im_end|>']


def test_contents_in_parts_are_learned_in_the_form_that_the_template_takes() -> None:
    parts = [{"type": "text", "text": "Ho, "}, {"type": "text", "text": "you", "image": None}]
    joined = "{%- for p in m.content %}{{- p.text + '|' }}{%- endfor %}"
    bodies = {
        "{{- m.content }}": "Ho, you",  # would write a list as Python does
        "{{- '' + m.content }}": "Ho, you",
        "{%- if m.content is string %}{{- m.content }}{%- endif %}": "Ho, you",
        "{%- if m.content is string %}{{- m.content }}{%- else %}" + joined + "{%- endif %}": "Ho, |you|",
    }
    for body, expected in bodies.items():
        row = {"messages": [HI, message("assistant", parts)]}
        assert learned(row, template(body)) == [f"{expected}<|im_end|>"]
    only_parts = template("{%- for p in m.content %}{{- p.text }}{%- endfor %}")
    assert learned({"messages": [HI, HO]}, only_parts) == ["Ho<|im_end|>"]


@pytest.mark.parametrize("text", [tiny.MARKED, tiny.UNMARKED, tiny.FORGETFUL])
def test_answers_as_the_whole_chat_has_them_are_one_example(text: str) -> None:
    """Also where it does not have them as they were said."""
    last = "(thought)" if text is tiny.FORGETFUL else ""
    for content in ("Ho", "x", "", "(thought)"):
        row = {"messages": [HI, message("assistant", content), AND, BYE]}
        assert learned(row, text, Learn.AS_READ) == [f"{content}<|im_end|>", f"{last}Bye<|im_end|>"]
        assert len(encode(row, text, Learn.AS_READ)) == 1
        followed = {"messages": [*row["messages"], HI]}
        assert learned(followed, text, Learn.AS_READ) == [f"{content}<|im_end|>", "Bye<|im_end|>"]
    lost = template("{{- m.content if loop.last else m.content.split('-')[0] }}")
    row = {"messages": [HI, message("assistant", "Well -\nHo - all"), AND, BYE]}
    assert "messages[1] as it was said once more" in str(encode(row, lost.replace("'-'", "' - '"), Learn.AS_READ))


# Where an answer begins and ends


SHAPES = {
    # As Phi-3: a whole chat is ended once more.
    UNMARKED_AND_ENDED: (["Ho<|im_end|>", "Bye<|im_end|>"], 1),
    # The same, by a template that looks ahead.
    "{%- set count = messages | length %}" + UNMARKED_AND_ENDED: (["Ho<|im_end|>", "Bye<|im_end|>"], 1),
    # As DeepSeek: more is asked with than is then written.
    tiny.UNMARKED[: -len(ASKING)] + ASKING.replace("assistant\\n", "assistant\\n<think>"): (
        ["Ho<|im_end|>", "Bye<|im_end|>"],
        1,
    ),
    # As GLM: a message is ended by the beginning of the next.
    "{%- for m in messages %}{{- ('<|im_start|>' if m.role == 'user' else '<|im_end|>') + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_end|>' }}{%- endif %}": (["Ho<|im_start|>", "Bye<|im_start|>"], 1),
    # As gpt-oss: the last answer is ended by a token of its own.
    "{%- for m in messages %}{{- m.role + ':' + m.content }}"
    "{{- '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}": (["Ho<|endoftext|>", "Bye<|endoftext|>"], 2),
    # As SmolLM: what is asked with depends on the question, so that it is another one for each.
    "{%- set ns = namespace(asked='') %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (ns.asked if m.role == 'assistant' else '') }}"
    "{{- m.content + '<|im_end|>\\n' }}{%- set ns.asked = '<think>' if '?' in m.content else '' %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + ns.asked }}{%- endif %}": (
        ["Ho<|im_end|>", "Bye<|im_end|>"],
        1,
    ),
    # In a macro, all at once.
    "{%- macro turns() %}" + tiny.UNMARKED[: -len(ASKING)] + "{%- endmacro %}{{- turns() }}" + ASKING: (
        ["Ho<|im_end|>", "Bye<|im_end|>"],
        1,
    ),
    # By number.
    "{%- for n in range(messages | length) %}{%- set m = messages[n] %}{{- m.role + ':' + m.content }}"
    "{{- '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}": (
        ["Ho<|im_end|>", "Bye<|im_end|>"],
        1,
    ),
    # No special tokens at all.
    "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}": ([" Ho\n\n", " Bye\n\n"], 1),
}


def test_an_answer_begins_behind_what_does_not_depend_on_it() -> None:
    """As DeepSeek, asked with <think>, of an answer that begins with a tag itself."""
    text = tiny.UNMARKED[: -len(ASKING)] + ASKING.replace("assistant\\n", "assistant\\n<think>")
    for content in ("<b>Ho</b>", "<think>Ho", "xyz", ""):
        messages = [HI, message("assistant", content)]
        expected = content.removeprefix("<think>")  # there the template goes on from what it has asked with
        assert learned({"messages": messages}, text) == [f"{expected}<|im_end|>"]


def test_marks_are_those_of_their_messages_though_the_template_looks_ahead() -> None:
    for ahead in ("loop.nextitem", "loop.last", "messages | length"):
        text = tiny.MARKED.replace(
            "{%- for m in messages %}", "{%- for m in messages %}{%- set _ = " + ahead + " %}"
        )
        assert learned({"messages": [HI, HO, AND, BYE]}, text) == ["Ho<|im_end|>", "Bye<|im_end|>"]
        assert learned({"messages": [HI, {**HO, "weight": 0}, AND, BYE]}, text) == ["Bye<|im_end|>"]
        assert learned({"messages": [HI, HO, AND, {**BYE, "weight": 0}]}, text) == ["Ho<|im_end|>"]


@pytest.mark.parametrize("text", SHAPES)
def test_an_answer_is_what_the_model_would_have_to_write(text: str) -> None:
    expected, count = SHAPES[text]
    made = encode({"messages": [HI, HO, AND, BYE]}, text)
    assert len(made) == count
    assert learned({"messages": [HI, HO, AND, BYE]}, text) == expected
    assert learned({"messages": [HI, HO, AND, BYE]}, text, Learn.LAST) == expected[1:]
    assert learned({"messages": [AND, BYE]}, text) == expected[1:]
    as_read = learned({"messages": [HI, HO, AND, BYE]}, text, Learn.AS_READ)
    assert as_read == [expected[0].replace("<|endoftext|>", "<|im_end|>"), expected[1]]
    assert learned({"messages": [AND, HO, HI, BYE]}, text) == expected


# What is refused


MALFORMED = {
    "messages[1] has no 'content'": [HI, {"role": "assistant"}],
    "messages[0].content is a JSON null, not a string": [{"role": "user", "content": None}, HO],
    "messages[0].content is a JSON number, not a string": [message("user", 3), HO],
    "messages[0].content[1] is of the type 'image'": [
        message("user", [{"type": "text", "text": "a"}, {"type": "image", "url": "x"}]),
        HO,
    ],
    "messages[0].content[0] is a JSON string, not an object": [message("user", ["a"]), HO],
    "messages[0].content[0].text is a JSON null": [message("user", [{"type": "text"}]), HO],
    "messages[1].weight is 0.5": [HI, {**HO, "weight": 0.5}],
    "messages[1].weight is '0'": [HI, {**HO, "weight": "0"}],
    "messages[0].weight is 1, but only what the assistant says": [{**HI, "weight": 1}, HO],
    "every answer has a weight of 0": [HI, {**HO, "weight": 0}],
    "messages[1] has 'function_call', the older form": [HI, {**HO, "function_call": {"name": "f"}}],
    "messages[0] has 'tool_calls', but is by the role 'user'": [{**HI, "tool_calls": [{"name": "f"}]}, HO],
    "messages[1].tool_calls[0] has no 'function' with a 'name'": [HI, {**HO, "tool_calls": [{}]}],
    "messages[1].tool_calls is a JSON object": [HI, {**HO, "tool_calls": {"name": "f"}}],
    "messages[1].tool_calls[0].function.arguments is a string, but not valid JSON": [HI, call("{")],
    "messages[1].tool_calls[0].function.arguments is a JSON array": [HI, call("[]")],
    "messages[1].reasoning_content is a JSON number": [HI, {**HO, "reasoning_content": 3}],
    "messages[1].content is no text: character 0 is half of a surrogate pair": [HI, message("assistant", "\ud800")],
    "messages[1] has half of a surrogate pair in it": [HI, call({"a": "\udfff"})],
    "messages[1] has a value that is not JSON": [HI, call({"a": float("nan")})],
    "messages[1].tool_calls[0].function.arguments has a value that is not JSON": [HI, call('{"a": [Infinity]}')],
    "messages[1].tool_calls[0].function.arguments has half of a surrogate pair": [HI, call('{"a": "\\ud800"}')],
    "messages[1].tool_calls[0].function.arguments is a string, but not valid JSON (an object in it has 'a' twice": [
        HI,
        call('{"a": 1, "a": 2}'),
    ],
    "messages[0].role is a JSON number": [message(3, "a"), HO],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("cause", MALFORMED)
def test_a_message_that_cannot_be_is_named(cause: str) -> None:
    assert str(encode({"messages": MALFORMED[cause]})).startswith(cause)


@pytest.mark.parametrize(
    ("further", "cause"),
    [
        ({"tools": "["}, "'tools' is a string, but not valid JSON"),
        ({"tools": {}}, ""),
        ({"tools": {"name": "f"}}, "'tools' is a JSON object, not an array"),
        ({"tools": ["f"]}, "tools[0] is a JSON string, not an object"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' is a JSON array, not an object"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools would take the place"),
        ({"tools": [{"name": b"f"}]}, "tools has a value that is not JSON"),
        ({"tools": '[{"name": "f", "default": NaN}]'}, "tools has a value that is not JSON"),
        ({"chat_template_kwargs": {"share": float("inf")}}, "chat_template_kwargs has a value that is not JSON"),
    ],
)
def test_what_goes_with_messages_is_looked_at(further: dict[str, Any], cause: str) -> None:
    made = encode({"messages": [HI, HO], **further})
    assert str(made).startswith(cause) if cause else isinstance(made, list)
    named = next(iter(further))
    if further[named]:
        with pytest.raises(RowError, match=f"it has '{named}', which only a row with messages can have"):
            row_of(1, {"text": "a", **further})


# Templates that are hostile, or useless


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{{ raise_exception('not today') }}", "the chat template refuses it (not today)"),
        ("{{ messages[0].nothing.more }}", "the chat template refuses it ('dict object' has no attribute"),
        ("{{ 1 / 0 }}", "the chat template refuses it (division by zero)"),
        ("{%- macro f() %}{{ f() }}{%- endmacro %}{{ f() }}", "the chat template refuses it (it calls itself"),
        ("{{ ''.__class__.__mro__ }}", "the chat template refuses it"),
        (
            "{%- for m in messages %}{{- m.role + '\\n' }}{%- endfor %}",
            "the chat template does not write messages[0]",
        ),
        (template("{{- m.content if m.role == 'user' }}"), "the chat template does not write messages[1].content"),
        (template("{{- m.content.split('</think>')[-1] }}"), "the chat template leaves out messages[1].content"),
    ],
)
def test_a_template_that_does_not_do_is_told_once_with_its_rows(tmp_path: Path, text: str, cause: str) -> None:
    rows = [{"messages": [HI, message("assistant", f"<think>Hm {n}</think>Ho")]} for n in range(12)]
    file = tiny.write_rows(tmp_path / "chats.jsonl", *rows)
    with pytest.raises(ConfigError) as caught:
        read_data(file, tiny.tokenizer(text), max_length=64)
    heading, told = str(caught.value).splitlines()
    assert heading.endswith("12 rows cannot be used")
    assert told.startswith(f"  lines 1, 2, 3, 4, 5, 6, 7, 8 and 4 more: {cause}")


def test_a_template_cannot_change_the_row() -> None:
    hostile = "{%- for m in messages %}{%- set _ = m.update({'content': 'x'}) %}{%- endfor %}" + tiny.UNMARKED
    assert "refuses it" in str(encode({"messages": [HI, HO]}, hostile))


def test_a_template_that_writes_an_answer_twice() -> None:
    assert learned({"messages": [HI, HO]}, template("{{- m.content + '/' + m.content }}")) == ["Ho/Ho<|im_end|>"]


@pytest.mark.parametrize("text", [tiny.MARKED, tiny.UNMARKED, tiny.FORGETFUL])
@pytest.mark.parametrize(
    "content", ["\ue000\uf8ff\U00100000", "<|im_end|>", "\n<|im_end|>\n", "", "assistant\n", "é💥"]
)
def test_whatever_is_said_is_learned(text: str, content: str) -> None:
    runs = learned({"messages": [HI, message("assistant", content), AND, BYE]}, text)
    assert [run.removeprefix("(thought)") for run in runs] == [f"{content}<|im_end|>", "Bye<|im_end|>"]


def test_a_template_that_cannot_be_compiled(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the chat template cannot be compiled \(Encountered unknown tag 'nothing'"
    ):
        Encoder(tiny.tokenizer("{% nothing %}")).encode_many([row_of(1, {"messages": [HI, HO]})])
    (tmp_path / "wrong.jinja").write_text("{{")
    with pytest.raises(ConfigError, match="the chat template cannot be compiled"):
        Encoder(tiny.tokenizer(), ChatOptions(str(tmp_path / "wrong.jinja")))
    with pytest.raises(
        ConfigError, match=r"data.chat_template='none.jinja': .*No such file.* has no templates by name"
    ):
        Encoder(tiny.tokenizer(), ChatOptions("none.jinja"))


def test_a_template_from_a_file_takes_the_place_of_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(template("{{- m.content + '!' }}"))
    for own in (tiny.MARKED, None):
        tokenizer = tiny.tokenizer(own)
        [made] = Encoder(tokenizer, ChatOptions(str(tmp_path / "own.jinja"))).encode_many(
            [row_of(1, {"messages": [HI, HO]})]
        )
        assert not isinstance(made, RowFault)
        assert shipped.runs(made[0], tokenizer) == ["Ho!<|im_end|>"]


def test_a_configuration_says_which_answers_and_which_template(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(template("{{- m.content + '!' }}"))
    rows = tiny.write_rows(tmp_path / "chats.jsonl", {"messages": [HI, HO, AND, BYE]})
    section = {"train": str(rows), "learn": "last", "chat_template": str(tmp_path / "own.jinja")}
    config = TrainConfig.model_validate({"model": {"name": "m"}, "data": section, "output": {"directory": "o"}})
    data, _ = read_rows(config, tiny.tokenizer())
    [example] = data.examples
    assert shipped.runs(example, tiny.tokenizer()) == ["Bye!<|im_end|>"]
