"""In which form messages are handed to a chat template, and whether it writes what they say.

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

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from shardwise.training.texts.watched import Message

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
