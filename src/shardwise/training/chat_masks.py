"""Assistant masks for any chat template.

transformers masks assistant tokens only for templates with ``{% generation %}`` marks, and TRL has marked
versions of 31 templates, compared byte by byte. They are used first. This module finds the assistant's tokens for
any other template, and for all if messages have weights (0: not trained on) or tool calls (which a template may
omit).

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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from shardwise.core.errors import ConfigError
from shardwise.training.chat_checks import require_rendered, require_trained
from shardwise.training.chat_rendering import (
    Chat,
    ChatError,
    ChatMessage,
    MaskedText,
    common_length,
    forms,
    like,
    with_content,
)


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
        # The tokens by which templates begin and end messages. Not all of them have a role in the tokenizer.
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
        chat = self._render_completely(Chat.create(self._tokenizer, messages, tools, variables))
        # From the last answer to the first: one that is a prefix of a later example is trained in that example. The
        # first candidate is the whole chat, without an answer yet.
        examples = [MaskedText(chat.text)]
        for index in reversed(range(len(messages))):
            if messages[index]["role"] != "assistant" or messages[index].get("weight") == 0:
                continue
            answer = self._answer(chat, index)
            require_trained(chat, index, answer.trained)
            if examples[-1].text.startswith(answer.rendering):
                examples[-1].spans += answer.spans
            else:
                examples.append(answer)
        trained = [example for example in examples if example.spans] or examples[:1]
        return [self._tokenize(example) for example in reversed(trained)]

    def _render_completely(self, chat: Chat) -> Chat:
        """Return the chat in the first of the forms of its messages that the template renders completely."""
        for index, message in enumerate(chat.messages):
            if message.get("tool_responses"):
                name = f"messages[{index}].tool_responses"
                raise ChatError(f"{name}: is not supported. Write results as messages with the role 'tool'")
        has_calls = any(message.get("tool_calls") for message in chat.messages)
        # A template without the word leaves out what the row has, in every form of the messages.
        for name, is_used in (("tools", chat.variables["tools"] is not None), ("tool_calls", has_calls)):
            if is_used and name not in chat.template:
                raise ChatError(f"chat template: does not use {name!r}, which the row has. Set chat_template_path")
        # If no form is complete, the error is that of the first one, which most templates are made for.
        first: ChatError | None = None
        for form in forms(chat.messages):
            rendered = replace(chat, messages=form)
            try:
                require_rendered(rendered)
                return rendered
            except ChatError as error:
                first = first or error
        assert first is not None
        raise first

    def _answer(self, chat: Chat, index: int) -> MaskedText:
        """Return the assistant message at ``index`` as the model has to generate it, after its prompt."""
        before, message = chat.messages[:index], chat.messages[index]
        prompt = chat.attempt(before, prompt=True)
        rendered = chat.render([*before, message])
        # ``text`` is the chat through this answer, and ``start`` and ``end`` are the answer's place in it.
        text = rendered.text
        if prompt is not None and text.startswith(prompt):
            start = len(prompt)
        else:
            start = _start(chat, index, text, prompt)
        end = self._end(chat, index, text, start)
        # Marked ranges that end before the answer are those of earlier ones.
        if chat.has_marks:
            return MaskedText(text, [(first, min(last, end)) for first, last in rendered.spans if last > start])
        if prompt is not None and _lacks_context(chat, before, text[:start], prompt):
            # Mistral's templates render a system message only if the chat ends with a user message.
            text, start, end = prompt + text[start:end], len(prompt), len(prompt) + end - start
        # The model has to learn to stop, at a special token of the answer or the one that begins the next message.
        if text[start:end].endswith(self._special):
            return MaskedText(text, [(start, end)])
        opening = self._opening(chat, "tool" if message.get("tool_calls") else "user")
        return MaskedText(text[:end] + opening, [(start, end + len(opening))])

    def _end(self, chat: Chat, index: int, text: str, start: int) -> int:
        """Return the end of an answer that is the last message of ``text``, without the end of the whole chat."""
        body = text[start:].rstrip()
        ending = max((token for token in self._special if body.endswith(token)), key=len, default="")
        if not ending or not body.removesuffix(ending).rstrip().endswith(self._special):
            return start + len(body)
        # The last of two special tokens may end the chat: what stays if another message follows decides.
        following = chat.messages[index + 1 : index + 2] or [{"role": "user", "content": "x"}]
        more = chat.attempt([*chat.messages[: index + 1], *following]) or ""
        unchanged = text[start : common_length(text, more)]
        ends = [unchanged.rfind(token) + len(token) for token in self._special if token in unchanged]
        return start + min(len(body), max(ends, default=len(body)))

    def _opening(self, chat: Chat, role: str) -> str:
        """Return the special token that starts the message after an answer, or "" if it starts with other text."""
        # Found in a chat of stand-ins, once for each role: the answer is rendered with and without a next message.
        if role not in self._openings:
            answer: ChatMessage = {"role": "assistant", "content": "x"}
            if role == "tool":
                function = {"name": "x", "arguments": {}}
                answer = {**answer, "tool_calls": [{"type": "function", "function": function}]}
            messages = [{"role": "user", "content": "x"}, answer, {"role": role, "content": "x"}]
            before, after = chat.attempt(messages[:2]), chat.attempt(messages)
            shared = "" if before is None else before.rstrip()
            opening = after[len(shared) :] if after is not None and after.startswith(shared) else ""
            self._openings[role] = next((token for token in self._special if opening.startswith(token)), "")
        return self._openings[role]

    def _tokenize(self, example: MaskedText) -> dict[str, list[int]]:
        # The rendering has all special tokens. Offsets are the (first, stop) characters of each token.
        tokens = self._tokenizer(example.text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        mask = [0] * len(tokens["input_ids"])  # a token is trained on if any of its characters is
        for number, (first, stop) in enumerate(tokens.encodings[0].offsets):
            mask[number] = int(any(first < end and start < stop for start, end in example.spans))
        return {"input_ids": list(tokens["input_ids"]), "assistant_masks": mask}


def _start(chat: Chat, index: int, text: str, prompt: str | None) -> int:
    """Return the start of an answer in a text that does not continue the prompt for it."""
    before, message = chat.messages[:index], chat.messages[index]
    # Two other contents, because the answer may begin like one of them.
    others = (chat.attempt([*before, with_content(message, other)]) for other in ("x", "y"))
    changed = min((common_length(text, other) for other in others if other is not None), default=len(text))
    if prompt is None:
        return changed
    context_end, shared = _context_end(chat, index, text), common_length(text, prompt)
    if context_end <= shared:
        return min(changed, shared)
    # With the answer, the template renders the messages before it differently. Look in the text for what the prompt
    # adds to them, or the longest beginning of it, and if it adds nothing for the longest end of the prompt.
    previous = chat.attempt(before) or ""
    header = prompt.removeprefix(previous)
    pieces = (header[:size] for size in range(len(header), 0, -1))
    if not header:
        pieces = (prompt[-size:] for size in range(len(prompt), 0, -1))
    for piece in pieces:
        place = text.rfind(piece, 0, changed)
        if place >= 0 and place + len(piece) >= context_end:
            return place + len(piece)
    return changed


def _context_end(chat: Chat, index: int, text: str) -> int:
    """Return the end in ``text`` of the contents before an answer, beginning with the last user message.

    A template may write a message behind later ones, as Gemma 4 does with content beside calls of tools.
    """
    before = chat.messages[:index]
    users = [place for place, message in enumerate(before) if message["role"] == "user"]
    end = 0
    for place in range(users[-1] if users else 0, index):
        message = before[place]
        if not message.get("content"):
            continue
        # The last character that changes with this content, counted from the end. Two others, as in _start.
        for other in ("x", "y"):
            changed = {**message, "content": like(message["content"], other)}
            whole = chat.attempt([*before[:place], changed, *chat.messages[place + 1 : index + 1]])
            if whole is not None:
                end = max(end, len(text) - common_length(text[::-1], whole[::-1]))
    return end


def _lacks_context(chat: Chat, before: Sequence[ChatMessage], text: str, prompt: str) -> bool:
    """Return whether a system message or a tool is in the prompt for an answer, but not in the text before it."""
    contents = [message.get("content") for message in before if message["role"] == "system"]
    return any(isinstance(one, str) and one in prompt and one not in text for one in (*contents, *chat.tool_names))
