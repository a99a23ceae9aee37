"""Masks of the tokens to learn for well-known chat templates, compared with those of transformers."""

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
from tests.training import trl_templates
from transformers.utils.chat_template_utils import render_jinja_template

from shardwise.training.chat_masks import AssistantMasks
from shardwise.training.chat_rendering import ChatError

pytestmark = pytest.mark.skipif(
    trl_templates.folder() is None, reason="TRL, which ships the templates, is not installed"
)

Message = dict[str, Any]
ASSISTANT = "<\uff5cAssistant\uff5c>"  # DeepSeek's, as the next
TOOL_ENDED = "<\uff5ctool\u2581outputs\u2581end\uff5c>"


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str | None, **further: Any) -> Message:
    return {"role": "assistant", "content": content, **further}


ARGUMENTS = {"city": "Paris", "days": 2}
CALL = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It", "parameters": SCHEMA}}]
ANSWERED = {"role": "tool", "name": "weather", "tool_call_id": "123456789", "content": "dry"}
CALLING = [user("Rain?"), assistant(None, tool_calls=[CALL]), ANSWERED, assistant("No rain.")]
ROWS: dict[str, dict[str, Any]] = {
    "single": {"messages": [user("Hi"), assistant("Ho, you.")]},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, user("Hi"), assistant("Ho, you.")]},
    "two turns": {"messages": [user("Hi"), assistant("Ho, you."), user("And?"), assistant("<b>Bye</b>")]},
    "reasoning": {"messages": [user("Hi"), assistant("Ho, you.", reasoning_content="Be brief.")]},
    "reasoning twice": {
        "messages": [
            user("Hi"),
            assistant("Ho, you.", reasoning_content="Be brief."),
            user("And?"),
            assistant("Bye", reasoning_content="They go."),
        ]
    },
    "calls": {"messages": CALLING},
    "tools": {"messages": CALLING, "tools": TOOLS},
    "calls, then more": {"messages": [*CALLING, user("And?"), assistant("Bye")], "tools": TOOLS},
}

WITHOUT_REASONING = {
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "gemma4", "gemma4_v2"),
    *("gemma4_v3", "gemma4_v4", "idefics3", "lfm2", "lfm2_v2", "llama3", "llama3_1", "llama3_2", "llava_next"),
    *("phi3", "phi3_5", "qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl", "smolvlm"),
}
"""Of these an answer has no reasoning, even where it is the last (TRL's page says so of DeepSeek and Gemma 4)."""
WITHOUT_CALLS = {
    *("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5"),
    *("qwen2_5_vl", "smolvlm"),
}
WITHOUT_TOOLS = {*WITHOUT_CALLS, "deepseek_r1_distill", "deepseekv3"} - {"lfm2"}
REWRITING = {
    "two turns": {"gptoss", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"},
    "reasoning twice": {
        *("diffusion_gemma", "gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),
        *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
        *("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
    },
    "calls": {"qwen3"},  # without reasoning it writes of the last answer alone that there was none
    "tools": {"qwen3"},
}
"""These write earlier answers otherwise than they were, so that each is learned in an example of its own."""


def refusal(name: str, kind: str) -> str | None:
    """Why a template does not have such a row."""
    if kind == "system" and name == "gemma":
        return "System role not supported"
    if kind.startswith("reasoning") and name in WITHOUT_REASONING:
        return "reasoning_content"
    if kind in ("tools", "calls, then more") and name in WITHOUT_TOOLS:
        return "does not use 'tools'"
    if kind.startswith(("calls", "tools")) and name in WITHOUT_CALLS:
        return "does not use 'tool_calls'"
    return None


def encoded(template: str, kind: str) -> list[dict[str, list[int]]] | ChatError:
    row = ROWS[kind]
    try:
        return masks(template)(row["messages"], row.get("tools"))
    except ChatError as error:
        return error


@lru_cache(maxsize=4)
def masks(template: str) -> AssistantMasks:
    return AssistantMasks(trl_templates.tokenizer(template))


def runs(example: dict[str, list[int]], tokenizer: Any) -> list[str]:
    """The runs of tokens that are trained on, as text."""
    found: list[list[int]] = []
    before = 0
    for token, trained in zip(example["input_ids"], example["assistant_masks"], strict=True):
        if trained:
            found = [*found[:-1], [*found[-1], token]] if before else [*found, [token]]
        before = trained
    return [tokenizer.decode(run) for run in found]


def whole(examples: list[dict[str, list[int]]], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(example["input_ids"]) for example in examples]


def forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Contents as texts and in parts; arguments as objects and as JSON; without content, and with null for it."""
    for parts, arguments, without in itertools.product((0, 1), (ARGUMENTS, json.dumps(ARGUMENTS)), ("-", None)):
        changed = []
        for message in messages:
            other = dict(message)
            if other.get("tool_calls"):
                other["tool_calls"] = [{**CALL, "function": {"name": "weather", "arguments": arguments}}]
            if other["content"] is None and without == "-":
                del other["content"]
            elif parts:
                other["content"] = [{"type": "text", "text": other["content"]}]
            changed.append(other)
        yield changed


def rendered(tokenizer: Any, messages: list[Message], tools: Any, **asked: Any) -> str | None:
    """What transformers itself writes; None where the template refuses."""
    given = {"chat_template": tokenizer.chat_template, "tools": tools, **tokenizer.special_tokens_map, **asked}
    try:
        [text], _ = render_jinja_template(conversations=[messages], **given)
    except Exception:  # whatever a template's code may raise
        return None
    return str(text)


def turns_of(tokenizer: Any, kind: str) -> Iterator[list[tuple[str, str]]]:
    """For each form of the messages, of each answer what transformers writes with it, and to ask for it."""
    tools = ROWS[kind].get("tools")
    for messages in forms(ROWS[kind]["messages"]):
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        written = [rendered(tokenizer, messages[: index + 1], tools) for index in answers]
        asked = [rendered(tokenizer, messages[:index], tools, add_generation_prompt=True) for index in answers]
        if None not in written:
            yield [(str(text), str(prompt)) for text, prompt in zip(written, asked, strict=True)]


def is_answer(run: str, written: str, prompt: str) -> bool:
    """Whether a run is what is written after the prompt, up to the end of the turn."""
    # Some templates ask with more than they then write: DeepSeek with <think>, Nemotron with a line break after it.
    head = next(
        prompt.removesuffix(more)
        for more in ("", "\n", "\n</think>\n\n", "<think>\n")
        if prompt.endswith(more) and written.startswith(prompt.removesuffix(more))
    )
    rest = written[len(head) :]
    if run in (f"{rest}<|user|>", f"{rest}<|observation|>"):
        return True  # GLM ends a message by the beginning of the next
    return rest.startswith(run) and rest[len(run) :].strip() in ("", "<eos>")  # Phi-3 ends a whole chat once more


@pytest.mark.parametrize("name", trl_templates.names())
def test_answers_are_the_text_of_the_template_at_their_turns(name: str) -> None:
    template = trl_templates.text(name)
    tokenizer = trl_templates.tokenizer(template)
    for kind, row in ROWS.items():
        made = encoded(template, kind)
        reason = refusal(name, kind)
        if reason is not None:
            assert isinstance(made, ChatError), kind
            assert reason in str(made)
            continue
        assert not isinstance(made, ChatError), (kind, str(made))
        learned = [run for example in made for run in runs(example, tokenizer)]
        answers = sum(message["role"] == "assistant" for message in row["messages"])
        assert len(learned) == answers, kind
        texts = whole(made, tokenizer)
        marked = "{% generation %}" in template or "{%- generation" in template
        assert any(
            # Every example is a rendering of transformers' own, of the chat or of its beginning,
            all(any(text in (written, f"{written}<|user|>") for written, _ in turns) for text in texts)
            # and every answer is learned once, in its turn; marks have the line break in them, too.
            and all(
                is_answer(run.removesuffix("\n") if marked else run, *turn)
                for run, turn in zip(learned, turns, strict=True)
            )
            for turns in turns_of(tokenizer, kind)
        ), (kind, texts, learned)
        assert len(made) == (2 if name in REWRITING.get(kind, ()) else len(made)), kind
        assert len(made) == 1 or kind == "calls, then more" or name in REWRITING.get(kind, ()), kind


def call(number: int, name: str = "weather") -> Message:
    arguments = {"city": f"argument{number}", "days": number}
    return {"id": f"12345678{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, name: str = "weather") -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"12345678{number}", "content": f"result{number}"}


ASKED: Message = user("question1")
PARTS: dict[str, list[Message]] = {
    "two calls": [
        ASKED,
        assistant(None, tool_calls=[call(1), call(2)]),
        result(1),
        result(2),
        assistant("answer3"),
    ],
    "calls beside content": [
        *(ASKED, assistant("answer1", tool_calls=[call(1)]), result(1)),
        *(assistant("answer2", tool_calls=[call(2)]), result(2), assistant("answer3")),
    ],
}
"""Rows whose parts are all different words."""
LEFT_OUT = {
    "two calls": {
        "gptoss": r"leaves out messages\[1\].tool_calls\[1\]",
        "llama3_1": "single",
        "llama3_2": "single",
    },
    "calls beside content": dict.fromkeys(
        ("gptoss", "llama3_1", "llama3_2", "muse_glimmer"), r"leaves out messages\[1\].content"
    ),
}
"""Templates that do not write such rows, and what is said of it."""


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_parts_of_the_assistant_are_trained_once_and_no_others(kind: str) -> None:
    messages = PARTS[kind]
    written = [message for message in messages if message["role"] == "assistant"]
    expected = sorted(
        [message["content"] for message in written if message["content"]]
        + [each["function"]["arguments"]["city"] for message in written for each in message.get("tool_calls", ())]
    )
    for name in sorted({*trl_templates.names()} - WITHOUT_TOOLS - {"lfm2"}):
        template = trl_templates.text(name)
        reason = LEFT_OUT[kind].get(name)
        if reason is not None:
            with pytest.raises(ChatError, match=reason):
                masks(template)(messages, TOOLS)
            continue
        made = masks(template)(messages, TOOLS)
        text = "".join(run for example in made for run in runs(example, trl_templates.tokenizer(template)))
        assert sorted(re.findall(r"(?:answer|argument|result|question)\d", text)) == expected, (name, text)


def test_results_inside_of_an_answer_are_an_error() -> None:
    answer = assistant("answer1", tool_calls=[call(1)], tool_responses=[{"name": "weather", "response": {}}])
    with pytest.raises(
        ChatError, match=r"messages\[1\].tool_responses: is not supported. Write results as messages"
    ):
        masks(trl_templates.text("qwen3"))([ASKED, answer], TOOLS)


def test_calls_that_a_training_template_of_trl_leaves_out_are_an_error() -> None:
    left_out = {**dict.fromkeys(WITHOUT_TOOLS, "does not use 'tools'"), "lfm2": "does not use 'tool_calls'"}
    left_out["gptoss"] = r"leaves out messages\[1\].tool_calls\[1\]"
    messages = [{**message, "content": message["content"] or ""} for message in PARTS["two calls"]]
    for name in [name for name in trl_templates.names() if trl_templates.has(f"{name}_training")]:
        with pytest.raises(ChatError, match=left_out[name]) if name in left_out else nullcontext():
            masks(trl_templates.text(f"{name}_training"))(messages, TOOLS)


HANDED = (ASSISTANT, TOOL_ENDED, "<|start|>assistant", "\n", "<think>\n\n</think>\n\n", "<think>\n", "<think>", "")
"""What training templates mark, though the prompt for an answer ends with it, so that no model has to write it."""
KEEPING = {"qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"}
"""Their training templates keep all reasoning in one rendering, which the models' own do not."""


@pytest.mark.parametrize("name", [name for name in trl_templates.names() if trl_templates.has(f"{name}_training")])
def test_trained_tokens_are_those_marked_by_the_training_template(name: str) -> None:
    own, training = trl_templates.text(name), trl_templates.text(f"{name}_training")
    tokenizer, other = trl_templates.tokenizer(own), trl_templates.tokenizer(training)
    for kind in ROWS:
        if refusal(name, kind) is not None:
            continue
        made, expected = encoded(own, kind), encoded(training, kind)
        assert not isinstance(made, ChatError)
        assert not isinstance(expected, ChatError), (kind, str(expected))
        ours = [run for example in made for run in runs(example, tokenizer)]
        theirs = [run for example in expected for run in runs(example, other)]
        if name == "diffusion_gemma" and kind in ("calls", "tools", "calls, then more"):
            # The token at which Gemma stops for a tool; and that template asks without what it then writes.
            assert ours[0] == theirs[0] + "<|tool_response>"
            assert ours[1] == f"<|turn>model\n{theirs[1]}".rstrip()
            continue
        assert len(ours) == len(theirs), kind
        for one, mark in zip(ours, theirs, strict=True):
            ended = mark.removesuffix("<eos>").rstrip()  # no model has to write what comes behind its end of turn
            assert one in [ended.removeprefix(head) for head in HANDED if ended.startswith(head)], kind
        if name not in KEEPING:
            assert whole(made, tokenizer) == whole(expected, other)


# Chats and templates that are easily masked wrong


def trained(name_or_template: str, *messages: Message) -> list[list[str]]:
    """By example, the runs of text that are trained on."""
    template = name_or_template if "{" in name_or_template else trl_templates.text(name_or_template)
    return [runs(one, trl_templates.tokenizer(template)) for one in masks(template)(messages)]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6", "llama3", "gptoss"])
def test_of_two_assistant_messages_in_a_row_each_is_trained_once(name: str) -> None:
    found = trained(name, user("Hi"), assistant("First."), assistant("Second."))
    texts = [run for example in found for run in example]
    assert [sum(text in run for run in texts) for text in ("First.", "Second.")] == [1, 1], texts
    assert len(texts) == 2


@pytest.mark.parametrize("name", ["gptoss", "qwen3", "qwen2_5", "llama3"])
def test_a_chat_may_begin_with_the_assistant(name: str) -> None:
    found = [
        run for example in trained(name, assistant("Welcome."), user("Hi"), assistant("Ho.")) for run in example
    ]
    assert len(found) == 2
    assert "Welcome." in found[0]
    assert "Hi" not in "".join(found)
    assert found[0].count("<|") <= 3


@pytest.mark.parametrize("name", trl_templates.names())
def test_text_parts_are_trained_as_the_string_that_they_are(name: str) -> None:
    parts = [{"type": "text", "text": "Ho, "}, {"type": "text", "text": "you."}]
    whole_string = trained(name, user("Hi"), assistant("Ho, you."))
    assert trained(name, user("Hi"), {"role": "assistant", "content": parts}) == whole_string


MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}<bos>"
    "{%- for m in rest %}{%- if m['role'] == 'user' %}{%- if loop.last and system is defined %}"
    "{{- '[INST] ' + system + '\\n\\n' + m['content'] + '[/INST]' }}{%- else %}"
    "{{- '[INST] ' + m['content'] + '[/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + m['content'] + '<eos>' }}{%- endif %}{%- endfor %}"
)
"""A template that writes the system message into the last message of the user, if the chat ends with that."""


def test_a_system_message_is_in_front_of_every_answer_that_was_prompted_with_it() -> None:
    system: Message = {"role": "system", "content": "Be kind."}
    made = masks(MISTRAL)([system, user("Hi"), assistant("Ho."), user("And?"), assistant("Bye.")])
    tokenizer = trl_templates.tokenizer(MISTRAL)
    assert whole(made, tokenizer) == [
        "<bos>[INST] Be kind.\n\nHi[/INST] Ho.<eos>",
        "<bos>[INST] Hi[/INST] Ho.<eos>[INST] Be kind.\n\nAnd?[/INST] Bye.<eos>",
    ]
    assert [runs(one, tokenizer) for one in made] == [[" Ho.<eos>"], [" Bye.<eos>"]]
    [alone] = masks(MISTRAL)([user("Hi"), assistant("Ho."), user("And?"), assistant("Bye.")])
    assert runs(alone, tokenizer) == [" Ho.<eos>", " Bye.<eos>"]


def test_an_assistant_message_of_weight_0_is_context() -> None:
    wanted = [["Yes.<|im_end|>"]]
    assert trained("qwen2_5", user("Hi"), assistant("No.", weight=0), user("And?"), assistant("Yes.")) == wanted


ALL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role ~ ':' ~ (m.content or '') }}"
    "{% for c in m.tool_calls or () %}{{ c.function.name ~ ':' ~ c.function.arguments | tojson ~ '!' }}{% endfor %}"
    "{{ '<eos>' }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
)
"""A template that writes everything."""


@pytest.mark.parametrize(
    ("part", "edited", "named"),
    [
        (
            "(m.content or '')",
            "(m.content if m.role == 'user' else '')",
            r"messages\[0\]\.content",
        ),  # of the system
        ("(m.content or '')", "(m.content if m.role != 'tool' else '')", r"messages\[3\]\.content"),
        ("(m.content or '')", "(m.content if m.role != 'assistant' else '')", r"messages\[5\]\.content"),
        ("m.tool_calls or ()", "(m.tool_calls or ())[:1]", r"messages\[2\]\.tool_calls\[1\]"),
        ("m.tool_calls or ()", "(m.tool_calls or ())[1:]", r"messages\[2\]\.tool_calls\[0\]"),
        ("c.function.arguments", "dict(city=c.function.arguments.city)", r"tool_calls\[0\]\.arguments\.days"),
        (" ~ ':' ~ c.function.arguments | tojson", "", r"messages\[2\]\.tool_calls\[0\]\.arguments"),
        ("tools | tojson", "'tools'", r"tools\[0\]"),
    ],
)
def test_a_template_that_leaves_out_a_part_of_a_row_is_an_error(part: str, edited: str, named: str) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *PARTS["two calls"]]
    [whole] = masks(ALL)(messages, TOOLS)
    assert sum(whole["assistant_masks"])
    with pytest.raises(ChatError, match=f"leaves out .*{named}"):
        masks(ALL.replace(part, edited))(messages, TOOLS)
