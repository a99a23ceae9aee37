"""Rows as tokens, and which of them are learned."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training import shipped, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from shardwise.models.chat_templates import CompiledTemplate
from shardwise.training.texts.chat_script import ChatOptions, Learn, Script
from shardwise.training.texts.masking import Encoder, Example
from shardwise.training.texts.rows import Chat, Completion, Row, RowError, RowFault, Text
from shardwise.training.texts.word_tokens import WordTokens

TALK = tiny.chat("Hi", "Hé llo", "And?", "Bye")["messages"]


CHATS = ChatOptions()


def examples(row: Row, tokenizer: PreTrainedTokenizerBase, options: ChatOptions = CHATS) -> list[Example]:
    [made] = Encoder(tokenizer, options).encode_many([row])
    assert not isinstance(made, RowFault), made
    return made


def learned(row: Row, template: str | None = tiny.MARKED) -> list[str]:
    """The runs of learned tokens, as text."""
    tokenizer = tiny.tokenizer(template)
    [example] = examples(row, tokenizer)
    return shipped.runs(example, tokenizer)


def whole(row: Row, template: str | None = tiny.MARKED) -> str:
    return tiny.tokenizer(template).decode(examples(row, tiny.tokenizer(template))[0].tokens)


def test_a_template_with_marks_says_what_is_learned() -> None:
    assert learned(Chat(1, tuple(TALK))) == ["Hé llo<|im_end|>", "Bye<|im_end|>"]


def test_without_marks_answers_are_what_the_template_adds() -> None:
    assert learned(Chat(1, tuple(TALK)), tiny.UNMARKED) == ["Hé llo<|im_end|>", "Bye<|im_end|>"]


@pytest.mark.parametrize("template", [tiny.MARKED, tiny.UNMARKED])
def test_the_tokens_are_those_of_the_template(template: str) -> None:
    expected = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHé llo<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nBye<|im_end|>\n"
    )
    assert whole(Chat(1, tuple(TALK)), template) == expected


def test_answers_that_are_rewritten_later_have_an_example_each() -> None:
    tokenizer = tiny.tokenizer(tiny.FORGETFUL)
    assert learned(Chat(1, tuple(TALK[:2])), tiny.FORGETFUL) == ["(thought)Hé llo<|im_end|>"]
    first, second = examples(Chat(1, tuple(TALK)), tokenizer)
    assert shipped.runs(first, tokenizer) == ["(thought)Hé llo<|im_end|>"]
    assert shipped.runs(second, tokenizer) == ["(thought)Bye<|im_end|>"]
    assert "(thought)Hé" not in tokenizer.decode(second.tokens)


def test_of_a_text_all_is_learned_but_its_first_token() -> None:
    assert learned(Text(1, "abc")) == ["bc<|im_end|>"]
    assert learned(Text(1, "abc<|im_end|>")) == ["bc<|im_end|>"]


def test_of_a_completion_the_completion_is_learned() -> None:
    row = Completion(1, "2+2=", "4")
    assert (whole(row), learned(row)) == ("2+2=4<|im_end|>", ["4<|im_end|>"])
    asked = Completion(1, "2+2?<|im_end|>", "4")  # what it ends with itself
    assert (whole(asked), learned(asked)) == ("2+2?<|im_end|>4<|im_end|>", ["4<|im_end|>"])


# Tokens


SPEAKING = (
    "{%- for m in messages %}{{- m.role[0] + ':' + m.content + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'a:' }}{%- endif %}"
)
"""Without special tokens, so that answers may begin and end within a token."""
MERGES = [
    ("a", ":"),
    (":", "H"),
    ("Ġ", "b"),
    ("o", "Ċ"),
    ("Ã", "©"),
    ("<", "b"),
    ("l", "l"),
    ("ll", "o"),
    ("Ġ", "Ġ"),
]


def merging(template: str, *, trim_offsets: bool = False, special: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that puts some bytes together."""
    names = [tiny.PAD, tiny.START, tiny.END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [one + other for one, other in MERGES]
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=MERGES))
    if special:
        made.add_special_tokens([tiny.PAD, tiny.START, tiny.END])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=tiny.END, chat_template=template)


def by_prefixes(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[bool]] | None:
    """Tokens and which are learned, by what each answer adds to the tokens before; None where that is not known."""

    def templated(count: int, **asked: Any) -> list[int]:
        return list(tokenizer.apply_chat_template(messages[:count], return_dict=False, **asked))

    whole = templated(len(messages))
    mask = [False] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = templated(index, add_generation_prompt=True), templated(index + 1)
            if after[: len(before)] != before or whole[: len(after)] != after:
                return None
            mask[len(before) : len(after)] = [True] * (len(after) - len(before))
    return whole, mask


pieces = st.sampled_from([*" :abHol\n<", "é", "💥", "\u0301", tiny.END, "</think>"])
contents = st.lists(pieces, max_size=8).map("".join)


@given(said=st.lists(contents, min_size=2, max_size=6), trim=st.booleans())
def test_tokens_are_those_that_an_answer_adds(said: list[str], trim: bool) -> None:
    """With special tokens around answers: what the tokens of the messages so far add, to the end of the turn."""
    messages: Any = tiny.chat(*said)["messages"]
    tokenizer = merging(tiny.UNMARKED, trim_offsets=trim)
    expected = by_prefixes(messages, tokenizer)
    [made] = examples(Chat(1, tuple(messages)), tokenizer)
    assert expected is not None
    tokens, mask = expected
    for place, token in enumerate(tokens):  # the line break after the end of a turn
        if mask[place] and token == 2 and not any(mask[place + 2 : place + 3]) and place + 1 < len(tokens):
            mask[place + 1] = False
    assert made.tokens.tolist() == tokens
    assert made.supervised.tolist() == mask


@given(said=st.lists(contents.map(lambda text: text.replace(tiny.END, "")), min_size=2, max_size=6))
def test_a_token_that_has_a_character_of_an_answer_is_learned(said: list[str]) -> None:
    """Of a template that ends answers by nothing: each token's text is known, and so whether it meets an answer."""
    messages: Any = tiny.chat(*said)["messages"]
    tokenizer = merging(SPEAKING, special=False)
    [made] = examples(Chat(1, tuple(messages)), tokenizer)
    text = "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)
    answered = np.zeros(len(text.encode()), dtype=bool)
    place = 0
    for message in messages:
        line = len(f"{message['role'][0]}:{message['content']}\n".encode())
        answered[place + 2 : place + line] = message["role"] == "assistant"
        place += line
    place = 0
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    for index, (token, learned) in enumerate(zip(made.tokens.tolist(), made.supervised.tolist(), strict=True)):
        size = len(bytes(alphabet[character] for character in tokenizer.convert_ids_to_tokens(token)))
        assert learned == (index > 0 and bool(answered[place : place + size].any()))
        place += size
    assert place == len(answered)


def test_a_token_across_the_beginning_of_an_answer() -> None:
    tokenizer = merging(SPEAKING)
    [made] = examples(Chat(1, tuple(tiny.chat("Hi", "Ho")["messages"])), tokenizer)
    assert tokenizer.convert_ids_to_tokens(made.tokens.tolist()) == ["u", ":H", "i", "Ċ", "a:", "H", "oĊ"]
    assert made.supervised.tolist() == [False] * 5 + [True] * 2
    [made] = examples(Chat(1, tuple(tiny.chat("Hi", "Ho")["messages"])), merging(SPEAKING.replace("'a:'", "'a'")))
    assert made.supervised.tolist() == [False] * 4 + [True] * 3  # "a:" has the colon, which is the answer's


@pytest.mark.parametrize("template", [tiny.MARKED, tiny.UNMARKED, tiny.FORGETFUL, SPEAKING])
def test_tokenizers_without_offsets(template: str) -> None:
    """A tokenizer in Python, a byte a token: what it learns is what one learns that knows the characters."""
    slow = ByT5Tokenizer(extra_ids=0, additional_special_tokens=[tiny.START, tiny.END])
    slow.chat_template = template
    assert not slow.is_fast
    fast = tiny.tokenizer(template)
    for said in (TALK, tiny.chat("é", "💥a", "<b>", "")["messages"]):
        row = Chat(1, tuple(said))
        runs = [
            [run for example in examples(row, one) for run in shipped.runs(example, one)] for one in (slow, fast)
        ]
        assert runs[0] == runs[1]
        assert len(runs[0]) == 2


def test_a_character_of_several_tokens_is_learned_whole() -> None:
    row = Chat(1, tuple(tiny.chat("é", "a💥")["messages"]))
    marked = tiny.MARKED.replace("m.content + '<|im_end|>'", "m.content").replace(
        "{{- '\\n' }}", "{{- '<|im_end|>' }}"
    )
    [made] = examples(row, tiny.tokenizer(marked))
    assert shipped.runs(made, tiny.tokenizer(marked)) == ["a💥"]
    assert int(made.supervised.sum()) == 5


# Many rows


ROWS = [
    Chat(1, tuple(TALK)),
    Text(2, "abc"),
    Completion(3, "2+2=", "4"),
    Chat(4, ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "reasoning_content": "x"})),
    Completion(5, "", "é"),
    Chat(6, tuple(TALK[:2])),
]


@pytest.mark.parametrize("template", [tiny.MARKED, tiny.UNMARKED, tiny.FORGETFUL])
def test_rows_together_are_the_rows_alone(template: str) -> None:
    tokenizer = tiny.tokenizer(template)
    encoder = pickle.loads(pickle.dumps(Encoder(tokenizer)))
    for _ in range(2):  # it keeps nothing
        together = encoder.encode_many(ROWS)
        for row, made in zip(ROWS, together, strict=True):
            [alone] = Encoder(tokenizer).encode_many([row])
            if isinstance(made, RowFault):
                assert made == alone
                assert made.line == 4
            else:
                assert not isinstance(alone, RowFault)
                assert [example.tokens.tolist() for example in made] == [
                    example.tokens.tolist() for example in alone
                ]
                masks = [[example.supervised.tolist() for example in one] for one in (made, alone)]
                assert masks[0] == masks[1]
    assert encoder.encode_many([]) == []


def test_a_text_that_the_tokenizer_refuses_is_that_rows_fault() -> None:
    rows = [Text(1, "abc"), Text(2, "\ud800"), Chat(3, tuple(TALK))]
    first, second, third = Encoder(tiny.tokenizer()).encode_many(rows)
    assert isinstance(second, RowFault)
    assert second.cause.startswith("the tokenizer refuses it")
    assert not isinstance(first, RowFault)
    assert not isinstance(third, RowFault)


def test_facts_are_other_facts_where_examples_may_be_others(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(tiny.UNMARKED)
    encoders = [
        Encoder(tiny.tokenizer()),
        Encoder(tiny.tokenizer(tiny.UNMARKED)),
        Encoder(tiny.tokenizer(), ChatOptions(learn=Learn.LAST)),
        Encoder(merging(tiny.MARKED)),
        Encoder(merging(tiny.MARKED, special=False)),
        Encoder(tiny.tokenizer("{{- strftime_now('%Y') }}" + tiny.MARKED)),
    ]
    facts = [json.dumps(encoder.facts(), sort_keys=True) for encoder in encoders]
    assert len(set(facts)) == len(facts)
    again = pickle.loads(pickle.dumps(encoders[0]))
    assert json.dumps(again.facts(), sort_keys=True) == facts[0]
    named = Encoder(tiny.tokenizer(tiny.UNMARKED), ChatOptions(str(tmp_path / "own.jinja")))
    (tmp_path / "own.jinja").write_text(tiny.MARKED)  # what was read counts, also in another process
    assert json.dumps(pickle.loads(pickle.dumps(named)).facts(), sort_keys=True) == facts[1]


# Days


TOLD = "{{- strftime_now('%d %b %Y %H:%M') + '\\n' }}" + tiny.UNMARKED
LIKE_LLAMA = (
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "{{- 'Today: ' + date_string + '\\n' }}" + tiny.UNMARKED
)
A_DAY, NEXT_DAY = datetime.date(2024, 7, 26), datetime.date(2024, 7, 27)


def test_templates_are_told_the_day_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    first = whole_by(TOLD, ChatOptions(day=A_DAY))
    assert first.startswith("26 Jul 2024 00:00\n<|im_start|>user")
    assert whole_by(LIKE_LLAMA, ChatOptions(day=NEXT_DAY)).startswith("Today: 27 Jul 2024\n")
    own = {"date_string": "1 Jan 1970"}
    assert whole_by(LIKE_LLAMA, ChatOptions(day=A_DAY), own).startswith("Today: 1 Jan 1970\n")
    facts = [Encoder(tiny.tokenizer(TOLD), ChatOptions(day=day)).facts() for day in (A_DAY, A_DAY, NEXT_DAY)]
    assert [facts[0] == other for other in facts] == [True, True, False]
    silent = [Encoder(tiny.tokenizer(), ChatOptions(day=day)).facts() for day in (A_DAY, NEXT_DAY)]
    assert silent[0] == silent[1]


def test_an_encoder_stays_on_its_day_when_midnight_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, A_DAY)
    encoder = Encoder(tiny.tokenizer(TOLD))
    set_clock(monkeypatch, NEXT_DAY)
    for one in (encoder, pickle.loads(pickle.dumps(encoder))):
        [made] = one.encode_many([Chat(1, tuple(TALK))])
        assert tiny.tokenizer().decode(made[0].tokens).startswith("26 Jul 2024")
        assert one.facts()["date"] == "2024-07-26"


def set_clock(monkeypatch: pytest.MonkeyPatch, day: datetime.date) -> None:
    """What the day is, for whoever asks."""

    class Day(datetime.date):
        @classmethod
        def today(cls) -> Any:
            return day

    monkeypatch.setattr("shardwise.training.texts.masking.datetime", FakeDays(Day))


class FakeDays:
    """Python's ``datetime``, with another date."""

    def __init__(self, date: type[datetime.date]) -> None:
        self.date = date
        self.datetime, self.time = datetime.datetime, datetime.time


def whole_by(template: str, options: ChatOptions, own: Any = None) -> str:
    tokenizer = tiny.tokenizer(template)
    [made] = examples(Chat(1, tuple(TALK), (), own or {}), tokenizer, options)
    return str(tokenizer.decode(made.tokens))


# Long chats


@pytest.mark.parametrize("template", [tiny.MARKED, tiny.UNMARKED])
def test_a_long_chat_is_written_a_few_times_whatever_its_length(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    tokenised = 0
    tokenizer = tiny.tokenizer(template)
    for name in ("pieces", "marked_pieces"):
        original = getattr(CompiledTemplate, name)

        def counted(*args: Any, original: Any = original) -> Iterator[str]:
            nonlocal written
            for piece in original(*args):
                written += len(piece)
                yield piece

        monkeypatch.setattr(CompiledTemplate, name, counted)
    call = type(tokenizer).__call__

    def counting(self: Any, texts: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal tokenised
        tokenised += sum(map(len, texts))
        return call(self, texts, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    make = WordTokens._made

    def making(self: WordTokens, words: list[str]) -> dict[str, bytes]:
        nonlocal tokenised
        tokenised += sum(map(len, words))
        return make(self, words)

    monkeypatch.setattr(WordTokens, "_made", making)
    messages: Any = tiny.chat(*(f"{number} and so on" for number in range(2000)))["messages"]
    [made] = examples(Chat(1, tuple(messages)), tokenizer)
    text = tokenizer.decode(made.tokens)
    assert 0 < tokenised <= len(text)
    assert written <= 3 * len(text)
    assert len(shipped.runs(made, tokenizer)) == 1000


@pytest.mark.skipif(shipped.folder() is None, reason="TRL, which ships the templates, is not installed")
def test_what_a_template_has_not_seen_has_not_changed_what_it_wrote() -> None:
    """Of all templates that are known: as much of a chat as is said to be written alike is, of each beginning."""
    talk: Any = tiny.chat("Hi", "Ho", "And?", "Bye", "So", "On")["messages"]
    proven = reading = 0
    for name in shipped.names():
        template = shipped.text(name)
        script = Script(CompiledTemplate(template), {"bos_token": "<bos>", "eos_token": "<eos>"}, talk)
        try:
            whole = script.written(len(talk)).text
        except RowError:
            continue  # wants its contents in parts
        observer = script.watched(len(talk), whole)
        assert observer is not None, name
        at_once, looked = script.looked_at()
        assert looked is not None
        assert (at_once, looked.first) == (script.written(len(talk)), observer.first)
        reading += script.template.only_reads
        for count in range(1, len(talk)):
            same = observer.first[count]
            assert same is not None
            assert script.written(count).text.startswith(whole[:same]), name
            proven += same > len(whole) / 9 * count
    assert proven > 50
    assert reading > 5


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}{{ messages[0] }}", True),
        (
            "{% for m in messages %}{{ messages[loop.index0 - 1].role }}{% else %}{{ messages[-1] }}{% endfor %}",
            True,
        ),
        ("{{ messages }}", False),
        ("{% set rest = messages[1:] %}", False),
        ("{% for m in messages | list %}{% endfor %}", False),
        ("{{ messages['append'] }}", False),
        ("{{ messages.append }}", False),
        ("{{ messages is mapping }}", False),
        ("{% for m in messages %}{% for other in [messages] %}{% endfor %}{% endfor %}", False),
    ],
)
def test_templates_that_only_read_messages(template: str, expected: bool) -> None:
    assert CompiledTemplate(template).only_reads == expected
