"""Renders chats by a tokenizer's template, in the forms of messages that templates differ in."""

import bisect
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from shardwise.core.errors import ConfigError

ChatMessage: TypeAlias = Mapping[str, Any]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning in datasets; transformers' templates read the first two."""


class ChatError(ConfigError):
    """The chat template cannot render a chat, or leaves out a part of an answer."""


@dataclass(slots=True)
class MaskedText:
    """A rendered text and the character ranges of it that are trained on."""

    text: str
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rendering(self) -> str:
        """The text through the end of the last range."""
        return self.text[: self.spans[-1][1]].rstrip() if self.spans else self.text

    @property
    def trained(self) -> str:
        """The text that is trained on."""
        return "".join(self.text[start:end] for start, end in self.spans)


@dataclass(frozen=True)
class Chat:
    """A chat, the template that renders it, and its variables: tools, and further ones of the template."""

    template: str
    special_tokens: Mapping[str, Any]
    messages: Sequence[ChatMessage]
    variables: Mapping[str, Any]

    @classmethod
    def create(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> "Chat":
        """Return a chat with the template and the special tokens of a tokenizer."""
        variables = {**(variables or {}), "tools": list(tools) if tools else None}
        template = str(tokenizer.get_chat_template(tools=variables["tools"]))
        return cls(template, tokenizer.special_tokens_map, messages, variables)

    @property
    def has_marks(self) -> bool:
        """True if the template marks the assistant's tokens by ``{% generation %}``."""
        return _MARK.search(self.template) is not None

    def render(self, messages: Sequence[ChatMessage], *, prompt: bool = False) -> MaskedText:
        """Render messages with the ranges that the template marks, or one of everything if it has no marks.

        Args:
            messages: some of the chat.
            prompt: whether to add the prompt for an answer. Then there are no ranges.

        Raises:
            ChatError: the template raises an error.
        """
        options = {"add_generation_prompt": prompt, "return_assistant_tokens_mask": self.has_marks and not prompt}
        render: Any = render_jinja_template
        variables = {**self.special_tokens, **self.variables, **options}
        try:
            [text], spans = render([list(messages)], chat_template=self.template, **variables)
        except Exception as error:  # a template can raise anything
            raise ChatError(f"chat template: {error}. Change the row, or set chat_template_path") from error
        # Without marks everything is one range, in which the caller finds the answer.
        if not self.has_marks:
            return MaskedText(text, [(0, len(text))])
        return MaskedText(text, list(spans[0]) if spans else [])

    def attempt(self, messages: Sequence[ChatMessage], *, prompt: bool = False) -> str | None:
        """Render messages as text. None if the template rejects them."""
        try:
            return self.render(messages, prompt=prompt).text
        except ChatError:
            return None

    def trainable(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text of messages that can be trained on, "" if the template rejects them."""
        try:
            return self.render(messages).trained
        except ChatError:
            return ""

    def depends_on(self, index: int, message: ChatMessage) -> bool:
        """Return whether the chat, or the prompt for the next answer, changes with another message at ``index``."""
        others = [*self.messages[:index], message, *self.messages[index + 1 :]]
        if self.attempt(others) != self.text:
            return True
        # Some templates have a message only in the prompt for an answer, and not in the chat with it.
        roles = [one["role"] for one in self.messages]
        stop = roles.index("assistant", index) if "assistant" in roles[index:] else len(roles)
        return self.attempt(others[:stop], prompt=True) != self.attempt(self.messages[:stop], prompt=True)

    @property
    def tool_names(self) -> list[str]:
        """Names of the functions that the assistant may call."""
        return [str(tool.get("function", tool).get("name", "")) for tool in self.variables.get("tools") or ()]

    @cached_property
    def text(self) -> str:
        """The whole chat as text."""
        return self.render(self.messages).text


def forms(messages: Sequence[ChatMessage]) -> Iterator[list[ChatMessage]]:
    """Yield the messages in every form that templates differ in, the most common first.

    Contents as strings or lists of parts, arguments of tool calls as objects or JSON, absent contents left out,
    None or "".
    """
    # Only what the messages have is varied: a chat without calls and absent contents has two forms.
    usual = [_clean(message) for message in messages]
    has_calls = any("tool_calls" in message for message in usual)
    lacks_content = any(message.get("content") is None for message in usual)
    for arguments, absent, as_items in itertools.product(
        (dict, str) if has_calls else (dict,), ("left out", None, "") if lacks_content else ("",), (False, True)
    ):
        yield [_normalize(message, arguments, absent, as_items=as_items) for message in usual]


def _clean(message: ChatMessage) -> dict[str, Any]:
    """Return a message without nulls and weights, with its reasoning under both names that templates read."""
    cleaned = {key: value for key, value in message.items() if value is not None and key != "weight"}
    reasoning = next((cleaned[name] for name in REASONING if name in cleaned), None)
    if reasoning is not None:
        cleaned |= {"thinking": reasoning, "reasoning_content": reasoning}
    if not cleaned.get("tool_calls", True):
        del cleaned["tool_calls"]
    return cleaned


def _normalize(message: ChatMessage, arguments: type, absent: str | None, *, as_items: bool) -> ChatMessage:
    normalized = dict(message)
    content = normalized.get("content")
    if isinstance(content, list):
        content = "".join(item.get("text", "") for item in content)
    if content is not None:
        normalized["content"] = [{"type": "text", "text": content}] if as_items else content
    elif absent != "left out":
        normalized["content"] = absent
    if "tool_calls" in normalized:
        normalized["tool_calls"] = [_normalize_call(call, arguments) for call in normalized["tool_calls"]]
    return normalized


def _normalize_call(call: Mapping[str, Any], form: type) -> Mapping[str, Any]:
    # {"name": ..., "arguments": ...}, which is within the call, or the call itself.
    function = {key: value for key, value in call.get("function", call).items() if value is not None}
    arguments = function.get("arguments") or {}
    if form is dict:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    others = {key: value for key, value in call.items() if value is not None and key not in function}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


def with_content(message: ChatMessage, content: str) -> ChatMessage:
    """Return an answer with another content, and neither reasoning nor tool calls."""
    others = {key: value for key, value in message.items() if key not in (*REASONING, "tool_calls")}
    return {**others, "content": like(message.get("content"), content)}


def like(content: Any, text: str) -> Any:
    """Return a content with another text, in the same form."""
    return [{"type": "text", "text": text}] if isinstance(content, list) else text


def common_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    # By bisection over lengths, because comparing slices is far quicker than comparing characters in a loop.
    lengths = range(min(len(one), len(other)))
    return bisect.bisect_left(lengths, True, key=lambda length: one[: length + 1] != other[: length + 1])
