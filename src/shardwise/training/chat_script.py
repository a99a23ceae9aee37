"""What a chat template writes of one chat, and of its beginnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.models.chat_templates import CompiledTemplate
from shardwise.training.rows import RowError
from shardwise.training.watched import Message, Observer, WatchedMessages


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
        self._prompts: dict[int, str | None] = {}

    def written(self, count: int) -> ChatText:
        """Of the first ``count`` messages.

        Raises:
            RowError: the template refuses them.
        """
        return self._write(list(self.messages[:count]), add_generation_prompt=False)

    def looked_at(self) -> tuple[ChatText, Observer | None]:
        """All messages, and when the template looks at which: at once where it does no more than read them.

        Raises:
            RowError: the template refuses them.
        """
        count = len(self.messages)
        if self.template.only_reads:
            size = 0
            observer = Observer(count, lambda: size)
            given = self._given(WatchedMessages(self.messages, observer), add_generation_prompt=False)
            marks: list[tuple[int, int]] = []
            pieces: list[str] = []
            try:
                for piece in self._pieces(given, marks):
                    pieces.append(piece)
                    size += len(piece)
                return ChatText("".join(pieces), tuple(marks)), observer
            except Exception:  # told below, of a list
                pass
        whole = self.written(count)
        return whole, self.watched(count, whole.text)

    def prompt(self, count: int) -> str | None:
        """What asks for an answer to the first ``count`` messages; None where the template refuses that."""
        if count not in self._prompts:
            try:
                found = self._write(list(self.messages[:count]), add_generation_prompt=True).text
            except RowError:
                found = None
            self._prompts = {count: found}
        return self._prompts[count]

    def watched(self, count: int, expected: str) -> Observer | None:
        """When the template looks at which message; None where it writes anything but what is expected."""
        size = 0
        observer = Observer(count, lambda: size)
        messages = WatchedMessages(self.messages[:count], observer)
        pieces = []
        try:
            for piece in self.template.pieces(self._given(messages, add_generation_prompt=False)):
                pieces.append(piece)
                size += len(piece)
        except Exception:  # no list like others: whatever a template's code may raise of that
            return None
        return observer if "".join(pieces) == expected else None

    def _write(self, messages: list[Message], *, add_generation_prompt: bool) -> ChatText:
        marks: list[tuple[int, int]] = []
        given = self._given(messages, add_generation_prompt=add_generation_prompt)
        try:
            return ChatText("".join(self._pieces(given, marks)), tuple(marks))
        except RecursionError as error:
            raise RowError("the chat template refuses it (it calls itself without end)") from error
        except Exception as error:  # whatever a template's code may raise
            raise RowError(f"the chat template refuses it ({error})") from error

    def _pieces(self, given: Mapping[str, Any], marks: list[tuple[int, int]]) -> Iterator[str]:
        return self.template.marked_pieces(given, marks) if self.template.has_marks else self.template.pieces(given)

    def _given(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> dict[str, Any]:
        return {**self.variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
