"""Assistant masks for any chat template.

transformers masks assistant tokens only for templates with ``{% generation %}`` marks, and TRL has marked
versions of 31 templates, compared byte by byte. This module finds the assistant's tokens for any other template.

[Note: Assistant masks] The template renders the chat up to and including an answer, and the prompt for that answer
(``add_generation_prompt=True``). The answer is the text that the model has to generate at that turn:

- It starts where its own prompt ends. If the rendering does not continue the prompt (DeepSeek prompts with
  ``<think>`` and renders answers without it), it starts behind the part of the prompt that both have, and no later
  than the first character that changes if the answer's content changes.
- It ends behind the special token that ends the message. A template may end a whole chat with one more (Phi-3),
  which is not part of the answer. A message without one (GLM) is ended by the token that starts the next message,
  because the model stops there.
- A template with ``{% generation %}`` marks defines the tokens itself.

Templates may render an answer differently once more messages follow (most reasoning models drop earlier reasoning).
Training on that rendering would train the model to skip its reasoning. Answers whose rendering is still a prefix of
the whole chat share one example. Every other one ends an example of its own.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from shardwise.errors import ConfigError

ChatMessage: TypeAlias = Mapping[str, Any]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning in datasets; transformers' templates read the first two."""


class ChatError(ConfigError):
    """The chat template cannot render a chat, or leaves out a part of an answer."""


@dataclass(frozen=True, slots=True)
class _AssistantTurn:
    """An assistant message: the chat rendered up to it, and the character ranges of the answer in it."""

    text: str
    spans: Sequence[tuple[int, int]]

    @property
    def rendering(self) -> str:
        """The text through the end of the answer."""
        return self.text[: self.spans[-1][1]].rstrip() if self.spans else self.text

    @property
    def said(self) -> str:
        """The answer from its first to its last character."""
        return self.rendering[self.spans[0][0] :] if self.spans else ""


@dataclass(slots=True)
class _MaskedText:
    """A rendered text and the character ranges of it that are trained on."""

    text: str
    spans: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _RenderableChat:
    """A chat in the form that its template renders completely."""

    template: str
    special_tokens: Mapping[str, Any]
    messages: Sequence[ChatMessage]
    variables: Mapping[str, Any]
    """Tools, and further variables of the template."""

    def render(self, messages: Sequence[ChatMessage], *, prompt: bool = False) -> str:
        """Render messages as text, with the generation prompt on request.

        Raises:
            ChatError: the template raises an error.
        """
        return self._render(messages, add_generation_prompt=prompt)[0]

    @property
    def has_marks(self) -> bool:
        """True if the template marks the assistant's tokens."""
        return _MARK.search(self.template) is not None

    def marked(self, messages: Sequence[ChatMessage]) -> _MaskedText:
        """Render messages with the ranges that the template marks by ``{% generation %}``."""
        text, spans = self._render(messages, return_assistant_tokens_mask=True)
        return _MaskedText(text, spans)

    def _render(self, messages: Sequence[ChatMessage], **options: bool) -> tuple[str, list[tuple[int, int]]]:
        render: Any = render_jinja_template
        variables = {**self.special_tokens, **self.variables, **options}
        try:
            texts, spans = render(conversations=[list(messages)], chat_template=self.template, **variables)
        except Exception as error:  # a template can raise anything
            raise ChatError(f"chat template: {error}. Change the row, or set chat_template_path") from error
        return str(texts[0]), [(start, end) for start, end in (spans[0] if spans else ())]

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
        ConfigError: the tokenizer has no chat template, or does not report character offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise ConfigError(
                f"{name}: is a slow tokenizer, which reports no character offsets. assistant_only_loss needs a "
                "fast one (tokenizer.json)"
            )
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{name}: has no chat template, which rows with 'messages' need. Set chat_template_path, or use "
                "rows with 'prompt' and 'completion'"
            )
        self._tokenizer = tokenizer
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = tuple(sorted(special - {""}))
        self._openings: dict[str, str] = {}

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
            answer = self._answer(chat, index)
            _require_complete(chat.messages[index], answer.said, f"messages[{index}]")
            candidates = (one for one in (examples[-1], examples[0]) if one.text.startswith(answer.rendering))
            example = next(candidates, None)
            if example is None:
                example = _MaskedText(answer.text)
                examples.append(example)
            example.spans += answer.spans
        trained = [one for one in examples if one.spans] or examples[:1]
        return [self._tokenize(one) for one in reversed(trained)]

    # Rendering

    def _chat(self, messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> _RenderableChat:
        """The chat in the first of its forms that the template renders completely."""
        template = str(self._tokenizer.get_chat_template(tools=variables["tools"]))
        for name, is_used in (
            ("tools", variables["tools"] is not None),
            ("tool_calls", any(message.get("tool_calls") for message in messages)),
        ):
            if is_used and name not in template:
                raise ChatError(f"chat template: does not use {name!r}, which the row has. Set chat_template_path")
        first: ChatError | None = None
        for form in _forms(messages):
            chat = _RenderableChat(template, self._tokenizer.special_tokens_map, form, variables)
            try:
                for index, message in enumerate(form):
                    _require_rendered(message, chat.text, f"messages[{index}]")
                return chat
            except ChatError as error:
                first = first or error
        assert first is not None
        raise first

    def _answer(self, chat: _RenderableChat, index: int) -> _AssistantTurn:
        """The assistant message at ``index`` as the model has to generate it at its turn."""
        before, message = chat.messages[:index], chat.messages[index]
        through = [*before, message]
        prompt = chat.attempt(before, prompt=True)
        if chat.has_marks:
            marked = chat.marked(through)
            start = 0 if prompt is None else _common(prompt, marked.text)
            end = self._end(chat, index, marked.text, start)
            return _AssistantTurn(
                marked.text, [(first, min(last, end)) for first, last in marked.spans if last > start]
            )
        text = chat.text if index == len(chat.messages) - 1 else chat.render(through)
        if prompt is not None and text.startswith(prompt):
            start = len(prompt)
        else:
            start = self._start(chat, index, text, prompt)
        end = self._end(chat, index, text, start)
        if prompt is not None and _lacks_system(before, text, prompt):
            # Mistral's templates render a system message only if the chat ends with a user message.
            text, start, end = prompt + text[start:end], len(prompt), len(prompt) + end - start
        if text[start:end].endswith(self._special):
            return _AssistantTurn(text, [(start, end)])
        opening = self._opening(chat, "tool" if message.get("tool_calls") else "user")
        return _AssistantTurn(text[:end] + opening, [(start, end + len(opening))])

    def _end(self, chat: _RenderableChat, index: int, text: str, start: int) -> int:
        """The end of an answer that is the last message of ``text``, without the end of the whole chat."""
        body = text[start:].rstrip()
        ending = max((token for token in self._special if body.endswith(token)), key=len, default="")
        if not ending or not body.removesuffix(ending).rstrip().endswith(self._special):
            return start + len(body)
        # The last of two special tokens may end the chat: what stays if another message follows decides.
        role = "tool" if chat.messages[index].get("tool_calls") else "user"
        following = chat.messages[index + 1 : index + 2] or [{"role": role, "content": "x"}]
        more = chat.attempt([*chat.messages[: index + 1], *following]) or ""
        kept = text[start : _common(text, more)]
        ends = [kept.rfind(token) + len(token) for token in self._special if token in kept]
        return start + min(len(body), max(ends, default=len(body)))

    def _start(self, chat: _RenderableChat, index: int, text: str, prompt: str | None) -> int:
        """The start of an answer whose rendering does not continue its prompt."""
        before, message = chat.messages[:index], chat.messages[index]
        others = (chat.attempt([*before, _with_content(message, other)]) for other in ("x", "y"))
        changed = min((_common(text, other) for other in others if other is not None), default=len(text))
        previous = chat.attempt(before) if before else ""
        if prompt is None or previous is None or not prompt.startswith(previous):
            return changed if prompt is None else min(changed, _common(text, prompt))
        if text.startswith(previous):
            return min(changed, _common(text, prompt))
        # The messages before are rendered differently: look for the prompt's own part, or its beginning.
        header = prompt[len(previous) :]
        for size in range(len(header), 0, -1):
            found = text.rfind(header[:size], 0, changed)
            if found >= 0:
                return found + size
        for size in range(len(prompt) if not header else 0, 0, -1):
            found = text.rfind(prompt[-size:], 0, changed)
            if found >= 0:
                return found + size
        return changed

    def _opening(self, chat: _RenderableChat, role: str) -> str:
        """Return the special token that starts the message after an answer, or "" if it starts with other text."""
        if role not in self._openings:
            answer: ChatMessage = {"role": "assistant", "content": "x"}
            if role == "tool":
                function = {"name": "x", "arguments": {}}
                answer = {**answer, "tool_calls": [{"type": "function", "function": function}]}
            messages = [{"role": "user", "content": "x"}, answer, {"role": role, "content": "x"}]
            before, after = chat.attempt(messages[:2]), chat.attempt(messages)
            shared = "" if before is None else before.rstrip()
            rest = after[len(shared) :] if after is not None and after.startswith(shared) else ""
            self._openings[role] = next((token for token in self._special if rest.startswith(token)), "")
        return self._openings[role]

    # Tokens

    def _tokenize(self, example: _MaskedText) -> dict[str, list[int]]:
        made = self._tokenizer(example.text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids = list(made["input_ids"])
        mask = [0] * len(ids)
        encoding = made.encodings[0]
        for start, end in example.spans:
            first, stop = _token_range(encoding, start, end)
            mask[first:stop] = [1] * (stop - first)
        return {"input_ids": ids, "assistant_masks": mask}


def _token_range(encoding: Encoding, start: int, end: int) -> tuple[int, int]:
    """The range of tokens that have at least one of the characters ``start .. end``."""
    found = (encoding.char_to_token(place) for place in range(start, end))
    first = next((token for token in found if token is not None), None)
    backwards = (encoding.char_to_token(place) for place in range(end - 1, start - 1, -1))
    last = next((token for token in backwards if token is not None), None)
    if first is None or last is None:
        return 0, 0
    # White space that a tokenizer does not count to its token, and further tokens of one character.
    while first > 0 and (before := encoding.token_to_chars(first - 1)) is not None and before[1] > start:
        first -= 1
    while last + 1 < len(encoding) and (after := encoding.token_to_chars(last + 1)) is not None and after[0] < end:
        last += 1
    return first, last + 1


def _common(one: str, other: str) -> int:
    """The length of the longest common prefix."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing slices is far quicker than comparing characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


# Forms of messages


def _forms(messages: Sequence[ChatMessage]) -> Iterator[list[ChatMessage]]:
    """The messages in every form that templates differ in, the most common first.

    Contents as strings or lists of parts, arguments of tool calls as objects or JSON, absent contents left out,
    None or "".
    """
    usual = [_normalized(message) for message in messages]
    has_calls = any("tool_calls" in message for message in usual)
    lacks_content = any(message.get("content") is None for message in usual)
    for arguments, absent, as_items in itertools.product(
        (dict, str) if has_calls else (dict,), ("left out", None, "") if lacks_content else ("",), (False, True)
    ):
        yield [_normalize(message, arguments, absent, as_items=as_items) for message in usual]


def _normalized(message: ChatMessage) -> dict[str, Any]:
    """A message without nulls and weights, its reasoning under both of the names that templates read."""
    found = {key: value for key, value in message.items() if value is not None and key != "weight"}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is not None:
        found |= {"thinking": reasoning, "reasoning_content": reasoning}
    if not found.get("tool_calls", True):
        del found["tool_calls"]
    return found


def _normalize(message: ChatMessage, arguments: type, absent: str | None, *, as_items: bool) -> ChatMessage:
    found = dict(message)
    content = found.get("content")
    if isinstance(content, list):
        content = "".join(item.get("text", "") for item in content)
    if content is not None:
        found["content"] = [{"type": "text", "text": content}] if as_items else content
    elif absent != "left out":
        found["content"] = absent
    if "tool_calls" in found:
        found["tool_calls"] = [_normalize_call(call, arguments) for call in found["tool_calls"]]
    return found


def _normalize_call(call: Mapping[str, Any], form: type) -> Mapping[str, Any]:
    function = {key: value for key, value in call.get("function", call).items() if value is not None}
    arguments = function.get("arguments") or {}
    if form is dict:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    others = {key: value for key, value in call.items() if value is not None and key not in function}
    return {"type": "function", **others, "function": {**function, "arguments": arguments}}


def _with_content(message: ChatMessage, content: str) -> ChatMessage:
    """An answer with another content, and neither reasoning nor tool calls."""
    kept = {key: value for key, value in message.items() if key not in (*_REASONING, "tool_calls")}
    is_list = isinstance(message.get("content"), list)
    return {**kept, "content": [{"type": "text", "text": content}] if is_list else content}


# Completeness


def _lacks_system(messages: Sequence[ChatMessage], text: str, prompt: str) -> bool:
    """Return whether a system message is in the prompt for an answer, but not in the text with the answer."""
    contents = (message.get("content") for message in messages if message["role"] == "system")
    return any(isinstance(one, str) and one in prompt and one not in text for one in contents)


def _require_rendered(message: ChatMessage, text: str, name: str) -> None:
    """Check that a text has the content and the tool calls of a message, and none of it as Python or nested JSON.

    Reasoning may be missing: most templates drop it from earlier messages.
    """
    content = message.get("content")
    if isinstance(content, list):
        if str(content) in text or json.dumps(content, ensure_ascii=False) in text:
            raise _left_out(f"{name}.content")
        texts = [str(item.get("text", "")) for item in content]
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
    texts = [item["text"] for item in content] if isinstance(content, list) else content.split("</think>")
    if not all(_has(answer, text.removeprefix("<think>")) for text in texts):
        raise _left_out(f"{name}.content")


def _has(text: str, piece: str) -> bool:
    """Return whether a text contains another, whatever white space it has."""
    return piece in text or "".join(piece.split()) in "".join(text.split())


def _left_out(name: str) -> ChatError:
    return ChatError(f"chat template: leaves out {name}. Set chat_template_path, or drop it from the row")
