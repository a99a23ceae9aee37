"""What a chat template writes of one chat, and of its beginnings."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from shardwise.models.chat_templates import CompiledTemplate
from shardwise.training.texts.chat_rounds import Length, Rounds, recorded, taken_up
from shardwise.training.texts.rows import RowError
from shardwise.training.texts.watched import Message, Observer, WatchedMessages


class _Asks(enum.Enum):
    """What a text asks for at its end; the value is what templates are told."""

    NOTHING = False
    ANSWER = True


_SHORT: Final = 16
"""Messages of a chat whose beginnings are each written from their beginning: noting rounds costs more."""
_WRITTEN_WHOLE: Final = 2
"""So many texts of any chat are."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """A text, and the places in it that the template marks as the assistant's, in characters."""

    text: str
    marks: tuple[tuple[int, int], ...]


class Script:
    """One chat, and what the template writes of the first so many of its messages.

    Args:
        template: what writes.
        variables: what it is given beside messages.
        messages: of the chat, in the form that the template wants.
    """

    def __init__(
        self, template: CompiledTemplate, variables: Mapping[str, Any], messages: Sequence[Message]
    ) -> None:
        self.template = template
        self.variables = variables
        self.messages = messages
        self._whole: ChatText | None = None
        self._prompts: dict[int, str | None] = {}
        self._rounds: dict[_Asks, Rounds | None] = {}
        self._door = template.door if len(messages) > _SHORT else None
        self._written = 0

    def written(self, count: int) -> ChatText:
        """Of the first ``count`` messages.

        Raises:
            RowError: the template refuses them.
        """
        if count == len(self.messages) and self._whole is not None:
            return self._whole
        return self._write(list(self.messages[:count]), count, _Asks.NOTHING)

    def written_with(self, index: int, message: Message, count: int) -> ChatText:
        """Of the first ``count`` messages with another one in the place of number ``index``.

        Raises:
            RowError: the template refuses them.
        """
        return self._write(
            [*self.messages[:index], message, *self.messages[index + 1 : count]], index, _Asks.NOTHING
        )

    def looked_at(self) -> tuple[ChatText, Observer | None]:
        """All messages, and when the template looks at which: at once where it does no more than read them.

        Raises:
            RowError: the template refuses them.
        """
        count = len(self.messages)
        if self.template.only_reads:
            size = 0
            observer = Observer(count, lambda: size)
            given = self._given(WatchedMessages(self.messages, observer), _Asks.NOTHING)
            marks: list[tuple[int, int]] = []
            pieces: list[str] = []
            try:
                for piece in self._pieces(given, marks):
                    pieces.append(piece)
                    size += len(piece)
                self._whole = ChatText("".join(pieces), tuple(marks))
                return self._whole, observer
            except Exception:  # told below, of a list
                pass
        self._whole = self._write_all(list(self.messages), _Asks.NOTHING)
        seen = self._recorded(self._whole, _Asks.NOTHING)
        return self._whole, self.watched(count, self._whole.text) if seen is None else seen

    def prompt(self, count: int) -> str | None:
        """What asks for an answer to the first ``count`` messages; None where the template refuses that."""
        if count not in self._prompts:
            try:
                found = self._write(list(self.messages[:count]), count, _Asks.ANSWER).text
            except RowError:
                found = None
            self._prompts = {count: found}
        return self._prompts[count]

    def watched(self, count: int, expected: str) -> Observer | None:
        """When the template looks at which message; None where it writes anything but what is expected.

        Of what it has written before, what is noted is not noted again: when the last loop ended is.
        """
        length = Length()
        observer = Observer(count, lambda: length.characters)
        messages = WatchedMessages(self.messages[:count], observer)
        door, rounds = self._door, self._rounds.get(_Asks.NOTHING)
        try:
            if door is not None and rounds is not None:
                given = {**self.variables, "add_generation_prompt": False}
                text, _ = taken_up(rounds, door, given, messages, count, length)
                return observer if text == expected else None
            pieces = []
            for piece in self.template.pieces(self._given(messages, _Asks.NOTHING)):
                pieces.append(piece)
                length.characters += len(piece)
        except Exception:  # no list like others: whatever a template's code may raise of that
            return None
        return observer if "".join(pieces) == expected else None

    def _write(self, messages: list[Message], common: int, asks: _Asks) -> ChatText:
        """Messages of which the first ``common`` are the chat's, from where they differ once this pays."""
        self._written += 1
        door = self._door if self._written > _WRITTEN_WHOLE else None
        rounds = None if door is None else self._rounds_of(asks if door.asks else _Asks.NOTHING)
        if door is None or rounds is None:
            return self._write_all(messages, asks)
        with _refusals():
            text, marks = taken_up(
                rounds, door, {**self.variables, "add_generation_prompt": asks.value}, messages, common, Length()
            )
            return ChatText(text, tuple(marks))

    def _rounds_of(self, asks: _Asks) -> Rounds | None:
        """The whole chat, round by round."""
        if asks not in self._rounds:
            try:
                whole = self._whole if asks is _Asks.NOTHING else None
                whole = whole or self._write_all(list(self.messages), asks)
                self._recorded(whole, asks)
            except RowError:
                self._rounds[asks] = None
        return self._rounds[asks]

    def _recorded(self, whole: ChatText, asks: _Asks) -> Observer | None:
        """Write the whole chat once more, and note its rounds: they count if it is the same."""
        door, self._rounds[asks] = self._door, None
        if door is None:
            return None
        try:
            found = recorded(door, {**self.variables, "add_generation_prompt": asks.value}, self.messages)
        except Exception:  # as in ``watched``
            return None
        if found is None or (found[0].text, tuple(found[0].marks)) != (whole.text, whole.marks):
            return None
        self._rounds[asks], observer = found
        return observer

    def _write_all(self, messages: list[Message], asks: _Asks) -> ChatText:
        marks: list[tuple[int, int]] = []
        with _refusals():
            return ChatText("".join(self._pieces(self._given(messages, asks), marks)), tuple(marks))

    def _pieces(self, given: Mapping[str, Any], marks: list[tuple[int, int]]) -> Iterator[str]:
        return self.template.marked_pieces(given, marks) if self.template.has_marks else self.template.pieces(given)

    def _given(self, messages: Sequence[Message], asks: _Asks) -> dict[str, Any]:
        return {**self.variables, "messages": messages, "add_generation_prompt": asks.value}


@contextmanager
def _refusals() -> Iterator[None]:
    """Whatever a template's code raises becomes a RowError."""
    try:
        yield
    except RecursionError as error:
        raise RowError("the chat template refuses it (it calls itself without end)") from error
    except Exception as error:
        raise RowError(f"the chat template refuses it ({error})") from error
