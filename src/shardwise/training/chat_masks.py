"""Assistant masks for chat templates that mark no assistant tokens.

transformers masks assistant tokens only for templates with ``{% generation %}`` marks, and TRL has marked versions
of some templates, compared byte by byte. This module finds the assistant's tokens for any other template.

[Note: Assistant masks] The template renders the chat up to and including an answer, and the prompt for that answer
(``add_generation_prompt=True``). The answer is the text that the model has to generate at that turn:

- It starts at the end of its own prompt. If the rendering does not continue the prompt (DeepSeek prompts with
  ``<think>`` and renders answers without it), it starts at the end of the part of the prompt that both have, and no
  later than the first character that changes if the answer's content changes.
- It ends with the special token that ends the message. A template may end a whole chat with one more (Phi-3), which
  is not part of the answer. A template that ends messages without one is an error.

Templates may render an answer differently once more messages follow (most reasoning models drop earlier reasoning).
Training on that rendering would train the model to skip its reasoning. Answers whose rendering is still a prefix of
the whole chat share one example. Every other one ends an example of its own.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from shardwise.errors import ConfigError

ChatMessage: TypeAlias = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning in data sets; transformers' templates read the first two."""


class ChatError(ConfigError):
    """The chat template cannot render a chat, or leaves out a part of an answer."""


@dataclass(slots=True)
class _MaskedText:
    """A rendered text and the character ranges of it that are trained on."""

    text: str
    spans: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _RenderableChat:
    """A chat in the form that its template renders completely. ``variables`` are those of the template."""

    template: str
    messages: Sequence[ChatMessage]
    variables: Mapping[str, Any]

    def render(self, messages: Sequence[ChatMessage], *, prompt: bool = False) -> str:
        """Render messages as text, with the generation prompt on request.

        Raises:
            ChatError: the template raises an error.
        """
        render: Any = render_jinja_template
        variables = {**self.variables, "add_generation_prompt": prompt}
        try:
            [text], _ = render(conversations=[list(messages)], chat_template=self.template, **variables)
        except Exception as error:  # a template can raise anything
            raise ChatError(f"chat template: {error}. Change the row, or set chat_template_path.") from error
        return str(text)

    def attempt(self, messages: Sequence[ChatMessage], *, prompt: bool = False) -> str | None:
        """Render messages. None if the template rejects them."""
        try:
            return self.render(messages, prompt=prompt)
        except ChatError:
            return None

    @cached_property
    def text(self) -> str:
        """The whole chat as text."""
        return self.render(self.messages)


class AssistantMasks:
    """Tokenizes chats and marks the tokens of assistant messages.

    Args:
        tokenizer: a fast tokenizer with a chat template.

    Raises:
        ConfigError: the tokenizer does not report character offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise ConfigError(
                f"{name}: is a slow tokenizer, which reports no character offsets. assistant_only_loss needs a "
                "fast one (tokenizer.json)."
            )
        self._tokenizer = tokenizer
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = tuple(sorted(special - {""}))

    def __call__(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[dict[str, list[int]]]:
        """Tokenize a chat, usually as one example. See [Note: Assistant masks].

        Args:
            messages: with "role" and "content". An assistant message with a "weight" of 0 is not trained on.
            tools: JSON schemas of functions that the assistant may call.
            variables: further variables of the chat template (``chat_template_kwargs``).

        Returns:
            For each example ``input_ids`` and ``assistant_masks``, both of shape (tokens,). Every assistant message
            is marked in exactly one example.

        Raises:
            ChatError: the template cannot render the chat, or leaves out a part of an answer.
        """
        chat = self._chat(messages, {**(variables or {}), "tools": list(tools) if tools else None})
        examples = [_MaskedText(chat.text)]
        for index in reversed(range(len(messages))):
            if messages[index]["role"] != "assistant" or messages[index].get("weight") == 0:
                continue
            text, start, end = self._answer(chat, index)
            _require_complete(chat.messages[index], text[start:end], f"messages[{index}]")
            example = next((one for one in (examples[-1], examples[0]) if one.text.startswith(text[:end])), None)
            if example is None:
                example = _MaskedText(text)
                examples.append(example)
            example.spans.append((start, end))
        trained = [one for one in examples if one.spans] or examples[:1]
        return [self._tokenize(one) for one in reversed(trained)]

    # Rendering

    def _chat(self, messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> _RenderableChat:
        """Return the chat in the first form that the template renders completely."""
        template = str(self._tokenizer.get_chat_template(tools=variables["tools"]))
        for name, is_used in (
            ("tools", variables["tools"] is not None),
            ("tool_calls", any(message.get("tool_calls") for message in messages)),
        ):
            if is_used and name not in template:
                raise ChatError(f"chat template: does not use {name!r}, which the row has. Set chat_template_path.")
        first: ChatError | None = None
        for form in _forms(messages):
            chat = _RenderableChat(template, form, {**self._tokenizer.special_tokens_map, **variables})
            try:
                for index, message in enumerate(form):
                    _require_rendered(message, chat.text, f"messages[{index}]")
                return chat
            except ChatError as error:
                first = first or error
        assert first is not None
        raise first

    def _answer(self, chat: _RenderableChat, index: int) -> tuple[str, int, int]:
        """Return the chat through the answer at ``index``, as the model generates it, and the answer's range."""
        before, name = chat.messages[:index], f"messages[{index}]"
        text = chat.text if index == len(chat.messages) - 1 else chat.render(chat.messages[: index + 1])
        prompt = chat.attempt(before, prompt=True)
        start = self._start(chat, index, text, prompt)
        end = self._end(chat, index, text, start)
        if not text[:end].endswith(self._special):
            raise ChatError(f"chat template: ends {name} without a special token. Set chat_template_path.")
        if prompt is not None and not text.startswith(prompt) and _lacks_system(before, text, prompt):
            # Mistral's templates render a system message only if the chat ends with a user message.
            text, start, end = prompt + text[start:end], len(prompt), len(prompt) + end - start
        return text, start, end

    def _start(self, chat: _RenderableChat, index: int, text: str, prompt: str | None) -> int:
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        before, message = chat.messages[:index], chat.messages[index]
        others = (chat.attempt([*before, _with_content(message, other)]) for other in ("x", "y"))
        changed = min((_common(text, other) for other in others if other is not None), default=len(text))
        if prompt is None:
            return changed
        previous = chat.attempt(before) if before else ""
        if previous is None or not prompt.startswith(previous) or text.startswith(previous):
            return min(changed, _common(text, prompt))
        # Earlier messages are rendered differently: find the prompt's last message, or its end.
        header = prompt[len(previous) :]
        parts = [header[:size] for size in range(len(header), 0, -1)]
        parts = parts or [prompt[-size:] for size in range(len(prompt), 0, -1)]
        return next((at + len(part) for part in parts if (at := text.rfind(part, 0, changed)) >= 0), changed)

    def _end(self, chat: _RenderableChat, index: int, text: str, start: int) -> int:
        """Return the end of the answer that ends ``text``, without the end of the whole chat."""
        body = text[start:].rstrip()
        ending = max((token for token in self._special if body.endswith(token)), key=len, default="")
        if not ending or not body.removesuffix(ending).rstrip().endswith(self._special):
            return start + len(body)
        # The last of two special tokens may end the chat: it does if it is not there with another message.
        role = "tool" if chat.messages[index].get("tool_calls") else "user"
        following = chat.messages[index + 1 : index + 2] or [{"role": role, "content": "x"}]
        more = chat.attempt([*chat.messages[: index + 1], *following]) or ""
        kept = text[start : _common(text, more)]
        ends = [kept.rfind(token) + len(token) for token in self._special if token in kept]
        return start + min(len(body), max(ends, default=len(body)))

    def _tokenize(self, example: _MaskedText) -> dict[str, list[int]]:
        """Return tokens, and 1 for those that have at least one character of a span."""
        made = self._tokenizer(
            example.text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        mask = [
            int(any(first < end and max(last, first + 1) > start for start, end in example.spans))
            for first, last in made["offset_mapping"]
        ]
        return {"input_ids": list(made["input_ids"]), "assistant_masks": mask}


def _common(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    shortest = min(len(one), len(other))
    return next((place for place in range(shortest) if one[place] != other[place]), shortest)


# Forms of messages


def _forms(messages: Sequence[ChatMessage]) -> Iterator[list[ChatMessage]]:
    """Yield the messages in every form that templates need, the most common first.

    Contents are strings or lists of parts, arguments of tool calls are objects or JSON, and absent contents are
    left out, None or "".
    """
    usual = [_normalized(message) for message in messages]
    has_calls = any("tool_calls" in message for message in usual)
    lacks_content = any(message.get("content") is None for message in usual)
    for arguments, absent, parts in itertools.product(
        (dict, str) if has_calls else (dict,), ("left out", None, "") if lacks_content else ("",), (False, True)
    ):
        yield [_in_form(message, arguments, absent, parts=parts) for message in usual]


def _normalized(message: ChatMessage) -> dict[str, Any]:
    """Return a message without nulls and weights, its reasoning under both names that templates read."""
    found = {key: value for key, value in message.items() if value is not None and key != "weight"}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is not None:
        found |= {"thinking": reasoning, "reasoning_content": reasoning}
    if not found.get("tool_calls", True):
        del found["tool_calls"]
    return found


def _in_form(message: ChatMessage, arguments: type, absent: str | None, *, parts: bool) -> ChatMessage:
    found = dict(message)
    content = found.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if content is not None:
        found["content"] = [{"type": "text", "text": content}] if parts else content
    elif absent != "left out":
        found["content"] = absent
    if "tool_calls" in found:
        found["tool_calls"] = [_call_in_form(call, arguments) for call in found["tool_calls"]]
    return found


def _call_in_form(call: Mapping[str, Any], form: type) -> Mapping[str, Any]:
    function = {key: value for key, value in call.get("function", call).items() if value is not None}
    arguments = function.get("arguments") or {}
    if form is dict:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    others = {key: value for key, value in call.items() if value is not None and key not in function}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


def _with_content(message: ChatMessage, content: str) -> ChatMessage:
    """Return an answer with another content, without reasoning and tool calls."""
    kept = {key: value for key, value in message.items() if key not in (*_REASONING, "tool_calls")}
    is_parts = isinstance(message.get("content"), list)
    return {**kept, "content": [{"type": "text", "text": content}] if is_parts else content}


# Completeness


def _lacks_system(messages: Sequence[ChatMessage], text: str, prompt: str) -> bool:
    """Return whether a system message is in the prompt for an answer, but not in the text with the answer."""
    contents = (message.get("content") for message in messages if message["role"] == "system")
    return any(isinstance(one, str) and one in prompt and one not in text for one in contents)


def _require_rendered(message: ChatMessage, text: str, name: str) -> None:
    """Check that a text has the content and the tool calls of a message, not as a Python literal or nested JSON.

    Reasoning may be missing: most templates drop it from earlier messages.
    """
    content = message.get("content")
    if isinstance(content, list):
        if str(content) in text or json.dumps(content, ensure_ascii=False) in text:
            raise _left_out(f"{name}.content")
        texts = [str(part.get("text", "")) for part in content]
    else:
        texts = [line for line in (content or "").split("</think>")[-1].splitlines() if line.strip()]
        texts = [] if message["role"] in ("tool", "system") or not texts else [max(texts, key=len)]
    if not all(_has(text, one) for one in texts):
        raise _left_out(f"{name}.content")
    for number, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        is_written = call["function"]["name"] in text
        if isinstance(arguments, dict):
            is_written &= not (arguments and str(arguments) in text) and all(key in text for key in arguments)
        else:
            is_written &= json.dumps(arguments, ensure_ascii=False) not in text
        if not is_written:
            raise _left_out(f"{name}.tool_calls[{number}]")


def _require_complete(message: ChatMessage, answer: str, name: str) -> None:
    """Check that the trained text contains the reasoning and the content of a message."""
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and not _has(answer, reasoning):
        raise _left_out(f"{name}.reasoning_content")
    content = message.get("content") or ""
    texts = [part["text"] for part in content] if isinstance(content, list) else content.split("</think>")
    if not all(_has(answer, part.removeprefix("<think>")) for part in texts):
        raise _left_out(f"{name}.content")


def _has(text: str, part: str) -> bool:
    """Return whether a text contains a part, ignoring white space."""
    return part in text or "".join(part.split()) in "".join(text.split())


def _left_out(name: str) -> ChatError:
    return ChatError(f"chat template: leaves out {name}. Set chat_template_path, or drop it from the row.")
