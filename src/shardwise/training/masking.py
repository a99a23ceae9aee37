"""From a row to tokens, and which of them are learned.

[Note: Which tokens are learned] Of a chat the assistant's answers, and nothing else. Where the tokenizer's
template marks them (``{% generation %}``), the marks are obeyed. Where it does not, an answer is what the template
adds to the tokens of the messages before it and the prompt for an answer: exactly the tokens that the model would
have to produce itself. That is only so if the template writes the beginning of a chat alike whatever follows. A
template that does not (one that drops the reasoning of earlier answers, say) is found out on the row, and refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from shardwise.errors import ConfigError
from shardwise.training.chat_options import ChatOptions
from shardwise.training.rows import Chat, Completion, Row, RowError, RowFault, Text

_CHATS = ChatOptions()
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, slots=True)
class Example:
    """A row as tokens. ``supervised`` says which of them are to be predicted from those before."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]

    @classmethod
    def of(cls, tokens: Sequence[int], supervised: Sequence[int] | Sequence[bool]) -> Example:
        mask = np.array(supervised, dtype=np.bool_)
        mask[:1] = False  # nothing comes before the first token
        return cls(np.array(tokens, dtype=np.int32), mask)

    def cut(self, max_length: int) -> Example:
        """The first ``max_length`` tokens."""
        return Example(self.tokens[:max_length], self.supervised[:max_length])


class Encoder:
    """Makes examples of rows, by one tokenizer and one way of reading chats.

    It is built once, keeps nothing of the rows it has seen, and can be pickled for another process.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chats: ChatOptions = _CHATS) -> None:
        self.tokenizer = tokenizer
        self.chats = chats

    def encode_many(self, rows: Sequence[Row]) -> list[list[Example] | RowFault]:
        """Of each row its examples, at full length and in order, or what is wrong with it.

        A row has one example or, where no single one can have all that is to be learned of it, several.

        Raises:
            ConfigError: the tokenizer has no chat template that can be used, and a row needs one.
        """
        return [self._encode_one(row) for row in rows]

    def facts(self) -> Mapping[str, Any]:
        """Everything that decides what becomes of a row, as plain JSON: equal facts, equal examples."""
        return {"version": 1, "tokenizer": _identity(self.tokenizer), "learn": self.chats.learn.name}

    def _encode_one(self, row: Row) -> list[Example] | RowFault:
        if isinstance(row, Chat):
            has_generation_marks(self.tokenizer)  # refuses a tokenizer without a template, before any row is
        try:
            return [encode(row, self.tokenizer)]
        except RowError as error:
            return RowFault(row.line, str(error))


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of what a tokenizer makes of texts."""
    found = {
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "what": (
            tokenizer.backend_tokenizer.to_str()
            if tokenizer.is_fast
            else [sorted(tokenizer.get_vocab().items()), repr(sorted(tokenizer.init_kwargs.items()))]
        ),
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def has_generation_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks the assistant's answers.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template (chat_template.jinja), which rows "
            "with 'messages' need; add one, or give rows with 'prompt' and 'completion'"
        ) from error
    return _GENERATION_MARK.search(template) is not None


def encode(row: Row, tokenizer: PreTrainedTokenizerBase) -> Example:
    """The row's tokens, at full length.

    Raises:
        RowError: the row does not go with the tokenizer's chat template.
        ConfigError: the tokenizer has no chat template, and the row needs one.
    """
    match row:
        case Chat():
            try:
                if tokenizer.is_fast and has_generation_marks(tokenizer):
                    return _marked(row.messages, tokenizer)
                return _by_prefixes(row.messages, tokenizer)
            except RowError:
                raise
            except (TemplateError, TypeError, LookupError, ValueError) as error:  # whatever a template's code may
                raise RowError(f"the chat template refuses it ({error})") from error
        case Text():
            tokens = [*tokenizer(row.text, verbose=False)["input_ids"]]
            tokens += _end(tokenizer, tokens)
            return Example.of(tokens, [True] * len(tokens))
        case Completion():
            prompt = tokenizer(row.prompt, verbose=False)["input_ids"]
            answer = tokenizer(row.completion, add_special_tokens=False, verbose=False)["input_ids"]
            answer = [*answer, *_end(tokenizer, answer)]
            # A tokenizer that ends every text would end the prompt too.
            prompt = prompt[:-1] if prompt and prompt[-1:] == _end(tokenizer, []) else prompt
            return Example.of([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
        case _:
            assert_never(row)


def _end(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[int]:
    """The token that ends a text, unless the text has it or there is none."""
    end = tokenizer.eos_token_id
    return [] if end is None or (tokens and tokens[-1] == end) else [end]


def _marked(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Example:
    found: Any = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    return Example.of(found["input_ids"], found["assistant_masks"])


def _by_prefixes(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Example:
    """See [Note: Which tokens are learned]."""
    whole = _templated(messages, tokenizer)
    supervised = [False] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _templated(messages[:index], tokenizer, add_generation_prompt=True)
            after = _templated(messages[: index + 1], tokenizer)
            if after[: len(before)] != before or whole[: len(after)] != after:
                raise RowError(
                    f"the chat template does not write messages[{index}] alike when an answer is asked for, "
                    "when it is given, and when more follows, so its tokens cannot be told from the others; put "
                    "{% generation %} marks into the template, or let each answer be the last of a row of its own"
                )
            supervised[len(before) : len(after)] = [True] * (len(after) - len(before))
    return Example.of(whole, supervised)


def _templated(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = False,
) -> list[int]:
    found: Any = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
        tokenizer_kwargs={"verbose": False},
    )
    return list(found)
