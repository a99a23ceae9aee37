"""Rows to learn from: chats, texts, prompts with their completions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from shardwise.errors import ConfigError
from shardwise.training.texts.row_values import (
    RowError,
    json_of,
    json_type,
    messages_of,
    template_kwargs_of,
    text_of,
    tools_of,
)

__all__ = [
    "ROW_NAMES",
    "Chat",
    "Completion",
    "Row",
    "RowError",
    "RowFault",
    "Text",
    "json_lines",
    "json_value",
    "or_fault",
    "read_rows",
    "refuse",
    "row_of",
]

_SHOWN_CAUSES, _SHOWN_LINES = 20, 8
_NUMBER = re.compile(r"\d+")

ROW_NAMES = ("messages", "text", "prompt", "completion", "tools", "chat_template_kwargs")
"""Every name that a row may have; others are passed over."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages with "role" and "content"; the assistant's are learned, but for those with a "weight" of 0.

    Attributes:
        line: the row's place where it was read, from 1: a line of a text file, else a row.
        messages: plain JSON.
        tools: functions that the assistant may call, as JSON schemas.
        template_kwargs: further variables for the chat template.
    """

    line: int
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is learned from its first token to its last."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, and the completion that is learned."""

    line: int
    prompt: str
    completion: str


Row: TypeAlias = Chat | Text | Completion


@dataclass(frozen=True, slots=True, order=True)
class RowFault:
    """A row that cannot be used: its line, from 1, and why."""

    line: int
    cause: str


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a JSON lines file; empty lines are passed over.

    Raises:
        ConfigError: the file cannot be read or has no rows; or some are malformed, each named with its line.
    """
    rows: list[Row] = []
    faults: list[RowFault] = []
    for found in json_lines(path):
        if isinstance(found, RowFault):
            faults.append(found)
        else:
            rows.append(found)
    refuse(path, faults)
    if not rows:
        raise ConfigError(f"{os.fspath(path)}: there are no rows; give it one JSON object on each line")
    return rows


def json_lines(path: str | os.PathLike[str], *, rank: int = 0, size: int = 1) -> Iterator[Row | RowFault]:
    """Every ``size``-th row of a JSON lines file, beginning with number ``rank``, one line in memory at a time.

    Raises:
        ConfigError: the file cannot be read.
    """
    index = 0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                if index % size == rank:
                    yield or_fault(number, lambda line=line: json_value(line))  # type: ignore[misc]
                index += 1
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: the data cannot be read ({error.strerror or error})") from error


def or_fault(number: int, read: Callable[[], object]) -> Row | RowFault:
    """The row that a value is, or what is wrong with it."""
    try:
        return row_of(number, read())
    except RowError as error:
        return RowFault(number, str(error))


def refuse(path: str | os.PathLike[str], faults: Iterable[RowFault], *, unit: str = "line") -> None:
    """Raise a ConfigError that tells each cause once, with the rows it is of; nothing where there are no faults.

    Causes that differ in numbers only are one, told as of the first row. Of the causes the first 20 are told.
    """
    found = sorted(set(faults))
    if not found:
        return
    causes: dict[str, list[RowFault]] = {}
    for fault in found:
        causes.setdefault(_NUMBER.sub("#", fault.cause), []).append(fault)
    shown = [f"  {_places(alike, unit)}: {alike[0].cause}" for alike in list(causes.values())[:_SHOWN_CAUSES]]
    if len(causes) > _SHOWN_CAUSES:
        shown.append(f"  and {len(causes) - _SHOWN_CAUSES} more causes")
    rows = "row" if len(found) == 1 else "rows"
    raise ConfigError("\n".join([f"{os.fspath(path)}: {len(found)} {rows} cannot be used", *shown]))


def _places(faults: Sequence[RowFault], unit: str) -> str:
    if len(faults) == 1:
        return f"{unit} {faults[0].line}"
    lines = ", ".join(str(fault.line) for fault in faults[:_SHOWN_LINES])
    more = f" and {len(faults) - _SHOWN_LINES} more" if len(faults) > _SHOWN_LINES else ""
    return f"{unit}s {lines}{more}"


def json_value(line: bytes) -> object:
    """What a line says.

    Raises:
        RowError: it is not JSON in UTF-8, or says something twice.
    """
    try:
        return json_of(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"invalid UTF-8 at byte {error.start} of the line") from error
    except RecursionError as error:
        raise RowError("its JSON is nested too deeply") from error
    except RowError:
        raise
    except ValueError as error:
        raise RowError(f"it is not valid JSON ({error})") from error


def row_of(number: int, value: object) -> Row:
    """A value as the row it is by its names.

    Raises:
        RowError: it is none.
    """
    if not isinstance(value, dict):
        raise RowError(f"it is a JSON {json_type(value)}, not an object")
    forms = [name for name in ("messages", "text", "completion") if name in value]
    if len(forms) > 1:
        raise RowError(f"it has both {forms[0]!r} and {forms[1]!r}; which of them is meant?")
    match forms:
        case ["messages"]:
            return _chat(number, messages_of(value, "messages"), value)
        case ["text"]:
            _require_no_chat(value)
            return Text(number, text_of(value, "text"))
        case ["completion"]:
            if "prompt" not in value:
                raise RowError("it has a 'completion' but no 'prompt'")
            if isinstance(value["prompt"], list) or isinstance(value["completion"], list):
                asked = [_unlearned(message) for message in messages_of(value, "prompt")]
                return _chat(number, (*asked, *messages_of(value, "completion")), value)
            _require_no_chat(value)
            return Completion(number, text_of(value, "prompt"), text_of(value, "completion"))
        case _:
            keys = ", ".join(map(repr, value)) or "nothing"
            raise RowError(f"it has {keys}; wanted are 'messages', or 'text', or 'prompt' and 'completion'")


def _chat(number: int, messages: tuple[Mapping[str, Any], ...], value: Mapping[str, object]) -> Chat:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise RowError("no message is by the role 'assistant', so there is nothing to learn")
    if all(message.get("weight") == 0 for message in answers):
        raise RowError("every answer has a weight of 0, so there is nothing to learn")
    return Chat(number, messages, tools_of(value), template_kwargs_of(value))


def _unlearned(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def _require_no_chat(value: Mapping[str, object]) -> None:
    for name in ("tools", "chat_template_kwargs"):
        if value.get(name):
            raise RowError(f"it has {name!r}, which only a row with messages can have")
