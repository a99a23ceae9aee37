"""Checks that a template renders every part of a chat, and that every part of an answer is trained on.

Templates write arguments and results of tools in many ways, so a part that is not there as text is rendered if the
text changes with it.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.training.chat_rendering import Chat, ChatError, like


def require_rendered(chat: Chat) -> None:
    """Check that a chat has all tools, and of all messages the contents, tool calls and their results.

    None may be written as Python or as JSON in JSON. Reasoning may be missing: most templates drop it from earlier
    messages.

    Raises:
        ChatError: naming the part that the template leaves out.
    """
    for index in range(len(chat.messages)):
        _require_message(chat, index)
    _require_tools(chat)


def _require_message(chat: Chat, index: int) -> None:
    message, text, name = chat.messages[index], chat.text, f"messages[{index}]"
    content = message.get("content")
    if isinstance(content, list):
        # A template that does not know parts writes the list itself.
        if str(content) in text or json.dumps(content, ensure_ascii=False) in text:
            raise _left_out(f"{name}.content")
        texts = [str(item.get("text", "")) for item in content]
    else:
        # Templates strip and indent texts, and drop earlier reasoning. The longest line stands for the text.
        texts = [line for line in (content or "").split("</think>")[-1].splitlines() if line.strip()]
        texts = [max(texts, key=len)] if texts else []
    if not all(_has(text, one) for one in texts):
        # Templates write results of tools as JSON, and a system message into the prompt for the last answer.
        is_context = message["role"] in ("tool", "system", "developer")
        other = like(content, "x" if content != "x" else "y")
        if not is_context or not chat.depends_on(index, {**message, "content": other}):
            raise _left_out(f"{name}.content")
    for number, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        # An object as Python writes it, or a string within another, is not what a model should learn to write.
        is_written = call["function"]["name"] in text
        if isinstance(arguments, dict):
            is_written &= not (arguments and str(arguments) in text)
        else:
            is_written &= json.dumps(arguments, ensure_ascii=False) not in text
        if not is_written:
            raise _left_out(f"{name}.tool_calls[{number}]")


def _require_tools(chat: Chat) -> None:
    """Check that the prompt for the first answer has the names of all tools."""
    first = next((index for index, message in enumerate(chat.messages) if message["role"] == "assistant"), 0)
    prompt = chat.attempt(chat.messages[:first], prompt=True) or chat.text
    for number, name in enumerate(chat.tool_names):
        if name not in prompt:
            raise _left_out(f"tools[{number}]")


def require_trained(chat: Chat, index: int, answer: str) -> None:
    """Check that the trained text of an answer contains its reasoning, its content and its tool calls.

    Raises:
        ChatError: naming the part that is missing.
    """
    message, name = chat.messages[index], f"messages[{index}]"
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and not _has(answer, reasoning):
        raise _left_out(f"{name}.reasoning_content")
    content = message.get("content") or ""
    texts = [item["text"] for item in content] if isinstance(content, list) else content.split("</think>")
    if not all(_has(answer, text.removeprefix("<think>")) for text in texts):
        raise _left_out(f"{name}.content")
    calls = message.get("tool_calls") or []
    # Templates write calls in many ways. A part is trained if the trained text changes when it is left out.
    whole = chat.trainable([*chat.messages[:index], message]) if calls else ""
    for number, call in enumerate(calls):
        for part, fewer in _without_parts(call, answer):
            others = [*calls[:number], *fewer, *calls[number + 1 :]]
            if chat.trainable([*chat.messages[:index], {**message, "tool_calls": others}]) == whole:
                raise _left_out(f"{name}.tool_calls[{number}]{part}")


def _without_parts(call: Mapping[str, Any], answer: str) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield the name of each part of a call, and what is left without it.

    The parts are the call, its arguments, and each of these whose name is not in the answer.
    """
    yield "", []
    arguments = call["function"]["arguments"]
    values = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    without: dict[str, dict[str, Any]] = {".arguments": {}} if values else {}
    for key in values:
        if key not in answer:
            without[f".arguments.{key}"] = {other: value for other, value in values.items() if other != key}
    for part, fewer in without.items():
        form = json.dumps(fewer, ensure_ascii=False) if isinstance(arguments, str) else fewer
        yield part, [{**call, "function": {**call["function"], "arguments": form}}]


def _has(text: str, piece: str) -> bool:
    """Return whether a text contains another, whatever white space it has."""
    return piece in text or "".join(piece.split()) in "".join(text.split())


def _left_out(name: str) -> ChatError:
    return ChatError(f"chat template: leaves out {name}. Set chat_template_path, or drop it from the row")
