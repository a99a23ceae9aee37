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
- Results of tools inside of an answer (``tool_responses`` of Gemma 4) are not part of it.

Every part of a row has to be rendered, and every part of an answer to be trained on. Templates write arguments and
results of tools in many ways, so a part that is not there as text is rendered if the text changes with it.

Templates may render an answer differently once more messages follow (most reasoning models drop earlier reasoning).
Training on that rendering would train the model to skip its reasoning. Answers whose rendering is still a prefix of
the whole chat share one example. Every other one ends an example of its own.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    def trained(self) -> str:
        """The text that is trained on."""
        return "".join(self.text[start:end] for start, end in self.spans)


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

    def trainable(self, messages: Sequence[ChatMessage]) -> str:
        """Render messages, and return what the template marks, or everything if it has no marks."""
        if not self.has_marks:
            return self.attempt(messages) or ""
        try:
            marked = self.marked(messages)
        except ChatError:
            return ""
        return "".join(marked.text[start:end] for start, end in marked.spans)

    def depends_on(self, index: int, message: ChatMessage) -> bool:
        """Return whether the chat, or the prompt for the next answer, changes with another message at ``index``."""
        others = [*self.messages[:index], message, *self.messages[index + 1 :]]
        if self.attempt(others) != self.text:
            return True
        roles = [one["role"] for one in self.messages]
        stop = roles.index("assistant", index) if "assistant" in roles[index:] else len(roles)
        return self.attempt(others[:stop], prompt=True) != self.attempt(self.messages[:stop], prompt=True)

    def attempt(self, messages: Sequence[ChatMessage], *, prompt: bool = False) -> str | None:
        """Render messages. None if the template rejects them."""
        try:
            return self.render(messages, prompt=prompt)
        except ChatError:
            return None

    @property
    def tool_names(self) -> list[str]:
        """Names of the functions that the assistant may call."""
        return [str(tool.get("function", tool).get("name", "")) for tool in self.variables.get("tools") or ()]

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
            _require_complete(chat, index, answer.trained)
            candidates = (one for one in (examples[-1], examples[0]) if one.text.startswith(answer.rendering))
            example = next(candidates, None)
            if example is None:
                example = _MaskedText(answer.text)
                examples.append(example)
            example.spans += answer.spans
        trained = [one for one in examples if one.spans] or examples[:1]
        return [self._tokenize(one) for one in reversed(trained)]

    def require_calls(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Check that every tool call of a chat is trained on, where TRL masks it by the template's own marks.

        Raises:
            ChatError: the template leaves one out.
        """
        variables = {**(variables or {}), "tools": list(tools) if tools else None}
        template = str(self._tokenizer.get_chat_template(tools=variables["tools"]))
        chat = _RenderableChat(template, self._tokenizer.special_tokens_map, messages, variables)
        whole = chat.trainable(messages)
        if not whole:  # the template rejects the row, as TRL will find out
            return
        for index, message in enumerate(messages):
            calls = message.get("tool_calls") or []
            for number in range(len(calls)):
                fewer = {**message, "tool_calls": [*calls[:number], *calls[number + 1 :]]}
                if chat.trainable([*messages[:index], fewer, *messages[index + 1 :]]) == whole:
                    raise _left_out(f"messages[{index}].tool_calls[{number}]")

    # Rendering

    def _chat(self, messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> _RenderableChat:
        """The chat in the first of its forms that the template renders completely."""
        template = str(self._tokenizer.get_chat_template(tools=variables["tools"]))
        for name, is_used in (
            ("tools", variables["tools"] is not None),
            *((key, any(message.get(key) for message in messages)) for key in ("tool_calls", "tool_responses")),
        ):
            if is_used and name not in template:
                raise ChatError(f"chat template: does not use {name!r}, which the row has. Set chat_template_path")
        first: ChatError | None = None
        for form in _forms(messages):
            chat = _RenderableChat(template, self._tokenizer.special_tokens_map, form, variables)
            try:
                for index in range(len(form)):
                    _require_rendered(chat, index)
                _require_tools(chat)
                return chat
            except ChatError as error:
                first = first or error
        assert first is not None
        raise first

    def _answer(self, chat: _RenderableChat, index: int) -> _AssistantTurn:
        """The assistant message at ``index`` as the model has to generate it at its turn."""
        before, message = chat.messages[:index], chat.messages[index]
        if message.get("tool_responses"):
            return self._answer_around_results(chat, index)
        through = [*before, message]
        prompt = chat.attempt(before, prompt=True)
        if chat.has_marks:
            marked = chat.marked(through)
            start = 0 if prompt is None else _common(prompt, marked.text)
            if prompt is not None and start < len(prompt):
                start = max(start, _context_end(chat, index, marked.text))
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
        if prompt is not None and _lacks_context(chat, before, text[:start], prompt):
            # Mistral's templates render a system message only if the chat ends with a user message.
            text, start, end = prompt + text[start:end], len(prompt), len(prompt) + end - start
        if text[start:end].endswith(self._special):
            return _AssistantTurn(text, [(start, end)])
        opening = self._opening(chat, "tool" if message.get("tool_calls") else "user")
        return _AssistantTurn(text[:end] + opening, [(start, end + len(opening))])

    def _answer_around_results(self, chat: _RenderableChat, index: int) -> _AssistantTurn:
        """The calls of a message with ``tool_responses``, and what it says after these.

        Raises:
            ChatError: the template writes them in another order.
        """
        before, message = chat.messages[:index], chat.messages[index]
        calls = {key: value for key, value in message.items() if key not in ("content", "tool_responses")}
        calling = self._answer(replace(chat, messages=[*before, calls]), index)
        called = chat.attempt([*before, {**calls, "tool_responses": message["tool_responses"]}]) or ""
        text = chat.render([*before, message])
        if not called.startswith(calling.rendering) or not text.startswith(called):
            raise ChatError(
                f"chat template: messages[{index}].tool_responses cannot be told from the answer. Write them as "
                "messages with the role 'tool'"
            )
        end = self._end(chat, index, text, len(called))
        answered = [(len(called), end)] if text[len(called) : end].strip() else []
        return _AssistantTurn(text, [*calling.spans, *answered])

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
        context_end = _context_end(chat, index, text)
        if context_end <= (shared := _common(text, prompt)):  # only what ended the message before is
            return min(changed, shared)
        header = prompt[len(previous) :]
        for size in range(len(header), 0, -1):
            found = text.rfind(header[:size], 0, changed)
            if found >= 0 and found + size >= context_end:
                return found + size
        for size in range(len(prompt) if not header else 0, 0, -1):
            found = text.rfind(prompt[-size:], 0, changed)
            if found >= 0 and found + size >= context_end:
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


def _context_end(chat: _RenderableChat, index: int, text: str) -> int:
    """The end in ``text`` of what the messages before an answer say, from the last one of a user on.

    A template may write a message behind later ones, as Gemma 4 does with content beside calls of tools.
    """
    before = chat.messages[:index]
    users = [place for place, message in enumerate(before) if message["role"] == "user"]
    end = 0
    for place in range(users[-1] if users else 0, index):
        message = before[place]
        if not message.get("content"):
            continue
        for other in ("x", "y"):
            changed = {**message, "content": _like(message["content"], other)}
            whole = chat.attempt([*before[:place], changed, *chat.messages[place + 1 : index + 1]])
            if whole is not None:
                end = max(end, len(text) - _common(text[::-1], whole[::-1]))
    return end


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
    return {**kept, "content": _like(message.get("content"), content)}


def _like(content: Any, text: str) -> Any:
    """A content with another text, in the same form."""
    return [{"type": "text", "text": text}] if isinstance(content, list) else text


# Completeness


def _lacks_context(chat: _RenderableChat, before: Sequence[ChatMessage], text: str, prompt: str) -> bool:
    """Return whether a system message or a tool is in the prompt for an answer, but not in the text before it."""
    contents = [message.get("content") for message in before if message["role"] == "system"]
    return any(isinstance(one, str) and one in prompt and one not in text for one in (*contents, *chat.tool_names))


def _require_tools(chat: _RenderableChat) -> None:
    """Check that the prompt for the first answer has the names of all tools."""
    first = next((index for index, message in enumerate(chat.messages) if message["role"] == "assistant"), 0)
    prompt = chat.attempt(chat.messages[:first], prompt=True) or chat.text
    for number, name in enumerate(chat.tool_names):
        if name not in prompt:
            raise _left_out(f"tools[{number}]")


def _require_rendered(chat: _RenderableChat, index: int) -> None:
    """Check that a chat has the content, the tool calls and their results, and none as Python or nested JSON.

    Reasoning may be missing: most templates drop it from earlier messages.
    """
    message, text, name = chat.messages[index], chat.text, f"messages[{index}]"
    content = message.get("content")
    if isinstance(content, list):
        if str(content) in text or json.dumps(content, ensure_ascii=False) in text:
            raise _left_out(f"{name}.content")
        texts = [str(item.get("text", "")) for item in content]
    else:
        texts = [line for line in (content or "").split("</think>")[-1].splitlines() if line.strip()]
        texts = [max(texts, key=len)] if texts else []
    if not all(_has(text, one) for one in texts):
        # Templates write results of tools as JSON, and a system message into the prompt for the last answer.
        is_context = message["role"] in ("tool", "system", "developer")
        other = _like(content, "x" if content != "x" else "y")
        if not is_context or not chat.depends_on(index, {**message, "content": other}):
            raise _left_out(f"{name}.content")
    rest = {key: value for key, value in message.items() if key != "tool_responses"}
    if message.get("tool_responses") and not chat.depends_on(index, rest):
        raise _left_out(f"{name}.tool_responses")
    for number, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        is_written = call["function"]["name"] in text
        if isinstance(arguments, dict):
            is_written &= not (arguments and str(arguments) in text)
        else:
            is_written &= json.dumps(arguments, ensure_ascii=False) not in text
        if not is_written:
            raise _left_out(f"{name}.tool_calls[{number}]")


def _require_complete(chat: _RenderableChat, index: int, answer: str) -> None:
    """Check that the trained text of an answer contains its reasoning, its content and its tool calls."""
    message, name = chat.messages[index], f"messages[{index}]"
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and not _has(answer, reasoning):
        raise _left_out(f"{name}.reasoning_content")
    content = message.get("content") or ""
    texts = [item["text"] for item in content] if isinstance(content, list) else content.split("</think>")
    if not all(_has(answer, text.removeprefix("<think>")) for text in texts):
        raise _left_out(f"{name}.content")
    calls = message.get("tool_calls") or []
    through = chat.trainable([*chat.messages[:index], message]) if calls else ""
    for number, call in enumerate(calls):
        for part, fewer in _without_parts(call, answer):
            others = [*calls[:number], *fewer, *calls[number + 1 :]]
            if chat.trainable([*chat.messages[:index], {**message, "tool_calls": others}]) == through:
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
