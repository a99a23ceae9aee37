"""What a chat template writes of one chat, in the form that messages have for it, and how chats are read.

[Note: Forms of messages] Templates disagree about what a message is. Some want the arguments of a tool call as an
object, some as JSON; some want a message without content to have none, some null, some an empty text; some want a
text, some a list of its parts. What a row has is therefore handed over in the first form in which the template
writes all of it. A template that writes it in no form would have the model learn an answer with a hole in it, so
that the row is refused by the name of what is missing.

What counts as written: of an answer that is learned its reasoning, its content and its calls, whatever white space
a template trims. Of other messages at least a line of their content, since templates take words out of them that
are meant for the template (``/no_think``) and leave out reasoning that lies behind.
"""

from __future__ import annotations

import datetime
import enum
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from shardwise.models.chat_templates import CompiledTemplate
from shardwise.training.texts.chat_rounds import Length, Rounds, recorded, taken_up
from shardwise.training.texts.rows import RowError
from shardwise.training.texts.watched import Message, Observer, WatchedMessages


class _Asks(enum.Enum):
    """What a text asks for at its end; the value is what templates are told."""

    NOTHING = False
    ANSWER = True


_SHORT: Final = 16
"""Messages of a chat whose beginnings are each written from their beginning: noting rounds costs more."""
_WRITTEN_WHOLE: Final = 2
"""So many texts of any chat are."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """A text, and the places in it that the template marks as the assistant's, in characters."""

    text: str
    marks: tuple[tuple[int, int], ...]


class Script:
    """One chat, and what the template writes of the first so many of its messages.

    Args:
        template: what writes.
        variables: what it is given beside messages.
        messages: of the chat, in the form that the template wants.
    """

    def __init__(
        self, template: CompiledTemplate, variables: Mapping[str, Any], messages: Sequence[Message]
    ) -> None:
        self.template = template
        self.variables = variables
        self.messages = messages
        self._whole: ChatText | None = None
        self._prompts: dict[int, str | None] = {}
        self._rounds: dict[_Asks, Rounds | None] = {}
        self._door = template.door if len(messages) > _SHORT else None
        self._written = 0

    def written(self, count: int) -> ChatText:
        """Of the first ``count`` messages.

        Raises:
            RowError: the template refuses them.
        """
        if count == len(self.messages) and self._whole is not None:
            return self._whole
        return self._write(list(self.messages[:count]), count, _Asks.NOTHING)

    def written_with(self, index: int, message: Message, count: int) -> ChatText:
        """Of the first ``count`` messages with another one in the place of number ``index``.

        Raises:
            RowError: the template refuses them.
        """
        return self._write(
            [*self.messages[:index], message, *self.messages[index + 1 : count]], index, _Asks.NOTHING
        )

    def looked_at(self) -> tuple[ChatText, Observer | None]:
        """All messages, and when the template looks at which: at once where it does no more than read them.

        Raises:
            RowError: the template refuses them.
        """
        count = len(self.messages)
        if self.template.only_reads:
            size = 0
            observer = Observer(count, lambda: size)
            given = self._given(WatchedMessages(self.messages, observer), _Asks.NOTHING)
            marks: list[tuple[int, int]] = []
            pieces: list[str] = []
            try:
                for piece in self._pieces(given, marks):
                    pieces.append(piece)
                    size += len(piece)
                self._whole = ChatText("".join(pieces), tuple(marks))
                return self._whole, observer
            except Exception:  # told below, of a list
                pass
        self._whole = self._write_all(list(self.messages), _Asks.NOTHING)
        seen = self._recorded(self._whole, _Asks.NOTHING)
        return self._whole, self.watched(count, self._whole.text) if seen is None else seen

    def prompt(self, count: int) -> str | None:
        """What asks for an answer to the first ``count`` messages; None where the template refuses that."""
        if count not in self._prompts:
            try:
                found = self._write(list(self.messages[:count]), count, _Asks.ANSWER).text
            except RowError:
                found = None
            self._prompts = {count: found}
        return self._prompts[count]

    def watched(self, count: int, expected: str) -> Observer | None:
        """When the template looks at which message; None where it writes anything but what is expected.

        Of what it has written before, what is noted is not noted again: when the last loop ended is.
        """
        length = Length()
        observer = Observer(count, lambda: length.characters)
        messages = WatchedMessages(self.messages[:count], observer)
        door, rounds = self._door, self._rounds.get(_Asks.NOTHING)
        try:
            if door is not None and rounds is not None:
                given = {**self.variables, "add_generation_prompt": False}
                text, _ = taken_up(rounds, door, given, messages, count, length)
                return observer if text == expected else None
            pieces = []
            for piece in self.template.pieces(self._given(messages, _Asks.NOTHING)):
                pieces.append(piece)
                length.characters += len(piece)
        except Exception:  # no list like others: whatever a template's code may raise of that
            return None
        return observer if "".join(pieces) == expected else None

    def _write(self, messages: list[Message], common: int, asks: _Asks) -> ChatText:
        """Messages of which the first ``common`` are the chat's, from where they differ once this pays."""
        self._written += 1
        door = self._door if self._written > _WRITTEN_WHOLE else None
        rounds = None if door is None else self._rounds_of(asks if door.asks else _Asks.NOTHING)
        if door is None or rounds is None:
            return self._write_all(messages, asks)
        with _refusals():
            text, marks = taken_up(
                rounds, door, {**self.variables, "add_generation_prompt": asks.value}, messages, common, Length()
            )
            return ChatText(text, tuple(marks))

    def _rounds_of(self, asks: _Asks) -> Rounds | None:
        """The whole chat, round by round."""
        if asks not in self._rounds:
            try:
                whole = self._whole if asks is _Asks.NOTHING else None
                whole = whole or self._write_all(list(self.messages), asks)
                self._recorded(whole, asks)
            except RowError:
                self._rounds[asks] = None
        return self._rounds[asks]

    def _recorded(self, whole: ChatText, asks: _Asks) -> Observer | None:
        """Write the whole chat once more, and note its rounds: they count if it is the same."""
        door, self._rounds[asks] = self._door, None
        if door is None:
            return None
        try:
            found = recorded(door, {**self.variables, "add_generation_prompt": asks.value}, self.messages)
        except Exception:  # as in ``watched``
            return None
        if found is None or (found[0].text, tuple(found[0].marks)) != (whole.text, whole.marks):
            return None
        self._rounds[asks], observer = found
        return observer

    def _write_all(self, messages: list[Message], asks: _Asks) -> ChatText:
        marks: list[tuple[int, int]] = []
        with _refusals():
            return ChatText("".join(self._pieces(self._given(messages, asks), marks)), tuple(marks))

    def _pieces(self, given: Mapping[str, Any], marks: list[tuple[int, int]]) -> Iterator[str]:
        return self.template.marked_pieces(given, marks) if self.template.has_marks else self.template.pieces(given)

    def _given(self, messages: Sequence[Message], asks: _Asks) -> dict[str, Any]:
        return {**self.variables, "messages": messages, "add_generation_prompt": asks.value}


@contextmanager
def _refusals() -> Iterator[None]:
    """Whatever a template's code raises becomes a RowError."""
    try:
        yield
    except RecursionError as error:
        raise RowError("the chat template refuses it (it calls itself without end)") from error
    except Exception as error:
        raise RowError(f"the chat template refuses it ({error})") from error


REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; that which transformers has templates read comes first."""

_THOUGHT = re.compile(r"</?think>")
_DIRECTIVE = re.compile(r"/(?:no_?)?think\b")


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages in every form that may differ, the usual one first."""
    usual = [_usual(message, _as_object) for message in messages]
    bases = [usual]
    if any("tool_calls" in message for message in usual):
        bases.append([_usual(message, _as_json) for message in messages])
    contents: list[_Change] = [_same]
    if any("content" not in message for message in usual):
        contents += [_with_null_content, _with_empty_content]
    lists = any(isinstance(message.get("content"), list) for message in usual)
    for base, content, parts in itertools.product(bases, contents, (_same, _with_text if lists else _with_parts)):
        yield [parts(content(message)) for message in base]


def unwritten(messages: Sequence[Message], text: str) -> str | None:
    """What of a chat a text does not have; None where nothing is missing."""
    behind = 0  # what is looked for next is usually there
    for index, message in enumerate(messages):
        place, content = f"messages[{index}]", message.get("content")
        missing = _unwritten_calls(message, text)
        if missing is not None:
            return f"{place}.{missing}"
        if isinstance(content, list):
            if not all(_is_in(part["text"], text) for part in content) or _is_notation(content, text):
                return f"{place}.content"
        elif content and (found := text.find(content, behind)) >= 0:
            behind = found + len(content)
        elif content and content not in text and message["role"] != "tool":
            lines = [_DIRECTIVE.sub("", line).strip() for line in _THOUGHT.split(content)[-1].splitlines()]
            if any(lines) and not any(_is_in(line, text) for line in lines if line):
                return f"{place}.content"
    return None


def unwritten_answer(message: Message, text: str) -> str | None:
    """What of an answer a text does not have; None where nothing is missing."""
    for name in REASONING:
        if isinstance(message.get(name), str) and not _is_in(message[name], text):
            return name
    content = message.get("content") or ""
    texts = [part["text"] for part in content] if isinstance(content, list) else _THOUGHT.split(content)
    if not all(_is_in(part, text) for part in texts):
        return "content"
    return _unwritten_calls(message, text)


def _unwritten_calls(message: Message, text: str) -> str | None:
    for number, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        arguments = function.get("arguments", {})
        if function["name"] not in text:
            return f"tool_calls[{number}]"
        if isinstance(arguments, dict):
            if _is_notation(arguments, text) or not all(key in text for key in arguments):
                return f"tool_calls[{number}].function.arguments"
        elif json.dumps(arguments, ensure_ascii=False) in text:  # JSON in JSON
            return f"tool_calls[{number}].function.arguments"
    return None


def _is_in(part: str, text: str) -> bool:
    """Whether a text has this, whatever white space is in between."""
    return part in text or "".join(part.split()) in "".join(text.split())


def _is_notation(value: object, text: str) -> bool:
    """Whether a text has a value as Python writes it, which no model is to learn."""
    return bool(value) and str(value) in text


# Forms


_Change: TypeAlias = Callable[[Message], Message]


def _usual(message: Message, arguments: Callable[[object], object]) -> Message:
    """As transformers hands it over: nothing null, and reasoning by its names."""
    found = {name: value for name, value in message.items() if value is not None and name != "weight"}
    reasoning = next((found[name] for name in REASONING if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    if "tool_calls" in found:
        found["tool_calls"] = [_usual_call(call, arguments) for call in found["tool_calls"]]
    return found


def _usual_call(call: Mapping[str, Any], arguments: Callable[[object], object]) -> Mapping[str, Any]:
    function = dict(call.get("function", call))
    function["arguments"] = arguments(function.get("arguments"))
    others = {name: value for name, value in call.items() if value is not None and name not in function}
    return {"type": "function", **others, "function": function}


def _as_object(arguments: object) -> object:
    return json.loads(arguments) if isinstance(arguments, str) else arguments or {}


def _as_json(arguments: object) -> object:
    """JSON as the row has it, or as transformers writes it."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _same(message: Message) -> Message:
    return message


def _with_null_content(message: Message) -> Message:
    return {"content": None, **message}


def _with_empty_content(message: Message) -> Message:
    return {"content": "", **message}


def _with_text(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


class Learn(enum.Enum):
    """Which answers of a chat are learned; see [Note: What is learned of a chat]."""

    ALL = "all"
    """Each as it was said at its turn, in as many examples as that takes."""
    LAST = "last"
    """The last one."""
    AS_READ = "as_read"
    """Each as it stands in the whole chat, in one example, be it rewritten there."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How chats are read.

    Attributes:
        template: the chat template: None for the tokenizer's own, else a path to a Jinja file, or the name of one
            of several that the tokenizer has.
        learn: which answers are learned.
        day: the day that templates are told (Llama 3, gpt-oss); None for today's. Rows of one run have one.
    """

    template: str | None = None
    learn: Learn = Learn.ALL
    day: datetime.date | None = None
