"""Rows of other programs in our words: ShareGPT, Alpaca, and columns of other names.

[Note: Layouts] Whose words a row has is told by its keys, row by row: a file may hold several kinds. Keys with null
say nothing. A row that can be read in two ways is refused, and so is one that is not of the layout that was asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, assert_never

from shardwise.errors import ConfigError
from shardwise.training.texts.row_values import RowError, json_of

LayoutName: TypeAlias = Literal["messages", "sharegpt", "alpaca", "completion", "text"]

_FORMS: Final[Mapping[LayoutName, tuple[str, ...]]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations", "conversation"),
    "alpaca": ("instruction",),
    "completion": ("completion",),
    "text": ("text",),
}
"""By which keys a layout is known."""

_BESIDE: Final[Mapping[LayoutName, tuple[str, ...]]] = {
    "messages": ("tools", "chat_template_kwargs"),
    "sharegpt": ("system", "tools", "chat_template_kwargs"),
    "alpaca": ("input", "output", "system", "history", "chat_template_kwargs"),
    "completion": ("prompt", "tools", "chat_template_kwargs"),
    "text": (),
}
"""What else is read of a row."""

KNOWN_COLUMNS: Final = frozenset(name for layout in _FORMS for name in (*_FORMS[layout], *_BESIDE[layout]))
"""All columns that any layout has a use for."""

WANTED: Final = (
    "messages, or conversations, or instruction and output, or prompt and completion, or text (data.columns "
    "renames: {prompt: question, completion: answer})"
)

_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
    "function_call": "assistant",
}
"""Who speaks, as ShareGPT has it, in the words of chat templates."""

_IN_JSON: Final = frozenset(
    {"messages", "conversations", "conversation", "tools", "history", "chat_template_kwargs"}
)
"""Columns that some data sets keep as JSON in a string."""


@dataclass(frozen=True, slots=True)
class RowWords:
    """How rows say what they say.

    Attributes:
        layout: the only one that is taken; None for whichever a row has.
        columns: by our names, what the data call them.

    Raises:
        ConfigError: a column is none of ours.
    """

    layout: LayoutName | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.columns if name not in KNOWN_COLUMNS]:
            known = ", ".join(sorted(KNOWN_COLUMNS))
            raise ConfigError(f"data.columns: {unknown[0]!r} is none of our names, which are {known}")

    def facts(self) -> dict[str, object]:
        """All of it as plain JSON values."""
        return {"layout": self.layout, "columns": dict(sorted(self.columns.items()))}

    def wanted(self, there: Sequence[str]) -> list[str]:
        """Of the columns that are there, those that are read; none where no layout can be had of them."""
        layouts = [self.layout] if self.layout is not None else list(_FORMS)
        forms = {self.columns.get(name, name) for layout in layouts for name in _FORMS[layout]}
        beside = {self.columns.get(name, name) for layout in layouts for name in _BESIDE[layout]}
        return [name for name in there if name in forms | beside] if forms & set(there) else []

    def in_ours(self, value: object) -> tuple[LayoutName | None, object]:
        """A row in the words of :func:`~shardwise.training.texts.rows.row_of`, and the layout it had.

        What is no object comes back as it is, for that function to refuse.

        Raises:
            RowError: it can be read in two ways, or is not of the layout asked for, or not as that has it.
        """
        if not isinstance(value, dict):
            return None, value
        row = self._renamed({key: found for key, found in value.items() if found is not None})
        layout = _layout_of(row) if self.layout is None else self._layout_asked(row)
        if layout is None:
            raise RowError(f"it has {', '.join(map(repr, row)) or 'nothing'}; wanted are {WANTED}")
        row = {key: _of_json(key, found) for key, found in row.items()}
        match layout:
            case "messages":
                return layout, _with_tools({**row, "messages": _turns(row["messages"], "messages")}, row)
            case "sharegpt":
                return layout, _from_sharegpt(row)
            case "alpaca":
                return layout, _from_alpaca(row)
            case "completion" | "text":
                return layout, _with_tools(dict(row), row)
            case _:
                assert_never(layout)

    def _layout_asked(self, row: dict[str, Any]) -> LayoutName:
        """The layout asked for; of the row only what belongs to it stays."""
        assert self.layout is not None
        forms = _FORMS[self.layout]
        if not any(name in row for name in forms):
            has = ", ".join(map(repr, row)) or "nothing"
            raise RowError(f"it has {has}, and no {forms[0]!r}, which data.layout={self.layout!r} asks for")
        for name in row.keys() - {*forms, *_BESIDE[self.layout]}:
            del row[name]
        return self.layout

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        if not self.columns:
            return row
        taken = set(self.columns.values())
        renamed = {key: found for key, found in row.items() if key not in taken and key not in self.columns}
        for ours, theirs in self.columns.items():
            if theirs in row:
                renamed[ours] = row[theirs]
        return renamed


def _layout_of(row: Mapping[str, Any]) -> LayoutName | None:
    found = [(layout, name) for layout, names in _FORMS.items() for name in names if name in row]
    if "output" not in row and len(found) > 1:  # an instruction alone is no Alpaca
        found = [(layout, name) for layout, name in found if layout != "alpaca"]
    if len(found) > 1:
        raise RowError(
            f"it has both {found[0][1]!r} and {found[1][1]!r}; which of them is meant? Say it by data.layout "
            f"({', '.join(dict(found))})"
        )
    return found[0][0] if found else None


def _of_json(key: str, value: Any) -> Any:
    """Lists and objects that were kept as text."""
    if key not in _IN_JSON or not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json_of(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{key!r} is a string that is not valid JSON ({error})") from error


def _with_tools(made: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """With the row's tools as chat templates want them: none for an empty list, each a function."""
    for name in ("tools", "chat_template_kwargs"):
        if not row.get(name):
            made.pop(name, None)
    tools = row.get("tools")
    if isinstance(tools, list) and tools:
        made["tools"] = [
            {"type": "function", "function": tool}
            if isinstance(tool, dict) and "name" in tool and "function" not in tool
            else tool
            for tool in tools
        ]
    return made


def _from_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    key = "conversations" if "conversations" in row else "conversation"
    messages = _turns(row[key], key)
    system = row.get("system")
    if isinstance(system, str) and system:
        if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
            raise RowError(f"its 'system' and the first of its {key!r} both are the system's; which is meant?")
        messages = [{"role": "system", "content": system}, *messages]
    made: dict[str, Any] = {"messages": messages}
    if "chat_template_kwargs" in row:
        made["chat_template_kwargs"] = row["chat_template_kwargs"]
    if "tools" in row:
        made["tools"] = row["tools"]
    return _with_tools(made, row)


def _turns(value: Any, key: str) -> Any:
    """Messages, those with "from" and "value" in our words."""
    if not isinstance(value, list):
        return value if key == "messages" else _no_list(key)
    return [_turn(turn, f"{key}[{index}]") for index, turn in enumerate(value)]


def _no_list(key: str) -> Any:
    raise RowError(f"{key!r} is not a list of messages")


def _turn(turn: Any, place: str) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    if "role" in turn:
        raise RowError(f"{place} has both 'from' and 'role'; which of them is meant?")
    speaker, said = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise RowError(f"{place} is from {speaker!r}; known are {', '.join(map(repr, _ROLES))}")
    if "value" not in turn:
        raise RowError(f"{place} has 'from' but no 'value'")
    rest = {name: found for name, found in turn.items() if name not in ("from", "value")}
    if speaker == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(said, place), **rest}
    return {"role": _ROLES[speaker], "content": said, **rest}


def _calls(said: Any, place: str) -> list[dict[str, Any]]:
    """What an assistant calls, as ShareGPT has it: JSON with a name and arguments, or a list of such."""
    try:
        found: Any = json_of(said) if isinstance(said, str) else said
    except (ValueError, RecursionError) as error:
        raise RowError(f"{place} is a function_call that is not valid JSON ({error})") from error
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RowError(f"{place} is a function_call without a 'name' and 'arguments'")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def _from_alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """An instruction, with its input on the next line, and the output as its answer; earlier pairs before it."""
    messages: list[dict[str, Any]] = []
    if row.get("system"):
        messages.append({"role": "system", "content": _text(row, "system")})
    history = row.get("history") or []
    if not isinstance(history, list):
        raise RowError("'history' is not a list of pairs")
    for index, pair in enumerate(history):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise RowError(f"history[{index}] is not a pair of texts: what was asked, and what was answered")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    if "output" not in row:
        raise RowError("it has an 'instruction' but no 'output'")
    asked = [_text(row, "instruction"), *([_text(row, "input")] if row.get("input") else [])]
    messages.append({"role": "user", "content": "\n".join(asked)})
    messages.append({"role": "assistant", "content": _text(row, "output")})
    kwargs = row.get("chat_template_kwargs")
    return {"messages": messages, **({"chat_template_kwargs": kwargs} if kwargs else {})}


def _text(row: Mapping[str, Any], name: str) -> str:
    found = row[name]
    if not isinstance(found, str):
        raise RowError(f"{name!r} is not a string")
    return found


def without_filled_nulls(value: object) -> object:
    """A value of columns as the object it was.

    Arrow gives all structs of a column the same fields, and fills those that one lacks with null, at any depth:
    tool calls get the arguments of all others. These go. The content of a message that calls tools stays null.
    """
    if isinstance(value, Mapping):
        kept = {key: without_filled_nulls(found) for key, found in value.items() if found is not None}
        if "content" in value and value["content"] is None and kept.get("tool_calls"):
            kept["content"] = None
        return kept
    if isinstance(value, list):
        return [without_filled_nulls(found) for found in value]
    return value
