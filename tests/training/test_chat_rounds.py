"""Texts that are taken up in the middle of a chat are those that the template writes from the beginning."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training import shipped

from shardwise.models.chat_templates import CompiledTemplate
from shardwise.training.texts import chat_script
from shardwise.training.texts.chat_script import Learn
from shardwise.training.texts.chat_turns import ChatReader, Rendering
from shardwise.training.texts.rows import Chat, RowError

HEAD = "{%- for m in messages %}{{- strftime_now('') }}"
TURN = "{{- '<|im_start|>' + m.role + '\\n' }}"
SAID = "{{- (m.reasoning_content or '') + m.content + '<|im_end|>\\n' }}"
ASKING = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
THOUGHT = "{{- '<think>' + (m.reasoning_content or '') + '</think>' }}"
LAST_QUESTION = (
    "{%- set ns = namespace(last=-1, count=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
)
REVERSED = (
    "{%- set ns = namespace(open=true, last=messages | length - 1) %}{%- for m in messages[::-1] %}"
    "{%- if ns.open and m.role == 'user' %}{%- set ns.open = false %}"
    "{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
)


def template(body: str, before: str = "", asking: str = ASKING) -> str:
    return before + HEAD + TURN + body + SAID + "{%- endfor %}" + asking


LINEAR = {
    "as Qwen3": template(
        "{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
        + THOUGHT
        + "{%- endif %}",
        REVERSED,
    ),
    "as GLM": template(
        "{%- if m.role == 'assistant' and not loop.index0 <= ns.last %}" + THOUGHT + "{%- endif %}", LAST_QUESTION
    ),
    "as DeepSeek": template(
        "{%- if m.role == 'user' %}{%- set ns.count = ns.count + 1 %}{%- endif %}",
        LAST_QUESTION,
        ASKING.replace("assistant\\n", "assistant\\n<think>"),
    ),
    "as gpt-oss": template(
        "{%- if m.role == 'assistant' and loop.last and not add_generation_prompt %}" + THOUGHT + "{%- endif %}"
    ),
    "with marks": template(
        "{%- if m.role == 'assistant' %}{% generation %}"
        "{%- if loop.index0 > ns.last %}"
        + THOUGHT
        + "{%- endif %}{{- m.reasoning_content + m.content }}{% endgeneration %}{%- endif %}",
        LAST_QUESTION,
    ),
    "the next message": template("{{- 'a' if not loop.last and messages[loop.index0 + 1].role == m.role }}"),
}
"""These write a part of every message in each text, but look ahead: no further than a message, or for a number."""

FURTHER = {
    "all": template("{{- loop.revindex }}"),
    "two behind": template("{{- 'a' if messages[loop.index0 + 2] is defined and loop.index0 % 2 }}"),
    "how many": template("{{- messages | length }}"),
    "how many, before": template("{{- n }}", "{%- set n = messages | length %}"),
    "the last, before": template("{{- last.content[:1] }}", "{%- set last = messages[-1] %}"),
    "numbers of all kinds": template(
        "{{- ns.last * 2 }}{{- ns.last ~ '' }}{{- 'x' * ns.last }}{{- [1, 2, 3][ns.last % 3] }}"
        "{%- if ns.last in (2, 4) %}{{- 'in' }}{%- endif %}{{- ns.last | string }}"
        "{%- for i in range(ns.last) %}.{%- endfor %}",
        LAST_QUESTION,
    ),
    "between": template(
        "{%- if loop.index0 < ns.last < loop.index0 + 4 %}{{- 'a' }}{%- endif %}"
        "{%- if ns.last == loop.index0 %}{{- 'b' }}{%- elif ns.last != 3 %}{{- 'c' }}{%- endif %}"
        "{%- if loop.index0 >= ns.last %}{{- 'd' }}{%- endif %}{%- if ns.last %}{{- 'e' }}{%- endif %}",
        LAST_QUESTION,
    ),
    "copied": template("{%- set ns.count = ns.last %}{{- ns.count }}", LAST_QUESTION),
    "overwritten": template(
        "{{- 'a' if ns.last > loop.index0 }}{%- set ns.last = 2 if m.role == 'user' else ns.last %}{{- ns.last }}",
        LAST_QUESTION,
    ),
    "what was before": template(
        "{{- loop.previtem.role if loop.previtem }}{{- loop.cycle('a', 'b') }}{{- loop.index }}{{- loop.first }}"
    ),
    "what changed": template("{{- 'a' if loop.changed(m.role) }}"),
    "what joins": template("{{- j() }}", "{%- set j = joiner('|') %}"),
    "one number for two": template(
        "{%- set ns.count = ns.count + 1 %}{{- other.count }}", LAST_QUESTION + "{%- set other = ns %}"
    ),
    "used up": template("{{- (roles | first) }}", "{%- set roles = messages | map(attribute='role') %}"),
    "from the second": template("{{- first.role }}", "{%- set first = messages[0] %}").replace(
        "in messages %}", "in messages[1:] %}{%- if loop.first %}{{- first.content }}{%- endif %}"
    ),
    "in macros": "{%- macro said(m, last) %}"
    + TURN
    + "{{- 'a' if last }}"
    + SAID
    + "{%- endmacro %}"
    + HEAD
    + "{{- said(m, loop.last) }}{%- endfor %}"
    + ASKING,
    "rounds left out": template("{%- if m.role == 'user' and loop.last %}{% continue %}{%- endif %}"),
    "no more than": template("{%- if loop.index0 > 5 %}{% break %}{%- endif %}"),
    "twice": LAST_QUESTION + HEAD + TURN + "{%- endfor %}" + template("{{- 'a' if loop.index0 > ns.last }}"),
    "another space within": template(
        "{%- if loop.first %}{%- set ns.own = namespace(n=0) %}{%- endif %}"
        "{%- set own = ns.own %}{{- own.n }}{%- set own.n = own.n + 1 %}{{- 'z' if loop.last }}",
        LAST_QUESTION,
    ),
    "used up in rounds": template(
        "{%- if loop.first %}{%- set ns.signs = ['a', 'b', 'c', 'd'] | map('upper') %}{%- endif %}"
        "{{- ns.signs | first }}{{- 'z' if loop.last }}",
        LAST_QUESTION,
    ),
    "a number in a list": template(
        "{%- if loop.first %}{%- set ns.places = [{'last': ns.last}] %}{%- endif %}"
        "{{- 'a' if loop.index0 > ns.places[0].last }}",
        LAST_QUESTION,
    ),
    "messages kept": template(
        "{%- if loop.first %}{%- set ns.all = messages %}{%- endif %}"
        "{{- 'a' if loop.index0 > 2 and ns.all | length > 4 }}{{- 'z' if loop.last }}",
        LAST_QUESTION,
    ),
    "a macro kept": template(
        "{%- if loop.first %}{%- set ns.count = counted %}{%- endif %}"
        "{{- ns.count() if loop.index0 > 2 }}{{- 'z' if loop.last }}",
        LAST_QUESTION + "{%- macro counted() %}{{- messages | length }}{%- endmacro %}",
    ),
    "a loop kept": template(
        "{%- if loop.first %}{%- set ns.loop = loop %}{%- endif %}{{- ns.loop.index0 }}{{- 'z' if loop.last }}",
        LAST_QUESTION,
    ),
    "a name like ours": template("{{- shardwise_round_begun }}"),
    "refused": template("{%- if loop.last and m.content == 'Ho' %}{{- raise_exception('Ho') }}{%- endif %}"),
}

saying = st.sampled_from(["Ho", "", "x", "a\n", "<|im_end|>", "é"])
asked = st.builds(lambda said: {"role": "user", "content": said}, saying)
answered = st.builds(
    lambda said, thought, weight: {
        "role": "assistant",
        "content": said,
        **({"reasoning_content": thought} if thought else {}),
        **({} if weight else {"weight": 0}),
    },
    saying,
    st.sampled_from(["", "Hm"]),
    st.booleans(),
)
chats = st.lists(st.one_of(asked, answered), min_size=1, max_size=9).filter(
    lambda messages: any(m["role"] == "assistant" and "weight" not in m for m in messages)
)


class Counted:
    """What a template calls in each round, and how often that was."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _: str) -> str:
        self.count += 1
        return ""


@lru_cache(maxsize=64)
def compiled(text: str) -> CompiledTemplate:
    return CompiledTemplate(text)


def read(
    text: str, messages: list[dict[str, Any]], learn: Learn, short: int, **further: Any
) -> list[Rendering] | str:
    """What is learned of a chat, if those of so many messages are short, or what is wrong with it."""
    variables = {"strftime_now": Counted(), **further}
    special = ["<|im_start|>", "<|im_end|>", "<bos>", "<eos>", *shipped.specials(text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_script, "_SHORT", short)
        patch.setattr(chat_script, "_WRITTEN_WHOLE", 0)
        try:
            return ChatReader(compiled(text), variables, special, learn).read(Chat(1, tuple(messages)))
        except RowError as error:
            return str(error)


def turns(count: int, steps: int = 0) -> list[dict[str, Any]]:
    """Questions, each with so many answers that think."""
    answer = {"role": "assistant", "content": "Ho", "reasoning_content": "Hm"}
    return [m for n in range(count) for m in ({"role": "user", "content": f"Hi {n}"}, *[answer] * (1 + steps))]


@pytest.mark.parametrize("name", LINEAR)
def test_the_rounds_of_all_texts_of_a_chat_are_as_many_times_its_messages(name: str) -> None:
    """Also where the template looks ahead: twice as many messages do not take four times as many rounds."""
    for make in (lambda count: turns(count), lambda count: turns(1, 2 * count)):
        rounds = []
        for count in (20, 40):
            counted = Counted()
            made = read(LINEAR[name], make(count), Learn.ALL, 16, strftime_now=counted)
            assert not isinstance(made, str), made
            rounds.append(counted.count)
        assert rounds[1] <= 2.2 * rounds[0]
        assert rounds[1] <= 10 * len(make(40))


@settings(max_examples=25, deadline=None)
@given(chats, st.sampled_from([*LINEAR, *FURTHER]), st.sampled_from(Learn))
def test_whatever_is_said_is_the_same(messages: list[dict[str, Any]], name: str, learn: Learn) -> None:
    text = {**LINEAR, **FURTHER}[name]
    assert read(text, messages, learn, 0) == read(text, messages, learn, 1 << 30)


@pytest.mark.parametrize("name", [*LINEAR, *FURTHER])
def test_every_template_writes_the_same(name: str) -> None:
    text = {**LINEAR, **FURTHER}[name]
    for messages in (turns(3), turns(1, 3), turns(2, 1), turns(2, 1)[1:]):
        for learn in Learn:
            assert read(text, messages, learn, 0) == read(text, messages, learn, 1 << 30)


LOOKING_AHEAD = (
    "deepseekv3",
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "lfm2_2_5",
    "muse_glimmer",
    "nemotron_3_nano",
    "qwen3",
    "qwen3_6",
)


@pytest.mark.skipif(shipped.folder() is None, reason="TRL, which ships the templates, is not installed")
@pytest.mark.parametrize(
    "name",
    [name if name in LOOKING_AHEAD else pytest.param(name, marks=pytest.mark.slow) for name in shipped.names()],
)
def test_templates_of_models_write_the_same(name: str) -> None:
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    calling: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    answering = {"role": "tool", "name": "f", "tool_call_id": "123456789", "content": "dry"}
    system, hi = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}
    ho, thinking = {"role": "assistant", "content": "Ho"}, {"reasoning_content": "Hm"}
    text = shipped.text(name)
    for messages in (
        [hi, ho] * 3,
        [system, *[hi, ho] * 3],
        [hi, {**ho, **thinking}] * 3,
        [hi, *[calling, answering] * 2, ho] * 2,
        [hi, *[{**calling, **thinking}, answering] * 2, {**ho, **thinking}] * 2,
    ):
        for learn in (Learn.ALL, Learn.AS_READ):
            made = read(text, messages, learn, 0, bos_token="<bos>", eos_token="<eos>")
            assert made == read(text, messages, learn, 1 << 30, bos_token="<bos>", eos_token="<eos>")
