"""Rows to learn from: chats, texts, prompts with their completions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from shardwise.errors import ConfigError

_SHOWN_FAULTS = 20

ROW_NAMES = ("messages", "text", "prompt", "completion", "tools", "chat_template_kwargs")
"""Every name that a row may have; others are passed over."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages with "role" and "content"; the assistant's are learned.

    ``line`` is the row's place where it was read, from 1: a line of a text file, else a row.
    """

    line: int
    messages: tuple[Mapping[str, Any], ...]


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


class RowError(ValueError):
    """What is wrong with one row."""


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
    """Raise a ConfigError that names every fault, up to the first 20; nothing when there are none."""
    found = sorted(set(faults))
    if not found:
        return
    shown = [f"  {unit} {fault.line}: {fault.cause}" for fault in found[:_SHOWN_FAULTS]]
    if len(found) > _SHOWN_FAULTS:
        shown.append(f"  and {len(found) - _SHOWN_FAULTS} more")
    rows = "row" if len(found) == 1 else "rows"
    raise ConfigError("\n".join([f"{os.fspath(path)}: {len(found)} {rows} cannot be used", *shown]))


def json_value(line: bytes) -> object:
    """What a line says.

    Raises:
        RowError: it is not JSON in UTF-8.
    """
    try:
        value: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"invalid UTF-8 at byte {error.start} of the line") from error
    except RecursionError as error:
        raise RowError("its JSON is nested too deeply") from error
    except ValueError as error:
        raise RowError(f"it is not valid JSON ({error})") from error
    return value


def row_of(number: int, value: object) -> Row:
    """A value as the row it is by its names.

    Raises:
        RowError: it is none.
    """
    if not isinstance(value, dict):
        raise RowError(f"it is a JSON {_json_type(value)}, not an object")
    forms = [name for name in ("messages", "text", "completion") if name in value]
    if len(forms) > 1:
        raise RowError(f"it has both {forms[0]!r} and {forms[1]!r}; which of them is meant?")
    match forms:
        case ["messages"]:
            return Chat(number, _messages(value["messages"]))
        case ["text"]:
            return Text(number, _string(value, "text"))
        case ["completion"]:
            if "prompt" not in value:
                raise RowError("it has a 'completion' but no 'prompt'")
            return Completion(number, _string(value, "prompt"), _string(value, "completion"))
        case _:
            keys = ", ".join(map(repr, value)) or "nothing"
            raise RowError(f"it has {keys}; wanted are 'messages', or 'text', or 'prompt' and 'completion'")


def _messages(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise RowError("'messages' must be a list of at least one message")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise RowError(f"messages[{index}] is a JSON {_json_type(message)}, not an object")
        for name in ("role", "content"):
            if name not in message:
                raise RowError(f"messages[{index}] has no {name!r}")
            if not isinstance(message[name], str):
                raise RowError(f"messages[{index}].{name} is a JSON {_json_type(message[name])}, not a string")
    if not any(message["role"] == "assistant" for message in value):
        raise RowError("no message is by the role 'assistant', so there is nothing to learn")
    return tuple(value)


def _string(value: Mapping[str, object], name: str) -> str:
    found = value[name]
    if not isinstance(found, str):
        raise RowError(f"{name!r} is a JSON {_json_type(found)}, not a string")
    try:
        found.encode()
    except UnicodeEncodeError as error:  # JSON can escape one half of a pair that is one character
        raise RowError(f"{name!r} is no text: character {error.start} is half of a surrogate pair") from error
    return found


def _json_type(value: object) -> str:
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
