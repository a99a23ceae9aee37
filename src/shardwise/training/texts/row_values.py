"""What may stand in a row: texts, messages, tools, each checked and told by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_REASONING = ("reasoning_content", "reasoning", "thinking")
_LOOKED_AT = frozenset({"role", "content", "weight", *_REASONING})
"""What of a message is plain once it has been looked at by itself."""
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class RowError(ValueError):
    """What is wrong with one row."""


def json_of(text: str | bytes) -> object:
    """What JSON says.

    Raises:
        RowError: an object has a name twice, of which Python would take the last.
        ValueError, RecursionError: it is none, or nested too deeply.
    """
    return json.loads(text, object_pairs_hook=object_of)


def object_of(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, for a decoder.

    Raises:
        RowError: it has a name twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"an object in it has {twice!r} twice; which of them is meant?")
    return found


def text_of(row: Mapping[str, object], name: str) -> str:
    """A text of a row.

    Raises:
        RowError: it is none.
    """
    return _text(row[name], repr(name))


def messages_of(row: Mapping[str, object], name: str) -> tuple[Mapping[str, Any], ...]:
    """The messages of a row, without what is null.

    Raises:
        RowError: they are none, or have what is not known here.
    """
    value = row[name]
    if not isinstance(value, list) or not value:
        raise RowError(f"{name!r} must be a list of at least one message")
    return tuple(_message(message, f"{name}[{index}]") for index, message in enumerate(value))


def tools_of(row: Mapping[str, object]) -> tuple[Mapping[str, Any], ...]:
    """The functions that may be called in a row: a list of JSON schemas, or the JSON of one.

    Raises:
        RowError: they are none.
    """
    value = row.get("tools") or []
    if isinstance(value, str):
        value = _parsed(value, "'tools'")
    if not isinstance(value, list):
        raise RowError(f"'tools' is a JSON {json_type(value)}, not an array")
    for index, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise RowError(f"tools[{index}] is a JSON {json_type(tool)}, not an object")
    _require_plain(value, "tools")
    return tuple(value)


def template_kwargs_of(row: Mapping[str, object]) -> Mapping[str, Any]:
    """Further variables of a row for the chat template.

    Raises:
        RowError: they are none, or would take the place of others.
    """
    name = "chat_template_kwargs"
    value = row.get(name) or {}
    if not isinstance(value, dict):
        raise RowError(f"{name!r} is a JSON {json_type(value)}, not an object")
    for key in _RESERVED:
        if key in value:
            raise RowError(f"{name}.{key} would take the place of what the row itself says")
    _require_plain(value, name)
    return {key: found for key, found in value.items() if found is not None}


def json_type(value: object) -> str:
    """What JSON calls a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case Sequence():
            return "array"
        case _:
            return "object"


# Messages


def _message(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{place} is a JSON {json_type(value)}, not an object")
    if "role" not in value:
        raise RowError(f"{place} has no 'role'")
    role = _text(value["role"], f"{place}.role")
    found: dict[str, Any] = {name: item for name, item in value.items() if item is not None}
    if not found.get("tool_calls", True):
        del found["tool_calls"]
    for name in _REASONING:
        if name in found:
            _text(found[name], f"{place}.{name}")
    if "function_call" in found:
        raise RowError(f"{place} has 'function_call', the older form of calls; give 'tool_calls'")
    if "tool_calls" in found:
        if role != "assistant":
            raise RowError(f"{place} has 'tool_calls', but is by the role {role!r}; only the assistant calls")
        found["tool_calls"] = _calls(found["tool_calls"], f"{place}.tool_calls")
    if "weight" in found:
        _require_weight(found["weight"], role, place)
    if "content" in found:
        found["content"] = _content(found["content"], f"{place}.content")
    elif not any(name in found for name in ("tool_calls", *_REASONING)):
        if "content" not in value:
            raise RowError(f"{place} has no 'content'")
        raise RowError(f"{place}.content is a JSON null, not a string")
    if others := {name: item for name, item in found.items() if name not in _LOOKED_AT}:
        _require_plain(others, place)
    return found


def _content(value: object, place: str) -> object:
    if not isinstance(value, list):
        return _text(value, place)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise RowError(f"{place}[{index}] is a JSON {json_type(part)}, not an object")
        kind = part.get("type", "text")
        if kind != "text":
            raise RowError(
                f"{place}[{index}] is of the type {kind!r}; parts of a content can be of the type 'text'"
            )
        parts.append({"type": "text", "text": _text(part.get("text"), f"{place}[{index}].text")})
    return parts


def _calls(value: object, place: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise RowError(f"{place} is a JSON {json_type(value)}, not an array")
    calls = []
    for index, call in enumerate(value):
        here = f"{place}[{index}]"
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict):
            raise RowError(f"{here} is a JSON {json_type(function)}, not an object")
        if "name" not in function:
            raise RowError(f"{here} has no 'function' with a 'name'")
        _text(function["name"], f"{here}.function.name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{here}.function.arguments")
            _require_plain(arguments, f"{here}.function.arguments")
        if not isinstance(arguments, dict | None):
            raise RowError(f"{here}.function.arguments is a JSON {json_type(arguments)}, not an object")
        calls.append(call)
    return calls


def _require_weight(value: object, role: str, place: str) -> None:
    if not isinstance(value, int | float) or value not in (0, 1):
        raise RowError(f"{place}.weight is {value!r}; it can be 1, and 0 for an answer that is not learned")
    if value and role != "assistant":
        raise RowError(f"{place}.weight is 1, but only what the assistant says is learned, not the role {role!r}")


def _parsed(value: str, place: str) -> object:
    try:
        return json_of(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{place} is a string, but not valid JSON ({error})") from error


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{place} is a JSON {json_type(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can escape one half of a pair that is one character
        raise RowError(f"{place} is no text: character {error.start} is half of a surrogate pair") from error
    return value


def _require_plain(value: object, place: str) -> None:
    """Refuse what JSON cannot say, which no template is to be handed."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{place} has half of a surrogate pair in it, which is no text") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{place} has a value that is not JSON ({error})") from error
