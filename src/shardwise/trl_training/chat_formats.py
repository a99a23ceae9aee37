"""Rows of data sets as chats: ShareGPT, Alpaca and JSON strings become ``messages``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardwise.errors import ConfigError

_ROLES: Final = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
    **{name: name for name in ("system", "developer")},
}
"""Roles of chat templates by the names that ShareGPT has for speakers."""

_JSON_COLUMNS: Final = ("messages", "conversations", "conversation", "tools", "history", "chat_template_kwargs")
"""Columns that some data sets keep as JSON in a string."""


class MalformedRowError(ConfigError):
    """A row of a data set cannot be used."""


def is_foreign(columns: Sequence[str]) -> bool:
    """Whether rows with these columns have to be converted to ``messages``."""
    names = set(columns)
    return bool(names & {"conversations", "conversation"}) or {"instruction", "output"} <= names


def to_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of ShareGPT, Alpaca or ``messages`` to ``messages``, with ``tools`` as function schemas.

    A key of None counts as absent. Other columns are kept. Arrow fills structs of one column with the keys of all
    of them; what is None is removed at any depth, but for the content of a message with tool calls.

    Raises:
        MalformedRowError: naming the key that is malformed.
    """
    found = {key: _parsed(key, _without_nulls(value)) for key, value in row.items() if value is not None}
    if "messages" in found:
        turns = found.pop("messages")
    elif "conversations" in found or "conversation" in found:
        turns = found.pop("conversations", None) or found.pop("conversation", None)
    elif "instruction" in found:
        return _from_alpaca(found)
    else:
        return found
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise MalformedRowError("messages: is not a list of messages. Write [{role: ..., content: ...}, ...].")
    messages = [_message(turn, f"messages[{index}]") for index, turn in enumerate(turns)]
    if isinstance(system := found.pop("system", None), str) and system:
        messages.insert(0, {"role": "system", "content": system})
    if tools := found.pop("tools", None):
        found["tools"] = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return {**found, "messages": messages}


def _parsed(key: str, value: Any) -> Any:
    if key not in _JSON_COLUMNS or not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise MalformedRowError(f"{key}: is a string that is not valid JSON, {error}. Correct the row.") from error


def _message(turn: Mapping[str, Any], name: str) -> dict[str, Any]:
    if "role" in turn:
        return dict(turn)
    speaker = turn.get("from")
    if speaker not in _ROLES:
        raise MalformedRowError(f"{name}: has the speaker {speaker!r}. Use one of {', '.join(_ROLES)}.")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    said = turn.get("value", "")
    if speaker != "function_call":
        return {"role": _ROLES[speaker], "content": said, **rest}
    try:
        calls = json.loads(said) if isinstance(said, str) else said
        calls = [
            {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
            for call in (calls if isinstance(calls, list) else [calls])
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedRowError(
            f"{name}: is no function call in JSON. Write {{name: ..., arguments: ...}}."
        ) from error
    return {"role": "assistant", "content": "", "tool_calls": calls, **rest}


def _from_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """The input on the line behind the instruction, the output as its answer, pairs of ``history`` before both."""
    messages = []
    if system := row.pop("system", None):
        messages.append({"role": "system", "content": system})
    history = row.pop("history", None) or []
    try:
        for asked, answered in history:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    except (TypeError, ValueError) as error:
        raise MalformedRowError("history: is not a list of pairs. Write [[question, answer], ...].") from error
    if "output" not in row:
        raise MalformedRowError("output: is missing beside 'instruction'. Add it.")
    asked = "\n".join(text for text in (row.pop("instruction"), row.pop("input", None)) if text)
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": row.pop("output")}]
    return {**row, "messages": messages}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _without_nulls(item) for key, item in value.items() if item is not None}
        if "content" in value and value["content"] is None and kept.get("tool_calls"):
            kept["content"] = None
        return kept
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
