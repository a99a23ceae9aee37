"""What is learned of a row."""

from __future__ import annotations

import pytest
from tests.training import tiny
from transformers import PreTrainedTokenizerBase

from shardwise.training.chat_options import ChatOptions
from shardwise.training.masking import Encoder, Example
from shardwise.training.rows import Chat, Completion, Row, RowFault, Text

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
    return runs(example, tokenizer)


def runs(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    found: list[list[int]] = []
    before = False
    for token, supervised in zip(example.tokens.tolist(), example.supervised.tolist(), strict=True):
        if supervised:
            found = [*found[:-1], [*found[-1], token]] if before else [*found, [token]]
        before = supervised
    return [tokenizer.decode(run) for run in found]


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
    assert runs(first, tokenizer) == ["(thought)Hé llo<|im_end|>"]
    assert runs(second, tokenizer) == ["(thought)Bye<|im_end|>"]
    assert "(thought)Hé" not in tokenizer.decode(second.tokens)


def test_of_a_text_all_is_learned_but_its_first_token() -> None:
    assert learned(Text(1, "abc")) == ["bc<|im_end|>"]
    assert learned(Text(1, "abc<|im_end|>")) == ["bc<|im_end|>"]


def test_of_a_completion_the_completion_is_learned() -> None:
    row = Completion(1, "2+2=", "4")
    assert (whole(row), learned(row)) == ("2+2=4<|im_end|>", ["4<|im_end|>"])
