"""From rows to tokens, and which of them are learned.

[Note: Which tokens are learned] Of a chat the assistant's answers, and nothing else: exactly the tokens that the
model would have to produce itself. Which characters these are is found in
:mod:`~shardwise.training.texts.chat_turns`, and which tokens are those in
:mod:`~shardwise.training.texts.token_spans`. Of a prompt with its completion the completion; of a text everything.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from shardwise.errors import ConfigError
from shardwise.models.chat_templates import CompiledTemplate
from shardwise.training.texts.chat_script import ChatOptions
from shardwise.training.texts.chat_turns import ChatReader, Rendering
from shardwise.training.texts.rows import Chat, Completion, Row, RowError, RowFault, Text
from shardwise.training.texts.token_spans import tokenise, tokens_within
from shardwise.training.texts.word_tokens import WordTokens

_CHATS = ChatOptions()
_FORM = 3  # another number for whatever makes other examples of the same rows


@dataclass(frozen=True, slots=True)
class Example:
    """A row as tokens. ``supervised`` says which of them are to be predicted from those before."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        tokens: Sequence[int] | NDArray[np.int32],
        supervised: Sequence[int] | Sequence[bool] | NDArray[np.bool_],
    ) -> Example:
        mask = np.array(supervised, dtype=np.bool_)
        mask[:1] = False  # nothing comes before the first token
        return cls(np.array(tokens, dtype=np.int32), mask)

    def cut(self, max_length: int) -> Example:
        """The first ``max_length`` tokens."""
        return Example(self.tokens[:max_length], self.supervised[:max_length])


@dataclass(frozen=True, slots=True)
class _RenderedChat:
    """A chat: texts that each become an example. What begins a text, the template has written."""

    renderings: Sequence[Rendering]


_Readable: TypeAlias = _RenderedChat | Text | Completion | RowFault
_Spans: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Tokenised:
    """A text as tokens, and which of them have one of the characters that were asked for, each (tokens,)."""

    ids: NDArray[np.int32]
    within: NDArray[np.bool_]


class Encoder:
    """Makes examples of rows, by one tokenizer and one way of reading chats.

    It is built once, for a tokenizer that nobody changes from then on, and can be pickled for another process. Of
    the rows it has seen it keeps the tokens of words, and these are the same whatever row they are in.

    Raises:
        ConfigError: ``chats`` names a template that is not there, or is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chats: ChatOptions = _CHATS) -> None:
        self.tokenizer = tokenizer
        self.chats = chats
        self._day = chats.day or datetime.date.today()
        self._template = None if chats.template is None else named_template(tokenizer, chats.template)
        self._readers: dict[str, ChatReader] = {}
        if self._template is not None:
            self._reader_of(self._template)

    def __getstate__(self) -> dict[str, Any]:
        without = {name: value for name, value in self.__dict__.items() if name != "_words"}
        return {**without, "_readers": {}}  # a compiled template cannot be sent

    @cached_property
    def _words(self) -> WordTokens | None:
        return WordTokens.of(self.tokenizer)

    @cached_property
    def _ends_texts(self) -> bool:
        """Whether the tokenizer adds the token that ends a text."""
        [made] = tokenise(self.tokenizer, ["x"], add_special_tokens=True)
        return not isinstance(made, ValueError) and made.ids[-1:].tolist() == self._end([])

    def encode_many(self, rows: Sequence[Row]) -> list[list[Example] | RowFault]:
        """Of each row its examples, at full length and in order, or what is wrong with it.

        A row has one example or, where no single one can have all that is to be learned of it, several; see
        [Note: What is learned of a chat] in :mod:`~shardwise.training.texts.chat_turns`.

        Raises:
            ConfigError: the tokenizer has no chat template that can be used, and a row needs one.
        """
        read = [self._read(row) for row in rows]
        bare: list[tuple[str, _Spans]] = []
        opened: list[tuple[str, _Spans]] = []
        for one in read:
            match one:
                case _RenderedChat():
                    bare += ((rendering.text, rendering.learned) for rendering in one.renderings)
                case Text():
                    opened.append((one.text, ()))
                case Completion():
                    opened.append((one.prompt, ()))
                    bare.append((one.completion, ()))
        # In this order they are taken out again.
        bare_tokens = iter(self._tokenise(bare, add_special_tokens=False))
        opened_tokens = iter(self._tokenise(opened, add_special_tokens=True))
        found: list[list[Example] | RowFault] = []
        for row, one in zip(rows, read, strict=True):
            match one:
                case RowFault():
                    found.append(one)
                    continue
                case _RenderedChat():
                    tokens = [next(bare_tokens) for _ in one.renderings]
                case Text():
                    tokens = [next(opened_tokens)]
                case Completion():
                    tokens = [next(opened_tokens), next(bare_tokens)]
                case _:
                    assert_never(one)
            wrong = [item for item in tokens if isinstance(item, ValueError)]
            fine = [item for item in tokens if not isinstance(item, ValueError)]
            found.append(RowFault(row.line, str(wrong[0])) if wrong else self._examples(one, fine))
        return found

    def _tokenise(
        self, texts: Sequence[tuple[str, _Spans]], *, add_special_tokens: bool
    ) -> list[_Tokenised | ValueError]:
        """Texts as tokens, by their words where that can be, and which of them are asked for."""
        known: list[tuple[NDArray[np.int32], NDArray[np.bool_]] | None] = [None] * len(texts)
        adds = add_special_tokens and self.tokenizer.num_special_tokens_to_add() > 0
        if texts and self._words is not None and not adds:
            known = self._words.tokenise([text for text, _ in texts], [spans for _, spans in texts])
        others = [text for (text, _), tokens in zip(texts, known, strict=True) if tokens is None]
        asked = iter(tokenise(self.tokenizer, others, add_special_tokens=add_special_tokens))
        found: list[_Tokenised | ValueError] = []
        for (text, spans), tokens in zip(texts, known, strict=True):
            if tokens is not None:
                found.append(_Tokenised(*tokens))
                continue
            made = next(asked)
            found.append(
                made
                if isinstance(made, ValueError)
                else _Tokenised(made.ids, tokens_within(self.tokenizer, text, made, spans))
            )
        return found

    def facts(self) -> Mapping[str, Any]:
        """Everything that decides what becomes of a row, as plain JSON: equal facts, equal examples."""
        template = self._template if self._template is not None else self.tokenizer.chat_template
        tells_time = "strftime_now" in json.dumps(template)
        return {
            "form": _FORM,
            "tokenizer": _identity(self.tokenizer),
            "template": template,
            "learn": self.chats.learn.value,
            "date": self._day.isoformat() if tells_time else None,
        }

    def _read(self, row: Row) -> _Readable:
        if not isinstance(row, Chat):
            return row
        reader = self._reader(row)  # refuses a tokenizer without a template, before any row is
        try:
            return _RenderedChat(reader.read(row))
        except RowError as error:
            return RowFault(row.line, str(error))

    def _reader(self, chat: Chat) -> ChatReader:
        if self._template is not None:
            return self._reader_of(self._template)
        try:
            return self._reader_of(
                self.tokenizer.get_chat_template(tools=[dict(tool) for tool in chat.tools] or None)
            )
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer of {self.tokenizer.name_or_path} has no chat template (chat_template.jinja), which "
                "rows with 'messages' need; add one, or give data.chat_template, or rows with 'prompt' and "
                "'completion'"
            ) from error

    def _reader_of(self, template: str) -> ChatReader:
        if template not in self._readers:
            tokenizer = self.tokenizer
            special = {str(token) for token in tokenizer.all_special_tokens}
            special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
            variables: dict[str, Any] = {
                name: _plain(token) for name, token in tokenizer.special_tokens_map.items()
            }
            variables["strftime_now"] = datetime.datetime.combine(self._day, datetime.time()).strftime
            self._readers[template] = ChatReader(
                CompiledTemplate(template), variables, sorted(special - {""}), self.chats.learn
            )
        return self._readers[template]

    def _examples(self, read: _RenderedChat | Text | Completion, tokens: Sequence[_Tokenised]) -> list[Example]:
        match read:
            case _RenderedChat():
                return [Example.of(made.ids, made.within) for made in tokens]
            case Text():
                ids = tokens[0].ids.tolist()
                ids += self._end(ids)
                return [Example.of(ids, [True] * len(ids))]
            case Completion():
                prompt, answer = (part.ids.tolist() for part in tokens)
                answer += self._end(answer)
                # A tokenizer that ends every text would end the prompt too. What a prompt itself ends with stays.
                prompt = prompt[:-1] if self._ends_texts and prompt[-1:] == self._end([]) else prompt
                return [Example.of([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))]
            case _:
                assert_never(read)

    def _end(self, tokens: Sequence[int]) -> list[int]:
        """The token that ends a text, unless the text has it or there is none."""
        end = self.tokenizer.eos_token_id
        return [] if end is None or (tokens and tokens[-1] == end) else [end]


def named_template(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """The text of the chat template that a name means: a file, or one of several that the tokenizer has.

    Raises:
        ConfigError: it means none.
    """
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if name in own:
        return str(own[name])
    try:
        return Path(name).read_text("utf-8")
    except (OSError, ValueError) as error:
        names = ", ".join(map(repr, own)) or "no templates by name"
        raise ConfigError(
            f"data.chat_template={name!r}: it cannot be read as a file ({error}), and the tokenizer has {names}"
        ) from error


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of what a tokenizer makes of texts."""
    found = {
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "what": (
            tokenizer.backend_tokenizer.to_str()
            if tokenizer.is_fast
            else [sorted(tokenizer.get_vocab().items()), repr(sorted(tokenizer.init_kwargs.items()))]
        ),
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _plain(token: Any) -> Any:
    return [str(one) for one in token] if isinstance(token, list) else str(token)
