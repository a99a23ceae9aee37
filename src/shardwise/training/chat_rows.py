"""One row of a dataset of chats: converted to ``messages`` from ShareGPT, Alpaca or JSON, and checked."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardwise.core.errors import ConfigError

_ROLES: Final = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
    **{name: name for name in ("system", "developer")},
}
"""Roles of chat templates by the names that ShareGPT has for speakers."""

# Columns that become ``messages``.
SHAREGPT_COLUMNS: Final = ("conversations", "conversation", "system")
ALPACA_COLUMNS: Final = ("instruction", "input", "output", "history", "system")

_JSON_COLUMNS: Final = ("messages", "conversations", "conversation", "tools", "history", "chat_template_kwargs")
"""Columns that some datasets keep as JSON in a string."""


class MalformedRowError(ConfigError):
    """A row of a dataset cannot be used."""


def is_foreign(columns: Sequence[str]) -> bool:
    """Return whether rows with these columns have to be converted to ``messages``."""
    names = set(columns)
    return bool(names & {"conversations", "conversation"}) or {"instruction", "output"} <= names


def to_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of ShareGPT, Alpaca or ``messages`` to ``messages``, with ``tools`` as function schemas.

    Messages without one for the system begin with the text of ``system``.

    Keys whose value is None are removed at any depth, because Arrow gives each struct in a column the keys of all
    of them. The content of a message with tool calls is an exception. Other columns are kept.

    Raises:
        MalformedRowError: naming the key that is malformed.
    """
    columns = {key: _parse_json(key, without_nulls(value)) for key, value in row.items() if value is not None}
    # An empty list of tools is no tools.
    if tools := columns.pop("tools", None):
        columns["tools"] = _to_functions(tools)
    if "messages" in columns:
        turns = columns.pop("messages")
    elif "conversations" in columns or "conversation" in columns:
        turns = columns.pop("conversations", None) or columns.pop("conversation", None)
    elif "instruction" in columns:
        return _from_alpaca(columns)
    else:
        return columns
    turns = require_turns("messages", turns)
    messages = [convert_turn(turn, f"messages[{index}]") for index, turn in enumerate(turns)]
    system, roles = columns.pop("system", None), {str(message["role"]) for message in messages}
    if isinstance(system, str) and system and roles.isdisjoint(("system", "developer")):
        messages.insert(0, {"role": "system", "content": system})
    return {**columns, "messages": messages}


def require_turns(key: str, value: Any) -> list[dict[str, Any]]:
    if not value or not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise MalformedRowError(
            f"{key}: is not a list of messages, or is empty. Write [{{role: ..., content: ...}}, ...]"
        )
    return value


_MEDIA: Final = frozenset(
    {"image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio"}
)
"""Types and keys of parts of a message that chat templates render as images, videos or sound."""


def require_no_media_parts(content: Any, name: str) -> None:
    """Check that no part of a message is an image: only those of a column have pixels."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping):
            continue
        words = {str(part.get("type")), *(key for key, value in part.items() if value)}
        if media := words & _MEDIA:
            raise MalformedRowError(
                f"{name}.content[{number}]: has {min(media)} inside of a message. Put images into a column images, "
                'which sft and dpo train on, and leave {"type": "image"} there'
            )


def require_message(message: Mapping[str, Any], name: str) -> None:
    """Check that a message has a role, text as its content, and calls of functions with an object as arguments."""
    if not isinstance(message.get("role"), str):
        raise MalformedRowError(f"{name}: has no role. Write {{role: ..., content: ...}}")
    # Parts without text are allowed, except for media.
    content = message.get("content") or ""
    require_no_media_parts(content, name)
    parts = content if isinstance(content, list) else [{"text": content}]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text", ""), str) for part in parts):
        raise MalformedRowError(f"{name}.content: is not text, nor a list of parts of text. Write content: TEXT")
    # A malformed call raises one of several errors below, which are all the same fault.
    try:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function.get("arguments") or {}
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if not isinstance(function["name"], str) or not isinstance(arguments, dict):
                raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedRowError(
            f"{name}.tool_calls: is not a list of calls. Write "
            "[{function: {name: ..., arguments: {...}}}, ...]"
        ) from error


def _to_functions(tools: Any) -> list[dict[str, Any]]:
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if not is_list or not all(isinstance(tool.get("function", tool), dict) for tool in tools):
        raise MalformedRowError("tools: is not a list of functions. Write [{name: ..., parameters: ...}, ...]")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _parse_json(key: str, value: Any) -> Any:
    if key not in _JSON_COLUMNS or not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise MalformedRowError(f"{key}: is a string that is not valid JSON, {error}. Correct the row") from error


def convert_turn(turn: Mapping[str, Any], name: str) -> dict[str, Any]:
    if "role" in turn:
        return dict(turn)
    speaker = turn.get("from")
    if speaker is None:
        raise MalformedRowError(f"{name}: has no role. Write {{role: ..., content: ...}}")
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise MalformedRowError(f"{name}: has the speaker {speaker!r}. Use one of {', '.join(_ROLES)}.")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    content = turn.get("value", "")
    # A function call is the JSON of one call, or of a list of calls.
    if speaker != "function_call":
        return {"role": _ROLES[speaker], "content": content, **others}
    try:
        parsed = json.loads(content) if isinstance(content, str) else content
        calls = []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            function = {"name": call["name"], "arguments": call.get("arguments", {})}
            calls.append({"type": "function", "function": function})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedRowError(
            f"{name}: is not a function call in JSON. Write {{name: ..., arguments: ...}}"
        ) from error
    return {"role": "assistant", "content": "", "tool_calls": calls, **others}


def _from_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of Alpaca. The input follows the instruction on a new line. ``history`` comes before both."""
    # Each column is removed when it is used, so that the others are left.
    messages = []
    if system := row.pop("system", None):
        messages.append({"role": "system", "content": system})
    history = row.pop("history", None) or []
    try:
        for asked, answered in history:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    except (TypeError, ValueError) as error:
        raise MalformedRowError("history: is not a list of pairs. Write [[question, answer], ...]") from error
    if "output" not in row:
        raise MalformedRowError("output: is missing beside 'instruction'. Add it")
    for key in ("instruction", "input", "output"):
        if not isinstance(row.get(key, ""), str):
            raise MalformedRowError(f"{key}: is not text. Put it in quotes")
    asked = "\n".join(text for text in (row.pop("instruction"), row.pop("input", None)) if text)
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": row.pop("output")}]
    return {**row, "messages": messages}


def without_nulls(value: Any) -> Any:
    """Return a value without keys that are None, at any depth, except for the content of a message with calls."""
    if isinstance(value, Mapping):
        cleaned = {key: without_nulls(item) for key, item in value.items() if item is not None}
        # Some templates render an absent content of a message with tool calls otherwise than a null.
        if "content" in value and value["content"] is None and cleaned.get("tool_calls"):
            cleaned["content"] = None
        return cleaned
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
