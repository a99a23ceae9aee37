"""Which characters of a chat, as its template writes it, are learned.

[Note: What is learned of a chat] An answer is learned as the model would have to write it at its turn: what the
template writes of the messages up to the answer, after what it writes to ask for it, to the end of the turn. That
needs no more than two renderings of the messages so far, and so it is known for any template and of any chat.

A template may write an answer otherwise once more has been said. Most templates of reasoning models leave out the
reasoning of earlier answers; gpt-oss ends the last answer by another token than those before. What such a template
writes of an earlier answer in a whole chat is what a model reads, not what it writes, and learning it would unlearn
the reasoning. So the answers of a chat share one example as far as they stand in it as they would have been
written; those that do not have another, which ends with the last of them. An agent's many calls in one turn of the
user are usually one example, and each turn of the user one more. ``Learn.LAST`` wants the last answer alone, and
``Learn.AS_READ`` all of them where they stand in the whole chat, for whoever prefers fewer tokens to exact turns.

*Where an answer begins*: behind the prompt for it. Where the template's own rendering does not go on from its
prompt (DeepSeek asks with ``<think>`` and writes answers without), behind what both have in common that does not
depend on what the answer says. *Where it ends*: behind the special token that ends the message, without the white
space that the template adds; a template may end a whole chat by one more (Phi-3), which is not the answer's if the
message has one. A message without any (GLM) is ended by the token with which the next one begins, as that is where
its model stops; to the last of a chat it is added. Where a template marks what is generated, these marks say all
this.

*In one pass*: what a template has not seen cannot have changed what it wrote ([Note: What a template has not seen]
in :mod:`~shardwise.training.texts.watched`). So of templates that do not look ahead one rendering of a chat shows
all of its answers, in time that grows with its length. Others have each answer rendered by itself, from where it
differs from what is written already ([Note: Taken up] in :mod:`~shardwise.training.texts.chat_rounds`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shardwise.models.chat_templates import CompiledTemplate
from shardwise.training.texts.chat_script import (
    REASONING,
    ChatText,
    Learn,
    Script,
    forms,
    unwritten,
    unwritten_answer,
)
from shardwise.training.texts.rows import Chat, RowError
from shardwise.training.texts.watched import Message, Observer

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendering:
    """A chat, or the beginning of one, as a text, and the characters that are learned of it."""

    text: str
    learned: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The messages up to an answer as a text, and the characters of the answer."""

    text: str
    spans: tuple[Span, ...]
    end: int
    """Where the message ends. What is learned beyond ends the text as a whole."""
    said: str
    """All that was written of the answer, learned or not."""

    def is_in(self, text: str) -> bool:
        return text is self.text or text.startswith(self.text[: self.end])

    def spans_in(self, text: str) -> tuple[Span, ...]:
        return self.spans if text is self.text else tuple(span for span in self.spans if span[0] < self.end)


@dataclass(slots=True)
class _SharedText:
    """A text, and what is learned of it so far."""

    text: str
    spans: list[Span] = field(default_factory=list)


class ChatReader:
    """Finds what is learned of chats, by one template.

    Args:
        template: what writes them.
        variables: what it is given beside messages: the special tokens by their names.
        special: the special tokens.
        learn: which answers are learned.
    """

    def __init__(
        self, template: CompiledTemplate, variables: Mapping[str, Any], special: Sequence[str], learn: Learn
    ) -> None:
        self.template = template
        self.variables = variables
        self.special = tuple(special)
        self.learn = learn
        self._opening = cache(self._find_opening)

    def read(self, chat: Chat) -> list[Rendering]:
        """What is learned of a chat: usually one rendering, see [Note: What is learned of a chat].

        Raises:
            RowError: the template refuses it, or leaves out a part of it.
        """
        script, whole, observer = self._script(chat)
        answers = [index for index in range(len(chat.messages)) if is_learned(chat.messages[index])]
        if self.learn is Learn.LAST:
            answers = answers[-1:]
        proven = {} if observer is None else self._at_once(script, whole, observer, answers)
        shared = [_SharedText(whole.text)]
        for index in reversed(answers):
            turn = proven.get(index) or self._turn(script, whole, index)
            missing = unwritten_answer(script.messages[index], turn.said)
            if missing is not None and turn.spans:
                name = next((name for name in REASONING if chat.messages[index].get(name)), missing)
                raise RowError(
                    f"the chat template leaves out messages[{index}].{name if missing in REASONING else missing}, "
                    "which is to be learned; give data.chat_template one that writes it"
                )
            place = next((other for other in (shared[-1], shared[0]) if turn.is_in(other.text)), None)
            if place is None and self.learn is Learn.AS_READ and not turn.text.startswith(whole.text.rstrip()):
                place = shared[-1]
                place.spans += reversed(self._as_read(script, place.text, index, turn))
                continue
            if place is None:
                place = _SharedText(turn.text)
                shared.append(place)
            place.spans += reversed(turn.spans_in(place.text))
        ordered = [*reversed(shared[1:]), shared[0]]
        found = [Rendering(one.text, tuple(reversed(one.spans))) for one in ordered if one.spans]
        return found or [Rendering(whole.text, ())]

    def _script(self, chat: Chat) -> tuple[Script, ChatText, Observer | None]:
        """The chat in the form in which the template writes all of it; see [Note: Forms of messages].

        Also what that is, and when the template has looked at which message, where that is known.
        """
        variables = self._variables(chat)
        first: RowError | None = None
        missing: str | None = None
        for messages in forms(chat.messages):
            script = Script(self.template, variables, messages)
            try:
                whole, observer = script.looked_at()
            except RowError as error:
                first = first or error
                continue
            found = unwritten(messages, whole.text)
            if found is None:
                return script, whole, observer
            missing = missing or found
        if first is not None:
            raise first
        raise RowError(f"the chat template does not write {missing}; give data.chat_template one that does")

    def _variables(self, chat: Chat) -> Mapping[str, Any]:
        if chat.tools and "tools" not in self.template.variables:
            raise RowError("it has 'tools', of which the chat template knows nothing")
        for name in chat.template_kwargs:
            if name not in self.template.variables:
                raise RowError(f"it has chat_template_kwargs.{name}, of which the chat template knows nothing")
        for index, message in enumerate(chat.messages):
            if "tool_calls" in message and "tool_calls" not in self.template.text:
                raise RowError(f"it has messages[{index}].tool_calls, of which the chat template knows nothing")
        return {**self.variables, "documents": None, **chat.template_kwargs, "tools": list(chat.tools) or None}

    # One pass

    def _at_once(
        self, script: Script, whole: ChatText, observer: Observer, answers: Sequence[int]
    ) -> Mapping[int, _Answer]:
        """Answers of which one rendering of the chat proves how they would have been written at their turns."""
        if self.template.has_marks:
            found = _marks_by_message(whole, observer, script.messages)
            return {index: found[index] for index in answers if index in found}
        last = answers[-1]
        start = observer.first[last]
        prompt = script.prompt(last)
        if start is None or prompt is None or not prompt.startswith(whole.text[:start]):
            return {}
        asked = prompt[start:]
        turns = {}
        for index in answers if self.template.has_one_prompt else [last]:
            begin, stop = observer.first[index], observer.first[index + 1]
            if begin is None or not whole.text.startswith(asked, begin):
                continue
            begin += len(asked)
            body = whole.text[begin:stop].rstrip()
            if body.endswith(self.special):
                end = begin + len(body)
                turns[index] = _Answer(whole.text, ((begin, end),), end, body)
        return turns

    # One by one

    def _turn(self, script: Script, whole: ChatText, index: int) -> _Answer:
        """An answer as it is written at its turn."""
        count = index + 1
        given = whole if count == len(script.messages) else script.written(count)
        text, prompt = given.text, script.prompt(index)
        if self.template.has_marks:
            start = 0 if prompt is None else _common(prompt, text)
        elif prompt is not None and text.startswith(prompt):
            start = len(prompt)
        else:
            start = self._start(script, text, prompt, index)
        end = self._end(script, text, start, count)
        if self.template.has_marks:
            marks = tuple(mark for mark in given.marks if mark[1] > start)
            first, last = (marks[0][0], marks[-1][1]) if marks else (start, start)
            return _Answer(text, marks, last if end is None else min(last, end), text[min(first, start) :])
        if end is None:
            opening = self._opening("tool" if script.messages[index].get("tool_calls") else "user")
            text = text.rstrip() + opening if opening else text
            end = len(text)
        return _Answer(text, ((start, end),), end, text[start:end])

    def _end(self, script: Script, text: str, start: int, count: int) -> int | None:
        """Where the answer that begins at ``start`` ends, as the last of ``count`` messages.

        None where no special token ends it.
        """
        body = text[start:].rstrip()
        ending = max((token for token in self.special if body.endswith(token)), key=len, default=None)
        if ending is None:
            return None
        if body[: -len(ending)].rstrip().endswith(self.special):  # the message's own, or parts of what it says
            observer = script.watched(count, text)
            stop = None if observer is None else observer.loop_end
            message = "" if stop is None or stop < start else text[start:stop].rstrip()
            if message.endswith(self.special):
                return start + len(message)
        return start + len(body)

    def _start(self, script: Script, text: str, prompt: str | None, index: int) -> int:
        """Where an answer begins that does not go on from the prompt for it."""
        shared = len(text) if prompt is None else _common(prompt, text)
        changed = self._saying_else(script, index, index + 1)
        if changed is None:
            return shared if prompt is not None else 0
        return min(shared, _common(changed, text))

    def _saying_else(self, script: Script, index: int, count: int) -> str | None:
        """The first ``count`` messages as they are written if an answer has another content, and no reasoning."""
        message = script.messages[index]
        content = message.get("content")
        other = "y" if str(content).lstrip().startswith("x") else "x"
        said = {name: value for name, value in message.items() if name not in REASONING}
        said["content"] = [{"type": "text", "text": other}] if isinstance(content, list) else other
        if count == index + 1:
            said.pop("tool_calls", None)  # where nothing answers them
        try:
            return script.written_with(index, said, count).text
        except RowError:
            return None

    def _as_read(self, script: Script, text: str, index: int, turn: _Answer) -> tuple[Span, ...]:
        """An answer where it stands in the whole chat, which the template does not write as it was said.

        It begins where another one would make the first difference, and is the end of what was said, or that with
        another special token behind it.
        """
        changed = self._saying_else(script, index, len(script.messages))
        start = 0 if changed is None else _common(changed, text)
        ending = next((token for token in self.special if turn.said.rstrip().endswith(token)), "")
        for said, following in ((turn.said, ("",)), (turn.said.rstrip().removesuffix(ending), self.special)):
            for place in range(len(said) if changed is not None else 0):
                stop = start + len(said) - place
                last = next((token for token in following if text.startswith(token, stop)), None)
                if last is not None and text.startswith(said[place:], start):
                    return ((start, stop + len(last)),)
        raise RowError(
            f"the chat template does not write messages[{index}] as it was said once more has been said, nor the "
            "end of it; give data.learn=all, which learns it by itself"
        )

    def _find_opening(self, role: str) -> str:
        """The special token with which a message after an answer begins; nothing where it begins otherwise."""
        answer: Message = {"role": "assistant", "content": "x"}
        if role == "tool":
            answer = {**answer, "tool_calls": [{"type": "function", "function": {"name": "x", "arguments": {}}}]}
        messages = [
            {"role": "user", "content": "x"},
            answer,
            {"role": role, "content": "x"},
        ]
        script = Script(self.template, self.variables, messages)
        try:
            before, after = script.written(2).text, script.written(3).text
        except RowError:
            return ""
        before = before.rstrip()
        follows = after[len(before) :] if after.startswith(before) else ""
        return next((token for token in self.special if token and follows.startswith(token)), "")


def is_learned(message: Message) -> bool:
    """Whether a message is one that is to be learned."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def _marks_by_message(whole: ChatText, observer: Observer, messages: Sequence[Message]) -> Mapping[int, _Answer]:
    """The marks of each answer, where it is certain whose they are, and that what follows has no part in them."""
    found: dict[int, _Answer] = {}
    counted = 0
    for index, message in enumerate(messages):
        begin, stop = observer.first[index], observer.first[index + 1]
        if begin is None or message["role"] != "assistant":
            continue
        last = len(whole.text) if stop is None else stop
        marks = _within(whole.marks, begin, last)
        counted += len(marks)
        found[index] = _Answer(whole.text, marks, marks[-1][1] if marks else begin, whole.text[begin:stop])
    return found if counted == len(whole.marks) and all(turn.spans for turn in found.values()) else {}


def _within(marks: tuple[Span, ...], begin: int, stop: int) -> tuple[Span, ...]:
    """Those that lie within a part of the text; they are in order."""
    first = bisect_left(marks, (begin, begin))
    found = []
    for mark in marks[first:]:
        if mark[0] >= stop:
            break
        if mark[1] <= stop:
            found.append(mark)
    return tuple(found)


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda size: one[: size + 1] != other[: size + 1])
